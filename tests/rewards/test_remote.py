"""Rewards from HTTP servers: what is sent and read, whose turn it is, and servers that are broken or hostile."""

import gzip
import random
import sys
import time
import traceback
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpaca_ppo.rewards import FailurePolicy, FunctionReward, RemoteReward, RewardError
from alpaca_ppo.rewards.batch import make_reward_batch
from alpaca_ppo.rewards.remote import _parts
from alpaca_ppo.rewards.reward_function import call_functions
from alpaca_ppo.rewards.wire_formats import openrlhf_scores, plain_scores
from tests.http_servers import RawServer, response
from tests.tiny_models import tiny_tokenizer

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


def scored(reward, batch=BATCH, policy=None, logged=None):
    source = FunctionReward(reward)
    if logged is not None:
        source.context = {"log_metric": lambda name, value: logged.append((name, value))}
    return call_functions([source], batch, policy or FailurePolicy())[0]


def right(request):
    """A score for each row, the number of its place."""
    return response({"rewards": list(range(len(request.body["prompts"])))})


def test_the_plain_form_sends_rows_and_columns_and_reads_numbers_nulls_and_scores_of_tokens():
    answer = {"rewards": [0.5, [1, -2.5], None], "metrics": {"length": [1, 2, 6], "load": 4}, "more": "ignored"}
    logged = []
    with RawServer(lambda request: response(answer)) as server:
        found = scored(RemoteReward(server.url), logged=logged)
    assert found.scores == [0.5, [1.0, -2.5], None]
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
        assert scored(RemoteReward(server.url, columns=["answer"]), batch).scores == [0.0]
        assert server.requests[0].body["columns"] == {"answer": ["7"]}
        with pytest.raises(RewardError, match=r"the column 'picture' cannot be sent as JSON .*columns=\[...\]"):
            scored(RemoteReward(server.url), batch)
        with pytest.raises(RewardError, match="the dataset has no column 'hint' to send, only .*'answer'"):
            scored(RemoteReward(server.url, columns=["hint"]), batch)
        played = replace(BATCH.row(0), episodes=[SimpleNamespace(environment=object())])
        assert scored(RemoteReward(server.url), played).scores == [0.0]
        assert server.requests[-1].body["columns"] == {"answer": ["7"]}
        dated = make_reward_batch([[{"role": "user", "content": b"p"}]], ["x"], [[1]], [{}])
        with pytest.raises(RewardError, match="the column 'prompts' cannot be sent as JSON"):
            scored(RemoteReward(server.url), dated)


def test_openrlhf_servers_get_the_whole_text_and_labels():
    answer = {"rewards": [[0.5], 2, 0], "scores": [1, 0.5, 0], "extra_logs": {"right": [1, [0], 0]}}
    logged = []
    with RawServer(lambda request: response(answer)) as server:
        reward = RemoteReward(server.url, wire_format="openrlhf", label_column="answer")
        assert scored(reward, logged=logged).scores == [0.5, 2.0, 0.0]
    assert server.requests[0].body == {
        "query": ["px", "py", "qz"],
        "prompts": ["p", "p", "q"],
        "labels": ["7", "7", None],
    }
    expected = [("right", 1.0), ("right", 0.0), ("right", 0.0), ("scores", 1.0), ("scores", 0.5), ("scores", 0.0)]
    assert logged == expected


def test_openrlhf_servers_get_messages_as_the_policy_saw_them():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ mark }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    prompt = [{"role": "user", "content": "Why?"}]
    turns = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]
    batch = make_reward_batch([prompt, prompt], ["So.", turns], [[1], [2]], [{}, {}])
    # Of a single row, some servers send the number alone.
    with RawServer(lambda r: response({"rewards": 3 if len(r.body["query"]) == 1 else [1, 2]})) as server:
        reward = RemoteReward(
            server.url, wire_format="openrlhf", processing_class=tokenizer, chat_template_kwargs={"mark": "|"}
        )
        assert scored(reward, batch).scores == [1.0, 2.0]
        assert server.requests[0].body == {
            "query": ["<user>Why?|<assistant>So.", "<user>Why?|<assistant>a|<tool>b|"],
            "prompts": ["<user>Why?|<assistant>"] * 2,
            "labels": ["", ""],
        }
        assert scored(reward, batch.row(0)).scores == [3.0]
        with pytest.raises(RewardError, match="prompts are messages, which the openrlhf form .*processing_class"):
            scored(RemoteReward(server.url, wire_format="openrlhf"), batch)


@pytest.mark.parametrize(
    ("prompts", "count", "expected"),
    [
        ("aabb", 2, [(0, 2), (2, 4)]),
        # The middle of five is 2.5, which is rounded to the even 2; it lies within the a's.
        ("aaabb", 2, [(0, 3), (3, 5)]),
        ("aaaa", 3, [(0, 4)]),
        ("abc", 5, [(0, 1), (1, 2), (2, 3)]),
        ("a", 1, [(0, 1)]),
        # Thirds end at 2 and 4, and the first has to go on to 5.
        ("aaaaab", 3, [(0, 5), (5, 6)]),
    ],
)
def test_requests_are_cut_between_prompts(prompts, count, expected):
    assert [(part.start, part.stop) for part in _parts(list(prompts), count)] == expected


