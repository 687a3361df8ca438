"""Real processes: the run is the same however many there are.

The runs are made one after the other in the same processes, whose start takes longer than a run.
"""

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.integration.launching import proves, start_tiny
from tests.tiny_models import tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import metric_lines


def save_reward_adapter(folder: Path) -> None:
    """A reward adapter whose scores differ from row to row."""
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")
    peft = get_peft_model(tiny_sequence_classifier("llama"), lora)
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    peft.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


IQN = ("ppo_epochs=2", "critic=iqn", "num_atoms=4", "critic_pretraining_steps=1", "target_kl_stop=0.001")
SEPARATE = ("critic_epochs=1", "critic_step_batch_size=5")
GSPO = ("policy_loss=gspo", "loss_agg_mode=seq-mean-token-mean", "kl_loss_coef=0.001", "entropy_coef=0.01")
RLOO = ("adv_estimator=rloo", "num_return_sequences=2", "loss_agg_mode=seq-mean-token-sum-norm", "old_policy=correct")
ADAPTER = ("lora=true", "critic_layout=adapter")
SKIPPING = ("total_episodes=30", "poison=[[0,1],[1,0],[2,2]]", "max_skipped_updates=3")
CLIPPED = ("total_episodes=10", "ppo_epochs=2", "max_grad_norm=0.1", "critic_max_grad_norm=0.3")
SPARING = ("rollout_batch_size=4",)
TALKING = (
    *("talker=true", "response_len=12", "max_turn_tokens=3", "turn_gamma=0.9", "total_episodes=15"),
    *("num_return_sequences=2", "rollout_batch_size=7", "eval_prompts=3"),
)
# Answers that differ from the reference's.
COMPARED = ("eval_prompts=3", "eval_opponent=reference", "eval_temperature=1.0", "learning_rate=0.3")
CACHED = ("critic_layout=cached", "critic_width=64", "critic_depth=1", "critic_epochs=2")
RUNS = {
    # 21 prompts at 4 a step leave one for the last step, and one rank without, in a step that takes the sampler's
    # log-probs.
    "rank_without_prompts": (*SPARING, "total_episodes=21"),
    # 20 prompts at 7 a step leave ragged step batches, of which responses that did not stop are taken out.
    "ragged_batches": (
        *("rollout_batch_size=7", "num_return_sequences=2", "critic_layout=shared", "mask_truncated=true"),
        *("truncate_tokens=[10,14,18,22,26,30,34,38,42,46]", "positive_nll_coef=0.3", "positive_nll_threshold=1"),
    ),
    "iqn_gspo": (*IQN, *GSPO, *SEPARATE),
    # Of ten pairs of responses some score the same: fresh prompts are drawn, in two steps other numbers of them.
    "rloo": (*RLOO, "dynamic_sampling=3", "overlong_buffer_len=3"),
    # States stay with the rank that computed them; of prompts that are drawn again too, and of conversations.
    "cached": (
        *CACHED,
        "shares_prompts=true",
        "dynamic_sampling=3",
        "num_return_sequences=2",
        *SPARING,
        "total_episodes=13",
        "critic=iqn",
    ),
    "cached_talking": (*CACHED, *TALKING, "lora=true", "critic_pretraining_steps=1", "critic_step_batch_size=5"),
    "adapter_critic": (*ADAPTER, "loss_agg_mode=seq-mean-token-sum"),
    "recomputed_warmup": (*ADAPTER, "gradient_checkpointing=true", "critic_pretraining_steps=1", "critic_epochs=1"),
    # Without a reference, agreement in the step before the policy moves would count at once.
    "lora_separate": (
        *(*SPARING, "total_episodes=16", "lora=true", "critic_layout=separate"),
        *("critic_pretraining_steps=1", "reference=none", "kl_coef=0"),
    ),
    "reward_adapter": (*ADAPTER, "gradient_checkpointing=true", "reward_adapter=saved"),
    "lora_shared": (
        *("lora=true", "critic_layout=shared", "gradient_checkpointing=true"),
        *("critic=c51", "critic_pretraining_steps=1"),
    ),
    # Six optimizer steps, all of them clipped; with a value loss of other weights in HEAVY.
    "clipped": CLIPPED,
    "clipped_adapter": (*CLIPPED, *ADAPTER, "gradient_checkpointing=true"),
    # Responses that are dropped: with a prompt or two on each of two ranks, all of a rank's in some steps.
    "dropping": (
        "flaky=true",
        "failed_rewards=mask",
        "rollout_batch_size=3",
        "num_return_sequences=2",
        "eval_prompts=5",
    ),
    # A loss that is NaN on one rank.
    "skipping": SKIPPING,
    "skipping_adapters": (*SKIPPING, *ADAPTER, "gradient_checkpointing=true"),
    # The second of two ranks cannot read rows without padding.
    "padded_rank": ("padded_rank=1", "eval_prompts=3", "old_policy=recompute"),
    # Of one eval set the second of two ranks has no prompt.
    "evaluated": (
        *("eval_prompts=3", "eval_named=true", "eval_temperature=1.0", "eval_num_samples=3", "eval_success_above=1.5"),
        *("dynamic_sampling=3", "num_return_sequences=2"),
        *("reference=none", "kl_coef=0", "critic_pretraining_steps=1"),
    ),
    # Conversations of one to three turns, of which a rank has other numbers than the other, and in the last step none.
    "talking": TALKING,
    "taught": (*TALKING, "teacher_model_name_or_path=kept"),
    "compared": (*COMPARED, "eval_named=true", "eval_judge=scores/count_even"),
    "compared_adapter": (*COMPARED, *ADAPTER),
}
# A frozen base with adapters, and a critic all of whose weights are trained, in bfloat16.
HALF = (*SPARING, "total_episodes=12", "dtype=float32", "bf16=true", "lora=true", "critic_layout=separate")
HEAVY = {name.replace("clipped", "heavy"): (*RUNS[name], "vf_coef=100.0") for name in ("clipped", "clipped_adapter")}
# What one rank alone says, sees or decides.
TOLD = (
    *("disagreeing=true", "stop_on=[constant_reward]", "total_episodes=60", "eval_prompts=3", "eval_steps=1"),
    *("metric_for_best_model=eval/own", "load_best_model_at_end=true", "save_steps=20"),
)
TWO = {**HEAVY, "told": TOLD}


