"""Reward functions that raise: retries, and rows that are dropped instead of ending the run."""

import asyncio
import math

import pytest
import torch

from alpaca_ppo.rewards import FailureHandling, RewardError, build_reward, reward_function

PROMPTS = ["a", "b", "c"]
COMPLETIONS = ["A", "B", "C"]
IDS = [[5, 6, 2], [2], [7, 2]]
ROWS = [{"prompt": p} for p in PROMPTS]
DROP = FailureHandling(mask_rows=True)


def score(*functions, failure_handling, **options):
    return build_reward(list(functions), failure_handling=failure_handling, **options)(PROMPTS, COMPLETIONS, IDS, ROWS)


def lengths(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


class Service:
    """A judge that fails: whole calls (`outages`, by number from 1), and always those with a completion in `bad`.

    It removes the last token of each row, as a function may that changes what it is given.
    """

    def __init__(self, outages=(), bad=(), scores=(1.0, 2.0, 3.0)):
        self.outages, self.bad, self.scores, self.calls = outages, bad, scores, []
        self.__name__ = "judge"

    def __call__(self, completions, completion_ids):
        self.calls.append([*completions, sum(map(len, completion_ids))])
        for ids in completion_ids:
            ids.pop()
        if len(self.calls) in self.outages or set(completions) & set(self.bad):
            raise TimeoutError(f"no answer for {completions}")
        return [self.scores[COMPLETIONS.index(text)] for text in completions]

    def asynchronous(self):
        async def judge(completions, completion_ids):
            await asyncio.sleep(0)
            return self(completions, completion_ids)

        return judge


@pytest.fixture
def pauses(monkeypatch):
    slept = []
    monkeypatch.setattr(reward_function.time, "sleep", slept.append)
    return slept


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_function_that_raises_is_called_again_after_pauses_that_double(asynchronous, pauses):
    service, steady = Service(outages=(1, 2, 3)), Service()
    judge = service.asynchronous() if asynchronous else service
    result = score(judge, steady, failure_handling=FailureHandling(retries=5))
    assert result.rewards.tolist() == [2.0, 4.0, 6.0]
    assert pauses == [1.0, 2.0, 4.0]
    # Each attempt gets the batch with all its 6 tokens; the function that has answered is not asked again.
    assert service.calls == [["A", "B", "C", 6]] * 4
    assert steady.calls == [["A", "B", "C", 6]]


def test_after_the_last_retry_the_error_names_the_row_and_the_attempts(pauses):
    service = Service(bad="B")
    with pytest.raises(
        RewardError, match=r"'judge' raised TimeoutError: .* in the last of 3 attempts, on row 1"
    ) as caught:
        score(service, failure_handling=FailureHandling(retries=2))
    assert caught.value.row == 1 and isinstance(caught.value.__cause__, TimeoutError)
    assert pauses == [1.0, 2.0]
    assert [call[:-1] for call in service.calls] == [["A", "B", "C"]] * 3 + [["A"], ["B"], ["C"]]


def test_all_attempts_of_an_async_function_run_in_one_event_loop(pauses):
    """What it keeps between them may belong to the loop, as a lock or a client does."""
    loops = []

    async def judge(completions, **columns):
        loops.append(asyncio.get_running_loop())
        if not kept:
            kept.append(asyncio.get_running_loop().create_future())
            kept[0].set_result(2.0)
            raise TimeoutError("no answer")
        if len(completions) > 1:
            raise TimeoutError("no answer again")
        return [await kept[0]]

    kept = []
    failure_handling = FailureHandling(retries=1, mask_rows=True)
    assert score(judge, failure_handling=failure_handling).rewards.tolist() == [2.0] * 3
    assert len(loops) == 5 and len(set(map(id, loops))) == 1

    async def notebook():
        return score(judge, failure_handling=failure_handling)

    kept, loops = [], []
    assert asyncio.run(notebook()).rewards.tolist() == [2.0] * 3
    assert len(loops) == 5 and len(set(map(id, loops))) == 1


def test_a_pause_is_never_longer_than_64_seconds(pauses):
    with pytest.raises(RewardError, match="in the last of 1101 attempts"):
        score(Service(bad="A"), failure_handling=FailureHandling(retries=1100))
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0] + [64.0] * 1094


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_is_not_retried(ending, pauses):
    calls = []

    def judge(completions, **columns):
        calls.append(completions)
        raise ending

    with pytest.raises(ending):
        score(judge, failure_handling=FailureHandling(retries=3, mask_rows=True))
    assert len(calls) == 1 and pauses == []


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0, 2.0], "returned 2 scores for 3 responses"),
        (None, "returned a NoneType instead of a list of 3 numbers"),
        ([1.0, "2", 3.0], "returned '2', a str and not a number, on row 1"),
        ([1.0, [1.0, 2.0], 3.0], "returned 2 token scores for 1 response tokens, on row 1"),
    ],
)
@pytest.mark.parametrize("drop", [False, True])
def test_a_mistake_in_the_function_is_neither_retried_nor_dropped(returned, message, drop, pauses):
    calls = []

    def judge(completions, **columns):
        calls.append(completions)
        return returned

    with pytest.raises(RewardError, match=message):
        score(judge, failure_handling=FailureHandling(retries=3, mask_rows=drop))
    assert len(calls) == 1 and pauses == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_only_the_rows_that_fail_by_themselves_are_dropped(asynchronous, pauses):
    service, steady = Service(bad="B"), Service(scores=(10.0, 20.0, 30.0))
    judge = service.asynchronous() if asynchronous else service
    scorer = build_reward(
        [judge, steady], failure_handling=FailureHandling(retries=1, mask_rows=True), reward_weights=[1.0, 0.1]
    )
    result = scorer(PROMPTS, COMPLETIONS, IDS, ROWS)
    # 1 + .1 * 10 = 2;  row 1 is dropped;  3 + .1 * 30 = 6
    assert result.rewards.tolist() == [2.0, 0.0, 6.0]
    assert list(result.failures) == [1]
    text = str(result.failures[1])
    assert "'judge' raised TimeoutError: no answer for ['B'], on row 1\n  prompt: 'b'\n  completion: 'B'" in text
    assert isinstance(result.failures[1].__cause__, TimeoutError)
    assert torch.isnan(result.by_source["judge"]).tolist() == [False, True, False]
    # Twice as a whole, then each row once with all its tokens.
    assert service.calls == [["A", "B", "C", 6]] * 2 + [["A", 3], ["B", 1], ["C", 2]]
    assert len(steady.calls) == 1
    assert scorer.pop_failures() == [result.failures[1]] and scorer.pop_failures() == []


