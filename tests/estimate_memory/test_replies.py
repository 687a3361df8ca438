"""The pass in which the sampler reads what environments and tools answer, against the live bytes of a real one."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from alpaca_ppo.cli.estimate_memory import main
from alpaca_ppo.estimate_memory.fake_models import Models
from alpaca_ppo.estimate_memory.live_bytes import LiveBytes
from alpaca_ppo.estimate_memory.measure import measure
from alpaca_ppo.estimate_memory.phases import peak_by_phase, sizes_of
from alpaca_ppo.estimate_memory.sharding import Sharding
from alpaca_ppo.generation import Turns, generate
from alpaca_ppo.models import packing_probe
from tests.estimate_memory.test_estimator import FLAGS, QUERY, ROWS, folder, llama, settings
from tests.tiny_models import tiny_config

__all__ = ["folder"]
RESPONSE = 128


class AnswersAtLength:
    """Answers each turn at once with all tokens that leave room for one more."""

    def on_stop(self, turn):
        return [9] * (RESPONSE - 1 - len(turn.response))

    def ready(self, timeout):
        raise AssertionError("nothing is pending")


def measured(config, **overrides):
    args = settings(output_dir="none", response_len=RESPONSE, **overrides)
    return measure(Models(config), args, sizes_of(args, 1, replies=True)), args


@pytest.mark.parametrize("samples", [1, 4])
def test_reading_long_replies_takes_the_estimated_memory(samples):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama()).eval()
    assert packing_probe.packing_problem(model) is None
    with torch.no_grad():
        # The rows of one pass, in a prompt or in several.
        queries = torch.full((ROWS // samples, QUERY), 9)
        live = LiveBytes()
        live.track(list(model.parameters()))
        before = live.live
        with live:
            found = generate(
                model,
                queries,
                torch.ones_like(queries),
                max_new_tokens=RESPONSE,
                pad_token_id=0,
                stop_token_ids=(),
                seed=0,
                step=0,
                prompt_ids=torch.arange(len(queries)),
                num_return_sequences=samples,
                backend="slots",
                turns=Turns(AnswersAtLength(), max_turn_tokens=1),
            )
    assert found.response_mask.sum(dim=1).tolist() == [2] * ROWS
    sizes, args = measured(llama(), num_return_sequences=samples, adv_estimator="rloo" if samples > 1 else "gae")
    estimated = sizes["policy/replies"] + sizes["policy/kv_cache"]
    assert 0.85 < estimated / (live.peak - before) < 1.15, (estimated, live.peak - before, sizes["policy/kv_cache"])
    # Eight times the tokens of the prompts.
    assert sizes["policy/replies"] > 4 * sizes["policy/prefill"]
    phases = {phase.phase: phase for phase in peak_by_phase(sizes, args, Sharding())}
    assert phases["sampling"].activations == sizes["policy/replies"]
    assert phases["sampling"].total > max(phases[name].total for name in ("prefill", "score", "log-probs"))


def test_replies_need_turns_a_second_column_and_a_model_that_can_be_sampled_in_slots():
    args = settings(output_dir="none")
    assert sizes_of(args, 1, replies=True).replies and not sizes_of(args, 1).replies
    for overrides in ({"generation_backend": "generate"}, {"response_len": 1}):
        assert not sizes_of(settings(output_dir="none", **overrides), 1, replies=True).replies
    assert measured(tiny_config("bloom"))[0]["policy/replies"] == 0


@pytest.mark.parametrize("option", ["environments: game.py:Game", "tools: [tools.py:search]"])
def test_the_command_counts_replies_where_environments_or_tools_are_given(folder, tmp_path, capsys, option):
    results = []
    # No file of this name is read.
    for line in ("", option):
        (tmp_path / "run.yaml").write_text(f"model_name_or_path: {folder}\n{line}\n")
        main(["--config", str(tmp_path / "run.yaml"), *FLAGS, "--response_len=128", "--json"])
        results.append({phase["phase"]: phase for phase in json.loads(capsys.readouterr().out)["phases"]})
    plain, answered = results
    assert answered["sampling"]["total"] > 1.1 * plain["sampling"]["total"]
    assert {name: phase for name, phase in plain.items() if name != "sampling"} == {
        name: phase for name, phase in answered.items() if name != "sampling"
    }
