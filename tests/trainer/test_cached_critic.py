"""A critic on cached states: what the policy says of a response is computed once, whatever the critic's passes."""

import pytest
import torch
from peft import LoraConfig

from alpaca_ppo import PPOTrainer
from alpaca_ppo.functional.packing import PackedRows
from alpaca_ppo.generation.built_in_backends import SlotsBackend
from alpaca_ppo.models import ActorCritic, Policy, factory, load_critic
from alpaca_ppo.models.factory import build_actor_critic, make_actor_critic
from alpaca_ppo.models.state_reader import StateReader
from alpaca_ppo.ppo.rollouts import RolloutOptions
from alpaca_ppo.ppo.state_cache import StateCache
from tests.tiny_models import READ_BY_CRITICS, tiny_causal_lm, tiny_sequence_classifier
from tests.tiny_runs import metric_lines, tiny_config, tiny_trainer, with_advantages

CACHED = {"critic_layout": "cached", "critic_width": 64, "critic_depth": 1}


def run(folder, **settings):
    trainer = tiny_trainer(folder, **{**CACHED, "critic_epochs": 3, **settings})
    passes = []
    backbone = trainer.actor_critic.policy.model.base_model
    backbone.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    trainer.train()
    return {name: parameter.detach().clone() for name, parameter in trainer.actor_critic.named_parameters()}, passes


