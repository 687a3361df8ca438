"""Training with LoRA: one base for all roles, what is saved, and how much memory it takes."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from alpaca_ppo.adapters.checks import UnreachedAdapters
from alpaca_ppo.checkpoint.export import save_merged
from alpaca_ppo.estimate_memory.fake_models import LiveBytes
from alpaca_ppo.models import build_actor_critic, load_causal_lm, load_critic
from alpaca_ppo.models.factory import make_actor_critic
from alpaca_ppo.rewards import RewardScorer
from alpaca_ppo.trainer.setup import add_reward_adapter
from tests.tiny_models import tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import count_even, metric_lines, tiny_config, tiny_trainer, weights

LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
LAYOUTS = ("separate", "shared", "adapter")


def lora_trainer(folder, *, peft_config=LORA, arguments=None, **overrides):
    given = {"peft_config": peft_config, **(arguments or {})}
    return tiny_trainer(folder, trainer_arguments=given, **overrides)


def storages(*modules):
    return {p.untyped_storage().data_ptr(): p.numel() for module in modules for p in module.parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reference_is_the_base_without_a_second_copy_of_it(layout, tmp_path):
    # k3 is never negative, unlike k1, so a positive sum proves a difference.
    trainer = lora_trainer(tmp_path, critic_layout=layout, kl_estimator="k3")
    base = sum(p.numel() for p in tiny_causal_lm("llama").parameters())
    collector = trainer.collector
    everything = storages(trainer.actor_critic, collector.reference.policy)
    adapters = sum(p.numel() for p in trainer.actor_critic.parameters() if p.requires_grad)
    assert sum(everything.values()) == base + adapters
    required = [p.requires_grad for p in trainer.actor_critic.parameters()]
    first = trainer.step(trainer.prompt_batches(0))
    assert first["objective/kl_sum_seq"] == 0.0 and first["ppo/policy/first_ratio_error_max"] < 1e-5
    assert trainer.step(trainer.prompt_batches(1))["objective/kl_sum_seq"] > 0.0
    assert [p.requires_grad for p in trainer.actor_critic.parameters()] == required


def test_layers_that_no_pass_goes_through_are_named_once(tmp_path, capsys):
    model = tiny_causal_lm("llama")
    model.model.vision = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
    names = ["q_proj", "vision.0", "vision.1"]
    arguments = {"model": model, "processing_class": tiny_tokenizer()}
    trainer = lora_trainer(
        tmp_path, peft_config=LoraConfig(target_modules=names), arguments=arguments, total_episodes=20
    )
    trainer.train()
    said = "warning: 2 of 4 layers with an adapter took no part in this step (model.vision.*), so it"
    assert capsys.readouterr().out.count(said) == 1
    assert not any(layer._forward_hooks for layer in model.modules())
    # A run that is resumed within the end of a step.
    watch = UnreachedAdapters(model, print)
    watch.on_step_end(trainer.args, SimpleNamespace(global_step=1), None)
    assert "took no part" not in capsys.readouterr().out
    lora_trainer(tmp_path / "all").train()
    assert "took no part" not in capsys.readouterr().out


@pytest.mark.parametrize(("layout", "dtype"), [("shared", "float32"), ("adapter", "bfloat16")])
def test_the_base_is_not_held_twice_for_a_moment_either(layout, dtype, tmp_path, monkeypatch):
    # Otherwise transformers loads in other threads, which `LiveBytes` does not see.
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 2048}
    tiny_causal_lm("llama", dtype=getattr(torch, dtype), **sizes).save_pretrained(tmp_path / "base")
    arguments = {"model": str(tmp_path / "base"), "args": tiny_config(tmp_path, critic_layout=layout, dtype=dtype)}
    with LiveBytes() as live:
        trainer = lora_trainer(tmp_path, arguments=arguments)
    own = trainer.actor_critic
    base = sum(p.nbytes for p in own.parameters() if not p.requires_grad)
    adapters = sum(p.nbytes for p in own.parameters() if p.requires_grad)
    assert base > 5 * adapters > 0
    assert base < live.peak < 1.3 * base, (live.peak / base, adapters / base)
    assert live.live == pytest.approx(base + adapters, rel=0.01)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_policys_adapter_stands_still_while_the_critic_warms_up(layout, tmp_path):
    trainer = lora_trainer(tmp_path, critic_layout=layout, critic_pretraining_steps=1, critic_learning_rate=1e-2)
    before = weights(trainer)
    trainer.step(trainer.prompt_batches(0))
    moved = {name for name, tensor in weights(trainer).items() if not torch.equal(tensor, before[name])}
    critic = {id(p) for p in trainer.actor_critic.critic_parameters()}
    assert moved == {name for name, p in trainer.actor_critic.named_parameters() if id(p) in critic}


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
def test_micro_batches_and_recomputed_activations_give_the_same_update(layout, tmp_path):
    outcomes = []
    for number, overrides in enumerate(({}, {"step_per_device_batch_size": 1}, {"gradient_checkpointing": True})):
        model = tiny_causal_lm("llama", dtype=torch.float64)
        trainer = lora_trainer(tmp_path / str(number), model=model, critic_layout=layout, **overrides)
        for step in range(2):
            trainer.step(trainer.prompt_batches(step))
        outcomes.append(weights(trainer))
    for other in outcomes[1:]:
        for name, tensor in outcomes[0].items():
            assert_close(other[name], tensor, rtol=0, atol=1e-9)


@pytest.mark.proof
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_recomputes_its_activations_already_trains_as_another(layout, reentrant, tmp_path):
    """Checkpointing was turned on by an earlier trainer; this run's own flag is off."""
    outcomes = []
    for checkpointing in (False, True):
        model = tiny_causal_lm("llama", dtype=torch.float64)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        trainer = lora_trainer(tmp_path / str(checkpointing), model=model, critic_layout=layout)
        for step in range(2):
            trainer.step(trainer.prompt_batches(step))
        outcomes.append(weights(trainer))
    for name, tensor in outcomes[0].items():
        assert_close(outcomes[1][name], tensor, rtol=0, atol=1e-9)


