"""One episode: an environment, and its conversation with the policy about a dataset row.

`begin`, `reply_to` and `end` are generators (`Steps`); `episodes` makes the calls that they yield.
"""

import json
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypeVar

from alpaca_ppo.async_calls import Call, CallTimeout, RowCall, error_text
from alpaca_ppo.config.fields import shown
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.control_tokens import ControlTokens
from alpaca_ppo.environments.conversation import Conversation, Message, tool_call_entry, tool_message, with_observation
from alpaca_ppo.environments.kinds import EnvironmentKind
from alpaca_ppo.environments.tool_calls import ToolCall, ToolCallParser, call_problem, encodable, find_parsed_calls
from alpaca_ppo.generation.turns import Reply, Turn
from alpaca_ppo.rewards.batch import copied

T = TypeVar("T")
# Yields calls of the user's functions, and is sent each once it has ended.
Steps = Generator[Call, RowCall, T]


class EnvironmentFailure(RuntimeError):
    """A method of an environment or the tool_call_parser raised an exception, took too long or returned a wrong
    value."""


@dataclass(frozen=True)
class EpisodeSettings:
    """What all episodes of a run have in common. Without a `tool_call_parser`, calls are found by the tokenizer's
    `response_template`, or else as JSON between <tool_call> tags.
    """

    conversation: Conversation
    args: PPOConfig
    tool_call_parser: ToolCallParser | None = None