def test_servers_are_asked_in_turn_and_the_next_one_in_place_of_one_that_fails():
    broken = {"now": False}

    def moody(request):
        return response({}, status="503 Busy") if broken["now"] else right(request)

    with RawServer(moody) as first, RawServer(right) as second:
        reward, logged = RemoteReward([first.url, second.url], name="served"), []
        # Two requests, of the two p's and of the q, and their scores in the order of the rows.
        assert scored(reward, logged=logged).scores == [0.0, 1.0, 0.0]
        assert [len(s.requests[0].body["prompts"]) for s in (first, second)] == [2, 1]
        for _ in range(2):
            scored(reward, BATCH.row(0), logged=logged)
        assert [len(s.requests) for s in (first, second)] == [2, 2]
        broken["now"] = True
        assert scored(reward, logged=logged).scores == [0.0, 1.0, 0.0]
        assert [len(s.requests) for s in (first, second)] == [3, 4]
    assert logged == [("served/failed_requests", count) for count in (0, 0, 0, 1)]
    with pytest.raises(RewardError) as found:
        scored(reward)
    message = str(found.value)
    assert message.startswith(
        "reward source 'served' raised RemoteServersFailed: none of 2 reward servers gave a usable"
    )
    assert first.url in message and second.url in message and "on row 0" in message


def test_a_failed_request_is_repeated_by_reward_retries_and_rows_that_fail_alone_are_dropped():
    def moody(request):
        if len(server.requests) == 1 or "y" in request.body["completions"]:
            return response(b"", status="500 Oops")
        return right(request)

    with RawServer(moody) as server:
        found = scored(RemoteReward(server.url), policy=FailurePolicy(retries=1, mask=True))
        assert found.scores == [0.0, None, 0.0] and list(found.failures) == [1]
        # The batch twice, then each of its rows.
        assert [len(request.body["prompts"]) for request in server.requests] == [3, 3, 1, 1, 1]
        assert scored(RemoteReward(server.url), BATCH.row(0), FailurePolicy(retries=1)).scores == [0.0]


def chunked(body):
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body


HOSTILE = {
    "no JSON": (response(b"<html>"), r"sent an answer that is no JSON \(JSONDecodeError\): '<html>'; check its addr"),
    "not UTF-8": (response(b'{"rewards": ["\xff"]}'), r"no JSON \(UnicodeDecodeError\)"),
    "deeply nested": (response(b"[" * 100000), r"no JSON \(RecursionError\)"),
    "digits": (response(b'{"rewards": [%s]}' % (b"9" * 5000)), r"no JSON \(ValueError\)"),
    "too few": (response({"rewards": [1, 2]}), "sent 2 rewards for 3 rows; it must send one for each"),
    "too many": (response({"rewards": [1] * 4}), "sent 4 rewards for 3 rows"),
    "no list": (response({"rewards": {"0": 1}}), r"sent \{'0': 1\} as rewards; it must be a list"),
    "no object": (response([1, 2, 3]), r'sent \[1, 2, 3\]; it must send \{"rewards": \[...\]\}'),
    "null": (response(None), "sent None; it must send"),
    "another key": (response({"reward": [1, 2, 3]}), "sent .*'reward'.*; it must send"),
    "NaN": (response(b'{"rewards": [1, NaN, 1]}'), r"sent nan, which is not finite in float32, in rewards\[1\]"),
    "infinity": (response(b'{"rewards": [1, 1, -Infinity]}'), r"sent -inf, which is not finite .*rewards\[2\]"),
    "overflow": (response({"rewards": [1e39, 1, 1]}), r"which is not finite in float32, in rewards\[0\]"),
    "large integer": (response({"rewards": [10**400, 1, 1]}), r"not finite in float32, in rewards\[0\]"),
    "bool": (response({"rewards": [True, 1, 1]}), r"sent True, a bool, in rewards\[0\]; it must be a number, null"),
    "text": (response({"rewards": ["1", 1, 1]}), r"sent '1', a str, in rewards\[0\]"),
    "nested": (response({"rewards": [[[1]], 1, 1]}), r"sent \[1\], a list, in rewards\[0\]\[0\]; it must be a number$"),
    "tokens": (response({"rewards": [1, [1], 1]}), r"sent 1 scores in rewards\[1\], a response of 2 tokens"),
    "metrics": (response({**ONES, "metrics": [1]}), r"sent \[1\] as metrics; it must be up to 100 metrics by name"),
    "metric": (response({**ONES, "metrics": {"a b": 1}}), "sent the metric 'a b' in metrics; a name is a word"),
    "metric value": (response({**ONES, "metrics": {"a": "1"}}), r"sent '1', a str, in metrics\['a'\]"),
    "metric values": (response({**ONES, "metrics": {"a": [1]}}), "sent 1 values of a in metrics for 3 rows"),
    "status": (response(b"broken", status="500 No"), "answered with HTTP status 500: 'broken'; look into its log"),
    "refusal": (
        response(b"key?", status="401 No"),
        "status 401: 'key\\?'; check the environment variable REWARD_API_KEY",
    ),
    "not found": (response(b"", status="404 No"), "status 404: ''; check its address and the form"),
    "long refusal": (response(b"x" * 10**6, status="400 No"), r"status 400: 'x{160}\.\.\.'"),
    "redirect": (
        response(b"", status="307 Elsewhere", headers="Location: http://u:hunter2@evil.example/x?token=abc123\r\n"),
        r"redirects to 'http://evil.example/x' \(HTTP status 307\), which is not followed",
    ),
    "compressed": (
        response(gzip.compress(b"0" * 10**6), headers="Content-Encoding: gzip\r\n"),
        "sent an answer compressed with 'gzip', which was not asked for",
    ),
    "large": (response(b" " * 2_000_000), "sent an answer of more than 1061120 bytes"),
    "large in chunks": ([chunked(b"")] + [b"10000\r\n" + b" " * 65536 + b"\r\n"] * 40, "answer of more than 1061120"),
    "cut off": (response(ONES)[:-4], "could not be asked .*; check that it runs and that this machine reaches it"),
    "nothing": (b"", r"could not be asked \(ServerDisconnectedError"),
    "no HTTP": (b"220 mail ready\r\n\r\n", "could not be asked "),
    "bad chunks": (chunked(b"zz\r\n"), "could not be asked "),
    "long header": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100000 + b"\r\n\r\n", "could not be asked "),
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


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"


