import copy
import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, CodeGenConfig
from transformers.utils import logging

from alpaca_ppo.adapters.adapter_set import add_policy_adapter
from alpaca_ppo.checkpoint.export import save_final, save_merged
from alpaca_ppo.checkpoint.model_card import TrainedRun, write_model_card
from alpaca_ppo.models import C51Head, HLGaussHead, IQNHead, Policy, QuantileHead, build_actor_critic, load_critic
from alpaca_ppo.tracking.results import WeightsStep
from tests.tiny_models import ARCHITECTURES, tiny_causal_lm, tiny_tokenizer

METRICS = {"objective/kl": 0.123456, "time/rollout": 3.0, "eval/reward": 1}
CONFIG = {"learning_rate": 1e-06, "report_to": ["tensorboard"], "run_name": None}
RUN = TrainedRun(Path("no-run"), WeightsStep(2, 2), METRICS, CONFIG)
IDS = torch.tensor([[5, 9, 11, 7], [8, 6, 4, 10]])


def with_critic(model, **settings):
    """Policy and critic on one backbone, whose head has been trained."""
    built = build_actor_critic(model, **{"critic_layout": "shared", **settings})
    for parameter in built.critic.head.parameters():
        torch.nn.init.normal_(parameter)
    return built


def card(folder, base_model=None, **config):
    """The card of a run with these options, and its options as they stand there."""
    write_model_card(folder, TrainedRun(folder, WeightsStep(2, 2), {}, config), base_model=base_model)
    text = (folder / "README.md").read_text()
    fence = re.search("\n(`{3,})yaml\n", text)[1]
    return text, yaml.safe_load(text.split(f"\n{fence}yaml\n")[1].split(f"\n{fence}\n")[0])


def front_matter(folder):
    return yaml.safe_load((folder / "README.md").read_text().split("---")[1])


@pytest.mark.parametrize(
    "others", [{"temperature": 0.6, "top_p": 0.9}, {"epsilon_cutoff": 0.1}, {"early_stopping": True}]
)
def test_a_policy_keeps_the_generation_config_of_its_base_but_for_where_answers_end(tmp_path, others):
    tiny_causal_lm("llama").save_pretrained(tmp_path / "base")
    (tmp_path / "base/generation_config.json").write_text(json.dumps({"eos_token_id": 40, **others}))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = add_policy_adapter(base, LoraConfig(r=2, target_modules=["q_proj"]))
    built = build_actor_critic(adapted, critic_layout="shared")
    built.policy.stop_token_ids = (1, 40)
    save_final(tmp_path / "adapter", built, tiny_tokenizer(), RUN, merged=True)
    whole = build_actor_critic(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), critic_layout="shared")
    whole.policy.stop_token_ids = (1, 40)
    save_final(tmp_path / "whole", whole, tiny_tokenizer(), RUN)
    for folder in ("adapter/policy", "adapter/merged", "whole/policy"):
        written = json.loads((tmp_path / folder / "generation_config.json").read_text())
        assert written.pop("eos_token_id") == [1, 40]
        assert {name: written[name] for name in others} == others


@pytest.mark.parametrize("arch", ["codegen", *ARCHITECTURES])
def test_a_saved_critic_gives_the_same_values(tmp_path, arch):
    # CodeGen has no sequence classifier in transformers.
    config = CodeGenConfig(n_embd=32, n_layer=2, n_head=4, n_positions=64, n_ctx=64, rotary_dim=4, vocab_size=64)
    model = AutoModelForCausalLM.from_config(config) if arch == "codegen" else tiny_causal_lm(arch)
    built = with_critic(model.eval(), critic_layout="separate")
    save_final(tmp_path, built, tiny_tokenizer(), RUN)
    loaded, own = load_critic(str(tmp_path / "value")), built.critic.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in loaded.state_dict().items())
    with torch.no_grad():
        values = loaded.head(loaded.backbone.eval()(IDS).last_hidden_state[0]).values
        expected = built.critic.backbone.eval()(IDS).last_hidden_state[0] @ built.critic.head.weight[0]
    torch.testing.assert_close(values, expected)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "value")) == 64