def test_the_run_is_one_that_computes_the_states_in_every_pass(tmp_path, monkeypatch):
    cached, passes = run(tmp_path / "cached")
    monkeypatch.setattr(StateCache, "states", lambda *_: None)
    anew, more_passes = run(tmp_path / "anew")
    assert sum(more_passes) == sum(passes) and len(more_passes) > len(passes)
    moved = [name for name in cached if name.startswith("critic.")]
    assert moved and {name.partition(".")[0] for name in cached} == {"critic", "policy"}
    for name, weights in cached.items():
        torch.testing.assert_close(weights, anew[name], rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(metric_lines(tmp_path / "cached"), metric_lines(tmp_path / "anew"), strict=True):
        assert ours["ppo/val/error"] == pytest.approx(theirs["ppo/val/error"], rel=1e-5)


def test_the_run_is_the_same_in_smaller_micro_batches(tmp_path):
    whole, _ = run(tmp_path / "whole")
    parts, _ = run(tmp_path / "parts", step_per_device_batch_size=1)
    for name, weights in whole.items():
        torch.testing.assert_close(weights, parts[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reference", ["copy", "copy_offloaded", "path"])
def test_every_reference_leaves_the_critic_the_same_states(reference, tmp_path):
    def trained(name, reference):
        lora = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}
        return run(tmp_path / name, reference=reference, trainer_arguments=lora)[0]

    if reference == "path":
        tiny_causal_lm("llama").save_pretrained(tmp_path / "base")
        reference = str(tmp_path / "base")
    adapter_off, other = trained("adapter_off", "adapter_off"), trained("other", reference)
    assert any(name.startswith("critic.") for name in other)
    for name, weights in adapter_off.items():
        torch.testing.assert_close(weights, other[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_kept_in_the_models_dtype_and_dropped_at_the_next_step(dtype, tmp_path):
    lora = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}
    trainer = tiny_trainer(tmp_path, dtype=dtype, trainer_arguments=lora, **CACHED)
    for step in range(2):
        trainer.state.global_step = step
        # A loop of one's own that does not call `rollout`.
        rollouts = trainer.collect_rollouts(
            trainer.prompt_batches(step), trainer.sampling_params, RolloutOptions(), trainer.step_record
        )
        kept = trainer.updater.cache.states(rollouts["state_keys"], torch.device("cpu"))
        assert kept.dtype == dtype and len(kept) == rollouts["response_mask"].sum()
        assert len(trainer.updater.cache._rows) == len(rollouts["responses"])


def test_it_reads_no_padding_and_a_row_as_if_it_were_alone():
    reader = StateReader(tiny_causal_lm("qwen2"), width=64, depth=2)
    linear = reader.blocks.layers[0].mlp.up_proj
    read = []
    linear.register_forward_hook(lambda module, inputs, output: read.append(output.shape[:-1]))
    counts = (2, 0, 9, 1)
    states = torch.randn(sum(counts), *reader.state_shape)
    together = reader(states, rows_of(counts))
    assert read == [(1, sum(counts))]
    alone = [reader(part, rows_of((len(part),))) for part in states.split(counts) if len(part)]
    torch.testing.assert_close(together, torch.cat(alone))
    # A dummy: gradients of zero for all weights.
    reader(states[:0], rows_of((0, 0))).sum().backward()
    assert not any(parameter.grad.any() for parameter in reader.parameters())


def rows_of(counts):
    """What the critic reads of rows with so many response tokens."""
    none = torch.zeros(0, dtype=torch.long)
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return PackedRows(torch.zeros(1, 1, dtype=torch.long), rows, none, none, counts=counts)


def test_it_never_trains_on_states_of_another_step_or_of_other_tokens(tmp_path):
    trainer = tiny_trainer(tmp_path, **CACHED)
    first = with_advantages(trainer, trainer.prompt_batches(0))
    trainer.state.global_step = 1
    rollouts = [first, with_advantages(trainer, trainer.prompt_batches(1))]
    with pytest.raises(ValueError, match="no states of these rollouts any more, because a later step was sampled"):
        trainer.step_with_rollouts(rollouts[0])
    mask = rollouts[1]["response_mask"].clone()
    mask[0, int(mask[0].nonzero()[-1])] = False
    with pytest.raises(
        ValueError, match=r"response_mask has \[.*\] tokens in rows of which the policy's states have \["
    ):
        trainer.step_with_rollouts({**rollouts[1], "response_mask": mask})
    with pytest.raises(ValueError, match="no state_keys, by which a cached critic"):
        trainer.step_with_rollouts({name: value for name, value in rollouts[1].items() if name != "state_keys"})


def test_more_passes_of_the_critic_are_no_passes_of_the_policy(tmp_path):
    counts = [len(run(tmp_path / str(epochs), critic_epochs=epochs)[1]) for epochs in (1, 6)]
    assert counts[0] == counts[1]


def test_by_default_it_reads_the_layers_at_half_and_three_quarters_of_the_depth():
    layers = [StateReader(tiny_causal_lm("qwen2", num_hidden_layers=count)).layers for count in (1, 2, 4, 30)]
    assert layers == [[1], [1], [2, 3], [15, 22]]


# Weights of the reader of the tiny model: the map 32 x 256 and its bias, three blocks with 4 x 256 x 256 in the
# attention, 3 x 256 x 1024 in the perceptron and two norms of 256, and a last norm.
READER = 32 * 256 + 256 + 3 * (4 * 256 * 256 + 3 * 256 * 1024 + 2 * 256) + 256


@pytest.mark.parametrize(("weights", "layout"), [(10 * READER - 1, "separate"), (10 * READER, "cached")])
def test_by_default_a_critic_is_cached_where_the_policys_layers_have_ten_times_its_weights(weights, layout, tmp_path):
    policy = tiny_causal_lm("llama")
    (stack,) = (module for module in policy.modules() if isinstance(module, torch.nn.ModuleList))
    present = sum(parameter.numel() for parameter in stack.parameters())
    stack[0].register_parameter("ballast", torch.nn.Parameter(torch.zeros(weights - present)))
    trainer = tiny_trainer(tmp_path, model=policy, reference="none", kl_coef=0.0)
    assert trainer.args.critic_layout == trainer.actor_critic.critic.layout == layout


@pytest.mark.parametrize(
    ("settings", "layout", "passes"),
    [
        ({}, "separate", 4),
        ({"critic_width": 64}, "cached", 8),
        ({"critic_depth": 1, "critic_epochs": 2}, "cached", 2),
        ({"critic_layers": [1], "critic_epochs": None}, "cached", 3),
        ({"critic_layout": "shared"}, "shared", 3),
        ({"critic_layout": "adapter", "critic_step_batch_size": 2, "critic_epochs": None}, "adapter", 3),
    ],
)
def test_sizes_of_a_cached_critic_ask_for_one_and_passes_follow_the_layout(settings, layout, passes, tmp_path):
    given = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])} if layout == "adapter" else {}
    settings = {"critic_epochs": "auto", "ppo_epochs": 3, **settings}
    trainer = tiny_trainer(tmp_path, trainer_arguments=given, **settings)
    assert trainer.args.critic_layout == trainer.actor_critic.critic.layout == layout
    assert trainer.args.num_critic_epochs == passes


