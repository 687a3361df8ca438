"""Episodes without a model: a test writes the turns of the policy."""

import json
import threading

import pytest
import torch

from alpaca_ppo.environments.episode import EnvironmentFailure
from alpaca_ppo.environments.episodes import Environments
from alpaca_ppo.environments.kinds import make_kinds
from alpaca_ppo.generation import PENDING, SamplingParams, Turn
from alpaca_ppo.generation.responses import Generation
from tests.environments.chat import WITH_TOOLS, chat_bytes, conversation, settings
from tests.environments.test_kinds import Counter, add
from tests.tiny_models import tiny_tokenizer

ROW = {"prompt": [{"role": "user", "content": "Count."}], "start": 2}
CHAT = chat_bytes()


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call><|im_end|>"


class Played:
    """An episode of one row, to which turns are given as text."""

    def __init__(self, kinds, row=ROW, *, poll=lambda: None, **keywords):
        self.environments = Environments(kinds, settings(**keywords))
        ids = CHAT(str(row["prompt"]), add_special_tokens=False)["input_ids"]
        batch = {
            "queries": torch.tensor([ids]),
            "query_attn_masks": torch.ones(1, len(ids), dtype=torch.long),
            "prompt_ids": torch.tensor([5]),
            "rows": [row],
        }
        stop = (CHAT.eos_token_id,)
        params = SamplingParams(max_new_tokens=4000, temperature=1.0, pad_token_id=0, stop_token_ids=stop)
        self._block = self.environments.episodes(batch, params, poll)
        self.episodes = self._block.__enter__()
        self.episode = self.episodes.episodes[0]
        self.response, self.mask = [], []

    def say(self, text):
        """The answer to a turn, as text; None at the end."""
        return self.say_ids(CHAT(text, add_special_tokens=False)["input_ids"])

    def say_ids(self, ids):
        """The same of token ids."""
        start = len(self.response)
        self.response += ids
        self.mask += [True] * len(ids)
        stopped = ids[-1] == CHAT.eos_token_id
        reply = self.episodes.on_stop(Turn(0, list(self.response), list(self.mask), start, stopped=stopped))
        if reply is PENDING:
            (row, reply), *others = next(found for found in iter(lambda: self.episodes.ready(5), None) if found)
            assert (row, others) == (0, [])
        if reply is None:
            return None
        self.response += reply
        self.mask += [False] * len(reply)
        return CHAT.decode(reply)

    def end(self, unseen="", *, stopped=True):
        """Ends the episode, after a turn that it has not seen."""
        ids = CHAT(unseen, add_special_tokens=False)["input_ids"]
        response, mask = self.response + ids, self.mask + [True] * len(ids)
        samples = {
            "responses": torch.tensor([response + [0]]),
            "response_mask": torch.tensor([mask + [False]]),
            "stopped": torch.tensor([stopped]),
        }
        self.episodes.finish([0], Generation(**samples, logprobs=torch.zeros(1, len(mask) + 1)))
        self.episodes.wait()
        statistics = self.episodes.statistics(samples)
        self._block.__exit__(None, None, None)
        self.tool_tokens = statistics.pop("tool_tokens")[0].tolist()
        return {name: value.item() for name, value in statistics.items() if name != "environment_seconds"}


def result(reply):
    """What a tool's message says."""
    return reply.split("<|im_start|>tool\n")[1].split("<|im_end|>")[0]


def test_tools_are_called_and_answered_and_the_reward_is_that_of_the_environment():
    played = Played(make_kinds([add], Counter))
    assert result(played.say("I count." + call("increment", step=3))) == "5"
    both = played.say(call("add", a=1, b=2).replace("<|im_end|>", "") + call("increment", step=1))
    assert [part.split("<|im_end|>")[0] for part in both.split("<|im_start|>tool\n")[1:]] == ["3", "6"]
    assert played.say("Six.<|im_end|>") is None
    statistics = played.end()
    assert statistics == {
        "num_turns": 3, "tool_calls": 3, "tool_failures": 0, "stopped": True,
        "environment_tokens": played.mask.count(False),
    }  # fmt: skip
    # All that the policy did not choose, but not the padding behind the response.
    assert played.tool_tokens == [not chosen for chosen in played.mask] + [False]
    assert played.episode.reward == 6.0
    assert played.episode.rewards_of("Counter") == 6.0
    assert played.episode.rewards_of("Another") is None
    roles = [message["role"] for message in played.episode.messages]
    assert roles == ["assistant", "tool", "assistant", "tool", "tool", "assistant"]


