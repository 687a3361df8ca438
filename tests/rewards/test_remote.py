"""Rewards from HTTP servers: what is sent and read, whose turn it is, and servers that are broken or hostile."""

import gzip
import random
import time
import traceback
from dataclasses import replace
from types import SimpleNamespace

import pytest

from alpaca_ppo.rewards import FailureHandling, FunctionReward, RemoteReward, RewardError, RewardScorer
from alpaca_ppo.rewards.batch import make_reward_batch
from alpaca_ppo.rewards.reward_function import call_functions
from tests.http_servers import RawServer, response

pytestmark = pytest.mark.usefixtures("deadline")

BATCH = make_reward_batch(
    ["p", "p", "q"], ["x", "y", "z"], [[1], [2, 3], [4]], [{"answer": "7"}, {"answer": "7"}, {"answer": None}]
)
ONES = {"rewards": [1, 1, 1]}
SECRETS = ("s3cret", "hunter2", "abc123")


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setattr("alpaca_ppo.rewards.reward_function.time.sleep", lambda seconds: None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("REWARD_API_KEY", raising=False)


def scored(reward, batch=BATCH, failure_handling=None, logged=None):
    source = FunctionReward(reward)
    if logged is not None:
        source.context = {"log_metric": lambda name, value: logged.append((name, value))}
    return call_functions([source], batch, failure_handling or FailureHandling())[0]


def right(request):
    """A score for each row, the number of its place."""
    return response({"rewards": list(range(len(request.body["prompts"])))})


def test_the_plain_form_sends_rows_and_columns_and_reads_numbers_nulls_and_scores_of_tokens():
    answer = {"rewards": [0.5, [1, -2.5], None], "metrics": {"length": [1, 2, 6], "load": 4}, "more": "ignored"}
    logged = []
    with RawServer(lambda request: response(answer)) as server:
        found = scored(RemoteReward(server.url), logged=logged)
    assert found == [0.5, [1.0, -2.5], None]
    assert [request.body for request in server.requests] == [
        {
            "prompts": ["p", "p", "q"],
            "completions": ["x", "y", "z"],
            "completion_ids": [[1], [2, 3], [4]],
            "columns": {"answer": ["7", "7", None]},
        }
    ]
    assert server.requests[0].headers["Accept-Encoding"] == "identity"
    # A metric of the whole request counts for each of its rows, as if it had been sent for each.
    assert logged == [("length", 1.0), ("length", 2.0), ("length", 6.0), ("load", 4.0), ("load", 4.0), ("load", 4.0)]


def test_columns_can_be_chosen_and_episodes_are_not_sent():
    rows = [{"answer": "7", "picture": object()}]
    batch = make_reward_batch(["p"], ["x"], [[1]], rows)
    with RawServer(right) as server:
        assert scored(RemoteReward(server.url, columns=["answer"]), batch) == [0.0]
        assert server.requests[0].body["columns"] == {"answer": ["7"]}
        with pytest.raises(RewardError, match=r"a column of \['answer', 'picture'\] or a prompt cannot be sent as J"):
            scored(RemoteReward(server.url), batch)
        with pytest.raises(RewardError, match="cannot be sent as JSON"):
            scored(RemoteReward(server.url), make_reward_batch(["p"], ["x"], [[1]], [{"answer": float("nan")}]))
        with pytest.raises(RewardError, match="the dataset has no column 'hint' to send, only .*'answer'"):
            scored(RemoteReward(server.url, columns=["hint"]), batch)
        played = replace(BATCH.row(0), episodes=[SimpleNamespace(environment=object())])
        assert scored(RemoteReward(server.url), played) == [0.0]
        assert server.requests[-1].body["columns"] == {"answer": ["7"]}
        dated = make_reward_batch([[{"role": "user", "content": b"p"}]], ["x"], [[1]], [{}])
        with pytest.raises(RewardError, match="or a prompt cannot be sent as JSON"):
            scored(RemoteReward(server.url), dated)


@pytest.mark.parametrize(
    ("prompts", "servers", "expected"),
    [
        # The middle of five is 2.5, which is rounded to the even 2; it lies within the a's.
        ("aaabb", 2, ["aaa", "bb"]),
        ("aaaa", 3, ["aaaa"]),
        ("abc", 5, ["a", "b", "c"]),
        # Thirds end at 2 and 4, and the first has to go on to 5.
        ("aaaaab", 3, ["aaaaa", "b"]),
    ],
)
def test_requests_are_cut_between_prompts(prompts, servers, expected):
    count = len(prompts)
    with RawServer(right) as server:
        reward = RemoteReward([server.url] * servers)
        scored(reward, make_reward_batch(list(prompts), ["x"] * count, [[1]] * count, [{}] * count))
    assert sorted("".join(request.body["prompts"]) for request in server.requests) == sorted(expected)


def test_servers_are_asked_in_turn_and_the_next_one_in_place_of_one_that_fails():
    broken = {"now": False}

    def moody(request):
        return response({}, status="503 Busy") if broken["now"] else right(request)

    with RawServer(moody) as first, RawServer(right) as second:
        reward, logged = RemoteReward([first.url, second.url], name="served"), []
        # Two requests, of the two p's and of the q, and their scores in the order of the rows.
        assert scored(reward, logged=logged) == [0.0, 1.0, 0.0]
        assert [len(s.requests[0].body["prompts"]) for s in (first, second)] == [2, 1]
        for _ in range(2):
            scored(reward, BATCH.row(0), logged=logged)
        assert [len(s.requests) for s in (first, second)] == [2, 2]
        broken["now"] = True
        assert scored(reward, logged=logged) == [0.0, 1.0, 0.0]
        assert [len(s.requests) for s in (first, second)] == [3, 4]
    assert logged == [("served/failed_requests", count) for count in (0, 0, 0, 1)]
    with pytest.raises(RewardError) as found:
        scored(reward)
    message = str(found.value)
    assert message.startswith("reward source 'served' raised RemoteServersFailed: the reward server http")
    assert first.url in message and second.url in message and "on row 0" in message


def test_a_failed_request_is_repeated_by_reward_retries_and_rows_that_fail_alone_are_dropped():
    def moody(request):
        if len(server.requests) == 1 or "y" in request.body["completions"]:
            return response(b"", status="500 Oops")
        return right(request)

    with RawServer(moody) as server:
        found = scored(RemoteReward(server.url), failure_handling=FailureHandling(retries=1, mask_rows=True))
        assert (found[0], found[1].row, found[2]) == (0.0, 1, 0.0)
        # The batch twice, then each of its rows.
        assert [len(request.body["prompts"]) for request in server.requests] == [3, 3, 1, 1, 1]
        assert scored(RemoteReward(server.url), BATCH.row(0), FailureHandling(retries=1)) == [0.0]


def chunked(body):
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body


HOSTILE = {
    "no JSON": (response(b"<html>"), r"sent an answer that is no JSON \(JSONDecodeError\): '<html>'; check its addr"),
    "not UTF-8": (response(b'{"rewards": ["\xff"]}'), r"no JSON \(UnicodeDecodeError\)"),
    "deeply nested": (response(b"[" * 100000), r"no JSON \(RecursionError\)"),
    "digits": (response(b'{"rewards": [%s]}' % (b"9" * 5000)), r"no JSON \(ValueError\)"),
    "too few": (response({"rewards": [1, 2]}), r"sent .*; it must send \{\"rewards\": \[...\]\} with 3 entries"),
    "no object": (response([1, 2, 3]), r"sent \[1, 2, 3\]; it must send"),
    "metrics": (response({**ONES, "metrics": [4]}), r'sent .*; it must send .*"metrics", if any, are an object'),
    "another key": (response({"reward": [1, 2, 3]}), "sent .*'reward'.*; it must send"),
    "status": (response(b"broken", status="500 No"), "answered with HTTP status 500: 'broken'; check its log"),
    "refusal": (response(b"key?", status="401 No"), "status 401: 'key\\?'; check .*REWARD_API_KEY"),
    "redirect": (
        response(b"", status="307 Elsewhere", headers="Location: http://u:hunter2@evil.example/x?token=abc123\r\n"),
        "HTTP status 307: ''; check",
    ),
    "compressed": (
        response(gzip.compress(b"0" * 10**6), headers="Content-Encoding: gzip\r\n"),
        r"no JSON \(UnicodeDecodeError\)",
    ),
    "large": (response(b" " * 2_000_000), "sent an answer of more than 1061120 bytes"),
    "large in chunks": ([chunked(b"")] + [b"10000\r\n" + b" " * 65536 + b"\r\n"] * 40, "answer of more than 1061120"),
    "cut off": (response(ONES)[:-4], "could not be asked .*; check that it runs"),
    "no HTTP": (b"220 mail ready\r\n\r\n", "could not be asked "),
    "long header": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200000 + b"\r\n\r\n", "could not be asked "),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_an_unusable_answer_is_an_error_that_names_server_and_remedy(case):
    answer, problem = HOSTILE[case]
    with RawServer(lambda request: answer) as server, pytest.raises(RewardError) as found:
        scored(RemoteReward(server.url))
    problem_line = str(found.value.__cause__)
    assert f"the reward server {server.url} " in problem_line
    with pytest.raises(ValueError, match=problem):
        raise ValueError(problem_line)
    assert not any(secret in str(found.value) for secret in SECRETS) and len(problem_line) < 900


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b'{"rewards": [1, NaN, 1]}', "returned nan, which is not finite in float32, on row 1"),
        (b'{"rewards": [1, [1], 1]}', "returned 1 token scores for 2 response tokens, on row 1"),
        (b'{"rewards": [1, 1, 1], "metrics": {"a b": 1}}', "log_metric\\('a b', 1\\)"),
    ],
)
def test_scores_and_metrics_of_a_server_are_checked_as_those_of_a_function(answer, problem):
    with RawServer(lambda request: response(answer)) as server:
        scorer = RewardScorer([FunctionReward(RemoteReward(server.url))], [1.0])
        scorer.offer(None)
        with pytest.raises(RewardError, match=problem):
            scorer(BATCH.prompts, BATCH.completions, BATCH.completion_ids, [{}] * 3)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"


