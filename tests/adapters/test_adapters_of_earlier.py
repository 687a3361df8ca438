"""Models in memory that already have adapters: the user's own, or those of an earlier trainer."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from alpaca_ppo.adapters.adapter_set import POLICY, REFERENCE, VALUE, add_policy_adapter, from_peft_model
from alpaca_ppo.models import build_actor_critic
from tests.tiny_models import tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import tiny_trainer


def lora(**settings):
    return LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings})


def supervised():
    peft = get_peft_model(tiny_causal_lm("llama"), lora())
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(3))
    return peft


def trainer_of(model, folder, **overrides):
    arguments = {"peft_config": overrides.pop("peft_config", None), "reward_funcs": overrides.pop("reward_funcs", [])}
    settings = {"critic_layout": "adapter", "kl_estimator": "k3", "learning_rate": 1e-2, **overrides}
    return tiny_trainer(folder, model=model, trainer_arguments=arguments, **settings)


def test_a_second_trainer_of_the_same_model_makes_its_own_adapters_anew(tmp_path):
    get_peft_model(tiny_sequence_classifier("llama"), lora(task_type="SEQ_CLS")).save_pretrained(tmp_path / "reward")
    tiny_tokenizer().save_pretrained(tmp_path / "reward")
    peft, reward = supervised(), str(tmp_path / "reward")
    first = trainer_of(peft, tmp_path / "1", reward_adapter=reward)
    for step in range(2):
        first.step(first.prompt_batches(step))
    own = first.actor_critic.policy.adapters
    trained = [parameter.clone() for parameter in own.parameters_of(POLICY)]
    second = trainer_of(peft, tmp_path / "2", reward_adapter=reward)
    adapters = second.actor_critic.policy.adapters
    assert sorted(adapters.peft.peft_config) == ["default", "reference", "reward", "value"]
    for name in (POLICY, REFERENCE, VALUE):
        assert all(torch.equal(a, b) for a, b in zip(adapters.parameters_of(name), trained, strict=True)), name
    assert second.step(second.prompt_batches(0))["objective/kl_sum_seq"] == 0.0
    assert second.step(second.prompt_batches(1))["objective/kl_sum_seq"] > 0.0


@pytest.mark.parametrize("name", ["value", "reward", "reference"])
def test_an_adapter_of_the_user_s_own_is_not_replaced(name):
    peft = supervised()
    # Also if an earlier trainer had an adapter of this name, and in a copy of the model.
    from_peft_model(peft)
    if name in peft.peft_config:
        peft.delete_adapter(name)
    peft.add_adapter(name, lora())
    for model in (peft, copy.deepcopy(peft)):
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        with pytest.raises(ValueError, match=rf"has an adapter '{name}', .*delete_adapter\('{name}'\)"):
            from_peft_model(model)
        assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    peft.delete_adapter(name)
    assert from_peft_model(peft).starting_point == REFERENCE


def test_a_copy_of_a_trained_model_serves_a_second_trainer_too():
    adapters = from_peft_model(supervised())
    build_actor_critic(adapters, critic_layout="adapter")
    again = from_peft_model(copy.deepcopy(adapters.peft))
    assert list(again.peft.peft_config) == [POLICY, REFERENCE]


def test_a_base_with_adapters_in_its_layers_is_no_base(tmp_path):
    model = tiny_causal_lm("llama")
    trainer = trainer_of(model, tmp_path, peft_config=lora(), reward_funcs=lambda completions, **columns: [0.0] * 10)
    message = r"LlamaForCausalLM already has adapters \['default', 'value'\] in its layers.* \(base = peft.unload\(\)\)"
    with pytest.raises(ValueError, match=message):
        add_policy_adapter(model, lora())
    base = trainer.actor_critic.policy.adapters.peft.unload()
    assert add_policy_adapter(base, lora()).starting_point is None


def test_an_adapter_that_does_not_act_is_refused_with_what_makes_it_act():
    peft = supervised()
    peft.add_adapter("other", lora())
    for active in ("other", ["default", "other"]):
        peft.base_model.set_adapter(active)
        with pytest.raises(ValueError, match=r"must be the only active one, .*model.set_adapter\('default'\)"):
            from_peft_model(peft)
    peft.set_adapter(POLICY)
    peft.base_model.disable_adapter_layers()
    with pytest.raises(ValueError, match=r"active ones are \[\]: call model.base_model.enable_adapter_layers\(\)"):
        from_peft_model(peft)
    peft.base_model.enable_adapter_layers()
    assert from_peft_model(peft).starting_point == REFERENCE


REFUSED = [{"target_modules": ["lm_head", "q_proj"]}, {"modules_to_save": ["embed_tokens"]}]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("settings", [*REFUSED, {"target_modules": ["q_proj", "nosuch"]}])
def test_a_refused_adapter_leaves_the_base_to_the_next(settings, tied):
    model = tiny_causal_lm("llama", dtype=torch.bfloat16, tie_word_embeddings=tied)
    ids = torch.tensor([[5, 9, 11]])
    before, names = model(ids).logits, [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match="language-model head|would train in torch.bfloat16|has no layers"):
        add_policy_adapter(model, lora(**settings))
    assert [name for name, _ in model.named_parameters()] == names and torch.equal(model(ids).logits, before)
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(add_policy_adapter(model, lora()).model(ids).logits, before)