def test_a_template_writes_what_a_tool_says_with_the_tools_in_view():
    template = WITH_TOOLS.replace("{{ m.content }}", "{{ m.content if tools else 'no tools' }}")
    played = Played(make_kinds([add], Counter), conversation=conversation(chat_bytes(template)))
    assert result(played.say(call("add", a=1, b=2))) == "3"
    played.end()


def test_calls_that_cannot_be_made_are_answered_and_counted():
    def explode(x: int) -> int:
        """Explodes.

        Args:
            x: anything
        """
        raise RuntimeError("boom")

    played = Played(make_kinds([explode], Counter))
    for turn, problem in [
        (call("missing"), "there is no tool 'missing'; the tools are ['explode', 'increment']"),
        (call("reset"), "there is no tool 'reset'"),
        (call("_helper"), "there is no tool '_helper'"),
        (call("increment"), "wrong arguments for increment: missing"),
        (call("increment", step="3"), "wrong arguments for increment: step must be of type integer"),
        ("<tool_call>{<|im_end|>", "the tool call is not closed"),
        (call("explode", x=1), "RuntimeError: boom"),
    ]:
        assert json.loads(result(played.say(turn)))["error"].startswith(problem)
    statistics = played.end("over<|im_end|>")
    assert (statistics["tool_calls"], statistics["tool_failures"], statistics["num_turns"]) == (7, 7, 8)


def test_a_slow_tool_is_answered_with_a_message_and_its_environment_is_not_used_again():
    release = threading.Event()

    class Hangs(Counter):
        def wait(self) -> str:
            """Waits."""
            release.wait(60)
            return "late"

    kinds = make_kinds([add], Hangs)
    played = Played(kinds, tool_timeout=1.0)
    assert json.loads(result(played.say(call("wait"))))["error"] == "wait was not done after 1 seconds"
    # The call may still be at work in the environment, which therefore takes no other one; tools beside it are free.
    problem = "wait is still at work, and nothing else can be called until it is done"
    for other in (call("increment", step=1), call("wait")):
        assert json.loads(result(played.say(other)))["error"] == problem
    assert result(played.say(call("add", a=1, b=2))) == "3"
    release.set()
    failures = 3
    while (said := result(played.say(call("increment", step=1)))) != "3":
        assert json.loads(said)["error"] == problem
        failures += 1
    first = played.episode.environment
    assert played.end("over<|im_end|>")["tool_failures"] == failures
    assert kinds[None].acquire() is not first


def test_results_of_any_type_and_size_are_text():
    def get(what: str) -> object:
        """Gets.

        Args:
            what: it
        """
        return {"none": None, "list": [1, "a"], "large": "x" * 1_000_000, "object": object}[what]

    played = Played(make_kinds([get], None))
    assert [result(played.say(call("get", what=what))) for what in ("none", "list", "object")] == [
        "None", "[1, 'a']", "<class 'object'>",
    ]  # fmt: skip
    assert len(played.say(call("get", what="large"))) > 1_000_000
    assert played.end("x<|im_end|>")["tool_failures"] == 0
    assert not played.environments.reward_functions()


def test_async_tools_and_environments():
    class Async(Counter):
        async def reset(self, **row):
            return " Async."

        async def double(self, x: int) -> int:
            """Doubles.

            Args:
                x: it
            """
            return 2 * x

        async def get_reward(self):
            return 4

    played = Played(make_kinds(None, Async))
    assert played.episode.prompt[-1]["content"] == "Count. Async."
    assert ROW["prompt"][-1]["content"] == "Count."
    assert result(played.say(call("double", x=4))) == "8"
    played.end("x<|im_end|>")
    assert played.episode.reward == 4.0


class Talks:
    def __init__(self):
        self.heard = []

    def reset(self, **row):
        self.heard = []

    def reply(self, completion):
        self.heard.append(completion)
        return {"bye": None, "win": (None, 2.0), "good": ("go on", 1)}.get(completion, "hm")


FIRST = Talks()


def test_a_partner_hears_each_turn_once_also_the_one_after_which_no_token_is_left():
    played = Played(make_kinds(None, Talks))
    assert played.say("a<|im_end|>").count("hm") == 1
    assert "go on" in played.say("good<|im_end|>")
    heard = played.episode.environment.heard
    end = len(played.response) - 1 - played.mask[::-1].index(True)
    statistics = played.end("win<|im_end|>")
    assert heard == ["a", "good", "win"]
    assert played.episode.turn_rewards == {end: 1.0, len(played.response) + 3: 2.0}
    rewards = played.episode.rewards_of("Talks")
    assert (len(rewards), sum(rewards), rewards[-1]) == (sum(played.mask) + 4, 3.0, 2.0)
    assert (statistics["stopped"], statistics["num_turns"]) == (True, 3)


