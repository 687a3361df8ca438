"""Several roles on one base: each computes the numbers it would compute on a base of its own."""

import copy
import json

import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import KasaConfig
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from alpaca_ppo.adapters.adapter_set import POLICY, REFERENCE, VALUE, add_policy_adapter, from_peft_model, load_adapters
from alpaca_ppo.models import Policy, build_actor_critic, load_causal_lm, loading
from alpaca_ppo.models.reference import copy_without_adapters
from alpaca_ppo.rewards import AdapterClassifier
from tests.tiny_models import ARCHITECTURES, EOS, PAD, tiny_causal_lm, tiny_sequence_classifier

QUERIES = torch.tensor([[0, 5, 9], [6, 7, 8]])
QUERY_MASK = torch.tensor([[0, 1, 1], [1, 1, 1]])
RESPONSES = torch.tensor([[10, 11, 2], [12, 2, 0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])
BATCH = (QUERIES, QUERY_MASK, RESPONSES, MASK)
HOW = {"temperature": 1.0, "chunk_size": 4}


def lora(**settings):
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **settings})


def stirred(adapters, *names, seed=0):
    """Fills adapters with random numbers, because PEFT initializes their product to zero."""
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        for parameter in adapters.parameters_of(name):
            parameter.data.normal_(0.0, 0.3, generator=generator)
    return adapters


def flags(module):
    return [parameter.requires_grad for parameter in module.parameters()]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_switched_off_the_model_is_the_base_and_on_again_the_policy(arch):
    base = load_causal_lm(tiny_causal_lm(arch))
    alone = Policy(base)(*BATCH, **HOW).logprobs
    adapters = stirred(add_policy_adapter(base, lora()), POLICY)
    policy, before = Policy(adapters.model, adapters), flags(adapters.peft)
    own = policy(*BATCH, **HOW).logprobs
    assert not torch.allclose(own, alone, atol=1e-3)
    with adapters.active(None):
        assert torch.equal(policy(*BATCH, **HOW).logprobs, alone)
        assert flags(adapters.peft) == before
    assert torch.equal(policy(*BATCH, **HOW).logprobs, own)
    assert flags(adapters.peft) == before and any(before)


@pytest.mark.parametrize(
    "settings", [{}, {"use_dora": True}, {"use_rslora": True}, {"modules_to_save": ["embed_tokens"]}]
)
def test_actor_critic_and_reference_on_one_base_are_those_on_their_own(settings):
    base = tiny_causal_lm("llama", tie_word_embeddings=False)
    plain = copy.deepcopy(base)
    adapters = add_policy_adapter(base, lora(**settings))
    built = build_actor_critic(adapters, critic_layout="adapter")
    stirred(adapters, POLICY, VALUE)
    built.critic.head.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    together = built(*BATCH, **HOW)
    for name, part in ((POLICY, "logprobs"), (VALUE, "values")):
        own = get_peft_model(copy.deepcopy(plain), lora(**settings))
        mine, theirs = adapters.parameters_of(name), from_peft_model(own).parameters_of(POLICY)
        for target, source in zip(theirs, mine, strict=True):
            target.data.copy_(source)
        alone = build_actor_critic(own.get_base_model(), critic_layout="shared")
        alone.critic.head.load_state_dict(built.critic.head.state_dict())
        assert_close(getattr(together, part), getattr(alone(*BATCH, **HOW), part), atol=1e-6, rtol=1e-6)
    with adapters.active(None):
        assert_close(Policy(adapters.model)(*BATCH, **HOW), Policy(plain)(*BATCH, **HOW), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_a_reward_adapter_scores_as_the_classifier_that_it_was_trained_in(arch, tmp_path):
    classifier = get_peft_model(tiny_sequence_classifier(arch), lora(task_type="SEQ_CLS"))
    for parameter in classifier.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(3))
    classifier.eval().save_pretrained(tmp_path)
    base = tiny_causal_lm(arch)
    base.base_model.load_state_dict(tiny_sequence_classifier(arch).base_model.state_dict())
    adapters = add_policy_adapter(base, lora())
    model = AdapterClassifier(adapters, str(tmp_path), pad_token_id=PAD)
    ids, mask = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    expected = [classifier(input_ids=row[keep.bool()].unsqueeze(0)).logits for row, keep in zip(ids, mask, strict=True)]
    assert_close(model(ids, mask).logits, torch.cat(expected), atol=1e-6, rtol=1e-6)
    assert adapters.peft.active_adapter == POLICY
    assert not any(parameter.requires_grad for parameter in adapters.parameters_of("reward"))


