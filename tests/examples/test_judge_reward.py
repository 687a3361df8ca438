"""The judged reward against a local stand-in of a chat interface: grades, the cache, the budget, failures."""

import json

import pytest

from alpaca_ppo.config.modules import load_function
from alpaca_ppo.rewards import FailureHandling, FunctionReward, RewardError
from alpaca_ppo.rewards.batch import make_reward_batch
from alpaca_ppo.rewards.reward_function import call_functions
from examples.rewards import judge
from examples.rewards.judge import JudgedReward
from tests.http_servers import RawServer, response

pytestmark = pytest.mark.usefixtures("deadline")

CHAT = [{"role": "user", "content": "Why?"}]
BATCH = make_reward_batch(["p", CHAT, "p", "p"], ["good", "bad", "good", "fair"], [[1]] * 4, [{"answer": "7"}] * 4)


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setattr("alpaca_ppo.rewards.reward_function.time.sleep", lambda seconds: None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")


def message(text, **others):
    return response({"choices": [{"message": {"content": text}}], "usage": {"total_tokens": 10}, **others})


def grades(request):
    asked = request.body["messages"][0]["content"]
    answer = asked.partition("[Answer]\n")[2].partition("\n")[0]
    return message(
        {"good": "Fine. [[9]]", "bad": "assistant? No. [[0]]"}.get(answer.split(": ")[-1], "[[4]] no, [[5.5]]")
    )


def scored(reward, failure_handling=None, batch=BATCH):
    return call_functions([FunctionReward(reward)], batch, failure_handling or FailureHandling())[0]


def test_a_grade_is_asked_for_once_and_kept(tmp_path):
    cache = tmp_path / "grades.jsonl"
    with RawServer(grades) as server:
        url = f"http://{server.address}/v1"
        reward = JudgedReward(url, "m", cache=cache)
        # Grades from 0 to 10; the last one of an answer counts; equal rows are one request.
        assert scored(reward) == [0.9, 0.0, 0.9, 0.55]
        assert len(server.requests) == 3 and reward.spent == {"requests": 3, "tokens": 30}
        first = server.requests[0]
        assert (first.path, first.body["model"], first.body["temperature"]) == ("/v1/chat/completions", "m", 0)
        assert first.headers["Authorization"] == "Bearer s3cret"
        assert any("user: Why?" in request.body["messages"][0]["content"] for request in server.requests)
        # A line that was cut off is asked for again. What the others cost is still counted.
        lines = cache.read_text().splitlines()
        cache.write_text("\n".join([*lines[:2], lines[2][:-9]]) + "\n")
        again = JudgedReward(url, "m", cache=cache)
        assert again.spent == {"requests": 2, "tokens": 20}
        assert scored(again) == [0.9, 0.0, 0.9, 0.55] and len(server.requests) == 4
        # Another model or rubric is another key.
        scored(JudgedReward(url, "n", cache=cache))
        scored(JudgedReward(url, "m", cache=cache, rubric="{prompt} {completion} {answer}?"))
        assert [request.body["messages"][0]["content"] for request in server.requests[-3:]] != ["p good 7?"] * 3
        assert len(server.requests) == 10
    assert "s3cret" not in cache.read_text()


def test_a_spent_budget_ends_the_run_or_leaves_the_rest_to_other_sources(tmp_path):
    with RawServer(grades) as server:
        url = f"http://{server.address}/v1"
        stopping = JudgedReward(url, "m", cache=tmp_path / "a", max_requests=2)
        with pytest.raises(RewardError, match="BudgetSpent: the judge's budget of 2 requests is spent .2.; raise it"):
            scored(stopping)
        assert len(server.requests) == 2
        # The two grades that were paid for are not lost, and a larger budget goes on from there.
        assert scored(JudgedReward(url, "m", cache=tmp_path / "a", max_requests=3)) == [0.9, 0.0, 0.9, 0.55]
        assert len(server.requests) == 3
        logged = []
        frugal = JudgedReward(url, "m", cache=tmp_path / "b", max_tokens=10, when_spent="abstain")
        scored(frugal, batch=BATCH.row(0))
        source = FunctionReward(frugal)
        source.context = {"log_metric": lambda *metric: logged.append(metric)}
        found = call_functions([source], BATCH, FailureHandling())[0]
        assert found == [0.9, None, 0.9, None] and len(server.requests) == 4
        assert logged == [("judge_requests", 1), ("judge_tokens", 10)]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (message("Eleven of ten! [[11]]"), "NoGrade: an answer without a grade: 'Eleven of ten"),
        (message(None), "NoGrade: an answer without text"),
        (response({"choices": []}), r"NoGrade: an answer of another form \(IndexError\)"),
        (response(b"x"), "RequestFailed: .*sent an answer that is no JSON"),
        (response(b"{}", status="503 Busy"), "RequestFailed: .*HTTP status 503"),
        (response(b"{}", status="401 No"), "RequestFailed: .*HTTP status 401.*OPENAI_API_KEY"),
    ],
)
def test_what_is_no_grade_is_an_error(answer, problem, tmp_path):
    with RawServer(lambda request: answer) as server:
        reward = JudgedReward(f"http://{server.address}/v1", "m", cache=tmp_path / "a")
        with pytest.raises(RewardError, match=problem) as found:
            scored(reward, batch=BATCH.row(0))
    assert "s3cret" not in str(found.value)
    # Twice, for the batch and for its row: one request, and where the answer has no grade, a reminder.
    assert len(server.requests) == (4 if "Eleven" in problem else 2)
    reminded = [request for request in server.requests if len(request.body["messages"]) == 3]
    assert len(reminded) == (2 if "Eleven" in problem else 0)


def test_the_command_line_reads_the_environment(tmp_path, monkeypatch):
    judge._from_environment.cache_clear()
    monkeypatch.delenv("JUDGE_URL", raising=False)
    function = load_function("examples.rewards.judge:judged", what="reward function")
    with pytest.raises(RewardError, match="the environment variable JUDGE_URL is not set"):
        scored(function)
    with RawServer(grades) as server:
        settings = {"URL": f"http://{server.address}/v1", "MODEL": "m", "CACHE": tmp_path / "c", "MAX_TOKENS": 30}
        for name, value in settings.items():
            monkeypatch.setenv(f"JUDGE_{name}", str(value))
        assert scored(function) == [0.9, 0.0, 0.9, 0.55]
    assert {json.loads(line)["tokens"] for line in (tmp_path / "c").read_text().splitlines()} == {10}
    judge._from_environment.cache_clear()
    for options, problem in (
        ({"rubric": "{prompt}"}, "has no {completion}"),
        ({"when_spent": "cry"}, "use 'stop' or 'abstain'"),
    ):
        with pytest.raises(ValueError, match=problem):
            JudgedReward("http://h", "m", **options)
    with pytest.raises(ValueError, match="JudgedReward.url. holds 'h', no address"):
        JudgedReward("h", "m")
