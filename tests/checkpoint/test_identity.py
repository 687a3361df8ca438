"""A resumed run is the run that began: models, rewards and schedule are those it started from, or the user says so."""

import shutil
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from alpaca_ppo import PPOConfig
from alpaca_ppo.checkpoint.compatibility import schedule_lengths
from alpaca_ppo.config.fields import options_of
from alpaca_ppo.distributed.optimizer import StepCounts
from alpaca_ppo.models import build_actor_critic
from tests.checkpoint.test_compatibility import refuse
from tests.option_types import choices
from tests.tiny_models import tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import count_even, metric_lines, prompts, tiny_config, tiny_trainer

HASH = r"[0-9a-f]{16}"
RUN = {"save_steps": 1, "total_episodes": 20}


def count_tokens(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


def scaled(completion_ids, scale, **columns):
    return [scale * len(ids) for ids in completion_ids]


def steps(folder):
    return [line["step"] for line in metric_lines(folder)]


def sources(folder, **changes):
    """Arguments of a run with a reference and a reward model from folders below `folder`, each changed on request."""
    given = {
        "ref_model": str(folder / "reference"),
        "reward_funcs": [count_even, str(folder / "rm")],
        "reward_processing_classes": [None, tiny_tokenizer()],
    }
    return {**given, **changes}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder of a reference, of a reward model, and of one whose other weights have the same shapes."""
    folder = tmp_path_factory.mktemp("models")
    tiny_causal_lm("llama", seed=1).save_pretrained(folder / "reference")
    tiny_sequence_classifier("llama", seed=2).save_pretrained(folder / "rm")
    tiny_sequence_classifier("llama", seed=3).save_pretrained(folder / "other")
    return folder


@pytest.fixture(scope="module")
def first_run(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "first"
    settings = {**RUN, "total_episodes": 10, "reward_weights": [1.0, 0.5]}
    tiny_trainer(folder, **settings, trainer_arguments=sources(models)).train()
    return folder


@pytest.fixture
def run(first_run, tmp_path):
    """A finished run of one step with `sources`; a copy for each test."""
    return shutil.copytree(first_run, tmp_path / "run")


def test_another_starting_policy_is_refused_unless_that_is_asked_for(tmp_path):
    run = tmp_path / "run"
    tiny_trainer(run, **{**RUN, "total_episodes": 10}).train()
    other = {"model": tiny_causal_lm("llama", seed=5)}
    # The reference is a copy of it, so that the KL would be measured from elsewhere.
    refuse(run, rf"run: weights.reference is weights {HASH} in .* here; .*ignore_changes: \[model\],", **other)
    other = {"model": tiny_causal_lm("llama", seed=5)}
    trainer = tiny_trainer(run, **RUN, **other, ignore_changes=["model"])
    trainer.train(resume_from_checkpoint=True)
    # From here on the run is one of the new models, and the old ones are the others.
    other = {"model": tiny_causal_lm("llama", seed=5), "total_episodes": 30}
    tiny_trainer(run, **{**RUN, **other}).train(resume_from_checkpoint=True)
    assert steps(run) == [1, 2, 3]
    refuse(run, "weights.reference is", total_episodes=40)


def test_a_trained_model_is_not_the_one_that_training_started_from(tmp_path):
    first = tiny_trainer(tmp_path, **{**RUN, "total_episodes": 10})
    first.train()
    # The same trainer remembers its start; another one gets the weights after training.
    first.train(resume_from_checkpoint=True)
    refuse(tmp_path, "weights.reference is", model=first.actor_critic.policy.model)


def test_a_starting_policy_from_which_nothing_is_built_may_change(models, tmp_path):
    settings = {**RUN, "reference": str(models / "reference")}
    tiny_trainer(tmp_path, **{**settings, "total_episodes": 10}).train()
    tiny_trainer(tmp_path, **settings, model=tiny_causal_lm("llama", seed=5)).train(resume_from_checkpoint=True)
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("part", ["starting_policy", "frozen_critic"])
def test_what_is_frozen_of_a_model_is_compared_and_what_is_trained_is_not(part, tmp_path):
    settings = {**RUN, "reference": "none", "kl_coef": 0.0} if part == "starting_policy" else RUN

    def made(seed, frozen_seed):
        model = build_actor_critic(tiny_causal_lm("llama"), critic_layout="separate")
        layers = (model.policy.model.model if part == "starting_policy" else model.critic.backbone).layers
        for layer, number in ((layers[0], frozen_seed), (layers[1], seed)):
            layer.mlp.up_proj.weight.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(number))
        return layers[0].mlp.requires_grad_(False) and model

    tiny_trainer(tmp_path, **{**settings, "total_episodes": 10}, model=made(1, 1)).train()
    refuse(tmp_path, f"run: weights.{part} is .* in the checkpoint", **settings, model=made(1, 2))
    tiny_trainer(tmp_path, **settings, model=made(2, 1)).train(resume_from_checkpoint=True)
    assert steps(tmp_path) == [1, 2]


CHANGES = {
    "function": (
        {"reward_funcs": [count_tokens, "rm"]},
        rf"run: rewards.0.function is tiny_runs.count_even \(source {HASH}\) in the checkpoint and "
        rf"test_identity.count_tokens \(source {HASH}\) here; .*ignore_changes: \[reward\],",
    ),
    "model": (
        {"reward_funcs": [count_even, "other"]},
        rf"run: rewards.1.model is LlamaForSequenceClassification with weights {HASH} in the ",
    ),
    "order": (
        {"reward_funcs": ["rm", count_even], "reward_processing_classes": [tiny_tokenizer(), None]},
        r"rewards.0.config.* is absent in the checkpoint and .* and \d+ more differences; ",
    ),
    "fewer": (
        {"reward_funcs": [count_even], "reward_weights": [1.0]},
        r"rewards.1 is present in the checkpoint and absent here",
    ),
    "weight": ({"reward_weights": [1.0, 2.0]}, r"run: rewards.1.weight is 0.5 in the checkpoint and 2.0 here; "),
    "tokenizer": (
        {"reward_processing_classes": [None, tiny_tokenizer(["other"])]},
        r"run: rewards.1.tokenizer.vocabulary is",
    ),
    "reference": ({"ref_model": "policy"}, "run: weights.reference is .*; .*ignore_changes: \\[model\\],"),
}


def changed(models, *names):
    """Overrides of a resumed run with the changes of these names."""
    change = {key: value for name in names for key, value in CHANGES[name][0].items()}
    overrides = {"reward_weights": change.pop("reward_weights", [1.0, 0.5])}
    if "reward_funcs" in change:
        change["reward_funcs"] = [str(models / f) if isinstance(f, str) else f for f in change["reward_funcs"]]
        change.setdefault("reward_processing_classes", [tiny_tokenizer()] * len(change["reward_funcs"]))
    if "ref_model" in change:
        change["ref_model"] = tiny_causal_lm("llama", seed=7)
    return {**overrides, "trainer_arguments": sources(models, **change)}


@pytest.mark.parametrize("name", CHANGES)
def test_each_source_and_the_reference_are_compared(name, run, models):
    refuse(run, CHANGES[name][1], **{**RUN, **changed(models, name)})


def test_one_error_names_everything_that_differs(run, models):
    change = changed(models, "function", "reference")
    refuse(
        run,
        r"args.lam is 0.95 in the checkpoint and 0.5 here, .*weights.reference is .*rewards.0.function is .*; "
        r"change it back, set ignore_changes: \[model, reward\], or start",
        **{**RUN, **change, "lam": 0.5, "model": tiny_causal_lm("llama", seed=5)},
    )


def test_other_rewards_go_on_where_that_is_asked_for(run, models):
    change = changed(models, "fewer")
    tiny_trainer(run, **RUN, **change, ignore_changes=["reward"]).train(resume_from_checkpoint=True)
    tiny_trainer(run, **{**RUN, "total_episodes": 30}, **change).train(resume_from_checkpoint=True)
    assert steps(run) == [1, 2, 3]
    # It allows nothing else.
    other = {**RUN, **changed(models, "reference", "function"), "ignore_changes": ["reward"]}
    refuse(run, r"run: weights.reference is [^,]*, set ignore_changes: \[model\],", **other)


def test_moved_folders_and_models_in_memory_are_the_same_models(run, models, tmp_path):
    moved = shutil.copytree(models, tmp_path / "moved")
    (moved / "rm").rename(moved / "renamed")
    change = {"ref_model": None, "reward_funcs": [count_even, str(moved / "renamed")]}
    settings = {**RUN, "reward_weights": [1.0, 0.5]}
    by_option = {**settings, "reference": str(moved / "reference"), "trainer_arguments": sources(moved, **change)}
    tiny_trainer(run, **by_option).train(resume_from_checkpoint=True)
    change = {
        "ref_model": AutoModelForCausalLM.from_pretrained(models / "reference"),
        "reward_funcs": [count_even, AutoModelForSequenceClassification.from_pretrained(models / "rm")],
    }
    settings["total_episodes"] = 30
    tiny_trainer(run, **settings, trainer_arguments=sources(models, **change)).train(resume_from_checkpoint=True)
    assert steps(run) == [1, 2, 3]


def test_each_rank_may_have_a_reward_function_of_its_own(tmp_path, monkeypatch):
    def of_rank(rank):
        return {"trainer_arguments": {"reward_funcs": partial(scaled, scale=2.0, device=f"cuda:{rank}")}}

    tiny_trainer(tmp_path, **{**RUN, "total_episodes": 10}, **of_rank(0)).train()
    refuse(tmp_path, r"rewards.0.function is", **of_rank(1))
    # As on rank 1, which does not compare: the main process has saved its own identity.
    trainer = tiny_trainer(tmp_path, **RUN, **of_rank(1))
    monkeypatch.setattr(type(trainer.accelerator), "is_main_process", False)
    trainer.checkpoints.load(tmp_path / "checkpoint-1")
    assert trainer.state.global_step == 1


def reward_adapter(folder, seed):
    """A folder of a reward model that is an adapter on the tiny Llama."""
    classifier = tiny_sequence_classifier("llama")
    classifier.load_state_dict(tiny_causal_lm("llama").state_dict(), strict=False)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS", modules_to_save=["score"])
    adapted = get_peft_model(classifier, config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.3, generator=generator)
    adapted.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def test_adapters_are_compared_by_what_is_not_trained(tmp_path):
    run, lora = tmp_path / "run", {"trainer_arguments": {"reward_funcs": [], "peft_config": LORA}}
    adapter = str(reward_adapter(tmp_path / "reward", seed=1))
    settings = {**RUN, "critic_layout": "adapter", "reward_adapter": adapter, **lora}
    tiny_trainer(run, **{**settings, "total_episodes": 10}).train()
    other = {**settings, "reward_adapter": str(reward_adapter(tmp_path / "other", seed=2))}
    refuse(run, r"run: rewards.0.model is .* with weights .* ignore_changes: \[reward\],", **other)
    other = {**settings, "model": tiny_causal_lm("llama", seed=5)}
    refuse(run, "run: weights.starting_policy is .* ignore_changes: \\[model\\],", **other)
    refuse(run, "reference is the policy with no adapter in the checkpoint and weights", **settings, reference="copy")
    (tmp_path / "reward").rename(tmp_path / "moved")
    tiny_trainer(run, **{**settings, "reward_adapter": str(tmp_path / "moved")}).train(resume_from_checkpoint=True)
    assert steps(run) == [1, 2]


def test_a_schedule_over_the_whole_run_refuses_another_length(tmp_path):
    run = tmp_path / "run"
    settings = {**RUN, "lr_scheduler_type": "cosine"}
    tiny_trainer(run, **settings).train()
    # Ten rows a step in batches of 4, 4 and 2: three optimizer steps in each step of ten prompts.
    message = "run: lr_scheduler_type.optimizer_steps is 6 in the checkpoint and {} here"
    refuse(run, message.format(9), **{**settings, "total_episodes": 30})
    fewer = {"trainer_arguments": {"train_dataset": prompts(10)}, "ignore_changes": ["data"]}
    refuse(run, message.format(3), **{**settings, **fewer, "total_episodes": None, "total_epochs": 1})
    same = {**settings, **fewer, "total_episodes": None, "total_epochs": 2}
    tiny_trainer(run, **same).train(resume_from_checkpoint=True)


def test_the_length_of_each_schedule_that_depends_on_it_is_compared():
    counts = StepCounts(10, 6, 4)
    lengths = [schedule_lengths(tiny_config("unused", lr_scheduler_type=n), counts) for n in ("cosine", "constant")]
    assert lengths == [{"optimizer_steps": 6, "critic_optimizer_steps": 4}, {}]


def test_a_schedule_that_the_user_passes_does_not_bind_the_length(tmp_path):
    def made(episodes):
        model = build_actor_critic(tiny_causal_lm("llama"), critic_layout="separate")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        given = {"optimizers": (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))}
        settings = {**RUN, "lr_scheduler_type": "cosine", "total_episodes": episodes}
        return tiny_trainer(tmp_path, **settings, model=model, trainer_arguments=given)

    made(10).train()
    made(20).train(resume_from_checkpoint=True)
    assert steps(tmp_path) == [1, 2]


def test_which_schedules_depend_on_the_length_of_the_run():
    def depends(name, **settings):
        return bool(schedule_lengths(tiny_config("unused", lr_scheduler_type=name, **settings), StepCounts(6, 6, 6)))

    free = {name for name in choices(options_of(PPOConfig)["lr_scheduler_type"]) if not depends(name)}
    assert free == {"constant", "constant_with_warmup", "inverse_sqrt"}
    assert depends("constant_with_warmup", warmup_steps=0.5)
    assert depends("constant_with_warmup", critic_lr_warmup_steps=0.5)