@pytest.mark.parametrize("layout", ["separate", "adapter"])
def test_the_graphs_of_critic_and_policy_are_never_alive_together(layout, tmp_path):
    trainer = lora_trainer(tmp_path, critic_layout=layout)
    built, alive, seen = trainer.actor_critic, [], []
    critic_states, policy_states = built._critic_states, built.policy.states

    def of_critic(critic, packed):
        states = critic_states(critic, packed)
        if torch.is_grad_enabled():
            alive.append(weakref.ref(states))
        return states

    def of_policy(packed):
        active = built.policy.adapters.peft.active_adapter
        if torch.is_grad_enabled() and active == "default":
            seen.append([reference() is not None for reference in alive])
        return policy_states(packed)

    built._critic_states, built.policy.states = of_critic, of_policy
    trainer.step(trainer.prompt_batches(0))
    assert len(seen) == len(alive) > 0 and not any(any(states) for states in seen)


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("by_model", [False, True])
def test_recomputing_saves_activations_of_every_backbone(layout, by_model, tmp_path):
    saved = {}
    for checkpointing in (False, True):
        model = tiny_causal_lm("llama")
        if checkpointing and by_model:
            model.gradient_checkpointing_enable()
        settings = {"critic_layout": layout, "gradient_checkpointing": checkpointing and not by_model}
        trainer = lora_trainer(tmp_path / str(checkpointing), model=model, **settings)
        sizes = []

        def pack(tensor, sizes=sizes):
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            trainer.step(trainer.prompt_batches(0))
        saved[checkpointing] = sum(sizes)
    assert saved[True] < 0.6 * saved[False], saved