@pytest.mark.parametrize("parts", [[b""], [HEAD, b""], [HEAD, b" "]], ids=["silent", "stalls", "drips"])
def test_a_server_that_takes_too_long_is_given_up(parts):
    """The last part is sent again every 0.05 s for 50 s, which no limit on a single read would end."""
    start = time.monotonic()
    with RawServer(lambda request: [*parts, *parts[-1:] * 1000], pause=0.05) as server:
        with pytest.raises(RewardError, match="did not answer within 0.2 s; give it more time .reward_url_timeout"):
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


def test_the_proxy_of_the_environment_is_asked(monkeypatch):
    with RawServer(right) as proxy:
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("http_proxy", f"http://{proxy.address}")
        assert scored(RemoteReward("http://rewards.invalid/score")).scores == [0.0, 1.0, 2.0]
    assert proxy.requests[0].path == "http://rewards.invalid/score"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (([],), "got no url"),
        (("ftp://h/x",), r"RemoteReward\(url\) holds 'ftp://h/x', which does not begin with http:// or https://"),
        (("user:hunter2@h:1",), "holds 'h:1', which does not begin"),
        (("http://",), "names no host"),
        (("http://u:hunter2@h:99999/",), "cannot be read"),
        (("http://u:hunter2@h:x/",), "cannot be read"),
        (("http://h:0/",), "has port 0 or a blank"),
        (("http://h/a b",), "has port 0 or a blank"),
        (("http://h", "xml"), "wire_format='xml'. must be one of plain, openrlhf"),
        (("http://h", "plain", 0), "timeout=0. must be above 0"),
        (("http://h", "plain", 1, None, "a"), "label_column='a'. is of the openrlhf form"),
        (("http://h", "openrlhf", 1, ["a"]), r"columns=\['a'\]. is of the plain form"),
    ],
)
def test_invalid_arguments_are_refused(arguments, problem):
    names = ("url", "wire_format", "timeout", "columns", "label_column")
    with pytest.raises(ValueError, match=problem) as found:
        RemoteReward(**dict(zip(names, arguments, strict=False)))
    assert "hunter2" not in str(found.value)


def test_aiohttp_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(ValueError, match=r"RemoteReward needs the package aiohttp; pip install 'alpaca_ppo\[http\]'"):
        RemoteReward("http://h")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["rewards", "scores", "metrics", "extra_logs", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(JSON | st.fixed_dictionaries({"rewards": JSON, "metrics": JSON, "extra_logs": JSON, "scores": JSON}))
def test_any_json_is_either_scores_or_a_value_error(answer):
    for read in (lambda: plain_scores(answer, [1, 2]), lambda: openrlhf_scores(answer, 2)):
        try:
            found = read()
        except ValueError as error:
            assert len(str(error)) < 2000
            continue
        assert len(found.rewards) == 2 and all(len(values) == 2 for values in found.metrics.values())
        flat = [n for r in found.rewards for n in (r if isinstance(r, list) else [r]) if n is not None]
        assert all(type(n) is float and abs(n) < 3.5e38 for n in flat)


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
        reward = RemoteReward(server.url, timeout=5.0)
        rows = make_reward_batch(["p"] * 100, ["x"] * 100, [[1]] * 100, [{}] * 100)
        for row in range(100):
            try:
                found += scored(reward, rows.row(row)).scores
            except RewardError as error:
                assert type(error.__cause__).__name__ == "RemoteServersFailed"
                found.append("failed")
    assert len(found) == 100 and found.count("failed") > 20 and found.count(0.25) > 5
    assert all(score == "failed" or type(score) is float for score in found)