@pytest.mark.parametrize("family", READ_BY_CRITICS)
def test_it_reads_every_family_whose_layers_return_a_state_for_each_token(family, tmp_path):
    args = tiny_config(tmp_path, **CACHED)
    model = make_actor_critic(tiny_causal_lm(family), None, [], None, args)
    tokens, mask = torch.tensor([[5, 6, 7], [0, 8, 9]]), torch.tensor([[1, 1, 1], [0, 1, 1]])
    responses, response_mask = torch.tensor([[10, 11], [12, 0]]), torch.tensor([[True, True], [True, False]])
    with torch.no_grad():
        values = model.eval()(tokens, mask, responses, response_mask, temperature=1.0, chunk_size=8).values
        alone = model(
            tokens[1:, 1:], mask[1:, 1:], responses[1:, :1], response_mask[1:, :1], temperature=1.0, chunk_size=8
        )
    assert values[response_mask].isfinite().all()
    torch.testing.assert_close(values[1:, :1], alone.values, rtol=1e-4, atol=1e-5)


class OfSlots(SlotsBackend):
    pass


class ChangesResponses(PPOTrainer):
    def _generate(self, prompts, sampling_params):
        samples = super()._generate(prompts, sampling_params)
        samples["responses"] = samples["responses"].where(~samples["response_mask"], 5)
        return samples


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({"old_policy": "rollout"}, [False, False, False]),
        # The first step compares the sampler with the trainer.
        ({"old_policy": "auto"}, [True, False, False]),
        ({"old_policy": "recompute"}, [True, True, True]),
        ({"old_policy": "rollout", "generation_backend": "generate"}, [True, True, True]),
        ({"old_policy": "rollout", "mismatch_action": "ignore", "trainer_class": ChangesResponses}, [True, True, True]),
        # A subclass of the slots may change responses too.
        ({"old_policy": "rollout", "generation_backend": OfSlots}, [True, True, True]),
    ],
)
def test_with_the_samplers_log_probs_come_its_states_and_no_pass(settings, passes, tmp_path, monkeypatch):
    sizes = {"total_episodes": 30, "reference": "none", "kl_coef": 0.0}
    is_own = not isinstance(settings.get("generation_backend", ""), str)
    backend = {"generation_backend": "slots"} if is_own else {}
    trainer = tiny_trainer(tmp_path, **{**CACHED, **sizes, **settings, **backend})
    if is_own:
        trainer.collector.backend.__class__ = settings["generation_backend"]
    made, rollout, states = [], trainer.rollout, Policy.states

    def counted(policy, rows):
        made[-1] = True
        return states(policy, rows)

    def collected(batches):
        made.append(False)
        with monkeypatch.context() as patch:
            patch.setattr(Policy, "states", counted)
            return rollout(batches)

    monkeypatch.setattr(trainer, "rollout", collected)
    trainer.train()
    assert made == passes


def test_a_run_with_the_samplers_states_is_one_with_those_of_a_pass(tmp_path, monkeypatch):
    settings = {"old_policy": "rollout", "num_return_sequences": 2, "total_episodes": 30}
    from_sampler, _ = run(tmp_path / "sampler", **settings)
    monkeypatch.setattr(ActorCritic, "layers_read", ())
    from_pass, _ = run(tmp_path / "pass", **settings)
    for name, weights in from_sampler.items():
        torch.testing.assert_close(weights, from_pass[name], rtol=1e-4, atol=1e-6)