@pytest.mark.parametrize("layout", LAYOUTS)
def test_final_folders_hold_adapters_that_load_on_the_base(layout, tmp_path):
    tiny_causal_lm("llama").save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    trainer = lora_trainer(tmp_path / "run", model=str(tmp_path / "base"), critic_layout=layout, learning_rate=1e-2)
    trainer.train()
    final, ids = tmp_path / "run" / "final", torch.tensor([[5, 9, 11, 7]])
    assert sorted(path.name for path in final.iterdir()) == ["policy", "step.json", "value"]
    save_merged(tmp_path / "merged", trainer.actor_critic.policy, tiny_tokenizer())
    names = {path.name for path in (final / "policy").iterdir()}
    assert "adapter_model.safetensors" in names and "model.safetensors" not in names
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    policy = PeftModel.from_pretrained(base, final / "policy").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    own = trainer.actor_critic.policy.model.eval()
    with torch.no_grad():
        assert_close(policy(ids).logits, own(ids).logits, atol=1e-6, rtol=1e-5)
        assert_close(merged(ids).logits, own(ids).logits, atol=1e-4, rtol=1e-4)
        if layout != "separate":
            critic = load_critic(str(final / "value")).eval()
            with trainer.actor_critic.critic_active():
                states = own.base_model(ids).last_hidden_state[:, -1]
            values = critic.head(critic.backbone(ids).last_hidden_state[:, -1]).values
            assert_close(values, trainer.actor_critic.critic.head(states).values, atol=1e-5, rtol=1e-5)


@pytest.mark.proof
def test_a_distributional_critic_that_is_an_adapter_loads_again(tmp_path):
    tiny_causal_lm("llama").save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    settings = {"critic_layout": "adapter", "critic": "iqn", "learning_rate": 1e-2}
    trainer = lora_trainer(tmp_path / "run", model=str(tmp_path / "base"), **settings)
    trainer.train()
    critic = load_critic(str(tmp_path / "run/final/value"))
    ids, own = torch.tensor([[5, 9, 11, 7]]), trainer.actor_critic
    with torch.no_grad(), own.critic_active():
        expected = own.critic.head(own.policy.model.base_model(ids).last_hidden_state[:, -1]).values
        assert_close(critic.head(critic.backbone.eval()(ids).last_hidden_state[:, -1]).values, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_hold_what_trains_and_a_resumed_run_is_exact(layout, tmp_path):
    lora_trainer(tmp_path / "whole", critic_layout=layout, save_steps=1).train()
    resumed = lora_trainer(tmp_path / "part", critic_layout=layout)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert metric_lines(tmp_path / "part") == metric_lines(tmp_path / "whole")[1:]
    size = (tmp_path / "whole/checkpoint-1/model.safetensors").stat().st_size
    trains = sum(p.numel() for p in resumed.actor_critic.parameters() if p.requires_grad)
    assert size < 4 * trains + 20_000


@pytest.mark.parametrize("reference", ["copy", "copy_offloaded", "adapter_off", "path"])
def test_every_kind_of_reference_gives_the_same_run(reference, tmp_path):
    model = tiny_causal_lm("llama")
    if reference == "path":
        model.save_pretrained(tmp_path / "model")
    choice = str(tmp_path / "model") if reference == "path" else reference
    lora_trainer(tmp_path / "one", model=model, reference=choice).train()
    lora_trainer(tmp_path / "auto").train()
    for one, other in zip(metric_lines(tmp_path / "one"), metric_lines(tmp_path / "auto"), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


def test_an_offloaded_reference_is_on_the_device_for_its_pass_only(tmp_path, monkeypatch):
    trainer = lora_trainer(tmp_path, reference="copy_offloaded")
    moves, policy = [], trainer.collector.reference.policy
    monkeypatch.setattr(policy, "to", lambda device: moves.append(str(device)))
    with trainer.collector.reference.on_device(torch.device("cuda:3")):
        assert moves == ["cuda:3"]
    assert moves == ["cuda:3", "cpu"]


def test_without_a_reference_there_is_no_kl(tmp_path):
    trainer = tiny_trainer(tmp_path, reference="none", kl_coef=0.0)
    assert trainer.collector.reference is None
    for step in range(2):
        stats = trainer.step(trainer.prompt_batches(step))
    assert stats["objective/kl_sum_seq"] == 0.0 and "objective/ref_entropies" not in stats


def test_half_precision_bases_train_adapters_and_heads_in_float32(tmp_path):
    tiny_causal_lm("llama").save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    args = tiny_config(tmp_path / "run", dtype="bfloat16", critic_layout="adapter")
    trainer = lora_trainer(tmp_path / "run", model=str(tmp_path / "base"), arguments={"args": args})
    kinds = {(p.dtype, p.requires_grad) for p in trainer.actor_critic.parameters()}
    assert kinds == {(torch.bfloat16, False), (torch.float32, True)}
    before = weights(trainer)
    trainer.step(trainer.prompt_batches(0))
    stats = trainer.step(trainer.prompt_batches(1))
    assert stats["ppo/policy/grad_norm"] > 0
    moved = {name for name, tensor in weights(trainer).items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name, p in trainer.actor_critic.named_parameters() if p.requires_grad}
    assert any(".value." in name for name in moved) and any(".default." in name for name in moved)
    state = trainer.updater.engine.optimizer.state.values()
    assert {entry["exp_avg"].dtype for entry in state} == {torch.float32}


@pytest.mark.proof
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"use_rslora": True}])
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_on_a_half_precision_base_too_every_adapter_starts_from_it(arch, settings, tmp_path):
    tiny_causal_lm(arch, dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    args = tiny_config(tmp_path / "run", dtype="bfloat16", critic_layout="adapter")
    given = {"model": str(tmp_path / "base"), "args": args}
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **settings)
    trainer = lora_trainer(tmp_path / "run", peft_config=lora, arguments=given)
    assert trainer.step(trainer.prompt_batches(0))["objective/kl_sum_seq"] == 0.0
    assert trainer.step(trainer.prompt_batches(1))["objective/kl_sum_seq"] != 0.0


