import asyncio
import functools

import pytest

from alpaca_ppo.rewards import RewardError, build_reward
from alpaca_ppo.rewards.batch import RewardBatch
from alpaca_ppo.rewards.build import check_columns
from alpaca_ppo.rewards.reward_function import FunctionReward, LoggedMetrics, merged

PROMPTS = ["Count.", "Sing.", "Où ?"]
COMPLETIONS = ["one two", "la", "là 🎵"]
IDS = [[5, 6, 2], [7, 2], [8, 9, 10, 2]]
ROWS = [{"prompt": p, "answer": a, "level": i} for i, (p, a) in enumerate(zip(PROMPTS, "xyz", strict=True))]


def score(*functions, **options):
    return build_reward(list(functions), **options)(PROMPTS, COMPLETIONS, IDS, ROWS)


def test_a_function_gets_texts_ids_and_every_other_column():
    seen = {}

    def record(prompts, completions, **columns):
        seen.update(prompts=prompts, completions=completions, **columns)
        return [0.5, 1, True]

    assert score(record).rewards.tolist() == [0.5, 1.0, 1.0]
    assert seen == {
        "prompts": PROMPTS,
        "completions": COMPLETIONS,
        "completion_ids": IDS,
        "answer": ["x", "y", "z"],
        "level": [0, 1, 2],
    }


def test_a_function_without_kwargs_gets_only_the_arguments_in_its_signature():
    def named(completions, level, *, bonus=10):
        return [len(text) + number + bonus for text, number in zip(completions, level, strict=True)]

    # 7 + 0 + 10, 2 + 1 + 10, 4 + 2 + 10
    assert score(named).rewards.tolist() == [17.0, 13.0, 16.0]


def test_a_decorator_may_supply_an_argument_that_is_no_column():
    def with_bonus(function):
        @functools.wraps(function)
        def decorated(*arguments, **keywords):
            return function(*arguments, bonus=10, **keywords)

        return decorated

    @with_bonus
    def named(completions, level, bonus):
        return [len(text) + number + bonus for text, number in zip(completions, level, strict=True)]

    check_columns(named, "train set", ["prompt", "level"])
    # 7 + 0 + 10, 2 + 1 + 10, 4 + 2 + 10
    assert score(named).rewards.tolist() == [17.0, 13.0, 16.0]


def test_a_decorator_that_passes_on_what_it_gets_requires_what_the_function_requires():
    def logged(function):
        @functools.wraps(function)
        def decorated(*arguments, **keywords):
            return function(*arguments, **keywords)

        return decorated

    @logged
    def named(completions, answer): ...

    with pytest.raises(ValueError, match="answer"):
        check_columns(named, "train set", ["prompt", "level"])


def test_a_wrapper_without_a_signature_of_its_own_gets_what_the_function_names():
    @functools.lru_cache
    def cached(completions, level, bonus=1):
        """Lists are no keys of a cache, so only its arguments matter here."""

    class Cached:
        @functools.lru_cache  # noqa: B019
        def __call__(self, completions, level): ...

    batch = RewardBatch(PROMPTS, COMPLETIONS, IDS, {"level": [0, 1, 2], "answer": ["x", "y", "z"]})
    for function in (cached, functools.partial(cached, bonus=2), Cached()):
        assert FunctionReward(function).keywords(batch).keys() == {"completions", "level"}
        with pytest.raises(ValueError, match=r"requires \['level'\]"):
            check_columns(function, "train set", ["prompt"])


def test_text_completions_of_message_prompts_become_assistant_messages():
    seen = []

    def record(completions, **columns):
        seen.extend(completions)
        return [0.0, 0.0]

    messages = [{"role": "user", "content": "hi"}]
    done = [{"role": "assistant", "content": "as it is"}]
    build_reward(record)([messages, messages], ["hello", done], [[1], [2]], [{"prompt": messages}] * 2)
    assert seen == [[{"role": "assistant", "content": "hello"}], done]


def test_async_functions_run_concurrently():
    def waiting(number, events):
        async def judge(completions, **columns):
            events.append(f"start {number}")
            for _ in range(20_000):
                if len(events) < 2:
                    await asyncio.sleep(0.001)
            events.append(f"end {number}")
            return [float(number)] * len(completions)

        return judge

    events = []
    result = score(waiting(1, events), waiting(2, events), lambda completions, **columns: [0.25] * len(completions))
    assert [event.split()[0] for event in events] == ["start", "start", "end", "end"]
    assert result.rewards.tolist() == [3.25] * 3
    assert list(result.by_source) == ["judge", "judge_2", "lambda"]


