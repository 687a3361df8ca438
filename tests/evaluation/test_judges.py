"""Judges: functions, and a chat model behind a local stand-in server."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from alpaca_ppo.evaluation.chat_judge import ChatJudge
from alpaca_ppo.evaluation.judges import Comparison, FunctionJudge
from alpaca_ppo.evaluation.opponents import stored_answers

LONG, SHORT = "a much longer answer", "short"
PAIRS = [Comparison("p", LONG, SHORT, {"answer": "7"}), Comparison("q", SHORT, LONG, {"answer": "8"})]


def test_a_function_sees_both_orders_and_the_columns():
    calls = []

    def longer(prompts, completions, others, answer):
        calls.append((prompts, completions, answer))
        return [float(len(own) > len(other)) for own, other in zip(completions, others, strict=True)]

    assert FunctionJudge(longer, name="longer")(PAIRS) == [1.0, 0.0]
    assert calls == [(["p", "q"], [LONG, SHORT], ["7", "8"]), (["p", "q"], [SHORT, LONG], ["7", "8"])]
    first = FunctionJudge(lambda prompts, completions, others, **columns: [1.0, None], name="first")
    assert first(PAIRS) == [0.5, None]


@pytest.mark.parametrize(
    ("verdicts", "message"), [([1.0], "eval_judge f returned .* for 2 pairs"), ([1.0, 2.0], "returned the verdict 2.0")]
)
def test_a_function_must_return_a_verdict_for_each_pair(verdicts, message):
    with pytest.raises(ValueError, match=message):
        FunctionJudge(lambda **arguments: verdicts, name="f")(PAIRS)


class Server:
    """An OpenAI-compatible interface on this machine: `answer` maps a request's body to (status, text)."""

    def __init__(self, answer):
        self.requests, self.keys, outer = [], [], self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(body)
                outer.keys.append(self.headers["Authorization"])
                status, text = answer(body, len(outer.requests))
                content = {"choices": [{"message": {"content": text}}]} if status == 200 else {}
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(content).encode())

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    servers = []

    def start(answer):
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.server.shutdown()
        server.server.server_close()


def longer_answer(body, number):
    text = body["messages"][0]["content"]
    a, b = text.index(LONG), text.index(SHORT)
    return 200, f"I compared [[A]] with [[B]]. My verdict: [[{'A' if a < b else 'B'}]]"


def judge(server, folder, **settings):
    return ChatJudge(server.url, "m", cache=folder / "cache.jsonl", pause=0.0, **settings)


def test_a_chat_model_judges_both_orders_and_verdicts_are_cached(serve, tmp_path, monkeypatch):
    server = serve(longer_answer)
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    assert judge(server, tmp_path)(PAIRS) == [1.0, 0.0]
    assert len(server.requests) == 4
    assert server.keys == ["Bearer secret-key"] * 4
    assert {request["model"] for request in server.requests} == {"m"}
    assert "secret-key" not in (tmp_path / "cache.jsonl").read_text()
    # A line that was cut off is asked for again; the others are not.
    lines = (tmp_path / "cache.jsonl").read_text().splitlines()
    (tmp_path / "cache.jsonl").write_text("\n".join([*lines[:3], lines[3][:20]]))
    assert judge(server, tmp_path)(PAIRS) == [1.0, 0.0]
    assert len(server.requests) == 5


def test_a_preference_for_the_first_place_is_a_tie_and_a_tie_counts_half(serve, tmp_path):
    assert judge(serve(lambda body, number: (200, "[[A]]")), tmp_path / "a")(PAIRS) == [0.5, 0.5]
    assert judge(serve(lambda body, number: (200, "[[C]]")), tmp_path / "c")(PAIRS[:1]) == [0.5]


def test_failed_and_malformed_answers_are_asked_for_again(serve, tmp_path):
    def moody(body, number):
        if number == 1:
            return 503, ""
        return (200, "Hard to say.") if len(body["messages"]) == 1 else (200, "[[A]]")

    server = serve(moody)
    assert judge(server, tmp_path, template="{prompt} {answer_a} {answer_b} {answer}")(PAIRS[:1]) == [0.5]
    assert server.requests[-1]["messages"][1] == {"role": "assistant", "content": "Hard to say."}
    assert any(request["messages"][0]["content"] == f"p {LONG} {SHORT} 7" for request in server.requests)