def test_a_batch_that_fails_only_as_a_whole_loses_no_row():
    result = score(Service(outages=(1,)), failure_handling=DROP)
    assert result.rewards.tolist() == [1.0, 2.0, 3.0] and result.failures == {}


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e39, None])
def test_a_row_without_a_finite_score_is_dropped_and_not_asked_for_again(bad, pauses):
    service = Service(scores=(1.0, bad, 3.0))
    result = score(service, failure_handling=FailureHandling(retries=3, mask_rows=True))
    assert result.rewards.tolist() == [1.0, 0.0, 3.0] and list(result.failures) == [1]
    assert "returned None; a row" in str(result.failures[1]) or "not finite" in str(result.failures[1])
    assert len(service.calls) == 1 and pauses == []
    with pytest.raises(RewardError, match="on row 1"):
        score(Service(scores=(1.0, bad, 3.0)), failure_handling=FailureHandling(retries=3))


@pytest.mark.parametrize(
    "second", [Service(bad="B", scores=(1.0, 2.0, math.nan)), Service(scores=(1.0, math.nan, math.nan))]
)
def test_a_row_that_fails_for_two_sources_fails_once_with_the_first_error(second):
    scorer = build_reward([Service(bad="B"), second], failure_handling=DROP)
    result = scorer(PROMPTS, COMPLETIONS, IDS, ROWS)
    assert [(row, str(e).split("'")[1]) for row, e in sorted(result.failures.items())] == [(1, "judge"), (2, "judge_2")]
    assert [error.row for error in scorer.pop_failures()] == [1, 2]


def test_token_scores_of_the_other_rows_stay_on_their_tokens():
    def tokens(completion_ids, completions):
        if "C" in completions:
            raise ValueError("C")
        return [[float(i) for i in range(len(ids))] for ids in completion_ids]

    result = score(tokens, lengths, failure_handling=DROP)
    # Row 0: 0, 1, 2 + its length 3.  Row 1: 0 + 1.  Row 2 is dropped.
    assert result.rewards.tolist() == [[0.0, 1.0, 5.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert list(result.failures) == [2]


def test_a_call_for_one_row_must_return_one_score():
    def judge(completions, **columns):
        if len(completions) == 3:
            raise TimeoutError
        return [1.0, 1.0]

    with pytest.raises(RewardError, match="'judge' returned 2 scores for 1 responses, on a batch of 1 rows"):
        score(judge, failure_handling=DROP)