@pytest.mark.parametrize("adapted", [False, True])
def test_the_card_of_a_cached_critic_gives_its_values(tmp_path, adapted):
    tiny_causal_lm("llama").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    if adapted:
        model = add_policy_adapter(model, LoraConfig(r=2, target_modules=["q_proj"]))
        for name, parameter in model.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    built = with_critic(model, critic_layout="cached")
    save_final(tmp_path, built, tiny_tokenizer(), RUN)
    program = (tmp_path / "value/README.md").read_text().split("```python\n")[1].split("```")[0]
    program = program.replace("path/to/this/folder", f"{tmp_path}/value")
    program = program.replace("path/to/the/policy", f"{tmp_path}/policy")
    mask = torch.ones_like(IDS, dtype=torch.bool)
    names = {"queries": IDS, "query_attn_masks": mask, "responses": IDS.flip(1), "response_mask": mask}
    exec(program, names)
    with torch.no_grad():
        expected = built(*list(names.values())[:4], temperature=1.0, chunk_size=8).values
    torch.testing.assert_close(names["values"], expected)


def test_a_folder_without_a_critic_is_refused(tmp_path):
    with pytest.raises(ValueError, match="critic_head.json"):
        load_critic(str(tmp_path))


@pytest.mark.parametrize(
    ("head", "settings"),
    [
        (C51Head, {"num_atoms": 5, "v_min": -2.0, "v_max": 3.0}),
        (HLGaussHead, {"num_atoms": 5, "v_min": -2.0, "v_max": 3.0}),
        (QuantileHead, {"num_quantiles": 4}),
        (IQNHead, {"num_quantiles": 4, "embedding_dim": 8}),
    ],
)
def test_a_distributional_critic_loads_again_with_its_support(tmp_path, head, settings):
    actor_critic = with_critic(tiny_causal_lm("llama"), head=partial(head, **settings))
    save_final(tmp_path, actor_critic, tiny_tokenizer(), RUN)
    critic = load_critic(str(tmp_path / "value"))
    critic.head.risk_level = "upper:0.25"
    states = torch.randn(6, 32)
    actor_critic.critic.head.risk_level = "upper:0.25"
    for loaded, own in zip(critic.head(states), actor_critic.critic.head(states), strict=True):
        assert torch.equal(loaded, own)
    assert type(critic.head) is head and critic.head.settings() == settings
    own, loaded = actor_critic.policy.model.base_model, critic.backbone
    assert torch.equal(loaded(IDS).last_hidden_state, own(IDS).last_hidden_state)


def test_a_failing_save_leaves_the_older_policy_whole_and_progress_bars_as_they_were(tmp_path):
    seen = []

    class Broken:
        def save_pretrained(self, folder):
            seen.append(logging.is_progress_bar_enabled())
            raise OSError("disk full")

    def save(arch, tokenizer):
        save_final(tmp_path, build_actor_critic(tiny_causal_lm(arch), critic_layout=None), tokenizer, RUN)

    save("llama", tiny_tokenizer())
    before = sorted(path.name for path in (tmp_path / "policy").iterdir())
    for shown in (False, True):
        (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
        with pytest.raises(OSError, match="disk full"):
            save("gpt2", Broken())
        assert logging.is_progress_bar_enabled() == shown
    assert seen == [False, False]
    assert sorted(path.name for path in (tmp_path / "policy").iterdir()) == before
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["model_type"] == "llama"
    # The models are not those of a step until all of them are there.
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_the_final_folders_hold_policy_and_cards_and_leave_other_files_alone(tmp_path):
    actor_critic = build_actor_critic(tiny_causal_lm("llama"), critic_layout="shared")
    (tmp_path / "notes.txt").write_text("mine")
    save_final(tmp_path, actor_critic, tiny_tokenizer(), RUN)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    own = actor_critic.policy.model.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in policy.state_dict().items())
    assert "| `objective/kl` | 0.1235 |" in (tmp_path / "policy" / "README.md").read_text()
    assert "values[t]" in (tmp_path / "value" / "README.md").read_text()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_card_has_front_matter_metrics_and_configuration(tmp_path):
    write_model_card(tmp_path, RUN, base_model="someone/some-model")
    assert front_matter(tmp_path) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "someone/some-model",
        "tags": ["alpaca_ppo", "ppo", "rlhf"],
    }
    text = (tmp_path / "README.md").read_text()
    assert "| Metric | Step 2 |\n| --- | ---: |\n| `eval/reward` | 1 |\n| `objective/kl` | 0.1235 |\n" in text
    assert "time/rollout" not in text and "trust_remote_code" not in text
    assert yaml.safe_load(text.split("```yaml")[1].split("```")[0]) == CONFIG
    assert "from transformers import AutoModelForCausalLM" in text