ROWS = {
    "right": [[5, 6, EOS, PAD], [9, EOS, 10, 11], [7, EOS, EOS, PAD]],
    "left": [[PAD, 5, 6, EOS], [9, EOS, 10, 11], [PAD, 7, EOS, EOS]],
}


@pytest.mark.parametrize("side", ROWS)
@pytest.mark.parametrize("pad", [PAD, EOS])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_reward_adapter_reads_its_score_where_transformers_classifier_does(arch, pad, side, tmp_path):
    """A classifier reads the last token that is not padding; with pad == eos, the one before the final eos."""
    classifier = get_peft_model(tiny_sequence_classifier(arch, pad_token_id=pad), lora(task_type="SEQ_CLS"))
    classifier.eval().save_pretrained(tmp_path)
    # The base has no pad id, or another one than the classifier was trained with.
    base = tiny_causal_lm(arch, pad_token_id=None if pad == EOS else EOS)
    base.base_model.load_state_dict(tiny_sequence_classifier(arch).base_model.state_dict())
    model = AdapterClassifier(add_policy_adapter(base, lora()), str(tmp_path), pad_token_id=pad)
    ids = torch.tensor([[pad if token == PAD else token for token in row] for row in ROWS[side]])
    mask = torch.tensor([[int(token != PAD) for token in row] for row in ROWS[side]])
    expected = classifier(input_ids=ids, attention_mask=mask).logits
    assert_close(model(ids, mask).logits, expected, atol=1e-6, rtol=1e-6)
    assert base.config.pad_token_id != pad


def test_a_reward_adapters_pad_id_is_its_bases_where_its_tokenizer_has_none(tmp_path):
    classifier = get_peft_model(tiny_sequence_classifier("llama", pad_token_id=EOS), lora(task_type="SEQ_CLS"))
    classifier.eval().save_pretrained(tmp_path)
    ids, mask = torch.tensor([[5, 6, EOS, EOS], [EOS] * 4]), torch.ones(2, 4, dtype=torch.long)
    for pad, rows in ((EOS, ids), (None, ids[:1])):
        base = tiny_causal_lm("llama", pad_token_id=pad)
        base.base_model.load_state_dict(tiny_sequence_classifier("llama").base_model.state_dict())
        model = AdapterClassifier(add_policy_adapter(base, lora()), str(tmp_path), pad_token_id=None)
        # transformers scores a row of padding only at its first token, and without a pad id accepts only one row.
        classifier.get_base_model().config.pad_token_id = pad
        expected = classifier(input_ids=rows, attention_mask=mask[: len(rows)]).logits
        assert_close(model(rows, mask[: len(rows)]).logits, expected, atol=1e-6, rtol=1e-6)


def test_a_policy_that_is_an_adapter_keeps_a_frozen_copy_as_its_reference(tmp_path):
    base = tiny_causal_lm("llama")
    supervised = stirred(add_policy_adapter(copy.deepcopy(base), lora(task_type="CAUSAL_LM")), POLICY)
    supervised.peft.save_pretrained(tmp_path)
    expected = Policy(supervised.model)(*BATCH, **HOW).logprobs
    adapters = load_adapters(base, str(tmp_path))
    assert adapters.starting_point == REFERENCE
    policy = Policy(adapters.model, adapters)
    assert_close(policy(*BATCH, **HOW).logprobs, expected)
    stirred(adapters, POLICY, seed=5)
    with adapters.active(REFERENCE):
        assert_close(policy(*BATCH, **HOW).logprobs, expected)
    assert_close(Policy(copy_without_adapters(policy))(*BATCH, **HOW).logprobs, expected, atol=1e-5, rtol=1e-5)
    assert not any(p.requires_grad for p in adapters.parameters_of(REFERENCE))
    assert all(p.requires_grad for p in adapters.parameters_of(POLICY))


def test_a_critics_adapter_starts_where_the_policy_does():
    adapters = from_peft_model(get_peft_model(tiny_causal_lm("llama"), lora()))
    stirred(adapters, REFERENCE)
    build_actor_critic(adapters, critic_layout="adapter")
    for start, value in zip(adapters.parameters_of(REFERENCE), adapters.parameters_of(VALUE), strict=True):
        assert torch.equal(start, value) and value.requires_grad and not start.requires_grad