@pytest.mark.parametrize("parts", [[b""], [HEAD, b""], [HEAD, b" "]], ids=["silent", "stalls", "drips"])
def test_a_server_that_takes_too_long_is_given_up(parts):
    """The last part is sent again every 0.05 s for 50 s, which no limit on a single read would end."""
    start = time.monotonic()
    with RawServer(lambda request: [*parts, *parts[-1:] * 1000], pause=0.05) as server:
        with pytest.raises(RewardError, match="did not answer within 0.2 s; allow it more time"):
            scored(RemoteReward(server.url, timeout=0.2), BATCH.row(0))
    assert time.monotonic() - start < 20


def test_no_credential_is_shown(monkeypatch):
    monkeypatch.setenv("REWARD_API_KEY", "s3cret")

    def echo(request):
        return response(request.headers["Authorization"].encode(), status="400 No")

    with RawServer(echo) as server:
        own = f"http://user:hunter2@{server.address}/x?token=abc123"
        for url, sent in ((server.url, "Bearer s3cret"), (own, "Basic dXNlcjpodW50ZXIy")):
            reward = RemoteReward(url)
            with pytest.raises(RewardError) as found:
                scored(reward)
            shown = "".join(traceback.format_exception(found.value)) + repr(reward) + str(vars(found.value))
            assert server.requests[-1].headers["Authorization"] == sent
            assert not any(secret in shown for secret in SECRETS), shown
        assert server.requests[-1].path == "/x?token=abc123"
    monkeypatch.setenv("REWARD_API_KEY", "s3cret\nX: y")
    with pytest.raises(ValueError, match="REWARD_API_KEY holds characters that no HTTP header can") as bad:
        RemoteReward("http://h/")
    assert "s3cret" not in str(bad.value)