@pytest.mark.parametrize("base_model", [None, "", "here", "/some/absolute/folder", "outputs/a/b", ".."])
def test_the_card_names_no_folder_as_base_model(tmp_path, monkeypatch, base_model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    text, _ = card(tmp_path, base_model)
    assert "base_model" not in front_matter(tmp_path) and "No metrics were logged." in text


def test_the_card_shows_the_last_part_of_local_paths_alone(tmp_path, monkeypatch):
    (tmp_path / "models/judge").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    path = str(tmp_path / "models")
    paths = {
        "output_dir": ("outputs/secret/run", "run"),
        "deepspeed": (str(tmp_path / "zero.json"), "zero.json"),
        "reference": ("models/judge", "judge"),
        "reward_adapter": ("/gone/adapter", "adapter"),
        "own": (
            [path, {"file": path, "names": ["/no_think", 1]}],
            ["models", {"file": "models", "names": ["/no_think", 1]}],
        ),
        "pair": ((path, 2.5), ["models", 2.5]),
    }
    # No paths, though they look like some.
    others = {"hub_model_id": "me/model", "prompt_template": "/no_think {prompt}", "tokens": ["/", "."]}
    text, shown = card(tmp_path, **{name: given for name, (given, _) in paths.items()}, **others)
    assert shown == {name: wanted for name, (_, wanted) in paths.items()} | others
    assert str(tmp_path) not in text
    for word in ("auto", "someone/some-model"):
        assert card(tmp_path, reference=word)[1] == {"reference": word}
    monkeypatch.chdir(tmp_path / "models/judge")
    assert card(tmp_path, output_dir=".")[1] == {"output_dir": "judge"}


def test_backticks_in_an_option_do_not_end_the_configuration_s_code_block(tmp_path):
    config = {"prompt_template": "```\n{prompt}\n````\n", "seed": 1}
    assert card(tmp_path, **config)[1] == config


def test_an_adapter_s_card_loads_it_as_an_adapter(tmp_path):
    adapters = add_policy_adapter(tiny_causal_lm("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    save_final(tmp_path, build_actor_critic(adapters, critic_layout=None), tiny_tokenizer(), RUN)
    assert front_matter(tmp_path / "policy")["library_name"] == "peft"
    text = (tmp_path / "policy" / "README.md").read_text()
    assert f"from peft import {AutoPeftModelForCausalLM.__name__}" in text
    # PEFT loads the base's generation config, which ends answers elsewhere.
    assert 'model.generation_config = GenerationConfig.from_pretrained("path/to/this/folder")' in text
    assert "from transformers import AutoTokenizer, GenerationConfig\n" in text
    assert not (tmp_path / "policy" / "model.safetensors").exists()


EMBEDDED = {"llama": "embed_tokens", "gpt2": "wte"}


@pytest.mark.parametrize(
    ("arch", "tied", "adapter"),
    [
        ("gpt2", True, {"use_dora": True}),
        ("gpt2", True, {"modules_to_save": ["ln_f"]}),
        ("gpt2", True, {"modules_to_save": ["wte"]}),
        ("llama", True, {"use_rslora": True}),
        ("llama", True, {"modules_to_save": ["embed_tokens"]}),
        ("llama", True, {"target_modules": ["q_proj", "embed_tokens"]}),
        ("gpt2", True, {"target_modules": ["c_attn", "wte"]}),
        ("mixtral", False, {"target_modules": ["q_proj", "v_proj"]}),
        ("llama", False, {"use_dora": True}),
        ("llama", False, {"modules_to_save": ["norm", "embed_tokens"]}),
        ("bloom", True, {"use_dora": True}),
    ],
)
def test_a_merged_model_has_the_logits_of_its_adapter_and_base(arch, tied, adapter, tmp_path):
    base = tiny_causal_lm(arch, tie_word_embeddings=tied)
    adapters = add_policy_adapter(base, LoraConfig(**{"r": 4, "target_modules": "all-linear", **adapter}))
    generator = torch.Generator().manual_seed(1)
    for parameter in adapters.parameters_of("default"):
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    before = {name: tensor.clone() for name, tensor in adapters.peft.state_dict().items()}
    built = build_actor_critic(adapters, critic_layout="shared")
    save_final(tmp_path, built, tiny_tokenizer(), RUN, merged=True)
    merged, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        torch.testing.assert_close(merged.eval()(IDS).logits, base.eval()(IDS).logits, atol=1e-4, rtol=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapters.peft.state_dict().items())
    # The adapter's own embedding is not tied to the head, whatever loads the folder.
    own = EMBEDDED.get(arch) in [*adapter.get("modules_to_save", []), *adapter.get("target_modules", [])]
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] == (tied and not own)
    assert base.config.tie_word_embeddings == tied


def test_merging_into_half_precision_loses_nothing(tmp_path):
    # A model without rotary frequencies, which this cast would round.
    base = tiny_causal_lm("gpt2", dtype=torch.bfloat16)
    adapters = add_policy_adapter(base, LoraConfig(r=4, target_modules="all-linear", use_dora=True))
    generator = torch.Generator().manual_seed(1)
    for parameter in adapters.parameters_of("default"):
        # So small that bfloat16 would round most of it away.
        parameter.data += 0.01 * torch.randn(parameter.shape, generator=generator)
    before = {name: tensor.clone() for name, tensor in adapters.peft.state_dict().items()}
    save_merged(tmp_path / "merged", Policy(base, adapters), tiny_tokenizer())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert merged.dtype == torch.float32 and base.dtype == torch.bfloat16
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapters.peft.state_dict().items())
    with torch.no_grad():
        exact = copy.deepcopy(base).float().eval()(IDS).logits
        torch.testing.assert_close(merged.eval()(IDS).logits, exact, atol=1e-4, rtol=0)
        with adapters.active(None):
            assert (base.float()(IDS).logits - exact).abs().max() > 1e-2


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"target_modules": ["q_proj", "embed_tokens"]}])
def test_an_adapter_in_half_precision_is_merged_in_float32(settings, tmp_path):
    base = tiny_causal_lm("llama")
    adapters = add_policy_adapter(base, LoraConfig(**{"r": 4, "target_modules": "all-linear", **settings}))
    generator = torch.Generator().manual_seed(1)
    for parameter in adapters.parameters_of("default"):
        # As under DeepSpeed with bf16.
        parameter.data = (parameter.data + 0.1 * torch.randn(parameter.shape, generator=generator)).bfloat16()
    kinds = {name: tensor.dtype for name, tensor in adapters.peft.state_dict().items()}
    adapters.peft.save_pretrained(tmp_path / "policy")
    save_merged(tmp_path / "merged", Policy(base, adapters), tiny_tokenizer())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    on_base = PeftModel.from_pretrained(tiny_causal_lm("llama"), tmp_path / "policy")
    with torch.no_grad():
        torch.testing.assert_close(merged.eval()(IDS).logits, on_base.eval()(IDS).logits, atol=1e-4, rtol=0)
    assert {name: tensor.dtype for name, tensor in adapters.peft.state_dict().items()} == kinds