def saved_reward_adapter(folder, model):
    """A classifier with an adapter on the base of `model`, which is saved in `folder`."""
    classifier = tiny_sequence_classifier("llama")
    classifier.base_model.load_state_dict(model.base_model.state_dict())
    peft = get_peft_model(classifier, LoraConfig(r=2, target_modules="all-linear", task_type="SEQ_CLS"))
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
    peft.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return peft


@pytest.mark.parametrize("padding_free", ["auto", False])
def test_a_reward_adapter_reads_rows_without_padding_though_its_base_has_been_sharded(padding_free, tmp_path):
    saved_reward_adapter(tmp_path, tiny_causal_lm("llama"))
    args = tiny_config(tmp_path, reward_adapter=str(tmp_path), padding_free=padding_free)
    actor_critic = make_actor_critic(tiny_causal_lm("llama"), None, [], LORA, args)
    scorer = RewardScorer([], [])
    add_reward_adapter(scorer, actor_critic, args, torch.device("cpu"))
    for parameter in actor_critic.parameters():
        parameter.data = torch.empty(0)
    (source,) = scorer.sources
    source.prepare(equal_passes=True)
    assert source._packs == bool(padding_free)


def test_the_reward_model_may_be_a_third_adapter(tmp_path):
    model = tiny_causal_lm("llama")
    peft = saved_reward_adapter(tmp_path / "reward", model)
    settings = {"critic_layout": "adapter", "learning_rate": 1e-2}
    alone = {"reward_funcs": []}
    reward = {"reward_adapter": str(tmp_path / "reward")}
    adapter = lora_trainer(tmp_path / "a", model=model, arguments=alone, **reward, **settings)
    merged = {"reward_funcs": peft.merge_and_unload(), "reward_processing_classes": tiny_tokenizer()}
    whole = lora_trainer(tmp_path / "b", arguments=merged, **settings)
    for step in range(2):
        one, other = (trainer.step(trainer.prompt_batches(step)) for trainer in (adapter, whole))
        assert one["objective/rewards"] == pytest.approx(other["objective/rewards"], abs=1e-4)
    assert adapter.collector.scorer.names == ["reward_adapter"] and one["objective/kl_sum_seq"] != 0
    weighted = lora_trainer(tmp_path / "c", reward_weights=[1.0, 0.5], **reward)
    assert weighted.collector.scorer.weights == [1.0, 0.5]