def test_a_shortened_answer_shows_no_part_of_a_credential(monkeypatch):
    """Of a long answer the first 197 characters are shown: all of the key but its last letter."""
    monkeypatch.setenv("REWARD_API_KEY", "s3cret")
    with RawServer(lambda request: response(b"-" * 192 + b"s3cret" + b"-" * 999, status="400 No")) as server:
        with pytest.raises(RewardError) as found:
            scored(RemoteReward(server.url))
    assert "status 400: '---" in str(found.value.__cause__) and "s3c" not in str(found.value)


def test_the_proxy_of_the_environment_is_asked(monkeypatch):
    with RawServer(right) as proxy:
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("http_proxy", f"http://{proxy.address}")
        assert scored(RemoteReward("http://rewards.invalid/score")) == [0.0, 1.0, 2.0]
    assert proxy.requests[0].path == "http://rewards.invalid/score"


def test_no_proxy_hears_of_an_address_of_this_machine(monkeypatch):
    with RawServer(right) as proxy, RawServer(right) as server:
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("http_proxy", f"http://{proxy.address}")
        port = server.address.rpartition(":")[2]
        for host in ("127.1", "2130706433", "0x7f.1"):
            assert scored(RemoteReward(f"http://{host}:{port}/score")) == [0.0, 1.0, 2.0]
    assert not proxy.requests


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (([],), "got no url"),
        (("ftp://h/x",), r"RemoteReward\(url\) holds 'ftp://h/x', no address"),
        (("http://u:hunter2@h:99999/",), "holds 'h:99999/'"),
        (("http:/h/?key=ab@secret",), "holds text with credentials, no address"),
        (("http//u:hunter2#1@h/",), "holds text with credentials, no address"),
        (("http://h/a b",), "holds 'http://h/a b'"),
        (("http://h", 0), "timeout=0. must be above 0"),
    ],
)
def test_invalid_arguments_are_refused(arguments, problem):
    with pytest.raises(ValueError, match=problem) as found:
        RemoteReward(**dict(zip(("url", "timeout"), arguments, strict=False)))
    assert "hunter2" not in str(found.value)