def test_a_turn_that_was_cut_off_by_the_width_is_not_heard_and_truncates():
    played = Played(make_kinds(None, Talks))
    played.say("a<|im_end|>")
    heard = played.episode.environment.heard
    assert played.end("unfinish", stopped=False)["stopped"] is False
    assert heard == ["a"]
    assert [m["content"] for m in played.episode.messages] == ["a", "hm", "unfinish"]


@pytest.mark.parametrize(("last", "stopped"), [("b<|im_end|>", False), ("bye<|im_end|>", True)])
def test_max_turns_is_no_end_of_its_own(last, stopped):
    played = Played(make_kinds(None, Talks), max_turns=2)
    assert played.say("a<|im_end|>") is not None
    assert played.say(last) is None
    assert played.episode.environment.heard == ["a", last.removesuffix("<|im_end|>")]
    assert played.end()["stopped"] is stopped


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("reset", 3, r"before the first turn: reset returned 3; it must return text or None"),
        ("reply", 3, "turn 1: reply returned 3; it must return text, None, or a pair"),
        ("reply", ("x", "much"), "turn 1: reply returned 'much' as a reward "),
        ("reply", ("x", 10**400), r"turn 1: reply returned 10{100,}\.\.\..* as a reward .OverflowError: int too large"),
        ("get_reward", "1.5", "turn 1: get_reward returned '1.5' as a reward "),
    ],
)
def test_what_an_environment_must_not_return_is_named(method, value, message):
    def wrong(self, *args, **row):
        return value

    body = {method: wrong} if method != "reply" else {"reply": lambda self, completion: value}
    kinds = make_kinds(None, type("Wrong", (Talks,), {"__init__": lambda self: setattr(self, "heard", []), **body}))
    with pytest.raises(EnvironmentFailure, match=f"environment 'Wrong', prompt 5, {message}") as caught:
        played = Played(kinds)
        played.say("bye<|im_end|>")
        played.end()
    assert "'start': 2" in str(caught.value)


@pytest.mark.parametrize("method", ["reset", "reply", "get_reward"])
def test_an_environment_that_never_returns_stops_the_run_by_name(method):
    release = threading.Event()

    def hang(self, *args, **row):
        release.wait(60)

    body = {method: hang} if method != "reply" else {"reply": lambda self, completion: release.wait(60)}
    kinds = make_kinds(None, type("Hangs", (Talks,), body))
    with pytest.raises(EnvironmentFailure, match=rf"{method} was not done after 1 seconds; .* tool_timeout"):
        played = Played(kinds, tool_timeout=1.0)
        played.say("bye<|im_end|>")
        played.end()
    release.set()


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (lambda release: 1 / 0, "environment_factory raised ZeroDivisionError: division by zero"),
        (lambda release: release.wait(60), r"environment_factory was not done after 1 seconds; .* tool_timeout"),
        (lambda release: FIRST, "environment_factory returned the same object twice"),
        (lambda release: Counter(), "environment_factory returned a Counter after a Talks; name one for each"),
    ],
)
def test_an_environment_that_cannot_be_made_in_the_run_stops_it_by_name(made, problem):
    release = threading.Event()
    makes = iter([lambda release: FIRST, made])
    kinds = make_kinds(None, lambda: next(makes)(release))
    assert kinds[None].acquire() is FIRST
    with pytest.raises(EnvironmentFailure, match=f"environment 'Talks', prompt 5, before the first turn: {problem}"):
        Played(kinds, tool_timeout=1.0)
    release.set()


def test_signals_are_looked_for_while_environments_are_awaited():
    release = threading.Event()

    class Stopped(BaseException):
        pass

    def poll():
        raise Stopped

    class Slow(Talks):
        def reset(self, **row):
            release.wait(60)

    kinds = make_kinds(None, Slow)
    with pytest.raises(Stopped):
        Played(kinds, poll=poll)
    release.set()
    # The instance may still be at work; the first one was made to look at the class.
    assert kinds[None]._free == []


