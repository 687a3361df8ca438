"""One episode: an environment, and the conversation that it has with the policy about a dataset row.

Its parts are generators that yield the calls of the user's functions and are sent what became of them; `episodes` makes
these calls.
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
from alpaca_ppo.environments.tool_calls import (
    ToolCall,
    ToolCallParser,
    call_problem,
    encodable,
    find_json_calls,
    find_parsed_calls,
    find_template_calls,
)
from alpaca_ppo.generation.turns import Reply, Turn
from alpaca_ppo.rewards.batch import copied

T = TypeVar("T")
Steps = Generator[Call, RowCall, T]
"""Yields calls, and is sent how each has ended."""


class EnvironmentFailure(RuntimeError):
    """A method of an environment or the tool_call_parser raised an exception, was not done in time or returned what it
    must not."""


@dataclass(frozen=True)
class EpisodeSettings:
    """What all episodes of a run have in common."""

    conversation: Conversation
    args: PPOConfig
    tool_call_parser: ToolCallParser | None = None
    """None takes the tokenizer's `response_template` if it has one, and otherwise JSON between <tool_call> tags."""


@dataclass
class Episode:
    """An episode of one response.

    Args:
        kind: of its environment.
        row: the dataset's row.
        number: of the row, in error messages.
        settings: of the run.
    """

    kind: EnvironmentKind
    row: dict[str, Any]
    number: int
    settings: EpisodeSettings
    environment: Any = None
    observation: str = ""
    """What `reset` returned."""
    prompt: Any = None
    """Text or messages, with the observation."""
    messages: list[Message] = field(default_factory=list)
    """What came after the prompt, both sides; with a chat template."""
    num_turns: int = 0
    num_read: int = 0
    """Columns of the response that the environment has been given."""
    turn_rewards: dict[int, float] = field(default_factory=dict)
    """By the column of the turn's last token."""
    reward: float | None = None
    """Of the whole episode."""
    tool_calls: int = 0
    tool_failures: int = 0
    tool_spans: list[slice] = field(default_factory=list)
    """Columns of the response that the results of tools were written to."""
    seconds: float = 0.0
    """That calls of the environment and of tools took."""
    over: bool = False
    """Whether the environment ended it (`reply` returned None)."""
    cut: bool = False
    """Whether it ended by `max_turns` though it would have gone on."""
    chosen: list[int] = field(default_factory=list)
    """Once it has ended: the columns of the tokens that the policy chose."""
    reusable: bool = True
    """Whether nothing may still run in the environment."""
    late: tuple[str, Future[Any]] | None = None
    """The tool of the environment that was not done in time, and whether it has ended since."""

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """Of the tools that the policy sees."""
        return [tool.schema for tool in self.kind.tools]

    @property
    def completion(self) -> list[Message] | None:
        """The messages of both sides after a prompt of messages; None after text."""
        return self.messages if isinstance(self.prompt, list) else None

    def rewards_of(self, class_name: str) -> list[float] | float | None:
        """What the environment gives, if it is of this class: one number, or, where turns have rewards, one for each
        token that the policy chose. A turn's reward is on its last token, that of the episode on the last one of all.
        """
        if self.kind.class_name != class_name or not self.kind.rewards:
            return None
        if not self.kind.has_reply:
            return self.reward
        rewards = [self.turn_rewards.get(column, 0.0) for column in self.chosen]
        rewards[-1] += self.reward or 0.0
        return rewards

    def begin(self, seed: int) -> Steps[None]:
        """Resets the environment and makes the prompt.

        Raises:
            EnvironmentFailure: see there.
        """
        self.environment = self.kind.acquire()
        if self.environment is None:
            made = yield from self._own(self.kind.factory, {}, "environment_factory")
            if problem := self.kind.add(made):
                raise self._failure(problem)
            self.environment = made
        # Samples of a prompt share the row.
        columns = {name: copied(value) for name, value in self.row.items()}
        if self.kind.routed:
            del columns["environment"]
        arguments = self.kind.reset_arguments(columns, seed)
        observation = yield from self._own(self.environment.reset, arguments, "reset")
        if observation is not None and not isinstance(observation, str):
            raise self._failure(f"reset returned {shown(observation)}; it must return text or None")
        self.observation = encodable(observation or "")
        self.prompt = with_observation(self.row["prompt"], self.observation)
        # An empty message without tools says nothing to the policy.
        silent = isinstance(self.prompt, list) and not self.prompt[-1].get("content") and not self.kind.tools
        if not self.prompt or silent:
            raise self._failure("reset returned no text, and the row has no prompt; one of them must have it")

    @property
    def trusted(self) -> bool:
        """Whether what the environment and tools say may write control tokens."""
        return self.settings.conversation.trusting

    def protected(self, completion: Any, control_tokens: ControlTokens) -> tuple[Any, Any]:
        """The prompt, and the completion as `rewards.batch` has it, with what the environment and tools said protected
        for a reward model's tokenizer.
        """
        prompt = with_observation(self.row["prompt"], control_tokens.protect(self.observation))
        if isinstance(completion, str):
            return prompt, completion
        said = []
        for message in completion:
            if message["role"] != "assistant":
                said.append(control_tokens.protect(message))
                continue
            said.append({**message, "content": control_tokens.protect_turn(message["content"])})
            if calls := message.get("tool_calls"):
                said[-1]["tool_calls"] = [control_tokens.protect_call(call) for call in calls]
        return prompt, said

    def prompt_ids(self) -> list[int]:
        """The token ids of the prompt."""
        return self.settings.conversation.prompt_ids(self.row["prompt"], self.schemas, self.observation)

    def take(self, turn: Turn) -> Steps[Reply]:
        """What follows a turn of the policy: None if the episode has ended.

        Raises:
            EnvironmentFailure: see there.
        """
        answers = yield from self._answers(turn)
        args = self.settings.args
        last = args.max_turns is not None and self.num_turns >= args.max_turns
        if answers is None or last:
            self.cut = answers is not None
            return None
        replies, calls = answers
        ids = self.settings.conversation.reply_ids(
            replies,
            stopped_by_token=turn.stopped and self.settings.conversation.ends_turn(turn.response[-1]),
            tool_calls=calls,
            schemas=self.schemas,
            # What does not fit need not be written.
            columns=args.response_len - len(turn.response),
        )
        self.num_read = len(turn.response) + len(ids)
        if calls:
            self.tool_spans.append(slice(len(turn.response), self.num_read))
        return ids

    def end(self, response: list[int], response_mask: list[bool], *, complete: bool) -> Steps[None]:
        """Gives the environment a last turn that it has not seen, if there is one, and takes its reward.

        Args:
            response: token ids up to the last one that the policy chose.
            response_mask: as long; True = a token the policy chose.
            complete: whether the last turn ended by itself or by the limit of a turn. One that was cut off by the
                limits of the response is not shown.

        Raises:
            EnvironmentFailure: see there.
        """
        self.chosen = [column for column, chosen in enumerate(response_mask) if chosen]
        if len(response) > self.num_read:
            if complete:
                turn = Turn(self.number, response, response_mask, self.num_read, stopped=True)
                self.cut = (yield from self._answers(turn)) is not None
            else:
                self.num_turns += 1
                text = self.settings.conversation.turn_text(response[self.num_read :])
                self.messages.append({"role": "assistant", "content": text})
        if self.kind.has_reward:
            reward = yield from self._own(self.environment.get_reward, {}, "get_reward")
            self.reward = None if reward is None else self._number(reward, "get_reward")

    def _answers(self, turn: Turn) -> Steps[tuple[list[Message], list[dict[str, Any]]] | None]:
        """The messages that answer a turn, and the calls that it made; None if nothing answers."""
        self.num_turns += 1
        self.num_read = len(turn.response)
        ids, conversation = turn.response[turn.start :], self.settings.conversation
        message: Message = {"role": "assistant", "content": conversation.turn_text(ids)}
        self.messages.append(message)
        calls = self._find_calls(turn) if self.kind.tools else []
        if calls:
            entries = [tool_call_entry(call.name, call.arguments, self.tool_calls + i) for i, call in enumerate(calls)]
            message["tool_calls"] = entries
            results = []
            for call in calls:
                content = yield from self._call_tool(call)
                results.append(tool_message(call.name, content, self.tool_calls - 1))
            self.messages += results
            return results, entries
        if not self.kind.has_reply:
            return None
        answer = yield from self._own(self.environment.reply, {"completion": message["content"]}, "reply")
        text, reward = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
        if text is not None and not isinstance(text, str):
            raise self._failure(f"reply returned {shown(answer)}; it must return text, None, or a pair with a number")
        if reward is not None:
            self.turn_rewards[len(turn.response) - 1] = self._number(reward, "reply")
        if text is None:
            self.over = True
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
        settings, tokenizer = self.settings, self.settings.conversation.tokenizer
        text = settings.conversation.turn_text(turn.response[turn.start :], keep_special=True)
        if settings.tool_call_parser is not None:
            try:
                return find_parsed_calls(settings.tool_call_parser, text)
            # ValueError is about the policy's text; anything else is a defect of the parser.
            except Exception as error:
                raise self._failure(
                    f"tool_call_parser raised {error_text(error)}; let it raise ValueError for a malformed call"
                ) from error
        if getattr(tokenizer, "response_template", None) is not None:
            return find_template_calls(tokenizer, text, settings.conversation.prompt_end, self.schemas)
        return find_json_calls(text)

    def _call_tool(self, call: ToolCall) -> Steps[str]:
        """The result of a call as text, or what was wrong with it."""
        self.tool_calls += 1
        problem, own = call.problem, False
        if not problem:
            tool = next((tool for tool in self.kind.tools if tool.name == call.name), None)
            own = tool is not None and tool.function is None
            if tool is None:
                problem = f"there is no tool {call.name!r}; the tools are {[tool.name for tool in self.kind.tools]}"
            elif own and self.late and not self.late[1].done():
                problem = f"{self.late[0]} is still at work, and nothing else can be called until it is done"
            else:
                function = tool.function or getattr(self.environment, tool.name)
                problem = call_problem(call, function, tool.schema)
        if not problem:
            timeout = self.settings.args.tool_timeout
            # A tool may keep and change what it is given.
            ended = yield Call(function, deepcopy(dict(call.arguments)), timeout, finish=lambda v: encodable(str(v)))
            if ended.error is None:
                return str(ended.value)
            problem = error_text(ended.error)
            if isinstance(ended.error, CallTimeout):
                problem = f"{call.name} was not done after {timeout:g} seconds"
                if own:
                    self.reusable, self.late = False, (call.name, ended.outcome)
        self.tool_failures += 1
        return encodable(json.dumps({"error": problem}, ensure_ascii=False))

    def _own(self, method: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> Steps[Any]:
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