# What `make test` runs; the others are for `make proof`.
KEPT = ["rank_without_prompts", "cached", "dropping", "talking", "told"]


def case(name: str, *more: Any) -> Any:
    """Parameters of a test about the run `name`."""
    return pytest.param(name, *more, marks=() if name in KEPT else pytest.mark.proof)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request) -> Path:
    """A folder with every run on one process and on two, in folders such as two/rloo."""
    all_of_them = proves(request)
    folder = tmp_path_factory.mktemp("processes")
    save_reward_adapter(folder / "reward")
    tiny_causal_lm("llama", seed=7).save_pretrained(folder / "teacher")
    tiny_tokenizer().save_pretrained(folder / "teacher")
    for processes, config in (("one", None), ("two", "ddp")):
        given = {
            name: [
                setting.replace("=saved", f"={folder / 'reward'}").replace("=kept", f"={folder / 'teacher'}")
                for setting in settings
            ]
            for name, settings in (RUNS | {"half": HALF} | ({} if config is None else TWO)).items()
            if all_of_them or name in KEPT
        }
        output = start_tiny(config, *((folder / processes / name, *settings) for name, settings in given.items()))
        printed = re.split(r"each of \d processes", output)[1:]
        for name, text in zip(given, printed, strict=True):
            (folder / processes / name / "output.txt").write_text(text)
    return folder


