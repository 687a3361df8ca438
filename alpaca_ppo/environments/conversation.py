"""How a conversation is written in tokens: prompts with tools, and what is appended between two turns of the policy.

The tokens that the policy sampled stay as they were sampled. What follows them is rendered by the chat template around
placeholders, so a template must write earlier messages the same whatever comes after them; `check` finds out.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from alpaca_ppo.data.prompts import tokenize_prompts

Message = dict[str, Any]

# No environment says the second, which is looked for in what the template writes.
_QUESTION, _ANSWER = "first question", "earlier answer 8d1f6c03"
_THOUGHT = f"<think>\nearlier thought\n</think>\n\n{_ANSWER}"


class Conversation:
    """Writes prompts and replies.

    Args:
        tokenizer: of the policy.
        messages: whether prompts are messages, which the chat template writes; otherwise replies are plain text.
        chat_template_kwargs: further arguments of the chat template.
        stop_token_ids: what ends a turn.
        allow_rewriting: whether the chat template may change earlier turns when later messages follow; what was sampled
            stays as it is in any case.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        messages: bool,
        chat_template_kwargs: Mapping[str, Any] | None,
        stop_token_ids: Sequence[int],
        allow_rewriting: bool = False,
    ) -> None:
        self.tokenizer, self.messages = tokenizer, messages
        self._keywords = dict(chat_template_kwargs or {})
        self._stop = frozenset(stop_token_ids)
        self._special = frozenset(tokenizer.all_special_ids)
        self._allow_rewriting = allow_rewriting

    def prompt_ids(self, prompt: Any, schemas: Sequence[Mapping[str, Any]]) -> list[int]:
        """The token ids of text or messages; the tools of `schemas` are shown to the policy."""
        keywords = self._keywords | ({"tools": list(schemas)} if schemas and self.messages else {})
        return tokenize_prompts([prompt], self.tokenizer, keywords)[0]

    @cached_property
    def prompt_end(self) -> str:
        """What the chat template writes before each turn of the policy."""
        question = self._render([_user()], ())
        return self._render([_user()], (), add_generation_prompt=True).removeprefix(question)

    def ends_turn(self, token: int) -> bool:
        """Whether `token` ends a turn."""
        return token in self._stop

    def turn_text(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """The text of a turn, without the token that ended it and, unless `keep_special`, without special tokens."""
        kept = list(ids[:-1]) if ids and ids[-1] in self._stop else list(ids)
        text: str = self.tokenizer.decode(
            kept, skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False
        )
        return text

    def reply_ids(
        self,
        replies: Sequence[Message],
        *,
        stopped_by_token: bool,
        tool_calls: Sequence[Mapping[str, Any]] = (),
        schemas: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """The token ids between a turn of the policy and its next one.

        Args:
            replies: messages; of plain text, one whose content is appended as it is.
            stopped_by_token: whether the turn's last token is one that ends a turn; otherwise the template's own end of
                a turn is written first.
            tool_calls: those of the turn, as a message has them. The template gets the first one, without arguments:
                it may refuse what the policy has written, and nothing of it is appended.
            schemas: of the tools.
        """
        if not self.messages:
            return self._ids("".join(message["content"] for message in replies))
        closing, suffix = self._suffix(_ANSWER, replies, tool_calls, schemas)
        ids = self._ids(closing)
        if stopped_by_token:
            # The sampled token stands for the template's.
            ends = [i for i, token in enumerate(ids) if token in self._stop or token in self._special]
            ids = ids[ends[0] + 1 :] if ends else []
        following = self._ids(suffix)
        if stopped_by_token and not ids and following and following[0] in self._stop:
            # A turn ends with the token that begins the next message.
            following = following[1:]
        return ids + following

    def check(self, schemas: Sequence[Mapping[str, Any]], *, replies: bool) -> None:
        """Checks that the chat template writes a conversation as it grows, at the start of a run.

        Args:
            schemas: of the tools; without any, `replies` is True.
            replies: whether a conversation partner answers, as the user.

        Raises:
            ValueError: when there is no chat template, it cannot write the messages, or later messages change earlier
                ones.
        """
        if not self.messages:
            if schemas:
                raise ValueError(
                    f"the policy has tools ({schemas[0]['function']['name']}), but the prompts are plain text, in "
                    "which tools cannot be shown: make the prompts messages, with a tokenizer whose chat template "
                    "writes tools; or answer in the environment's reply(completion), and begin the names of methods "
                    "that are no tools with an underscore"
                )
            return
        # Where the template itself writes an empty thought before each turn, the policy writes none.
        for answer in (_ANSWER,) if "</think>" in self.prompt_end else (_ANSWER, _THOUGHT):
            if replies:
                self._suffix(answer, [{"role": "user", "content": "second question"}], (), schemas)
            for schema in schemas[:1]:
                name = schema["function"]["name"]
                call = tool_call_entry(name, {}, 0)
                self._suffix(answer, [tool_message(name, "result", 0)], [call], schemas)
        if schemas and self._render([_user()], schemas) == self._render([_user()], ()):
            raise ValueError(
                f"{self._owner()} writes nothing about tools, so the policy could not know them; use a tokenizer whose "
                "chat template does, or tokenizer.chat_template of your own"
            )

    def _suffix(
        self,
        answer: str,
        replies: Sequence[Message],
        tool_calls: Sequence[Mapping[str, Any]],
        schemas: Sequence[Mapping[str, Any]],
    ) -> tuple[str, str]:
        """How the template closes an answer, and what it writes after that up to the policy's next turn."""
        plain: Message = {"role": "assistant", "content": answer}
        named = [tool_call_entry(call["function"]["name"], {}, 0) for call in tool_calls[:1]]
        called = {**plain, "tool_calls": named} if named else plain
        start = self._render([_user()], schemas, add_generation_prompt=True)
        before = self._render([_user(), plain], schemas)
        earlier = self._render([_user(), called], schemas)
        after = self._render([_user(), called, *replies], schemas, add_generation_prompt=True)
        if not after.startswith(earlier):
            # Some templates write one at the end of the text.
            end_of_text = self.tokenizer.eos_token or ""
            before, earlier = before.removesuffix(end_of_text), earlier.removesuffix(end_of_text)
        if not self._allow_rewriting and not (before.startswith(start) and after.startswith(earlier)):
            raise ValueError(
                f"{self._owner()} changes an earlier turn when later messages follow it, so the policy would be "
                "trained on other tokens than the template writes when it is used. Set tokenizer.chat_template to one "
                "that writes every message as it was (many remove earlier reasoning by a rule that can be deleted), or "
                "train on the tokens as they were sampled with allow_history_rewriting: true"
            )
        closing, called_tail, tail = (text.rpartition(_ANSWER)[2] for text in (before, earlier, after))
        if _ANSWER in before and after.startswith(earlier):
            # With a call, a template may leave the text of the turn out.
            return closing, after[len(earlier) :]
        if not all(_ANSWER in text for text in (before, earlier, after)) or not tail.startswith(called_tail):
            raise ValueError(
                f"{self._owner()} does not write earlier answers, or writes their end in another way when messages "
                "follow; set tokenizer.chat_template to one that only appends"
            )
        return closing, tail[len(called_tail) :]

    def _render(
        self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False
    ) -> str:
        tools = {"tools": list(schemas)} if schemas else {}
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._keywords,
                **tools,
            )
        # A template refuses what it does not know with an error of its own choice.
        except Exception as error:
            roles = [message["role"] for message in messages]
            raise ValueError(
                f"{self._owner()} cannot write a conversation with the roles {roles}: {type(error).__name__}: {error}; "
                "use another tokenizer, or tokenizer.chat_template of your own"
            ) from error
        return text

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _owner(self) -> str:
        return f"the chat template of {self.tokenizer.name_or_path or 'the tokenizer'}"


def _user() -> Message:
    return {"role": "user", "content": _QUESTION}


def tool_call_entry(name: str, arguments: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A call as an assistant message has it; `number` is that of the call in the conversation."""
    return {"id": f"{number:09d}", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def tool_message(name: str, content: str, number: int) -> Message:
    """The message with the result of call `number`."""
    return {"role": "tool", "tool_call_id": f"{number:09d}", "name": name, "content": content}
