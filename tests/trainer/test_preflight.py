"""What is refused before a model is loaded, or as soon as the policy is there."""

import errno
import tempfile
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from alpaca_ppo.models.loading import load_processing_class
from alpaca_ppo.trainer import preflight
from alpaca_ppo.trainer.preflight import check_start
from tests.tiny_models import tiny_causal_lm, tiny_config, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import prompts, tiny_trainer
from tests.tiny_runs import tiny_config as run_config


def refused(tmp_path, message, *, arguments=None, **overrides):
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path, trainer_arguments=arguments, **overrides)


@pytest.fixture
def no_model(monkeypatch):
    """Makes every load of a model a failed test."""

    def load(*args, **kwargs):
        raise AssertionError("a model is loaded before the mistake is found")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", load)


@pytest.mark.usefixtures("no_model")
def test_what_needs_no_model_is_refused_before_one_is_loaded(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "config.json").write_text("{}")
    named = {"model": str(tmp_path)}
    refused(tmp_path, "report_to names 'smoke'", arguments=named, report_to=["smoke"])
    refused(tmp_path / "file", "output_dir is '.*file', .*Not a directory", arguments=named)
    refused(tmp_path / "file" / "run", "output_dir is '.*run', .*Not a directory", arguments=named)
    message = "hub_model_id is 'a/b/c', which the hub refuses .*; write 'owner/name'"
    refused(tmp_path, message, arguments=named, hub_model_id="a/b/c")
    # Root may write anywhere, but nobody can create a file there.
    refused("/proc/run", "output_dir is '/proc/run', where no file can be created", arguments=named)
    refused(tmp_path, "no module 'nowhere'", arguments={**named, "reward_funcs": [str(tmp_path), "nowhere:fn"]})
    refused(tmp_path, "truncate_tokens holds 'halt now'", arguments=named, truncate_tokens=["halt now"])
    refused(tmp_path, "truncate_tokens holds 64", arguments=named, truncate_tokens=[64])
    refused(tmp_path, "dataset is empty", arguments={**named, "train_dataset": prompts().select([])})
    refused(tmp_path, "has no column 'text'", arguments=named, prompt_column="text")


