"""Checks of saved adapters before any model is loaded, and adapters on the hub."""

import json

import httpx2
import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from alpaca_ppo.adapters import files
from alpaca_ppo.adapters.adapter_set import add_policy_adapter
from alpaca_ppo.adapters.files import check_adapter_shapes, is_adapter, read_policy_adapter, read_reward_adapter
from alpaca_ppo.rewards import AdapterClassifier
from tests.tiny_models import tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import tiny_trainer


def lora(**settings):
    return LoraConfig(**{"r": 4, "target_modules": "all-linear", **settings})


def stir(peft):
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(3))
    return peft


def save_reward(folder, arch="llama", sizes=None, **settings):
    """A reward adapter with its tokenizer, as alpaca-ppo reward --use_peft writes it."""
    classifier = tiny_sequence_classifier(arch, **(sizes or {}))
    stir(get_peft_model(classifier, lora(task_type="SEQ_CLS", **settings))).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def save_policy(folder, base, **settings):
    """A supervised adapter whose base is the folder `base`."""
    peft = stir(get_peft_model(tiny_causal_lm("llama"), lora(**{"task_type": "CAUSAL_LM", **settings})))
    peft.save_pretrained(folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": base}))
    return str(folder)


def in_hub_cache(monkeypatch, cache, repository, *, lacking=()):
    """An empty folder for `repository` in a hub cache, as after a download that missed the files in `lacking`."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    commit = "0" * 40
    (folder / "refs/main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / ".no_exist" / commit).mkdir(parents=True)
    for name in lacking:
        (folder / ".no_exist" / commit / name).touch()
    return folder / "snapshots" / commit


def test_a_folder_is_an_adapter_where_it_has_an_adapter_s_configuration(tmp_path):
    tiny_causal_lm("llama").save_pretrained(tmp_path / "whole")
    assert is_adapter(save_reward(tmp_path / "adapter"))
    assert not is_adapter(str(tmp_path / "whole")) and not is_adapter(str(tmp_path / "none/at/all"))


def test_a_hub_id_is_an_adapter_where_the_hub_says_so(monkeypatch, tmp_path):
    response = httpx2.Response(404, request=httpx2.Request("GET", "https://huggingface.co"))
    answers = {
        "they/adapter": None,
        "they/whole": RemoteEntryNotFoundError("no such file", response=response),
        "they/private": RepositoryNotFoundError("no such repository", response=response),
        "they/unreachable": LocalEntryNotFoundError("no connection, and not in the cache"),
    }

    def download(repo_id, filename):
        assert filename == "adapter_config.json"
        if answers[repo_id] is not None:
            raise answers[repo_id]
        return str(tmp_path)

    monkeypatch.setattr(files, "hf_hub_download", download)
    assert [name for name in answers if is_adapter(name)] == ["they/adapter"]


def test_offline_a_whole_model_s_id_stays_one(monkeypatch, tmp_path):
    folder = in_hub_cache(monkeypatch, tmp_path / "cache", "they/whole")
    tiny_causal_lm("llama").save_pretrained(folder)
    assert not is_adapter("they/whole") and not is_adapter("they/never-seen")
    trainer = tiny_trainer(tmp_path / "run", trainer_arguments={"model": "they/whole"})
    assert trainer.actor_critic.policy.adapters is None


def test_adapters_may_be_hub_ids(monkeypatch, tmp_path):
    tiny_causal_lm("llama").save_pretrained(tmp_path / "base")
    policy = in_hub_cache(monkeypatch, tmp_path / "cache", "they/sft")
    save_policy(policy, str(tmp_path / "base"))
    save_reward(in_hub_cache(monkeypatch, tmp_path / "cache", "they/reward", lacking=["config.json"]))
    arguments = {"model": "they/sft", "reward_funcs": []}
    trainer = tiny_trainer(tmp_path / "run", trainer_arguments=arguments, reward_adapter="they/reward")
    adapters = trainer.actor_critic.policy.adapters
    assert sorted(adapters.peft.peft_config) == ["default", "reference", "reward"]
    saved = load_file(policy / "adapter_model.safetensors")
    name = next(key for key in saved if "lora_B" in key)
    loaded = dict(adapters.peft.named_parameters())[name.replace(".weight", ".default.weight")]
    assert_close(loaded.data, saved[name])


def test_missing_weights_are_told_from_a_hub_that_cannot_be_reached(monkeypatch, tmp_path):
    in_hub_cache(monkeypatch, tmp_path / "cache", "they/unseen")
    with pytest.raises(ValueError, match="they/unseen: adapter_model.* is not in the cache, .*; connect, log in"):
        files.weights_file("reward_adapter", "they/unseen")

    def download(repo_id, filename):
        response = httpx2.Response(404, request=httpx2.Request("GET", "https://huggingface.co"))
        raise RemoteEntryNotFoundError("no such file", response=response)

    monkeypatch.setattr(files, "hf_hub_download", download)
    with pytest.raises(ValueError, match="reward_adapter they/weightless has no adapter_model.safetensors"):
        files.weights_file("reward_adapter", "they/weightless")


def test_an_error_of_the_hub_names_the_option(monkeypatch):
    def download(repo_id, filename):
        response = httpx2.Response(503, request=httpx2.Request("GET", "https://huggingface.co"))
        raise HfHubHTTPError("503 Server Error\n\nService Unavailable", response=response)

    with pytest.raises(ValueError, match="reward_adapter /no/folder: adapter_model.* cannot be downloaded .*; connect"):
        files.weights_file("reward_adapter", "/no/folder")
    monkeypatch.setattr(files, "hf_hub_download", download)
    with pytest.raises(ValueError, match="reward_adapter they/busy: .* cannot be downloaded .503 Server Error"):
        files.weights_file("reward_adapter", "they/busy")


def test_a_policy_does_not_start_from_a_reward_adapter_nor_from_one_without_a_base(tmp_path):
    with pytest.raises(ValueError, match=r"is the adapter of a classifier, .*reward_adapt"):
        read_policy_adapter(save_reward(tmp_path / "reward"))
    folder = save_policy(tmp_path / "policy", None)
    with pytest.raises(ValueError, match="model_name_or_path .*policy is an adapter without its base"):
        read_policy_adapter(folder)


def test_a_policy_s_adapter_may_hold_whole_layers(tmp_path):
    tiny_causal_lm("llama", tie_word_embeddings=False).save_pretrained(tmp_path / "base")
    base, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "base"), torch.tensor([[5, 9, 11]])
    peft = stir(get_peft_model(base, lora(task_type="CAUSAL_LM", modules_to_save=["embed_tokens"])))
    peft.save_pretrained(tmp_path / "sft")
    settings = {"trainer_arguments": {"model": str(tmp_path / "sft")}, "learning_rate": 1e-2, "kl_estimator": "k3"}
    trainer = tiny_trainer(tmp_path / "run", **settings)
    with trainer.collector.reference.on_device(torch.device("cpu")) as reference:
        assert_close(reference.model.eval()(ids).logits, peft.eval()(ids).logits, atol=1e-5, rtol=1e-5)
    assert trainer.step(trainer.prompt_batches(0))["objective/kl_sum_seq"] == pytest.approx(0.0, abs=1e-5)
    assert trainer.step(trainer.prompt_batches(1))["objective/kl_sum_seq"] > 1e-4


def test_a_reward_adapter_holds_lora_and_a_head_of_one_label_in_safetensors(tmp_path):
    with pytest.raises(ValueError, match=r"whole has modules_to_save \['embed_tokens'\] beside its score head"):
        read_reward_adapter(save_reward(tmp_path / "whole", modules_to_save=["embed_tokens"]))
    with pytest.raises(ValueError, match="reward_adapter .*biased has bias 'all'"):
        read_reward_adapter(save_reward(tmp_path / "biased", bias="all"))
    folder = save_reward(tmp_path / "headless")
    path = tmp_path / "headless/adapter_model.safetensors"
    tensors = {key: value for key, value in load_file(path).items() if "score" not in key}
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"headless has no score head with one label \(its heads: none\)"):
        read_reward_adapter(folder)
    save_file({**tensors, "base_model.model.score.weight": torch.zeros(3, 32)}, path)
    with pytest.raises(ValueError, match=r"no score head with one label \(its heads: .*score.weight': \(3, 32\)"):
        read_reward_adapter(folder)
    path.rename(path.with_suffix(".bin"))
    with pytest.raises(ValueError, match="headless has no adapter_model.safetensors, the only format that is read"):
        read_reward_adapter(folder)


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_an_adapter_of_another_size_is_refused_with_both_shapes(arch, tmp_path):
    sizes = {"llama": {"hidden_size": 64}, "gpt2": {"n_embd": 64}}[arch]
    folder = save_reward(tmp_path / "wide", arch, sizes)
    message = (
        r"reward_adapter .*wide does not fit .*: its .* has shape \(.*64.*\), but the layer needs \(.*32.*\); use an"
    )
    with pytest.raises(ValueError, match=message):
        check_adapter_shapes("reward_adapter", folder, tiny_causal_lm(arch))
    with pytest.raises(ValueError, match=message):
        AdapterClassifier(add_policy_adapter(tiny_causal_lm(arch), lora()), folder, pad_token_id=None)
    check_adapter_shapes("reward_adapter", folder, tiny_causal_lm(arch, **sizes))
    check_adapter_shapes("reward_adapter", folder, add_policy_adapter(tiny_causal_lm(arch, **sizes), lora()).model)


def test_an_adapter_that_gives_or_scores_another_size_is_refused_too(tmp_path):
    folder = save_reward(tmp_path / "reward", sizes={"intermediate_size": 96})
    path = tmp_path / "reward/adapter_model.safetensors"
    for part, has, needs in (("lora_A", r"\(4, 96\)", r"\(4, 48\)"), ("lora_B", r"\(96, 4\)", r"\(48, 4\)")):
        tensors = load_file(path)
        with pytest.raises(ValueError, match=rf"its .*{part}.weight has shape {has}, but the layer needs {needs}; use"):
            check_adapter_shapes("reward_adapter", folder, tiny_causal_lm("llama"))
        save_file({key: tensor for key, tensor in tensors.items() if part not in key}, path)
    save_file({"base_model.model.score.weight": torch.zeros(1, 64)}, path)
    with pytest.raises(ValueError, match=r"its .*score.weight has shape \(1, 64\), but the layer needs \(1, 32\);"):
        check_adapter_shapes("reward_adapter", folder, tiny_causal_lm("llama"))