def test_a_prompt_that_reset_leaves_empty_or_makes_too_long_is_refused():
    kinds = make_kinds(None, Talks)
    text = conversation(tiny_tokenizer(), messages=False)
    with pytest.raises(EnvironmentFailure, match="reset returned no text, and the row has no prompt"):
        Played(kinds, {"prompt": ""}, conversation=text)
    # As a run without a dataset has it, with a chat template.
    blank = [{"role": "user", "content": ""}]
    with pytest.raises(EnvironmentFailure, match="reset returned no text, and the row has no prompt"):
        Played(kinds, {"prompt": blank})
    with pytest.raises(ValueError, match="'Long' has 50.. tokens after reset, more than query_len"):
        Played(make_kinds(None, type("Long", (Talks,), {"reset": lambda self, **row: "x" * 5000})))
    # Tools may be all that there is to say.
    Played(make_kinds([add], Talks), {"prompt": blank}).end("bye<|im_end|>")


def test_a_column_chooses_the_environment():
    kinds = make_kinds(None, {"talk": Talks, "count": Counter})
    played = Played(kinds, {**ROW, "environment": "count"})
    assert type(played.episode.environment) is Counter
    assert [schema["function"]["name"] for schema in played.episode.kind.schemas] == ["increment"]
    played.end("x<|im_end|>")
    assert [name for name, _ in played.environments.reward_functions()] == ["Talks", "Counter"]
    with pytest.raises(ValueError, match=r"environment is 'tallk'; write one of environment_factory's \['talk', 'c"):
        Played(kinds, {**ROW, "environment": "tallk"})


def test_each_episode_has_columns_of_its_own():
    class Takes(Talks):
        def reset(self, board, **row):
            board.append(len(board))
            self.board = board

    row = {**ROW, "board": [7]}
    first = Played(make_kinds(None, Takes), row)
    assert Played(make_kinds(None, Takes), row).episode.environment.board == [7, 1]
    assert (first.episode.environment.board, row["board"]) == ([7, 1], [7])


class Silence(Exception):
    def __str__(self):
        raise OSError


class Written:
    """A result that is written out in a way of its own."""

    def __init__(self, write):
        self.write = write

    def __str__(self):
        return self.write()


def leave():
    raise SystemExit(0)


def test_writing_out_a_result_is_part_of_the_call():
    release = threading.Event()
    ways = {"slow": lambda: str(release.wait(60)), "leaves": leave, "whole": lambda: "text"}

    def get(way: str) -> object:
        """Gets something.

        Args:
            way: how
        """
        if way == "raises":
            raise Silence
        return Written(ways[way])

    played = Played(make_kinds([get], Counter), tool_timeout=1.0)
    assert result(played.say(call("get", way="whole"))) == "text"
    for way, problem in (
        ("slow", "get was not done after 1 seconds"),
        ("leaves", "RuntimeError: the call raised SystemExit: 0"),
        ("raises", "Silence"),
    ):
        assert json.loads(result(played.say(call("get", way=way))))["error"] == problem
    release.set()
    played.end("over<|im_end|>")


def test_a_tool_may_change_what_it_is_given():
    def extend(values: list[int]) -> int:
        """Extends.

        Args:
            values: some
        """
        values.append(99)
        return len(values)

    played = Played(make_kinds([extend], Counter))
    assert result(played.say(call("extend", values=[1]))) == "2"
    assert played.episode.messages[0]["tool_calls"][0]["function"]["arguments"] == {"values": [1]}
    played.end("over<|im_end|>")


def test_text_that_no_tokenizer_reads_is_replaced():
    def get() -> str:
        """Gets."""
        return "a\ud800b"

    class Odd(Talks):
        def reset(self, **row):
            return "c\udfffd"

        def reply(self, completion):
            raise AssertionError("the turn was a call")

    played = Played(make_kinds([get], Odd))
    assert played.episode.prompt[-1]["content"] == "Count.c?d"
    assert result(played.say(call("get"))) == "a?b"
    spoken = Played(make_kinds(None, type("Speaks", (Odd,), {"reply": lambda self, completion: "e\ud800"})))
    assert "e?<|im_end|>" in spoken.say("x<|im_end|>")


def test_a_rank_without_prompts_has_no_episodes():
    nothing = {
        "queries": torch.zeros(0, 4, dtype=torch.long),
        "query_attn_masks": torch.zeros(0, 4, dtype=torch.long),
        "prompt_ids": torch.zeros(0, dtype=torch.long),
        "rows": [],
    }
    params = SamplingParams(
        max_new_tokens=4, temperature=1.0, pad_token_id=0, stop_token_ids=(1,), num_return_sequences=2
    )
    environments = Environments(make_kinds([add], Counter), settings())
    with environments.episodes(nothing, params, lambda: None) as episodes:
        assert len(episodes.prompts["queries"]) == 0 and episodes.sampling_params == params
