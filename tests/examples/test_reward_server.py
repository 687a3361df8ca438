"""The reference reward server, started as a program, with a function and with a reward model."""

import json
import re
import signal
import subprocess
import urllib.error
import urllib.request

import pytest

from alpaca_ppo.rewards import FailureHandling, FunctionReward, RemoteReward, RewardError, build_reward
from alpaca_ppo.rewards.batch import make_reward_batch
from alpaca_ppo.rewards.reward_function import call_functions
from tests.tiny_models import tiny_sequence_classifier, tiny_tokenizer
from tests.tools.warm_python import ROOT, warm_python

pytestmark = pytest.mark.usefixtures("deadline")

FUNCTION = """
def graded(completions, completion_ids, log_metric, labels=None, answer=None, **columns):
    log_metric("rows", len(completions))
    right = labels or answer
    if "fail" in completions:
        raise RuntimeError("no score for it")
    if "tokens" in completions:
        return [[0.5] * len(ids) for ids in completion_ids]
    return [None if text == "skip" else float(text == wanted) for text, wanted in zip(completions, right)]
"""


@pytest.fixture
def start(monkeypatch):
    """Starts the program and returns its address."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("REWARD_API_KEY", "s3cret")
    processes = []

    def started(*arguments):
        command = [warm_python(), "examples/reward_server.py", *map(str, arguments), "--port", "0"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        line = process.stdout.readline()
        assert (found := re.search(r"scores at (http://127.0.0.1:\d+)/score", line)), line
        return found[1]

    yield started
    for process in processes:
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30)[0] == "stopped\n" and process.returncode == 0


def scored(reward, batch, logged=None):
    source = FunctionReward(reward)
    source.context = {"log_metric": lambda *metric: logged.append(metric)} if logged is not None else {}
    return call_functions([source], batch, FailureHandling())[0]


def batch_of(*completions):
    rows = [{"answer": "7"} for _ in completions]
    return make_reward_batch(["p "] * len(completions), list(completions), [[1, 2]] * len(completions), rows)


def test_a_function_answers(start, tmp_path, monkeypatch):
    (tmp_path / "graded.py").write_text(FUNCTION)
    address, logged = start(f"{tmp_path}/graded.py:graded"), []
    plain = RemoteReward(f"{address}/score")
    assert scored(plain, batch_of("7", "8", "skip"), logged) == [1.0, 0.0, None]
    assert logged == [("rows", 3.0)] * 3
    assert scored(plain, batch_of("tokens", "x")) == [[0.5, 0.5]] * 2
    with pytest.raises(RewardError, match="HTTP status 500.*RuntimeError: no score for it"):
        scored(plain, batch_of("fail"))
    with pytest.raises(RewardError, match="HTTP status 404.*the address is /score"):
        scored(RemoteReward(f"{address}/get_reward"), batch_of("7"))
    # What no run of this package sends.
    for request, message in (
        ({"prompts": "abc"}, "prompts is no list"),
        ({"prompts": ["a"]}, "KeyError"),
        ({"prompts": ["a"], "completions": ["b"], "columns": {"answer": "c"}}, "answer is no list of 1 values"),
        ("[" * 50_000, "RecursionError"),
    ):
        body = request if isinstance(request, str) else json.dumps(request)
        headers = {"Content-Type": "application/json", "Authorization": "Bearer s3cret"}
        asked = urllib.request.Request(f"{address}/score", body.encode(), headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=30)
        assert refused.value.code == 400 and message in json.load(refused.value)["error"]
    monkeypatch.setenv("REWARD_API_KEY", "another")
    with pytest.raises(RewardError, match="HTTP status 401.*the key is not that of REWARD_API_KEY"):
        scored(plain, batch_of("7"))


def test_a_reward_model_scores_as_it_does_in_the_run(start, tmp_path):
    tiny_sequence_classifier("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    batch = make_reward_batch(["w10 w11", "w12"], [" w20", " w21 w22"], [[20], [21, 22]], [{}, {}])
    local = build_reward(str(tmp_path))(batch.prompts, batch.completions, batch.completion_ids, [{}, {}])
    address = start(tmp_path)
    found = scored(RemoteReward(f"{address}/score"), batch)
    assert found == pytest.approx(local.rewards.tolist(), abs=1e-6)
