"""DeepSpeed ZeRO and FSDP2 with two processes (FSDP2 with three too) train what one process trains, and share what they
say they share.

The runs of one stage are made one after the other in the same two processes, whose start takes longer than a run.
"""

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from alpaca_ppo.tracking.results import WeightsStep, read_weights_step
from tests.integration.launching import ROOT, proves, start_tiny
from tests.tiny_models import tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import metric_lines

ADAPTERS = {"lora": True, "critic_layout": "adapter"}
# Never clipped: where weights are sharded, a norm is summed in another order, and the last bit of a clipped gradient
# can decide to which number of bfloat16 a weight is cast.
HALF = {"bf16": True, "max_grad_norm": 1e6}
# Six optimizer steps, all of them clipped, the critic's with settings of its own.
CLIPPED = {"total_episodes": 10, "ppo_epochs": 2, "max_grad_norm": 0.1}
RUNS: dict[str, dict[str, Any]] = {
    "adapters": {
        **ADAPTERS,
        "ppo_epochs": 2,
        "critic_epochs": 1,
        "gradient_checkpointing": True,
        "critic_pretraining_steps": 1,
        "weight_decay": 0.1,
        "num_inspected_prompts": 2,
    },
    # Prompts at 10 a step: one for the last step, and one rank without; odd numbers of rows to evaluate.
    "uneven": {
        "critic": "iqn",
        "num_inspected_prompts": 1,
        "total_episodes": 11,
        "num_return_sequences": 2,
        "dynamic_sampling": 3,
        # A set of one prompt; the sharded reference is sampled, and a sharded classifier measures.
        **{"eval_prompts": 3, "eval_named": True, "eval_temperature": 1.0, "eval_num_samples": 2},
        **{"eval_opponent": "reference", "eval_judge": "LlamaForSequenceClassification"},
    },
    # transformers' loop, which skips its processors on a rank that has done; and no critic.
    "generate": {
        **{"generation_backend": "generate", "rollout_per_device_batch_size": 1, "response_len": 12},
        **{"adv_estimator": "grpo", "num_return_sequences": 2},
    },
    # The policy whole on every rank while it samples, and one rank without a prompt, in a step that takes the sampler's
    # log-probs. Without a reference, agreement in critic pretraining would count.
    "ragged": {
        "critic": "quantile",
        "rollout_batch_size": 4,
        "total_episodes": 13,
        "critic_pretraining_steps": 1,
        "reference": "none",
        "kl_coef": 0.0,
        "num_inspected_prompts": 1,
    },
    # The policy moves away in every step, and so the first evaluation of a step is the best; save_steps skips it.
    "best": {
        "save_steps": 5,
        "eval_steps": 1,
        "eval_prompts": 3,
        "metric_for_best_model": "eval/kl_sum_seq",
        "greater_is_better": False,
        "load_best_model_at_end": True,
    },
    # One rank has no prompt in the last step, and so only dummies of the critic's states.
    "cached": {
        **{"critic_layout": "cached", "critic_width": 64, "critic_depth": 1, "critic_epochs": 2, "weight_decay": 0.1},
        **{"rollout_batch_size": 4, "total_episodes": 13, "critic": "quantile", "critic_pretraining_steps": 1},
    },
    "cached_given": {"critic_layout": "cached", "critic_width": 64, "critic_depth": 1, "own_critic": True},
    "reward_model": {"reward_model": True, "reference": "copy", "target_kl_stop": 0.01},
    "offloaded": {"reference": "copy_offloaded"},
    # Up to five micro-batches, where DeepSpeed's configuration has one. The critic steps alone, then the policy, then
    # the critic again: a moment that had decayed meanwhile, or a step that had been counted, would show in its weights.
    "one_row_each": {
        "critic": "hl_gauss",
        "max_tokens_per_micro_batch": 9,
        "critic_step_batch_size": 5,
        "weight_decay": 0.1,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 2,
    },
    # The copy keeps the adapter that training starts from.
    "copied_start": {"start_adapter": True, "critic_layout": "separate", "reference": "copy"},
    # As that of "tied", hardly any gradient reaches some weights.
    "reward_adapter": {**ADAPTERS, "reward_adapter": "reward", "adam_epsilon": 0.00001},
    # The gradient of a key's bias is 0 but for rounding errors, which AdamW with a small epsilon would scale up.
    "tied": {"arch": "gpt2", "critic_layout": "shared", "adam_epsilon": 0.00001},
    "clipped": CLIPPED,
    "clipped_adapters": {**CLIPPED, **ADAPTERS, "gradient_checkpointing": True},
    "clipped_offloaded": {**CLIPPED, "critic_epochs": 1},
    "steep": {"steep": True, "max_skipped_updates": 3, "total_episodes": 10},
    "skipped": {"total_episodes": 30, "poison": [[0, 1], [1, 0], [2, 2]], "max_skipped_updates": 3},
    "skipped_adapters": {"lora": True, "critic_layout": "shared", "poison": [[0, 1]], "max_skipped_updates": 3},
    "half": {**HALF, "critic": "c51"},
    "half_cached": {**HALF, "critic_layout": "cached", "critic_width": 64, "critic_depth": 1, "critic_epochs": 2},
    "half_steep": {"bf16": True, "steep": True, "max_skipped_updates": 3, "total_episodes": 10},
    "half_adapters": {**ADAPTERS, **HALF},
    "half_copied_start": {
        "start_adapter": True,
        "critic_layout": "adapter",
        "reference": "copy_offloaded",
        "dtype": "bfloat16",
    },
    # All four roles on a base in bfloat16, with gradients of the adapters in float32.
    "half_base": {
        **{**ADAPTERS, **HALF, "reward_adapter": "reward"},
        **{"dtype": "bfloat16", "gradient_checkpointing": True},
    },
}
TALKING = {"critic": "c51", "talker": True, "response_len": 12, "max_turn_tokens": 3, "turn_gamma": 0.9}
RUNS["talking"] = {**TALKING, "rollout_batch_size": 5, "eval_prompts": 3, "teacher_model_name_or_path": "teacher"}
HEAVY = {f"heavy{layout}": {**RUNS[f"clipped{layout}"], "vf_coef": 100.0} for layout in ("", "_adapters")}
CLIPPED_RUNS = ["clipped", "clipped_adapters", "clipped_offloaded"]
STAGES = {
    "single": list(RUNS),
    "zero1": ["adapters", "cached", "clipped", "one_row_each"],
    "zero2": [
        "ragged",
        "cached",
        "best",
        "one_row_each",
        "skipped",
        "skipped_adapters",
        *CLIPPED_RUNS,
        *HEAVY,
        "half",
        "half_cached",
        "half_steep",
    ],
    "zero3": list(RUNS),
    # DDP in bfloat16, which computes what FSDP2 does.
    "ddp": ["half", "half_cached", "half_adapters", "half_base"],
    "fsdp": [name for name, run in RUNS.items() if "offloaded" not in f"{name} {run.get('reference')}"] + [*HEAVY],
    "fsdp-3": [
        *("adapters", "cached", "uneven", "ragged", "reward_model", "one_row_each", "tied", "clipped"),
        "clipped_adapters",
    ],
}
# What `make test` runs; the others are for `make proof`.
KEPT = {"single": ["uneven"], "fsdp": ["uneven"]}