def in_memory_adapter():
    return get_peft_model(tiny_causal_lm("llama"), LORA)


@pytest.mark.parametrize(
    ("arguments", "overrides", "message"),
    [
        ({"peft_config": None}, {"reference": "adapter_off"}, "'adapter_off' but the policy has no adapter"),
        ({"ref_model": tiny_causal_lm("llama")}, {"reference": "copy"}, "ref_model is given and reference is 'copy'"),
        ({"ref_model": tiny_causal_lm("llama", vocab_size=70)}, {}, r"the reference's vocabulary is 70"),
        ({"model": in_memory_adapter()}, {}, "is an adapter; leave peft_config"),
        (
            {"model": tiny_causal_lm("llama", dtype=torch.bfloat16), "peft_config": None},
            {},
            "torch.bfloat16 weights cannot all be trained",
        ),
        ({}, {"load_in_4bit": True, "critic_layout": "separate"}, "load_in_4bit is True, but critic_layout 'separate'"),
        (
            {},
            {"load_in_4bit": True, "critic_layout": "adapter"},
            "load_in_4bit is given, but model is a LlamaForCausalLM",
        ),
        ({}, {"reward_adapter": "no/such"}, "reward_adapter is 'no/such', no adapter"),
        ({}, {"reward_adapter": "x", "reward_weights": [1.0]}, "reward_weights has 1 numbers; give 2"),
        ({}, {"reference": "none"}, "reference is 'none', but kl_coef is 0.05"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(arguments, overrides, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        lora_trainer(tmp_path, arguments=arguments, **overrides)


def test_an_actor_critic_brings_its_adapters(tmp_path):
    built = build_actor_critic(load_causal_lm(tiny_causal_lm("llama")), critic_layout="separate")
    with pytest.raises(ValueError, match="leave peft_config out"):
        lora_trainer(tmp_path, arguments={"model": built})


def test_an_adapter_is_trained_on_and_its_start_is_the_reference(tmp_path):
    tiny_causal_lm("llama").save_pretrained(tmp_path / "base")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32), LORA)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(2))
    model.save_pretrained(tmp_path / "sft")
    tiny_tokenizer().save_pretrained(tmp_path / "sft")
    ids, folder = torch.tensor([[5, 9, 11]]), str(tmp_path / "sft")
    expected = model.eval()(ids).logits
    for number, given in enumerate((folder, model)):
        arguments = {"model": given, "peft_config": None}
        trainer = lora_trainer(tmp_path / f"run{number}", arguments=arguments, kl_estimator="k3")
        with trainer.collector.reference.on_device(torch.device("cpu")) as reference:
            assert_close(reference.model.eval()(ids).logits, expected, atol=1e-5, rtol=1e-5)
        assert trainer.step(trainer.prompt_batches(0))["objective/kl_sum_seq"] == pytest.approx(0.0, abs=1e-5)
        assert trainer.step(trainer.prompt_batches(1))["objective/kl_sum_seq"] > 1e-4
    with pytest.raises(ValueError, match="is an adapter; leave peft_config"):
        lora_trainer(tmp_path / "two", arguments={"model": folder})
    for start in (folder, in_memory_adapter()):
        with pytest.raises(ValueError, match="is an adapter; set critic_layout: adapter, or merge"):
            lora_trainer(tmp_path / "critic", arguments={"value_model": start})


@pytest.mark.proof
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"modules_to_save": ["layers.1.mlp.up_proj"]}])
@pytest.mark.parametrize("reference", ["auto", "copy", "copy_offloaded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_that_starts_from_an_adapter_starts_at_a_kl_of_exactly_0(dtype, reference, settings, tmp_path):
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **settings)
    model = get_peft_model(tiny_causal_lm("llama", dtype=getattr(torch, dtype)), lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(2))
    arguments = {"model": model, "peft_config": None}
    if settings.get("modules_to_save") and dtype == "bfloat16":
        with pytest.raises(ValueError, match="would train in torch.bfloat16"):
            lora_trainer(tmp_path, arguments=arguments)
        return
    trainer = lora_trainer(tmp_path, arguments=arguments, reference=reference, critic_layout="adapter")
    before = [p.requires_grad for p in trainer.actor_critic.parameters()]
    first = trainer.step(trainer.prompt_batches(0))
    assert first["objective/kl_sum_seq"] == 0.0
    frozen = {n: p.clone() for n, p in trainer.collector.reference.policy.named_parameters() if not p.requires_grad}
    assert trainer.step(trainer.prompt_batches(1))["objective/kl_sum_seq"] != 0.0
    assert [p.requires_grad for p in trainer.actor_critic.parameters()] == before
    after = dict(trainer.collector.reference.policy.named_parameters())
    assert all(torch.equal(after[name], tensor) for name, tensor in frozen.items())


@pytest.mark.parametrize("in_memory", [False, True])
def test_the_reference_may_be_another_adapter(in_memory, tmp_path):
    tiny_causal_lm("llama").save_pretrained(tmp_path / "base")
    other = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LORA)
    for parameter in other.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(2))
    other.save_pretrained(tmp_path / "other")
    given = other if in_memory else str(tmp_path / "other")
    trainer = lora_trainer(tmp_path / "run", arguments={"ref_model": given})
    ids = torch.tensor([[5, 9, 11]])
    with trainer.collector.reference.on_device(torch.device("cpu")) as reference, torch.no_grad():
        assert_close(reference.model.eval()(ids).logits, other.eval()(ids).logits, atol=1e-5, rtol=1e-5)
        assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert trainer.step(trainer.prompt_batches(0))["objective/kl_sum_seq"] != 0.0