def test_the_samplers_log_probs_are_the_old_ones_from_the_second_step_on(tmp_path):
    run(tmp_path, old_policy="auto", total_episodes=30)
    assert [line["mismatch/recomputed"] for line in metric_lines(tmp_path) if line["step"]][:3] == [1, 0, 0]


def test_a_family_with_several_states_for_a_token_gets_a_separate_critic_or_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(factory, "LAYERS_TO_READER", 0)
    for family, layout in (("gemma3n", "separate"), ("llama", "cached")):
        args = tiny_config(tmp_path)
        assert make_actor_critic(tiny_causal_lm(family), None, [], None, args).critic.layout == layout
    message = (
        "the critic is cached, but the layers of .* do not return a state of 32 numbers for each token; set critic_la"
    )
    for settings in (CACHED, {"critic_width": 64}):
        with pytest.raises(ValueError, match=message):
            make_actor_critic(tiny_causal_lm("gemma3n"), None, [], None, tiny_config(tmp_path, **settings))


@pytest.mark.parametrize("setting", [{"critic_width": 64}, {"critic_depth": 1}, {"critic_layers": [1]}])
def test_a_cached_critic_that_should_start_from_a_model_is_refused_by_name(setting, tmp_path):
    reward_model = tiny_sequence_classifier("llama")
    (name,) = setting
    for given, settings in (([reward_model], {"init_value_with_reward": True}), ([], {})):
        value_model = None if given else reward_model
        with pytest.raises(
            ValueError, match=f"{name} is .*, which asks for a cached critic, but the critic starts from"
        ):
            make_actor_critic(
                tiny_causal_lm("llama"), value_model, given, None, tiny_config(tmp_path, **setting, **settings)
            )


@pytest.mark.parametrize("layers", [[0], [1, 9]])
def test_layers_that_the_policy_does_not_have_are_named(layers, tmp_path):
    with pytest.raises(ValueError, match=r"critic_layers is \[.*\], but LlamaForCausalLM has the layers 1 to \d"):
        tiny_trainer(tmp_path, **CACHED, critic_layers=layers)


def test_an_actor_critic_with_other_sizes_than_the_options_is_refused(tmp_path):
    policy = tiny_causal_lm("llama")
    model = build_actor_critic(policy, critic_layout="cached", reader=lambda model: StateReader(model, width=128))
    with pytest.raises(ValueError, match=r"critic_width and critic_depth \[.*128, 3\], the options are \[.*64, 1\]"):
        tiny_trainer(tmp_path, model=model, **CACHED)


def test_a_saved_critic_is_trained_beside_its_policy_without_another_copy_of_that(tmp_path):
    tiny_trainer(tmp_path / "first", **CACHED).save_model(str(tmp_path / "saved"))
    critic = load_critic(str(tmp_path / "saved/value"))
    model = ActorCritic(Policy(tiny_causal_lm("llama")), critic)
    trainer = tiny_trainer(tmp_path / "second", model=model, **CACHED)
    parts = {name.split(".")[1] for name, _ in trainer.actor_critic.critic.named_parameters(prefix="critic")}
    assert parts == {"head", "reader"}


@pytest.mark.parametrize("family", ["gpt2", "opt", "gemma3", "mixtral", "qwen2"])
def test_what_it_reads_are_the_outputs_of_the_layers(family):
    model = tiny_causal_lm(family)
    actor_critic = build_actor_critic(model, critic_layout="cached", reader=lambda m: StateReader(m, layers=[1]))
    queries, responses = torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor([[9, 10], [11, 0]])
    mask = torch.tensor([[True, True], [True, False]])
    with torch.no_grad():
        outputs = actor_critic(queries, torch.ones_like(queries), responses, mask, temperature=1.0, chunk_size=8)
        hidden = model(torch.cat([queries, responses], 1), output_hidden_states=True).hidden_states[1]
    torch.testing.assert_close(outputs.policy_states[:, 0], hidden[[0, 0, 1], [2, 3, 2]], rtol=1e-5, atol=1e-5)
