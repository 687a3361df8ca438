"""Runs whose rewards come from an HTTP server: when it is asked, what the progress bar says, what is written down."""

import pytest
import torch

from alpaca_ppo import RemoteReward, ScriptArguments
from alpaca_ppo.rewards.build import reward_sources
from alpaca_ppo.tracking.run_record import RunRecord
from tests.http_servers import RawServer, response
from tests.tiny_runs import count_even, metric_lines, tiny_config, tiny_trainer, weights

pytestmark = pytest.mark.usefixtures("deadline")


def even(request):
    return response({"rewards": count_even(**request.body), "metrics": {"rows": len(request.body["prompts"])}})


def test_a_run_with_a_server_is_that_with_the_function(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    local = tiny_trainer(tmp_path / "local", total_episodes=10)
    local.train()
    with RawServer(even) as server:
        sources = {"reward_funcs": RemoteReward(server.url, name="served")}
        remote = tiny_trainer(tmp_path / "remote", total_episodes=10, trainer_arguments=sources)
        remote.train()
    expected = weights(local)
    assert all(torch.equal(value, expected[name]) for name, value in weights(remote).items())
    assert metric_lines(tmp_path / "remote")[-1]["reward/rows"] == 10.0


def arguments(**options):
    return ScriptArguments(model_name_or_path="m", dataset_name="d", **options)


def test_options_name_one_source_after_the_others_and_run_yaml_has_no_credential():
    url = ["http://user:p@ss@host:1/x?api_key=abc123", "http://other/"]
    script, args = arguments(reward_funcs=["f.py:f"], reward_url_timeout=2.5, reward_url=url), tiny_config("out")
    function, remote = reward_sources(script)
    assert function == "f.py:f"
    assert (remote.urls, remote.timeout, remote.__name__) == (url, 2.5, "reward_url")
    written = RunRecord(vars(script)).config(args)["reward_url"]
    removed = "<credential removed>"
    assert written == [f"http://{removed}@host:1/x?api_key={removed}", "http://other/"]
    with pytest.raises(ValueError, match="reward_url holds 'host', no address"):
        arguments(reward_url=["host"])
    with pytest.raises(ValueError, match="no reward; .* --reward_url, --reward_adapter, --teacher_model_name_or_path"):
        arguments().check_before_loading(args)