def test_a_synchronous_function_may_run_a_loop_of_its_own():
    async def ask():
        return 2.0

    def judge(completions, **columns):
        return [asyncio.run(ask()) for _ in completions]

    assert score(judge).rewards.tolist() == [2.0] * 3


def test_an_async_function_may_be_a_partial_or_a_callable_object():
    class Judge:
        async def __call__(self, completions, **columns):
            return [1.0] * len(completions)

    async def scaled(completions, scale, **columns):
        return [scale] * len(completions)

    result = score(Judge(), functools.partial(scaled, scale=3.0))
    assert {name: values.tolist() for name, values in result.by_source.items()} == {
        "Judge": [1.0] * 3,
        "scaled": [3.0] * 3,
    }


def fails_on(bad, *, asynchronous):
    def judge(completions, **columns):
        return [1 / (text != bad) for text in completions]

    async def async_judge(completions, **columns):
        await asyncio.sleep(0)
        return judge(completions)

    return async_judge if asynchronous else judge


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_exception_names_source_row_and_text(asynchronous):
    with pytest.raises(RewardError, match="judge' raised ZeroDivisionError: division by zero, on row 2") as caught:
        score(fails_on("là 🎵", asynchronous=asynchronous))
    assert caught.value.row == 2 and caught.value.source.endswith("judge")
    assert "prompt: 'Où ?'\n  completion: 'là 🎵'" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_exception_that_no_row_raises_by_itself_names_the_batch():
    def judge(completions, **columns):
        if len(completions) > 1:
            raise RuntimeError("too many")
        return [1.0]

    with pytest.raises(RewardError, match="raised RuntimeError: too many, on a batch of 3 rows") as caught:
        score(judge)
    assert caught.value.row is None


def test_async_functions_are_awaited_even_if_another_function_fails(recwarn):
    async def judge(completions, **columns):
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match="raised ZeroDivisionError"):
        score(judge, fails_on("la", asynchronous=False))
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]


def test_a_long_text_is_shortened_at_both_ends_of_the_message():
    prompt = "start" + "x" * 5000 + "finish"
    with pytest.raises(RewardError) as caught:
        build_reward(lambda completions: [None])([prompt], ["la"], [[1]], [{"prompt": prompt}])
    assert "'startxxx" in str(caught.value) and "xxxfinish'" in str(caught.value) and len(str(caught.value)) < 600


def test_a_function_is_found_by_file(tmp_path):
    (tmp_path / "judge.py").write_text("def good(completions):\n    return [2.0] * len(completions)\n")
    assert score(f"{tmp_path}/judge.py:good").by_source["good"].tolist() == [2.0] * 3


def test_a_function_that_names_them_gets_log_metric_and_the_trainer_s_state():
    state, seen = object(), []

    def asks(completions, trainer_state, log_metric=None, **columns):
        seen.append((trainer_state, sorted(columns)))
        log_metric("longest", 3)
        return [0.0] * len(completions)

    def asks_for_nothing(completions, **columns):
        seen.append(sorted(columns))
        return [0.0] * len(completions)

    scorer = build_reward([asks, asks_for_nothing])
    scorer.offer(state)
    scorer(PROMPTS, COMPLETIONS, IDS, ROWS)
    scorer(PROMPTS, COMPLETIONS, IDS, ROWS)
    names = ["answer", "completion_ids", "level", "prompts"]
    assert seen == [(state, names), sorted([*names])] * 2
    assert scorer.logged.pop() == {"longest": [6.0, 2]} and scorer.logged.pop() == {}


def test_a_column_of_that_name_comes_before_what_the_trainer_offers():
    def asks(completions, trainer_state):
        return [float(state) for state in trainer_state]

    scorer = build_reward(asks)
    scorer.offer(object())
    rows = [{**row, "trainer_state": i} for i, row in enumerate(ROWS)]
    assert scorer(PROMPTS, COMPLETIONS, IDS, rows).rewards.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("a b", 1, r"log_metric\('a b', 1\): give a word without spaces"),
        ("", 1, r"log_metric\('', 1\)"),
        ("a", float("inf"), r"log_metric\('a', inf\): give a word without spaces and a finite number"),
    ],
)
def test_what_is_no_metric_is_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        LoggedMetrics().log(name, value)


def test_sums_and_numbers_of_all_ranks_are_added():
    parts = [{"a": [1.0, 2], "b": [5.0, 1]}, {}, {"a": [3.0, 2]}]
    assert merged(parts) == {"a": [4.0, 4], "b": [5.0, 1]}