@pytest.mark.usefixtures("no_model")
def test_a_reward_adapter_is_checked_before_a_model_is_loaded(tmp_path):
    tiny_config("llama").save_pretrained(tmp_path / "base")
    classifier = tiny_sequence_classifier("llama", hidden_size=64)
    peft = get_peft_model(classifier, LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS"))
    peft.save_pretrained(tmp_path / "wide")
    lora = {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")}
    named = {"model": str(tmp_path / "base"), "reward_funcs": [str(tmp_path / "another")]}
    wide = {"reward_adapter": str(tmp_path / "wide")}
    message = "(?s)no tokenizer can be loaded from '.*wide' .*; check reward_adapter: an existing folder with"
    refused(tmp_path, message, arguments={**named, **lora}, **wide)
    tiny_tokenizer().save_pretrained(tmp_path / "wide")
    named["reward_funcs"] = []
    message = "reward_adapter is '.*wide', but the policy has no adapters; give peft_config"
    refused(tmp_path, message, arguments=named, **wide)


def test_a_name_that_holds_no_model_or_tokenizer_is_named_with_the_remedy(tmp_path):
    missing = {"model": str(tmp_path / "none")}
    refused(tmp_path, "model is '.*none', neither a folder nor a hub id", arguments=missing)
    tiny_causal_lm("llama").save_pretrained(tmp_path / "policy", safe_serialization=True)
    (tmp_path / "policy/model.safetensors").unlink()
    refused(tmp_path, "no model can be loaded from '.*policy'", arguments={"model": str(tmp_path / "policy")})
    with pytest.raises(ValueError, match="no tokenizer can be loaded from '.*none' .*; check model_name_or_path"):
        load_processing_class(str(tmp_path / "none"))


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["w64"])
    message = r"the tokenizer has 'w64' \(id 64\), but the model has 64 embeddings; take the model's tokenizer"
    refused(tmp_path, message, arguments={"processing_class": tokenizer})
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    refused(tmp_path, "the tokenizer has '<new>'", arguments={"processing_class": tokenizer})


def test_a_reward_adapters_tokenizer_with_more_tokens_than_the_bases_embeddings_is_refused(tmp_path):
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")
    get_peft_model(tiny_sequence_classifier("llama"), lora).save_pretrained(tmp_path / "reward")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["w64"])
    tokenizer.save_pretrained(tmp_path / "reward")
    given = {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"), "reward_funcs": []}
    message = r"the tokenizer of reward_adapter .*reward has 'w64' \(id 64\), but the model has 64 embeddings"
    refused(tmp_path / "run", message, arguments=given, reward_adapter=str(tmp_path / "reward"))


def test_a_special_token_that_no_text_holds_needs_no_embedding(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert len(tokenizer) == 65
    tiny_trainer(tmp_path, trainer_arguments={"processing_class": tokenizer})
    tokenizer.chat_template = "<image>{{ messages }}"
    refused(tmp_path, "the tokenizer has '<image>'", arguments={"processing_class": tokenizer})


def test_a_run_starts_in_an_empty_folder_and_resumes_from_one_that_is_there(tmp_path):
    check_start(run_config(tmp_path / "new"), None)
    tiny_trainer(tmp_path / "run").save_checkpoint()
    (tmp_path / "run/checkpoint-0").rename(tmp_path / "run/checkpoint-2")
    args = run_config(tmp_path / "run")
    for resume in (True, "true", str(tmp_path / "run/checkpoint-2")):
        check_start(args, resume)
    with pytest.raises(ValueError, match="holds checkpoint-2 of an earlier run"):
        check_start(args, None)
    with pytest.raises(ValueError, match="checkpoint-3 is no folder"):
        check_start(args, str(tmp_path / "run/checkpoint-3"))
    (tmp_path / "run/checkpoint-2/state.pt").unlink()
    with pytest.raises(ValueError, match="state.pt"):
        check_start(args, True)


def test_a_file_or_folder_of_a_name_that_the_run_needs_is_refused_at_the_start(tmp_path):
    (tmp_path / "checkpoint-3").touch()
    for start in (lambda: check_start(run_config(tmp_path), None), lambda: tiny_trainer(tmp_path)):
        with pytest.raises(ValueError, match="output_dir .* holds checkpoint-3, which is no folder"):
            start()
    (tmp_path / "checkpoint-3").unlink()
    (tmp_path / "run.lock").mkdir()
    with pytest.raises(ValueError, match="holds run.lock, which is no file"):
        check_start(run_config(tmp_path), None)


def test_the_main_process_alone_needs_a_folder_to_write_to(tmp_path, monkeypatch):
    def read_only(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "_mkstemp_inner", read_only)
    with pytest.raises(ValueError, match="output_dir is '.*new/run', .*Read-only file system"):
        check_start(run_config(tmp_path / "new/run"), None)
    monkeypatch.setenv("RANK", "1")
    check_start(run_config(tmp_path / "new/run"), None)


def test_a_folder_that_this_user_may_not_search_is_refused_by_name(tmp_path, monkeypatch):
    def exists(path, **kwargs):
        if path.is_relative_to(tmp_path / "closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return True

    # Root may search every folder.
    monkeypatch.setattr(Path, "exists", exists)
    with pytest.raises(ValueError, match="output_dir is '.*closed/run', .*denied"):
        check_start(run_config(tmp_path / "closed/run"), None)


def test_the_check_of_the_folder_leaves_nothing_there(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "check_login", lambda: None)
    check_start(run_config(tmp_path / "new/run", hub_model_id="someone/model-1.0"), None)
    assert list(tmp_path.iterdir()) == []