def case(stage: str, name: str, *more: Any) -> Any:
    """Parameters of a test about the run `name` under `stage`."""
    return pytest.param(stage, name, *more, marks=() if name in KEPT.get(stage, ()) else pytest.mark.proof)


EXACT = [
    case(stage, name)
    for stage, names in STAGES.items()
    for name in names
    if stage not in ("single", "ddp") and not name.startswith(("half", "heavy"))
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request) -> Path:
    """A folder with the runs of every stage, and of one process (`single`), in folders such as zero3/tied."""
    folder = tmp_path_factory.mktemp("zero")
    write_reward_adapter(folder / "reward")
    tiny_causal_lm("llama", seed=7).save_pretrained(folder / "teacher")
    tiny_tokenizer().save_pretrained(folder / "teacher")
    for stage, names in (STAGES if proves(request) else KEPT).items():
        output = start_tiny(stage, *((folder / stage / name, *flags(folder, name, stage)) for name in names))
        (folder / stage / "output.txt").write_text(output)
    return folder


def write_reward_adapter(folder: Path) -> None:
    """A reward adapter on the base of the runs, as train_reward_model.py --use_peft writes it."""
    classifier = tiny_sequence_classifier("llama")
    classifier.base_model.load_state_dict(tiny_causal_lm("llama").base_model.state_dict())
    peft = get_peft_model(classifier, LoraConfig(r=2, target_modules="all-linear", task_type="SEQ_CLS"))
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
    peft.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def flags(folder: Path, name: str, stage: str) -> list[str]:
    settings = {"dtype": "float32", **(RUNS | HEAVY)[name]}
    if name == "clipped_offloaded" and stage != "single":
        settings["deepspeed"] = str(offloading(folder, stage))
    for option in {"reward_adapter", "teacher_model_name_or_path"} & settings.keys():
        settings[option] = str(folder / settings[option])
    return [
        f"{key}={yaml.safe_dump(value, default_flow_style=True, width=1e9).splitlines()[0]}"
        for key, value in settings.items()
    ]