@dataclass
class Episode:
    """An episode of one response, for a `row` of the dataset, which error messages name by `number`.

    Attributes:
        observation: what `reset` returned.
        prompt: text or messages, with the observation.
        prompt_end: what the chat template wrote before the policy's turn; filled in with tools.
        messages: what came after the prompt, from both sides.
        num_read: columns of the response that the environment has seen.
        turn_rewards: by the column of the turn's last token.
        reward: of the whole episode.
        tool_spans: columns of the response that the results of tools were written to.
        seconds: spent in calls of the environment and of tools.
        ended_by_environment: whether `reply` returned None.
        cut_off: whether `max_turns` or the length ended it after a whole turn, and the environment would have gone on.
        chosen: once it has ended, the columns of the tokens that the policy chose.
        reusable: False once `reset`, `reply` or `get_reward` has failed, or a tool of the environment has timed out.
        late: the last tool of the environment that timed out, and its call, which may still run.
    """

    kind: EnvironmentKind
    row: dict[str, Any]
    number: int
    settings: EpisodeSettings
    environment: Any = None
    observation: str = ""
    prompt: Any = None
    prompt_end: str = ""
    messages: list[Message] = field(default_factory=list)
    num_turns: int = 0
    num_read: int = 0
    turn_rewards: dict[int, float] = field(default_factory=dict)
    reward: float | None = None
    tool_calls: int = 0
    tool_failures: int = 0
    tool_spans: list[slice] = field(default_factory=list)
    seconds: float = 0.0
    ended_by_environment: bool = False
    cut_off: bool = False
    chosen: list[int] = field(default_factory=list)
    reusable: bool = True
    late: tuple[str, Future[Any]] | None = None

    def rewards_of(self, class_name: str) -> list[float] | float | None:
        """The reward of an environment of this class, None of another: one number, or, if turns have rewards, one for
        each token that the policy chose. A turn's reward is on its last token, that of the episode on the last of all.
        """
        if self.kind.class_name != class_name or not self.kind.rewards:
            return None
        if not self.kind.has_reply:
            return self.reward
        rewards = [self.turn_rewards.get(column, 0.0) for column in self.chosen]
        rewards[-1] += self.reward or 0.0
        return rewards

    def begin(self, seed: int) -> Steps[None]:
        """Resets the environment and makes the prompt."""
        self.environment = self.kind.acquire()
        if self.environment is None:
            made = yield from self._call_environment(self.kind.factory, {}, "environment_factory")
            if problem := self.kind.add(made):
                raise self._failure(problem)
            self.environment = made
        # Samples of a prompt share the row.
        columns = {name: copied(value) for name, value in self.row.items()}
        if self.kind.routed:
            del columns["environment"]
        arguments = self.kind.reset_arguments(columns, seed)
        observation = yield from self._call_environment(self.environment.reset, arguments, "reset")
        if observation is not None and not isinstance(observation, str):
            raise self._failure(f"reset returned {shown(observation)}; it must return text or None")
        self.observation = encodable(observation or "")
        self.prompt = with_observation(self.row["prompt"], self.observation)
        # An empty message without tools says nothing to the policy.
        silent = isinstance(self.prompt, list) and not self.prompt[-1].get("content") and not self.kind.tools
        if not self.prompt or silent:
            raise self._failure("reset returned no text, and the row has no prompt; one of them must have it")
        if self.kind.tools:
            self.prompt_end = self.settings.conversation.prompt_end(self.prompt, self.kind.schemas)

    @property
    def trusted(self) -> bool:
        """Whether the texts of environment and tools may write control tokens."""
        return self.settings.conversation.trusting

    def protected(self, completion: Any, control_tokens: ControlTokens) -> tuple[Any, Any]:
        """The prompt and the completion of `rewards.batch`, with the texts of environment and tools protected
        (`ControlTokens.protect`) for a reward model's tokenizer.
        """
        prompt = with_observation(self.row["prompt"], control_tokens.protect(self.observation))
        if isinstance(completion, str):
            return prompt, completion
        messages = []
        for message in completion:
            if message["role"] != "assistant":
                messages.append(control_tokens.protect(message))
                continue
            messages.append({**message, "content": control_tokens.protect_turn(message["content"])})
            if calls := message.get("tool_calls"):
                messages[-1]["tool_calls"] = [control_tokens.protect_call(call) for call in calls]
        return prompt, messages

    def prompt_ids(self, tokenized: list[int]) -> list[int]:
        """The token ids of the prompt: `tokenized`, unless there is an observation. Raises ValueError if too many."""
        ids, query_len = tokenized, self.settings.args.query_len
        if self.observation:
            ids = self.settings.conversation.prompt_ids(self.row["prompt"], self.kind.schemas, self.observation)
        if len(ids) > query_len:
            raise ValueError(
                f"the prompt of environment {self.kind.name!r} has {len(ids)} tokens after reset, more than "
                f"query_len ({query_len}); raise query_len, or let reset return less\n  row: {shown(self.row)}"
            )
        return ids

    def reply_to(self, turn: Turn) -> Steps[Reply]:
        """The token ids that follow a turn of the policy; None if the episode has ended."""
        answers = yield from self._answers(turn)
        args, conversation = self.settings.args, self.settings.conversation
        if answers is None:
            return None
        if args.max_turns is not None and self.num_turns >= args.max_turns:
            self.cut_off = True
            return None
        replies, calls = answers
        ids = conversation.reply_ids(
            replies,
            stopped_by_token=turn.stopped and turn.response[-1] in conversation.stop_token_ids,
            tool_calls=calls,
            schemas=self.kind.schemas,
            # What does not fit need not be written.
            columns=args.response_len - len(turn.response),
        )
        self.num_read = len(turn.response) + len(ids)
        if self.kind.tools:
            self.prompt_end = conversation.reply_end(replies, calls, self.kind.schemas)
        if calls:
            self.tool_spans.append(slice(len(turn.response), self.num_read))
        return ids

    def end(self, response: list[int], response_mask: list[bool], *, complete: bool) -> Steps[None]:
        """Shows the environment the last turn, if that is new to it and `complete`: not cut off by the limits of the
        response. Then asks for its reward. `response` ends with the policy's last token.
        """
        self.chosen = [column for column, chosen in enumerate(response_mask) if chosen]
        if len(response) > self.num_read:
            if complete:
                turn = Turn(self.number, response, response_mask, self.num_read, stopped=True)
                answers = yield from self._answers(turn)
                self.cut_off = answers is not None
            else:
                self.num_turns += 1
                text = self.settings.conversation.turn_text(response[self.num_read :])
                self.messages.append({"role": "assistant", "content": text})
        if self.kind.has_reward:
            reward = yield from self._call_environment(self.environment.get_reward, {}, "get_reward")
            self.reward = None if reward is None else self._number(reward, "get_reward")

    def _answers(self, turn: Turn) -> Steps[tuple[list[Message], list[dict[str, Any]]] | None]:
        """The messages that answer a turn, and the tool calls in it; None if nothing answers."""
        self.num_turns += 1
        self.num_read = len(turn.response)
        ids, conversation = turn.response[turn.start :], self.settings.conversation
        message: Message = {"role": "assistant", "content": conversation.turn_text(ids)}
        self.messages.append(message)
        calls = self._find_calls(turn) if self.kind.tools else []
        if calls:
            numbered = list(enumerate(calls, self.tool_calls))
            message["tool_calls"] = [tool_call_entry(call.name, call.arguments, number) for number, call in numbered]
            results = []
            for number, call in numbered:
                content = yield from self._call_tool(call)
                results.append(tool_message(call.name, content, number))
            self.messages += results
            return results, message["tool_calls"]
        if not self.kind.has_reply:
            return None
        arguments = {"completion": message["content"]}
        answer = yield from self._call_environment(self.environment.reply, arguments, "reply")
        text, reward = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
        if text is not None and not isinstance(text, str):
            raise self._failure(f"reply returned {shown(answer)}; it must return text, None, or a pair with a number")
        if reward is not None:
            self.turn_rewards[len(turn.response) - 1] = self._number(reward, "reply")
        if text is None:
            self.ended_by_environment = True
            return None
        self.messages.append({"role": "user", "content": encodable(text)})
        return self.messages[-1:], []

    def _number(self, value: Any, method: str) -> float:
        try:
            if isinstance(value, str | bytes):
                raise TypeError("it is text")
            return float(value)
        # A number of the user's own type may raise anything.
        except Exception as error:
            problem = f"{method} returned {shown(value)} as a reward ({error_text(error)}); it must be a number"
            raise self._failure(problem) from error

    def _find_calls(self, turn: Turn) -> list[ToolCall]:
        """The tool calls in a turn."""
        conversation, parser = self.settings.conversation, self.settings.tool_call_parser
        text = conversation.said_text(turn.response[turn.start :], self.prompt_end)
        if parser is not None:
            try:
                return find_parsed_calls(parser, text)
            # ValueError is about the policy's text; anything else is a defect of the parser.
            except Exception as error:
                raise self._failure(f"tool_call_parser raised {error_text(error)}; let it raise ValueError") from error
        return conversation.find_calls(text, self.prompt_end, self.kind.schemas)

    def _call_tool(self, call: ToolCall) -> Steps[str]:
        """The result of a call as text, or what was wrong with it as JSON."""
        self.tool_calls += 1
        tool = next((tool for tool in self.kind.tools if tool.name == call.name), None)
        if call.problem:
            return self._tool_failure(call.problem)
        if tool is None:
            names = [tool.name for tool in self.kind.tools]
            return self._tool_failure(f"there is no tool {call.name!r}; the tools are {names}")
        of_environment = tool.function is None
        if of_environment and self.late and not self.late[1].done():
            problem = f"{self.late[0]} is still at work, and nothing else can be called until it is done"
            return self._tool_failure(problem)
        function = tool.function or getattr(self.environment, tool.name)
        if problem := call_problem(call, function, tool.schema):
            return self._tool_failure(problem)
        timeout = self.settings.args.tool_timeout
        # A tool may keep and change what it is given.
        ended = yield Call(function, deepcopy(dict(call.arguments)), timeout, finish=lambda v: encodable(str(v)))
        if ended.error is None:
            return str(ended.value)
        if not isinstance(ended.error, CallTimeout):
            return self._tool_failure(error_text(ended.error))
        if of_environment:
            self.reusable, self.late = False, (call.name, ended.outcome)
        return self._tool_failure(f"{call.name} was not done after {timeout:g} seconds")

    def _tool_failure(self, problem: str) -> str:
        self.tool_failures += 1
        return encodable(json.dumps({"error": problem}, ensure_ascii=False))

    def _call_environment(self, method: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> Steps[Any]:
        timeout = self.settings.args.tool_timeout
        ended = yield Call(method, arguments, timeout)
        if ended.error is None:
            return ended.value
        self.reusable = False
        if isinstance(ended.error, CallTimeout):
            raise self._failure(f"{name} was not done after {timeout:g} seconds; make it faster, or raise tool_timeout")
        raise self._failure(f"{name} raised {error_text(ended.error)}") from ended.error

    def _failure(self, problem: str) -> EnvironmentFailure:
        turn = f"turn {self.num_turns}" if self.num_turns else "before the first turn"
        return EnvironmentFailure(
            f"environment {self.kind.name!r}, prompt {self.number}, {turn}: {problem}\n  row: {shown(self.row)}"
        )