def test_an_adapter_of_another_base_is_warned_of(tmp_path):
    config = lora(task_type="SEQ_CLS", base_model_name_or_path="their/base")
    get_peft_model(tiny_sequence_classifier("llama"), config).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "their/base"}))
    base = tiny_causal_lm("llama")
    base.config.name_or_path = "our/base"
    with pytest.warns(UserWarning, match="was trained on their/base, but the base here is our/base"):
        AdapterClassifier(add_policy_adapter(base, lora()), str(tmp_path), pad_token_id=PAD)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lora(bias="all"), "bias 'all'"),
        (IA3Config(), "peft_config is a IA3Config; use a peft.LoraConfig"),
        (lora(target_modules=["lm_head"]), "adapts the language-model head .* leave the head out"),
        (lora(modules_to_save=["lm_head"]), "adapts the language-model head"),
        (lora(init_lora_weights="pissa"), "init_lora_weights 'pissa'"),
        (lora(init_lora_weights=False), "init_lora_weights False"),
        (lora(lora_bias=True), "lora_bias True"),
        (lora(trainable_token_indices=[3]), "trainable_token_indices"),
        (lora(kasa_config=KasaConfig()), r"kasa_config KasaConfig\(.*leave it out"),
        (lora(alora_invocation_tokens=[5, 6]), r"alora_invocation_tokens \[5, 6\]"),
        (lora(target_parameters=["q_proj.weight"]), "target_parameters"),
        (lora(use_qalora=True), "use_qalora True"),
        (AdaLoraConfig(r=4, total_step=9, target_modules=["q_proj"]), "peft_config is a AdaLoraConfig; use a"),
    ],
)
def test_adapters_that_cannot_be_switched_or_joined_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        add_policy_adapter(tiny_causal_lm("llama", tie_word_embeddings=False), config)


def test_every_plain_field_of_a_lora_configuration_is_taken():
    settings = {"lora_dropout": 0.1, "exclude_modules": ["up_proj"], "rank_pattern": {"q_proj": 2}, "revision": "main"}
    layers = {"layers_to_transform": [0], "layers_pattern": "layers", "target_modules": ["q_proj", "k_proj"]}
    # Earlier versions of PEFT wrote null where the default now is an empty dictionary.
    for config in (lora(**settings, alpha_pattern={"q_proj": 4}), lora(**layers), lora(loftq_config=None)):
        adapters = add_policy_adapter(tiny_causal_lm("llama"), config)
        assert adapters.parameters_of(POLICY)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"target_modules": ["nosuch"]},
            r"target_modules \(--lora_target_modules\) is \['nosuch'\], which PEFT .*'q_p",
        ),
        ({"target_modules": ["input_layernorm"]}, "LlamaRMSNorm.* is not supported.*name linear layers"),
        ({"target_modules": ["q_proj", "v_prj"]}, r"but LlamaForCausalLM has no layers \['v_prj'\] .*'v_proj'"),
        ({"modules_to_save": ["embed_tokens", "nrom"]}, r"but LlamaForCausalLM has no layers \['nrom'\]; "),
    ],
)
def test_a_name_that_fits_no_layer_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        add_policy_adapter(tiny_causal_lm("llama", tie_word_embeddings=False), lora(**settings))


def test_an_adapter_s_name_is_not_that_of_a_layer():
    base = tiny_causal_lm("llama")
    attention = base.base_model.layers[0].self_attn
    attention.value = torch.nn.Linear(4, 4)
    adapters = add_policy_adapter(base, lora())
    assert adapters.parameters_of(VALUE) == []
    adapters.add(VALUE, lora(), trainable=True)
    names = {id(parameter): key for key, parameter in adapters.peft.named_parameters()}
    found = {name: {names[id(p)] for p in adapters.parameters_of(name)} for name in (POLICY, VALUE)}
    assert not found[POLICY] & found[VALUE] and len(found[POLICY]) == len(found[VALUE])
    assert any("value.lora_A.default" in key for key in found[POLICY])


@pytest.mark.parametrize(("device", "package"), [(False, "here"), (True, None)])
def test_4_bits_need_a_device_and_a_package(device, package, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device)
    monkeypatch.setattr(loading, "find_spec", lambda name: package)
    with pytest.raises(
        ValueError, match="4-bit weights are asked for .* teacher_dtype., which need a CUDA device and bitsandbytes"
    ):
        load_causal_lm("somewhere", load_in_4bit=True)