def test_a_judge_that_once_worked_leaves_pairs_undecided_and_is_asked_again_later(serve, tmp_path):
    status = [200]
    server = serve(lambda body, number: (status[0], "[[A]]"))
    asks = judge(server, tmp_path, retries=1)
    assert asks(PAIRS[:1]) == [0.5]
    status[0] = 500
    assert asks(PAIRS) == [0.5, None]
    assert [problem.partition("; ")[0] for problem in asks.problems] == [
        f"{server.url}/chat/completions answered with HTTP status 500: '{{}}'"
    ] * 2
    status[0] = 200
    assert asks(PAIRS) == [0.5, 0.5]
    stopped = judge(server, tmp_path / "new", stop=lambda: True)
    assert stopped(PAIRS) == [None, None]


def test_a_judge_without_a_connection_ends_the_evaluation(tmp_path):
    # Nothing listens at the port of a socket that is bound, but does not listen.
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        nobody = ChatJudge(f"http://127.0.0.1:{bound.getsockname()[1]}/v1", "m", cache=tmp_path / "c.jsonl", pause=0.0)
        with pytest.raises(ValueError, match=r"answered none of 2 requests, the last time: .*ClientConnectorError"):
            nobody([Comparison("Why?", "one", "other", {})])


def test_a_judge_that_cannot_work_ends_the_evaluation(serve, tmp_path):
    with pytest.raises(ValueError, match="HTTP status 401.* environment variable OPENAI_API_KEY"):
        judge(serve(lambda body, number: (401, "")), tmp_path)(PAIRS)
    with pytest.raises(ValueError, match="answered none of 4 requests, the last time: an answer without a verdict"):
        judge(serve(lambda body, number: (200, "hm")), tmp_path, retries=0)(PAIRS)
    with pytest.raises(ValueError, match="answered none .*an answer without text"):
        judge(serve(lambda body, number: (200, None)), tmp_path, retries=0)(PAIRS)
    with pytest.raises(ValueError, match="eval_judge_template cannot be filled in .*KeyError.* it may name answer, p"):
        judge(serve(longer_answer), tmp_path, template="{prompt}{answer_a}{answer_b}{no}")(PAIRS)


def test_messages_are_shown_with_their_roles(serve, tmp_path):
    server = serve(lambda body, number: (200, "[[A]]"))
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    judge(server, tmp_path)([Comparison(messages, LONG, SHORT)])
    assert "system: Be kind.\nuser: Hi" in server.requests[0]["messages"][0]["content"]


def test_stored_answers_come_from_a_column_or_a_file(tmp_path):
    rows = [{"prompt": "p", "gold": "1"}, {"prompt": [{"role": "user", "content": "q"}], "gold": "2"}]
    assert stored_answers("column:gold", rows) == ["1", "2"]
    path = tmp_path / "answers.jsonl"
    lines = [{"prompt": rows[1]["prompt"], "response": "b"}, {"prompt": "p", "response": "a"}]
    path.write_text("\n".join(json.dumps(line) for line in [*lines, {"prompt": "p", "response": "second"}]))
    assert stored_answers(str(path), rows) == ["a", "b"]
    with pytest.raises(ValueError, match='has no answer to the prompt "r"'):
        stored_answers(str(path), [{"prompt": "r"}])
    with pytest.raises(ValueError, match="row 0 of the eval set has no text there; its columns are prompt, gold"):
        stored_answers("column:silver", rows)
    with pytest.raises(ValueError, match="which is no file"):
        stored_answers("no/file.jsonl", rows)
    for line, reason in (("{", "JSONDecodeError"), ('{"prompt": "p"}', "KeyError"), ("3", "TypeError")):
        path.write_text(line)
        with pytest.raises(ValueError, match=f"line 1 is not a row with prompt and response: {reason}"):
            stored_answers(str(path), rows)
    path.write_text('{"prompt": "p", "response": 3}')
    with pytest.raises(ValueError, match="the response is not text"):
        stored_answers(str(path), rows)


def test_stored_answers_may_hold_line_breaks_that_json_leaves_as_they_are(tmp_path):
    path = tmp_path / "answers.jsonl"
    line = json.dumps({"prompt": "p", "response": "a\u2028b\x85c"}, ensure_ascii=False)
    path.write_text(line + "\n", encoding="utf-8")
    assert stored_answers(str(path), [{"prompt": "p"}]) == ["a\u2028b\x85c"]