@pytest.mark.parametrize("name", [case(name) for name in RUNS])
def test_two_processes_train_the_same_model_as_one(name, runs):
    one, two = (torch.load(runs / processes / name / "weights.pt", weights_only=True) for processes in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(bool(tensor.isfinite().all()) for tensor in two.values())
    for key in one:
        assert_close(two[key], one[key], rtol=1e-6, atol=1e-6)
    for first, second in zip(metric_lines(runs / "one" / name), metric_lines(runs / "two" / name), strict=True):
        assert first.keys() == second.keys()
        for key in first:
            if "padding" not in key:
                # Where one rank cannot sample in slots, all sample by model.generate, which rounds to float32.
                rounding = 1e-6 if key.startswith("mismatch/") else 1e-8
                # Of a prompt that is read once, norms round one gradient to float32 instead of one for each answer; a
                # teacher's weights are in float32.
                relative = 1e-5 if name in ("cached", "taught") else 1e-6
                expected = None if first[key] is None else pytest.approx(first[key], rel=relative, abs=rounding)
                assert second[key] == expected, key


def test_under_ddp_the_policy_s_weights_are_yielded_without_a_copy(runs):
    files = list((runs / "two").glob("*/reached_*.json"))
    published = [json.loads(file.read_text())["published"] for file in files]
    assert len(published) > 2 and all(found["same"] and found["more"] == 0 for found in published)


def test_under_ddp_a_step_of_the_critic_alone_reduces_no_gradient_of_the_policy(runs):
    counts = [json.loads(file.read_text())["policy_gradients"] for file in (runs / "two").glob("cached/reached_*.json")]
    assert len(counts) == 2 and all(counts) and {*chain(*counts)} == {0}


@pytest.mark.proof
def test_prompts_are_redrawn_on_two_processes_as_on_one(runs):
    redrawn = [line["objective/redrawn_prompts"] for line in metric_lines(runs / "two/rloo")]
    assert len(redrawn) == 2 and 0 < redrawn[0] != redrawn[1] > 0


def test_rows_that_one_rank_drops_are_dropped_on_all(runs):
    steps, two = metric_lines(runs / "one" / "dropping"), metric_lines(runs / "two" / "dropping")
    dropped = [[line.get(f"{kind}/masked_rows") for line in steps] for kind in ("eval", "objective")]
    # The prompts 0 and 4 of the five for the evaluation have one word, and every fourth of all prompts.
    assert dropped[0][0] == dropped[0][-1] == 2.0 and {0.0, 2.0} <= set(dropped[1][1:])
    assert [line["objective/masked_rows"] for line in two[1:]] == dropped[1][1:]


@pytest.mark.proof
@pytest.mark.parametrize("name", ["compared", "compared_adapter"])
def test_some_of_the_answers_that_two_processes_compare_win_or_lose(name, runs):
    last = metric_lines(runs / "two" / name)[-1]
    rates = [value for key, value in last.items() if key.startswith("eval/") and key.endswith("win_rate")]
    assert rates and {*rates} != {0.5}


@pytest.mark.parametrize("name", [case("skipping"), case("skipping_adapters")])
def test_a_loss_that_is_nan_on_one_rank_is_skipped_on_all(name, runs):
    assert [line["ppo/policy/skipped_updates"] for line in metric_lines(runs / "two" / name)] == [1, 1, 1]
    records = [json.loads(line) for line in (runs / "two" / name / "skipped_updates.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(record["cause"].count("on rank") == 1 for record in records), "one rank's loss, found by both"


@pytest.mark.proof
def test_a_rank_that_needs_padding_makes_all_pad(runs):
    for processes, reason in (("one", ""), ("two", ", with padding: policy on process 1, critic on process 1, ")):
        output = (runs / processes / "padded_rank/output.txt").read_text()
        assert output.startswith(reason or "\n")


@pytest.mark.proof
@pytest.mark.parametrize("name", HEAVY)
def test_vf_coef_changes_no_bit_of_the_policys_update(name, runs):
    heavy, light = (
        torch.load(runs / "two" / run / "weights.pt", weights_only=True)
        for run in (name, name.replace("heavy", "clipped"))
    )
    differ = {key for key in light if not torch.equal(heavy[key], light[key])}
    assert differ and all(key.startswith("critic.") or ".value." in key for key in differ)
    (line,) = metric_lines(runs / "two" / name)
    assert line["ppo/policy/grad_norm"] > 0.5 and line["ppo/val/grad_norm"] > 30


@pytest.mark.parametrize("processes", ["one", "two"])
@pytest.mark.parametrize(
    ("name", "recomputed"),
    [case("rank_without_prompts", [1, 0, 0, 0, 0, 0]), case("lora_separate", [0, 1, 0, 0]), case("half", [1, 1, 1])],
)
def test_the_same_steps_take_the_samplers_log_probs(name, recomputed, processes, runs):
    assert [line["mismatch/recomputed"] for line in metric_lines(runs / processes / name)] == recomputed


@pytest.mark.proof
def test_in_bfloat16_the_gradients_of_two_processes_are_those_of_one_up_to_rounding(runs):
    mine, one = runs / "two/half", runs / "one/half"
    weights = torch.load(mine / "weights.pt", weights_only=True)
    assert weights and {tensor.dtype for tensor in weights.values()} == {torch.float32}
    for ours, theirs in zip(metric_lines(mine)[:2], metric_lines(one)[:2], strict=True):
        for key in ("ppo/policy/grad_norm", "ppo/val/grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=0.02) and ours[key] > 0.1


def test_two_processes_end_for_a_finding_together_and_keep_the_main_process_s_best(runs):
    """A constant reward is found after three of six steps. The main process's evaluations are -1, 0 and -1 after steps
    1, 2 and 3, and -1, -2 and -3 on the other, which alone would keep the first.
    """
    folder = runs / "two/told"
    reached = [json.loads((folder / f"reached_{rank}.json").read_text()) for rank in (0, 1)]
    assert [(rank["step"], rank["best"]) for rank in reached] == [(3, 2), (3, 2)]
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == [f"checkpoint-{step}" for step in (1, 2, 3)]
    best = load_file(folder / "checkpoint-2/model.safetensors")
    held = torch.load(folder / "weights.pt", weights_only=True)
    assert all(torch.equal(held[name], best[name]) for name in held)


def test_the_console_of_two_processes_speaks_once_and_what_a_reward_logs_is_a_mean_over_both(runs):
    folder = runs / "two/told"
    printed = (runs / "two/told/output.txt").read_text()
    for line in (
        "eval before training:",
        "eval at step 2:",
        "done: stopped at step 3 of 6 ",
        "best step:   2 (eval/own",
    ):
        assert printed.count(f"\n{line}") == 1, line
    assert printed.count("[constant_reward]") == printed.count("constant_reward is in stop_on") == 1
    assert len(re.findall(r"\n +[123]/6 ", printed)) == 3
    assert printed.count("-- step 1, all scores equal") == 1
    # Ranks 0 and 1 with one call each; what the second alone logs is the mean of its own calls.
    logged = [(line["reward/rank"], line["reward/of_the_second"]) for line in metric_lines(folder) if line["step"]]
    assert logged == [(0.5, 5.0)] * 3