def test_what_trains_beside_adapters_is_not_in_half_precision():
    base = tiny_causal_lm("llama", tie_word_embeddings=False, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="embed_tokens.* would train in torch.bfloat16"):
        add_policy_adapter(base, lora(modules_to_save=["embed_tokens"]))
    peft = get_peft_model(tiny_causal_lm("llama", dtype=torch.bfloat16), lora(), autocast_adapter_dtype=False)
    adapters = from_peft_model(peft)
    assert {p.dtype for p in adapters.parameters_of(POLICY)} == {torch.float32}


def test_a_reward_adapter_has_no_dropout(tmp_path):
    classifier = get_peft_model(tiny_sequence_classifier("llama"), lora(task_type="SEQ_CLS", lora_dropout=0.5))
    for parameter in classifier.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(3))
    classifier.save_pretrained(tmp_path)
    model = AdapterClassifier(add_policy_adapter(tiny_causal_lm("llama"), lora()), str(tmp_path), pad_token_id=PAD)
    model.adapters.peft.train()
    ids, mask = torch.tensor([[5, 6, 7, 8]]), torch.ones(1, 4, dtype=torch.long)
    assert torch.equal(model(ids, mask).logits, model(ids, mask).logits)


def test_a_frozen_or_foreign_adapter_is_refused(tmp_path):
    peft = get_peft_model(tiny_causal_lm("llama"), lora())
    peft.requires_grad_(False)
    with pytest.raises(ValueError, match="the model's adapter is frozen; load it with is_trainable=True"):
        from_peft_model(peft)
    with pytest.raises(ValueError, match=r"adapters are \['mine'\]; the policy's must be named 'default'"):
        from_peft_model(PeftModel(tiny_causal_lm("llama"), lora(), adapter_name="mine"))
    with pytest.raises(ValueError, match="critic_layout is 'adapter', but the policy has no adapters"):
        build_actor_critic(tiny_causal_lm("llama"), critic_layout="adapter")
    get_peft_model(tiny_sequence_classifier("llama"), lora(target_modules=["q_proj"])).save_pretrained(tmp_path / "a")
    adapters = add_policy_adapter(tiny_causal_lm("llama"), lora())
    with pytest.raises(ValueError, match="has no score head with one label"):
        AdapterClassifier(adapters, str(tmp_path / "a"), pad_token_id=PAD)
    get_peft_model(tiny_sequence_classifier("gpt2"), lora(task_type="SEQ_CLS")).save_pretrained(tmp_path / "b")
    with pytest.raises(
        ValueError, match="does not fit LlamaForCausalLM: its .*transformer.h.0.attn.c_attn.* is not there"
    ):
        AdapterClassifier(add_policy_adapter(tiny_causal_lm("llama"), lora()), str(tmp_path / "b"), pad_token_id=PAD)


def test_an_adapter_without_all_its_weights_is_refused(tmp_path):
    get_peft_model(tiny_sequence_classifier("llama"), lora(task_type="SEQ_CLS")).save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    del tensors[next(name for name in tensors if "lora_A" in name)]
    save_file(tensors, path)
    adapters = add_policy_adapter(tiny_causal_lm("llama"), lora())
    with pytest.raises(ValueError, match="does not fit its base: .*lora_A.*missing or unexpected"):
        AdapterClassifier(adapters, str(tmp_path), pad_token_id=PAD)
    assert list(adapters.peft.peft_config) == [POLICY]


def test_activations_of_an_adapter_are_not_recomputed_with_another():
    built = build_actor_critic(add_policy_adapter(tiny_causal_lm("llama"), lora()), critic_layout="adapter")
    torch.manual_seed(0)
    for name, parameter in built.named_parameters():
        if "lora_B" in name or "critic.head" in name:
            parameter.data.normal_()
    built.train()

    def gradients():
        built.zero_grad()
        with built.critic_active():
            (built(*BATCH, **HOW, with_policy=False).values - 1).square().sum().backward()
        return {name: p.grad.clone() for name, p in built.named_parameters() if p.grad is not None}

    expected = gradients()
    built.policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = gradients()
    assert found.keys() == expected.keys() and any("value" in name for name in found)
    for name, gradient in expected.items():
        assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"needs the critic's adapter; .* critic_active\(\)"):
        built(*BATCH, **HOW)
