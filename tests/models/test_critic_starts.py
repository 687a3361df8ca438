"""A critic that a run saved (final/value) is the start of another: it has the same values, or is refused."""

import shutil
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig

from alpaca_ppo.checkpoint.compatibility import run_identity
from alpaca_ppo.checkpoint.export import save_final
from alpaca_ppo.checkpoint.model_card import TrainedRun
from alpaca_ppo.models import load_critic
from alpaca_ppo.models.factory import make_actor_critic
from alpaca_ppo.tracking.results import WeightsStep
from tests.tiny_models import tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import tiny_config

ROWS = (
    torch.tensor([[3, 4, 5], [6, 7, 8]]),
    torch.ones(2, 3, dtype=torch.long),
    torch.tensor([[9, 10, 11], [12, 13, 0]]),
    torch.tensor([[True, True, True], [True, True, False]]),
)
KINDS = {"scalar": {}, "quantile": {"num_atoms": 4}}


def lora(**settings):
    return LoraConfig(**{"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], **settings})


def make(folder, layout, *, adapters, model=None, value_model=None, peft_config=None, critic="scalar", **settings):
    """Policy and critic as a run makes them; `adapters` are new ones, unless `model` names saved ones."""
    args = tiny_config(folder, critic_layout=layout, critic=critic, **{**KINDS[critic], **settings})
    if adapters and model is None:
        peft_config = peft_config or lora()
    base = model or str(folder / "base")
    return make_actor_critic(base, value_model, [], peft_config, args), args


@torch.no_grad()
def values(actor_critic):
    outputs = actor_critic.eval()(*ROWS, temperature=1.0, chunk_size=8, with_policy=False)
    return outputs.values


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What a run with trained weights leaves (final/), and its values, by layout, adapters and kind of critic."""
    folder, made = tmp_path_factory.mktemp("starts"), {}
    tiny_causal_lm("llama").save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")

    def save(layout, adapters, critic):
        if (layout, adapters, critic) not in made:
            trained, _ = make(folder, layout, adapters=adapters, critic=critic)
            generator = torch.Generator().manual_seed(3)
            for parameter in trained.parameters():
                if parameter.requires_grad:
                    parameter.data += torch.empty_like(parameter).normal_(0, 0.1, generator=generator)
            final = folder / f"{layout}-{adapters}-{critic}"
            save_final(final, trained, tiny_tokenizer(), TrainedRun(folder, WeightsStep(2, 2), {}, {}))
            made[layout, adapters, critic] = final, values(trained)
        return made[layout, adapters, critic]

    return folder, save


@pytest.mark.parametrize("critic", KINDS)
@pytest.mark.parametrize(
    ("layout", "adapters"),
    [
        *[("separate", False), ("shared", False), ("cached", False)],
        *[("separate", True), ("shared", True), ("cached", True), ("adapter", True)],
    ],
)
def test_a_critic_starts_with_the_values_that_it_was_saved_with(layout, adapters, critic, saved):
    folder, save = saved
    final, before = save(layout, adapters, critic)
    # Critics that read the policy need the one that they were trained with, the others only its base.
    reads_policy = layout in ("shared", "cached")
    model = str(final / "policy") if reads_policy else None
    again, args = make(
        folder, layout, adapters=adapters, model=model, value_model=str(final / "value"), critic=critic, seed=7
    )
    assert before.abs().max() > 0.01
    torch.testing.assert_close(values(again), before, rtol=1e-5, atol=1e-6)
    untrained = make(folder, layout, adapters=adapters, critic=critic)[0]
    assert (values(untrained) - before).abs().max() > 0.01
    assert all(parameter.requires_grad for parameter in again.critic_parameters())
    fresh = {name: parameter.requires_grad for name, parameter in untrained.named_parameters()}
    if not reads_policy or not adapters:
        assert {name: p.requires_grad for name, p in again.named_parameters()} == fresh


@pytest.mark.parametrize(("layout", "adapters"), [("separate", False), ("cached", False), ("cached", True)])
def test_a_critic_that_starts_from_a_saved_one_has_its_layout(layout, adapters, saved):
    folder, save = saved
    final, before = save(layout, adapters, "scalar")
    model = str(final / "policy") if layout == "cached" else None
    again, _ = make(folder, "auto", adapters=adapters, model=model, value_model=str(final / "value"))
    assert again.critic.layout == layout
    torch.testing.assert_close(values(again), before, rtol=1e-5, atol=1e-6)


def test_a_critic_that_starts_from_a_model_has_a_backbone_of_its_own(saved, tmp_path):
    folder, _ = saved
    tiny_sequence_classifier("llama").save_pretrained(tmp_path)
    assert make(folder, "auto", adapters=False, value_model=str(tmp_path))[0].critic.layout == "separate"
    assert make(folder, "auto", adapters=False, adv_estimator="reinforce_plus_plus")[0].critic is None
    given, args = make(folder, "cached", adapters=False)
    assert make_actor_critic(given, None, [], None, replace(args, critic_layout="auto")) is given


def test_an_adapter_of_the_critic_keeps_a_rank_and_layers_of_its_own(saved, tmp_path):
    folder, save = saved
    final, before = save("adapter", True, "scalar")
    value = str(final / "value")
    other = lora(r=3, lora_alpha=5, target_modules=["v_proj"])
    again, args = make(folder, "adapter", adapters=True, peft_config=other, value_model=value)
    torch.testing.assert_close(values(again), before, rtol=1e-5, atol=1e-6)
    # A resumed run must bring the same adapter: its scale is not among the weights.
    without = make(folder, "adapter", adapters=True, peft_config=other)[0]
    prompts = type("Prompts", (list,), {"fingerprint": ""})()
    given = {"start": {}, "optimizer_steps": None}
    identities = [run_identity(args, prompts, tiny_tokenizer(), built, **given) for built in (again, without)]
    described = [identity["peft_config"]["value"] for identity in identities]
    assert "'r': 2, 'lora_alpha': 6" in described[0] and "'r': 3, 'lora_alpha': 5" in described[1]


@pytest.mark.parametrize(
    ("source", "to", "message"),
    [
        # Of (layout, adapters, kind of critic) each.
        (("separate", False, "scalar"), ("adapter", True, "scalar"), "is not the final/value of a run .* and adapters"),
        (("adapter", True, "scalar"), ("shared", False, "scalar"), "is not the final/value of a run .* no adapters"),
        (("adapter", True, "scalar"), ("separate", False, "scalar"), "is an adapter; set critic_layout: adapter"),
        (("separate", False, "scalar"), ("shared", False, "scalar"), "reads another policy"),
        (("shared", False, "scalar"), ("shared", False, "quantile"), "value_model has the head .*'kind': 'scalar'"),
        (("shared", False, "quantile"), ("shared", False, "scalar"), "value_model has the head .*'kind': 'quantile'"),
        (("shared", True, "scalar"), ("shared", True, "scalar"), r"another policy \(.*lora_A.* differs\)"),
        (("shared", False, "scalar"), ("cached", False, "scalar"), "is not the final/value of a run"),
        (("cached", False, "scalar"), ("shared", False, "scalar"), "is not the final/value of a run"),
        (("cached", False, "scalar"), ("separate", False, "scalar"), "is a cached critic; set critic_layout: cached"),
        (("cached", False, "scalar"), ("cached", False, "scalar"), "reads another policy"),
        (("adapter", True, "scalar"), ("adapter", True, "quantile"), "value_model has the head .*'kind': 'scalar'"),
        (("adapter", True, "quantile"), ("adapter", True, "scalar"), "value_model has the head .*'kind': 'quantile'"),
    ],
)
def test_a_critic_that_does_not_fit_is_refused(source, to, message, saved):
    folder, save = saved
    final, _ = save(*source)
    layout, adapters, critic = to
    model = str(final / "policy") if source[0] == to[0] == "shared" and source[2] != to[2] else None
    with pytest.raises(ValueError, match=message):
        make(folder, layout, adapters=adapters, model=model, critic=critic, value_model=str(final / "value"))


def test_what_a_folder_or_a_policy_lacks_is_named(saved, tmp_path):
    folder, save = saved
    with pytest.raises(ValueError, match="LlamaForSequenceClassification' is not the final/value of a run"):
        make(folder, "adapter", adapters=True, value_model=tiny_sequence_classifier("llama"))
    # Equal weights with another scale are other states.
    final, _ = save("shared", True, "scalar")
    shutil.copytree(final / "value", tmp_path / "scaled")
    config = (tmp_path / "scaled" / "adapter_config.json").read_text()
    (tmp_path / "scaled" / "adapter_config.json").write_text(config.replace('"lora_alpha": 6', '"lora_alpha": 7'))
    with pytest.raises(ValueError, match="the adapter's configuration differs"):
        make(folder, "shared", adapters=True, model=str(final / "policy"), value_model=str(tmp_path / "scaled"))


def test_an_adapter_is_read_from_safetensors_only(saved, tmp_path):
    _, save = saved
    shutil.copytree(save("adapter", True, "scalar")[0] / "value", tmp_path / "value")
    path = tmp_path / "value" / "adapter_model.safetensors"
    path.rename(path.with_suffix(".bin"))
    with pytest.raises(ValueError, match="value_model .*/value has no adapter_model.safetensors, the only format"):
        load_critic(str(tmp_path / "value"))


def test_an_adapter_of_another_base_is_warned_of(saved, tmp_path):
    folder, save = saved
    value = str(save("adapter", True, "scalar")[0] / "value")
    shutil.copytree(folder / "base", tmp_path / "base")
    with pytest.warns(UserWarning, match="was trained on .*, but the base here is .*"):
        make(folder, "adapter", adapters=True, peft_config=lora(), model=str(tmp_path / "base"), value_model=value)
