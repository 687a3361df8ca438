"""LoRA on mixtures of experts, where PEFT rewrites the configuration and would adapt the experts' parameters."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from alpaca_ppo.adapters.adapter_set import POLICY, add_policy_adapter, from_peft_model, load_adapters
from alpaca_ppo.adapters.files import read_policy_adapter
from alpaca_ppo.checkpoint.export import save_merged
from alpaca_ppo.cli.configurations import estimate_memory as main
from alpaca_ppo.models import load_critic
from alpaca_ppo.rewards import AdapterClassifier
from tests.tiny_models import MIXTURES, tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import metric_lines, tiny_trainer

LAYOUTS = ("separate", "shared", "adapter", None)
KEPT = [("mixtral", "adapter"), ("qwen3_moe", "separate")]
"""What `make test` runs; the others are for `make proof`."""
IDS = torch.tensor([[5, 9, 11, 7]])


def lora(**settings):
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **settings})


def saved(folder, arch, dtype=torch.float32):
    tiny_causal_lm(arch, dtype=dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def trainer_in(folder, model, layout, *, peft_config=None, **overrides):
    kind = {"adv_estimator": "rloo", "num_return_sequences": 2} if layout is None else {"critic_layout": layout}
    given = {"model": model, "peft_config": peft_config}
    return tiny_trainer(folder, trainer_arguments=given, learning_rate=1e-2, **kind, **overrides)


@pytest.mark.parametrize(
    ("arch", "layout"),
    [
        pytest.param(arch, layout, marks=[] if (arch, layout) in KEPT else pytest.mark.proof)
        for arch in MIXTURES
        for layout in LAYOUTS
    ],
)
def test_a_run_on_a_mixture_is_exported_merged_started_from_and_resumed(arch, layout, tmp_path):
    base, run = saved(tmp_path / "base", arch), tmp_path / "run"
    trainer = trainer_in(run, base, layout, peft_config=lora(), save_steps=1)
    trainer.train()
    save_merged(tmp_path / "merged", trainer.actor_critic.policy, tiny_tokenizer())
    own = logits(trainer.actor_critic.policy.model)
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert (own - logits(loaded)).abs().max() > 1e-3
    assert_close(logits(PeftModel.from_pretrained(loaded, run / "final/policy")), own, atol=1e-6, rtol=1e-5)
    merged, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(report.values()), report
    assert_close(logits(merged), own, atol=1e-4, rtol=0)
    if layout is not None:
        critic, built = load_critic(str(run / "final/value")), trainer.actor_critic
        with built.critic_active():
            backbone = built.critic.backbone or built.policy.model.base_model
            values = built.critic.head(backbone(IDS).last_hidden_state[:, -1]).values
        loaded_values = critic.head(critic.backbone(IDS).last_hidden_state[:, -1]).values
        assert_close(loaded_values, values, atol=1e-5, rtol=1e-5)
    again = trainer_in(tmp_path / "again", str(run / "final/policy"), layout, kl_estimator="k3")
    assert_close(logits(again.actor_critic.policy.model), own, atol=1e-6, rtol=1e-5)
    assert again.step(again.prompt_batches(0))["objective/kl_sum_seq"] == pytest.approx(0.0, abs=1e-5)
    resumed = trainer_in(tmp_path / "part", base, layout, peft_config=lora())
    resumed.train(resume_from_checkpoint=str(run / "checkpoint-1"))
    assert metric_lines(tmp_path / "part") == metric_lines(run)[1:]


@pytest.mark.parametrize("arch", MIXTURES)
def test_what_reaches_into_the_experts_is_refused_before_training(arch, tmp_path):
    model, config = tiny_causal_lm(arch), lora(target_modules="all-linear")
    message = (
        r"target_modules \(--lora_target_modules\) is all-linear, .* parameters \['down_proj', .*'gate_up_proj'\] of "
        r".*; name linear layers .*'k_proj', 'o_proj', 'q_proj', 'v_proj'"
    )
    before, flags = logits(model), [p.requires_grad for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        add_policy_adapter(model, config)
    # Model and configuration are unchanged.
    assert config.target_modules == "all-linear" and config.target_parameters is None
    assert torch.equal(logits(model), before) and [p.requires_grad for p in model.parameters()] == flags
    assert_close(logits(add_policy_adapter(model, lora()).model), before)
    names = {"mixtral": ["w1", "w2", "w3"], "qwen3_moe": ["gate_proj", "up_proj", "down_proj"]}[arch]
    with pytest.raises(ValueError, match=r"is \[.*'k_proj', 'o_proj', 'q_proj', 'v_proj'\]"):
        add_policy_adapter(tiny_causal_lm(arch), lora(target_modules=names))


def test_a_saved_adapter_of_experts_is_refused_with_what_to_do(tmp_path):
    base = saved(tmp_path / "base", "mixtral")
    loaded = AutoModelForCausalLM.from_pretrained(base)
    peft = get_peft_model(loaded, lora(target_modules="all-linear"))
    message = r"has target_parameters \['down_proj', .*name linear layers in target_modules instead"
    with pytest.raises(ValueError, match=message):
        from_peft_model(peft)
    peft.save_pretrained(tmp_path / "sft")
    with pytest.raises(ValueError, match=rf"model_name_or_path .*sft {message}"):
        read_policy_adapter(str(tmp_path / "sft"))
    # As written by earlier versions of PEFT: with names of layers that are parameters now.
    path = tmp_path / "sft/adapter_config.json"
    names = {"target_parameters": None, "target_modules": ["q_proj", "w1", "w2", "w3"], "rank_pattern": {}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **names, "alpha_pattern": {}}))
    assert read_policy_adapter(str(tmp_path / "sft"))
    save_file({}, tmp_path / "sft/adapter_model.safetensors")
    with pytest.raises(ValueError, match=rf"model_name_or_path .*sft {message}"):
        load_adapters(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "sft"))


def test_a_reward_adapter_of_layers_scores_and_one_of_experts_is_refused(tmp_path):
    classifier = get_peft_model(tiny_sequence_classifier("mixtral"), lora(task_type="SEQ_CLS"))
    classifier.save_pretrained(tmp_path / "reward")
    adapters = add_policy_adapter(tiny_causal_lm("mixtral"), lora())
    model = AdapterClassifier(adapters, str(tmp_path / "reward"), pad_token_id=None)
    assert model(IDS, torch.ones_like(IDS)).logits.isfinite().all()
    path = tmp_path / "reward/adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "target_modules": ["q_proj", "w1", "w2", "w3"]}))
    adapters = add_policy_adapter(tiny_causal_lm("mixtral"), lora())
    with pytest.raises(ValueError, match=r"reward_adapter .*reward has target_parameters \['down_proj'"):
        AdapterClassifier(adapters, str(tmp_path / "reward"), pad_token_id=None)
    assert list(adapters.peft.peft_config) == [POLICY]


@pytest.mark.proof
@pytest.mark.parametrize("arch", MIXTURES)
def test_a_run_on_a_mixture_is_estimated(arch, tmp_path, capsys):
    base = saved(tmp_path / "base", arch)
    flags = ["--model_name_or_path", base, "--use_peft", "--critic_layout", "adapter", "--output_dir", str(tmp_path)]
    main([*flags, "--lora_target_modules", "q_proj", "v_proj", "--dtype", "bfloat16", "--json"])
    assert json.loads(capsys.readouterr().out)