def test_any_bytes_are_an_error_of_the_server():
    """Well-formed answers with bytes changed, cut out and put in; each of a hundred is a request of its own."""
    draw = random.Random(7)
    right_answer = response({"rewards": [0.25]}, headers="X-Some: header\r\nSet-Cookie: a=b; Path=/\r\n")

    def mutated(request):
        answer = bytearray(right_answer)
        for _ in range(draw.randrange(1, 6)):
            place = draw.randrange(len(answer))
            change = draw.randrange(3)
            answer[place : place + draw.choice([0, 1, 1, 20])] = (
                b"" if change == 0 else bytes([draw.randrange(256)]) if change == 1 else draw.randbytes(8)
            )
        return bytes(answer)

    found = []
    with RawServer(mutated) as server:
        reward = RemoteReward(server.url, timeout=60.0)
        rows = make_reward_batch(["p"] * 100, ["x"] * 100, [[1]] * 100, [{}] * 100)
        for row in range(100):
            try:
                found += scored(reward, rows.row(row))
            except RewardError as error:
                assert type(error.__cause__).__name__ == "RemoteServersFailed"
                found.append("failed")
    assert len(found) == 100 and found.count("failed") > 20 and found.count(0.25) > 5
    assert all(score == "failed" or type(score) is float for score in found)