def test_a_resumed_run_needs_the_same_adapter(tmp_path):
    lora_trainer(tmp_path / "run", save_steps=1, critic_layout="adapter").train()
    scaled = LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
    other = lora_trainer(tmp_path / "a", peft_config=scaled, critic_layout="adapter")
    with pytest.raises(ValueError, match="peft_config.*lora_alpha"):
        other.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))


@pytest.mark.proof
def test_a_critics_adapter_warms_up_with_recomputed_activations(tmp_path):
    after = []
    for number, checkpointing in enumerate((False, True)):
        settings = {"critic_layout": "adapter", "critic_pretraining_steps": 1, "gradient_checkpointing": checkpointing}
        model = tiny_causal_lm("llama", dtype=torch.float64)
        trainer = lora_trainer(tmp_path / str(number), model=model, **settings)
        for step in range(2):
            trainer.step(trainer.prompt_batches(step))
        after.append(weights(trainer))
    for name, tensor in after[0].items():
        assert_close(after[1][name], tensor, rtol=0, atol=1e-9)


def test_an_accelerator_of_the_users_own_unwraps_to_the_same_base(tmp_path):
    trainer = lora_trainer(tmp_path, arguments={"accelerator": Accelerator(cpu=True), "reward_funcs": count_even})
    assert trainer.actor_critic.policy.adapters.model is trainer.actor_critic.policy.model
