"""Conversations as tokens: prompts with tools, and what is appended between two turns of the policy.

The tokens that the policy sampled stay as they are; the chat template renders what follows them around a placeholder.
So it must write a message the same whatever its position and whatever follows; `check` tries that.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cached_property
from os.path import commonprefix
from typing import Any, NamedTuple

from alpaca_ppo.async_calls import error_text
from alpaca_ppo.config.checks import template_options
from alpaca_ppo.control_tokens import ControlTokens
from alpaca_ppo.data.prompts import tokenize_prompts
from alpaca_ppo.environments.tool_calls import ToolCall, find_json_calls, find_template_calls, without_thoughts

Message = dict[str, Any]
# JSON schemas of tools.
Schemas = Sequence[Mapping[str, Any]]

# The second is searched for in what the template writes, so no environment may write it.
_QUESTION, _ANSWER = "First question", "Earlier answer 8D1f6c03"
_USER: Message = {"role": "user", "content": _QUESTION}
_THOUGHT = "earlier thought"
# Of the conversation in `check`: fewest and most turns of the policy, and about the most characters of a message.
_TURNS, _MOST_TURNS, _LONGEST = 32, 100, 4000
# Tokens that are kept of a text beyond those needed, because the last ones depend on where it is cut.
_MARGIN = 32


class _Written(NamedTuple):
    """How the template writes a turn of the policy with the text `_ANSWER`, and the replies to it.

    Attributes:
        text: from the end of the prompt to the start of the policy's next turn.
        closing: what ends a turn, after `_ANSWER`.
        suffix: what comes after `closing`, up to the start of the next turn.
    """

    text: str
    closing: str
    suffix: str


class Conversation:
    """Writes prompts and replies.

    Args:
        messages: whether prompts are messages, which the chat template writes; otherwise all is plain text.
        chat_template_kwargs, control_tokens_from: the options of these names.
        stop_token_ids: end a turn.

    Raises:
        ValueError: for a tokenizer that cannot tell control tokens from text.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        messages: bool,
        chat_template_kwargs: Mapping[str, Any] | None,
        stop_token_ids: Sequence[int],
        control_tokens_from: str = "prompts",
    ) -> None:
        self.tokenizer, self.messages = tokenizer, messages
        # Whether replies may write control tokens.
        self.trusting = control_tokens_from == "everything"
        self._prompts_trusted = control_tokens_from != "template"
        self._control_tokens = ControlTokens(tokenizer, trusting=self.trusting)
        self._keywords = dict(chat_template_kwargs or {})
        self.stop_token_ids = frozenset(stop_token_ids)
        self._special = frozenset(tokenizer.all_special_ids)

    def of_row(self, row: Mapping[str, Any]) -> "Conversation":
        """This one, with the chat template's arguments in the columns of a dataset row."""
        if not (options := template_options(row) if self.messages else {}):
            return self
        own = copy(self)
        own._keywords = self._keywords | options
        return own

    def prompt_ids(self, prompt: Any, schemas: Schemas, observation: str = "") -> list[int]:
        """The token ids of a row's text or messages, with `observation` at their end."""
        tokens = self._control_tokens
        if not self._prompts_trusted:
            prompt = tokens.protect(prompt)
        prompt = with_observation(prompt, tokens.protect(observation))
        options = self._keywords | ({"tools": list(schemas)} if schemas else {})
        return tokenize_prompts([prompt], self.tokenizer, [options], may_be_blank=True, control_tokens=tokens)[0]

    def prompt_end(self, messages: Sequence[Message], schemas: Schemas) -> str:
        """What the chat template writes after `messages`, before a turn of the policy."""
        text = self._render(messages, schemas, add_generation_prompt=True)
        # Some templates write an EOS where no turn follows.
        return text[len(commonprefix([text, self._render(messages, schemas)])) :]

    def reply_end(self, replies: Sequence[Message], tool_calls: Sequence[Mapping[str, Any]], schemas: Schemas) -> str:
        """What `reply_ids` writes after the replies, before the next turn of the policy."""
        turn = _assistant(self._thought(0, schemas) + _ANSWER, self._without_arguments(tool_calls))
        return self.prompt_end([_USER, turn, *self._control_tokens.protect(replies)], schemas)

    def turn_text(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """The text of a turn, without the token that ended it and, unless `keep_special`, without special tokens."""
        kept = list(ids[:-1]) if ids and ids[-1] in self.stop_token_ids else list(ids)
        skip = not keep_special
        return str(self.tokenizer.decode(kept, skip_special_tokens=skip, clean_up_tokenization_spaces=False))

    def said_text(self, ids: Sequence[int], before: str) -> str:
        """The text of a turn with its special tokens and without thoughts, of which the text `before` it, the result of
        `prompt_end` or `reply_end`, may have begun one.
        """
        return without_thoughts(self.turn_text(ids, keep_special=True), before)

    def find_calls(self, text: str, before: str, schemas: Schemas) -> list[ToolCall]:
        """The tool calls in a turn's `said_text`."""
        if getattr(self.tokenizer, "response_template", None) is not None:
            return find_template_calls(self.tokenizer, text, before, schemas)
        return find_json_calls(text)

    def reply_ids(
        self,
        replies: Sequence[Message],
        *,
        stopped_by_token: bool,
        tool_calls: Sequence[Mapping[str, Any]] = (),
        schemas: Schemas = (),
        columns: int | None = None,
    ) -> list[int]:
        """The token ids between a turn of the policy and its next one.

        Args:
            replies: messages; for plain text, one whose content is appended as it is.
            stopped_by_token: whether a stop token ended the turn; otherwise the template's end of a turn comes first.
            tool_calls: of the turn. The template gets them without their arguments, which it might refuse.
            columns: how many of the ids are used: little more of a long message is tokenized. None tokenizes all.
        """
        if columns is not None:
            replies = [{**message, "content": self._beginning(message["content"], columns)} for message in replies]
        replies = self._control_tokens.protect(replies)
        if not self.messages:
            return self._ids("".join(message["content"] for message in replies))
        written = self._written(self._thought(0, schemas) + _ANSWER, replies, tool_calls, schemas)
        if not stopped_by_token:
            return self._ids(written.closing + written.suffix)
        # What follows the token that the sampled stop token replaces.
        ends = self.stop_token_ids | self._special
        if ends.intersection(self._ids(written.closing)):
            ids = self._ids(written.closing + written.suffix)
            end = next(i for i, token in enumerate(ids) if token in ends)
            return ids[end + 1 :]
        ids = self._ids(written.suffix)
        # A turn may end with the token that begins the next message.
        starts_with_stop = bool(ids) and ids[0] in self.stop_token_ids
        return ids[1:] if starts_with_stop and not written.closing else ids

    def _beginning(self, text: str, columns: int) -> str:
        """What determines the first `columns` tokens of a message with `text`."""
        stripped = text.lstrip()
        kept = self._shortened(stripped, columns + _MARGIN)
        space = self._shortened(text[: len(text) - len(stripped)], columns + _MARGIN)
        # A template may strip white space; this must not change either end of the result.
        return space + kept + ("." if len(kept) < len(stripped) else "")

    def _shortened(self, text: str, tokens: int) -> str:
        """A beginning of `text` that has at least so many tokens; all of it if it has fewer."""
        size = 8 * tokens
        while size < len(text) and len(self._ids(text[:size])) < tokens:
            size *= 2
        return text[:size]

    def check(self, schemas: Schemas, *, replies: bool, max_turns: int | None = None) -> None:
        """Checks at the start of a run that the chat template only appends as a conversation grows.

        Args:
            schemas: of the tools; may be empty if `replies`.
            replies: whether a conversation partner answers, as the user.
            max_turns: of the run; of very many turns, only the first are tried.

        Raises:
            ValueError: for tools in plain text; for a template that refuses or rewrites messages, or leaves out tools.
        """
        if not self.messages:
            if schemas:
                raise ValueError(
                    f"the policy has tools ({schemas[0]['function']['name']}), but the prompts are plain text: make "
                    "them messages, or begin the names of methods that are no tools with an underscore"
                )
            return
        if schemas and self._render([_USER], schemas) == self._render([_USER], ()):
            raise self._error("writes nothing about tools")
        messages = [_USER]
        # What the template writes must be what `reply_ids` appends.
        appended = self._render([_USER], schemas, add_generation_prompt=True)
        for turn in range(min(max(_TURNS, max_turns or 0), _MOST_TURNS)):
            thought = self._thought(turn, schemas)
            calls, answers = _replies(turn, schemas, replies=replies)
            written = self._written(thought + _ANSWER, self._control_tokens.protect(answers), calls, schemas)
            if thought and _ANSWER in written.text and _THOUGHT not in written.text:
                raise self._error("leaves out what the policy thinks between <think> and </think>")
            if len(self._ids(written.closing)) > 1 and not written.text.endswith(written.closing + written.suffix):
                raise self._error(f"does not end a turn with tool calls as one without, with {written.closing!r}")
            answer = _words("answer", turn)
            messages += [_assistant(thought + answer, self._without_arguments(calls)), *answers]
            appended += self._control_tokens.restored(written.text).replace(_ANSWER, answer)
            rendered = self._render(messages, schemas, add_generation_prompt=True)
            if rendered != appended:
                raise self._error(f"writes a message in another way later: {_difference(appended, rendered)}")

    def _thought(self, turn: int, schemas: Schemas) -> str:
        """The thought before the text of a turn in `check`, in every other turn. The policy writes none where the
        template's prompt ends with one, and only the end of one that the prompt begins.
        """
        end = self.prompt_end([_USER], schemas)
        if "</think>" in end:
            return ""
        if "<think>" in end:
            return f"{_THOUGHT}\n</think>\n\n"
        return f"<think>\n{_THOUGHT}\n</think>\n\n" if turn % 2 else ""

    def _written(
        self, answer: str, replies: Sequence[Message], tool_calls: Sequence[Mapping[str, Any]], schemas: Schemas
    ) -> _Written:
        """How the template writes a first turn with the text `answer`, and the replies to it."""
        message = _assistant(answer, self._without_arguments(tool_calls))
        start = self._render([_USER], schemas, add_generation_prompt=True)
        replied = self._render([_USER, message, *replies], schemas, add_generation_prompt=True)
        if not replied.startswith(start):
            raise self._error(f"writes a message in another way later: {_difference(start, replied)}")
        without_calls = self._render([_USER, _assistant(answer)], schemas)
        with_calls = self._render([_USER, message], schemas)
        # Some templates write an EOS at the end of the text.
        for eos in ("", self.tokenizer.eos_token or ""):
            earlier = with_calls.removesuffix(eos)
            if _ANSWER in earlier and not replied.startswith(earlier):
                # Some write more before the text of the last message than they do once others follow.
                earlier = replied.rpartition(_ANSWER)[0] + earlier[earlier.rfind(_ANSWER) :]
            _, separator, closing = without_calls.removesuffix(eos).rpartition(_ANSWER)
            if separator and replied.startswith(earlier):
                return _Written(text=replied.removeprefix(start), closing=closing, suffix=replied[len(earlier) :])
        raise self._error("does not write earlier answers, or writes their end in another way when messages follow")

    def _without_arguments(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The calls as the template takes them, without arguments."""
        number, arguments = self._call_form
        return [{**call, "function": {**call["function"], "arguments": arguments}} for call in calls[:number]]

    @cached_property
    def _call_form(self) -> tuple[int | None, Any]:
        """The most calls that the template takes in a message (None: any), and its form of no arguments."""
        forms: list[tuple[int | None, Any]] = [(None, {}), (None, "{}"), (1, {}), (1, "{}")]
        for number, arguments in forms:
            call = {**tool_call_entry("name", {}, 0), "function": {"name": "name", "arguments": arguments}}
            with suppress(ValueError):
                self._render([_USER, _assistant(_ANSWER, [call] * (number or 2))], ())
                return number, arguments
        return forms[0]

    def _error(self, problem: str) -> ValueError:
        name = self.tokenizer.name_or_path or "the tokenizer"
        return ValueError(f"the chat template of {name} {problem}; set one that only appends (docs/environments.md)")

    def _render(self, messages: Sequence[Message], schemas: Schemas, *, add_generation_prompt: bool = False) -> str:
        tools = {"tools": list(schemas)} if schemas else {}
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **self._keywords, **tools
            )
        # A template may raise anything.
        except Exception as error:
            roles = [message["role"] for message in messages]
            raise self._error(f"cannot write a conversation with the roles {roles}: {error_text(error)}") from error
        return text

    def _ids(self, text: str) -> list[int]:
        return self._control_tokens.encode(text, continues=True)


def _assistant(content: str, calls: Sequence[Mapping[str, Any]] = ()) -> Message:
    message: Message = {"role": "assistant", "content": content}
    return {**message, "tool_calls": list(calls)} if calls else message


def _replies(turn: int, schemas: Schemas, *, replies: bool) -> tuple[list[dict[str, Any]], list[Message]]:
    """The calls of a turn in `check`, and the messages that follow it: up to three results, or one of the user."""
    if not schemas or (replies and turn % 3 == 1):
        return [], [{"role": "user", "content": _words("reply", turn)}]
    calls, results = [], []
    for i in range(1 + turn % 3):
        name = schemas[i % len(schemas)]["function"]["name"]
        number = 3 * turn + i
        calls.append(tool_call_entry(name, {}, number))
        results.append(tool_message(name, _words("result", number, of_turn=turn), number))
    return calls, results


def _words(name: str, number: int, of_turn: int | None = None) -> str:
    """A text with an end of its own, which is longer in later turns."""
    size = min(_LONGEST, 16 * 2 ** (number if of_turn is None else of_turn))
    return "More & 2 " * (size // 9) + f"of {name} {number:02d} [<b>]"


def with_observation(prompt: Any, observation: str) -> Any:
    """The prompt with the text of `reset` at its end, or at the end of its last message."""
    if isinstance(prompt, str):
        return prompt + observation
    return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + observation}]


def _difference(expected: str, found: str) -> str:
    """Where two renderings of a conversation begin to differ, in words."""
    at = len(commonprefix([expected, found]))
    here = slice(max(0, at - 20), at + 40)
    return f"{found[here]!r}, not {expected[here]!r}"


def tool_call_entry(name: str, arguments: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Call `number` of the conversation, in the form of an assistant message."""
    return {"id": f"{number:09d}", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def tool_message(name: str, content: str, number: int) -> Message:
    """The message with the result of call `number`."""
    return {"role": "tool", "tool_call_id": f"{number:09d}", "name": name, "content": content}