def offloading(folder: Path, stage: str) -> Path:
    """The DeepSpeed file for offloading, under stage 3 with several sub-groups to each group of the optimizer."""
    config = json.loads((ROOT / f"examples/deepspeed_configs/{stage}_offload.json").read_text())
    config["zero_optimization"]["sub_group_size"] = 2000
    (folder / f"{stage}_offload.json").write_text(json.dumps(config))
    return folder / f"{stage}_offload.json"


def assert_same_tensors(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], *, tolerance: float = 1e-4) -> None:
    assert theirs and ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        gap = float((ours[name] - tensor).norm()) / max(float(tensor.norm()), 1e-6)
        assert gap < tolerance, f"{name}: {gap}"


def saved(folder: Path) -> dict[str, Tensor]:
    """Every tensor under final/, by file and name."""
    files = sorted(folder.glob("final/*/*.safetensors"))
    return {f"{path.parent.name} {name}": tensor for path in files for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(("stage", "name"), EXACT)
def test_a_run_under_zero_is_that_of_one_process(stage, name, runs):
    two, one = runs / stage / name, runs / "single" / name
    tensors = (torch.load(folder / "weights.pt", weights_only=True) for folder in (two, one))
    assert_same_tensors(*tensors, tolerance=1e-5 if stage.startswith("fsdp") else 1e-4)
    for ours, theirs in zip(metric_lines(two), metric_lines(one), strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            if "padding" not in key:
                rel = 1e-5 if stage.startswith("fsdp") else 5e-5
                expected = None if value is None else pytest.approx(value, rel=rel, abs=1e-5)
                assert ours[key] == expected, f"step {ours['step']}: {key}"


@pytest.mark.parametrize(("stage", "name", "processes"), [case("fsdp", "cached", 2), case("fsdp-3", "cached", 3)])
def test_updates_of_a_cached_critic_under_fsdp_gather_nothing(stage, name, processes, runs):
    files = (runs / stage / name).glob("reached_*.json")
    counts = [json.loads(file.read_text())["critic_collectives"] for file in files]
    assert len(counts) == processes and all(counts) and {*chain(*counts)} == {0}


@pytest.mark.parametrize(
    ("stage", "name", "table"),
    [
        case(stage, name, table)
        for stage in ("zero3", "fsdp", "fsdp-3")
        for name, table in (("adapters", "inspected"), ("uneven", "eval"), ("ragged", "inspected"))
    ],
)
def test_sharded_models_log_the_tokens_of_followed_prompts(stage, name, table, runs):
    def tokens(stage):
        files = sorted((runs / stage / name / table).rglob("step_*.jsonl"))
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [entry for row in rows for entry in row.get("tokens", [])]

    whole, sharded = tokens("single" if name != "ragged" else "zero2"), tokens(stage)
    assert whole and [entry["id"] for entry in sharded] == [entry["id"] for entry in whole]
    for ours, theirs in zip(whole, sharded, strict=True):
        assert theirs.keys() == ours.keys()
        assert all(theirs[key] == pytest.approx(ours[key], rel=1e-3, abs=1e-4) for key in ours if key != "text")


@pytest.mark.parametrize(("stage", "name"), EXACT)
def test_the_final_folders_are_whole_and_those_of_one_process(stage, name, runs):
    # Of parameters that lie in parts, a careless save writes empty ones.
    assert_same_tensors(saved(runs / stage / name), saved(runs / "single" / name))


@pytest.mark.parametrize(("stage", "name"), [case("fsdp", name) for name in STAGES["fsdp"]])
def test_the_final_folders_hold_the_gathered_weights_to_the_last_bit(stage, name, runs):
    gathered = torch.load(runs / stage / name / "weights.pt", weights_only=True).values()
    contents = {(tensor.shape, tensor.numpy().tobytes()) for tensor in gathered}
    files = saved(runs / stage / name)
    assert files and all((tensor.shape, tensor.numpy().tobytes()) in contents for tensor in files.values())


@pytest.mark.parametrize(("stage", "name"), [case(stage, name) for stage, names in STAGES.items() for name in names])
def test_the_policy_s_weights_are_yielded_whole_and_one_at_a_time(stage, name, runs):
    for file in (runs / stage / name).glob("reached_*.json"):
        found = json.loads(file.read_text())["published"]
        # Kept tensors are empty, so that there is memory for one more at most, and only where weights are sharded.
        assert found["same"] and found["more"] <= (found["largest"] if stage in ("zero3", "fsdp", "fsdp-3") else 0)


@pytest.mark.proof
@pytest.mark.parametrize("name", STAGES["ddp"])
def test_in_bfloat16_fsdp_trains_what_ddp_trains(name, runs):
    ours, theirs = (torch.load(runs / stage / name / "weights.pt", weights_only=True) for stage in ("fsdp", "ddp"))
    # To the last bit on most CPUs; on one without AVX-512 a bias differs in its last one.
    assert_same_tensors(ours, theirs, tolerance=1e-6)


@pytest.mark.proof
@pytest.mark.parametrize("stage", ["single", "zero2", "zero3", "fsdp"])
def test_the_best_checkpoint_is_what_every_stage_ends_with(stage, runs):
    folder = runs / stage / "best"
    kl = {line["step"]: line["eval/kl_sum_seq"] for line in metric_lines(folder)}
    assert read_weights_step(folder / "final") == WeightsStep(1, 2, "eval/kl_sum_seq", kl[1]) and kl[1] < kl[2]
    held = torch.load(folder / "weights.pt", weights_only=True)
    best, last = (load_file(folder / f"checkpoint-{step}/model.safetensors") for step in (1, 2))
    assert all(torch.equal(held[name], best[name]) for name in held)
    assert not any(torch.equal(held[name], last[name]) for name in held if held[name].ndim == 2)


@pytest.mark.proof
@pytest.mark.parametrize("stage", ["single", "zero2", "zero3", "fsdp", "fsdp-3"])
def test_the_same_steps_take_the_samplers_log_probs(stage, runs):
    assert [line["mismatch/recomputed"] for line in metric_lines(runs / stage / "ragged")] == [0, 1, 0, 0]


@pytest.mark.proof
@pytest.mark.parametrize("stage", ["zero3", "fsdp"])
def test_the_final_folders_load(stage, runs):
    tied = AutoModelForCausalLM.from_pretrained(runs / stage / "tied/final/policy")
    assert tied.lm_head.weight is tied.transformer.wte.weight
    one = AutoModelForCausalLM.from_pretrained(runs / "single/tied/final/policy")
    assert_same_tensors(tied.state_dict(), one.state_dict())
    assert not torch.allclose(tied.lm_head.weight, tiny_causal_lm("gpt2").lm_head.weight, atol=1e-4), "it moved"
    folder = runs / stage / "adapters/final"
    ids = torch.tensor([[5, 6, 7]])
    adapted = PeftModel.from_pretrained(tiny_causal_lm("llama"), folder / "policy")
    assert not torch.allclose(tiny_causal_lm("llama")(ids).logits, adapted(ids).logits, atol=1e-3)
    assert {path.name for path in (folder / "value").glob("adapter_*")} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


@pytest.mark.proof
def test_stage_3_holds_a_part_of_every_model_and_the_others_all_of_it(runs):
    shares = {name: json.loads((runs / "zero3" / name / "resident.json").read_text()) for name in RUNS}
    assert shares["reward_model"].keys() == {"policy", "reference", "reward 1"}
    # Between passes nothing is there but the small tensors that DeepSpeed leaves whole.
    small = {"copied_start": 0.2, "half_copied_start": 0.2}  # The reference's adapters, beside so small a base.
    for run, models in shares.items():
        assert all(share < small.get(run, 0.05) for name, share in models.items() if "reward" not in name)
    assert shares["reward_model"]["reward 1"] < 0.05
    assert shares["offloaded"].keys() == {"policy", "reference"}
    parted = json.loads((runs / "fsdp/reward_model/resident.json").read_text())
    assert parted.keys() == shares["reward_model"].keys() and all(0.49 < share < 0.51 for share in parted.values())
    whole = json.loads((runs / "zero2/skipped/resident.json").read_text())
    assert whole == {"policy": 1.0, "reference": 1.0}


@pytest.mark.proof
@pytest.mark.parametrize(
    ("stage", "name"), [("zero2", "skipped"), ("zero3", "skipped"), ("zero3", "skipped_adapters"), ("fsdp", "skipped")]
)
def test_an_update_that_is_nan_on_one_rank_is_skipped_on_both(stage, name, runs):
    records = [json.loads(line) for line in (runs / stage / name / "skipped_updates.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == ([1, 2, 3] if name == "skipped" else [1])
    assert all(record["cause"].count("on rank") == 1 for record in records), "one rank's loss, found by both"


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        case(stage, name)
        for stage, names in STAGES.items()
        for name in names
        if name.startswith("clipped")
        if stage != "single"
    ],
)
def test_both_gradients_were_above_their_limits(stage, name, runs):
    """The runs that are those of one process were clipped, then, each gradient by its own norm."""
    (line,) = metric_lines(runs / stage / name)
    assert line["ppo/policy/grad_norm"] > 5 * 0.1 and line["ppo/val/grad_norm"] > 2 * 0.3


@pytest.mark.proof
@pytest.mark.parametrize("name", HEAVY)
@pytest.mark.parametrize("stage", ["zero2", "fsdp"])
def test_vf_coef_changes_no_bit_of_the_policys_update(stage, name, runs):
    heavy, light = (
        torch.load(runs / stage / run / "weights.pt", weights_only=True)
        for run in (name, name.replace("heavy", "clipped"))
    )
    differ = {key for key in light if not torch.equal(heavy[key], light[key])}
    assert differ and all(key.startswith("critic.") or ".value." in key for key in differ)


@pytest.mark.proof
@pytest.mark.parametrize(("stage", "name"), [("zero2", "half_steep"), ("zero3", "steep"), ("fsdp", "steep")])
def test_an_infinite_gradient_is_skipped_by_all_and_says_whose_it_was(stage, name, runs):
    records = [json.loads(line) for line in (runs / stage / name / "skipped_updates.jsonl").read_text().splitlines()]
    causes = ["the policy's gradient norm is inf, though the losses of all ranks are finite"] * 3
    # Where ranks add up inf and -inf, the sum is NaN.
    assert [record["cause"].replace("is nan", "is inf") for record in records] == causes
    two, one = (torch.load(runs / place / name / "weights.pt", weights_only=True) for place in (stage, "single"))
    # DeepSpeed rounds the start of a bfloat16 run.
    start = {key: tensor.bfloat16().float() for key, tensor in one.items()} if "half" in name else one
    assert all(torch.equal(two[key], start[key]) for key in start), "nothing was trained anywhere"


@pytest.mark.proof
@pytest.mark.parametrize("name", ["copied_start", "half_copied_start"])
def test_the_copy_of_an_adapters_start_has_its_numbers_to_the_last_bit(name, runs):
    first, second = metric_lines(runs / "zero3" / name)
    assert first["objective/kl_sum_seq"] == 0.0 and second["objective/kl_sum_seq"] != 0.0


@pytest.mark.proof
@pytest.mark.parametrize(("stage", "name"), [("zero2", "half"), ("zero3", "half"), ("zero3", "half_adapters")])
def test_a_bfloat16_run_starts_where_its_reference_is(stage, name, runs):
    first, second = metric_lines(runs / stage / name)
    assert abs(first["objective/kl_sum_seq"]) < 1e-5 and abs(second["objective/kl_sum_seq"]) > 1e-4
    # The passes of sampler, trainer and update are those of one precision, and the critic's start is exactly 0.
    assert first["ppo/policy/first_ratio_error_max"] < 1e-4 and abs(first["ppo/val/mean"]) < 1e-6
    exact = metric_lines(runs / "single" / name)[0]
    assert first["objective/entropies"] == pytest.approx(exact["objective/entropies"], rel=0.02)
    findings = runs / stage / name / "findings.jsonl"
    assert not findings.exists() or "logprobs_disagree" not in findings.read_text()
    weights = torch.load(runs / stage / name / "weights.pt", weights_only=True)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}, "what a checkpoint holds is not rounded"
