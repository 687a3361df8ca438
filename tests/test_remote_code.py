"""Models with code of their own: it runs where that is allowed, is refused elsewhere, and is never asked about."""

import builtins
import json
import sys

import pytest
import torch
from peft import LoraConfig
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils

from alpaca_ppo.checkpoint.export import save_merged
from alpaca_ppo.estimate_memory.fake_models import without_weights
from alpaca_ppo.models import load_critic
from alpaca_ppo.models.loading import load_processing_class
from alpaca_ppo.rewards import build_reward
from alpaca_ppo.saved_models import has_remote_code, loading, remote_code
from tests.tiny_models import tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import tiny_trainer

CONFIGURATION = """
from transformers import LlamaConfig

class CustomConfig(LlamaConfig):
    model_type = "custom_llama"
"""
MODEL = """
from torch import nn
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel, LlamaPreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput
from .configuration_custom import CustomConfig

class CustomModel(LlamaModel):
    config_class = CustomConfig

class CustomForCausalLM(LlamaForCausalLM):
    config_class = CustomConfig
    def __init__(self, config):
        super().__init__(config)
        self.model = CustomModel(config)
        self.post_init()

class CustomForSequenceClassification(LlamaPreTrainedModel):
    config_class = CustomConfig
    def __init__(self, config):
        super().__init__(config)
        self.model = CustomModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()
    def forward(self, input_ids, attention_mask=None):
        states = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        last = attention_mask.sum(dim=1) - 1
        return SequenceClassifierOutput(logits=self.score(states[range(len(states)), last]))

class NestedForSequenceClassification(LlamaForSequenceClassification):
    '''Calls AutoModel.from_config, as the classifiers of transformers do.'''
    config_class = CustomConfig
"""
CLASSIFIER = "AutoModelForSequenceClassification"
LANGUAGE_MODEL = {"AutoModelForCausalLM": "CustomForCausalLM"}
KINDS = {
    "policy": (tiny_causal_lm, LANGUAGE_MODEL | {CLASSIFIER: "CustomForSequenceClassification"}),
    "alone": (tiny_causal_lm, LANGUAGE_MODEL),
    "reward": (tiny_sequence_classifier, {CLASSIFIER: "NestedForSequenceClassification", "AutoModel": "CustomModel"}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each of KINDS, as `save_pretrained` writes models that came with code."""
    place = tmp_path_factory.mktemp("models")
    for name, (model, classes) in KINDS.items():
        model("llama").save_pretrained(place / name)
        tiny_tokenizer().save_pretrained(place / name)
        (place / name / "configuration_custom.py").write_text(CONFIGURATION)
        (place / name / "modeling_custom.py").write_text(MODEL)
        config = json.loads((place / name / "config.json").read_text())
        config["auto_map"] = {"AutoConfig": "configuration_custom.CustomConfig"}
        config["auto_map"] |= {kind: f"modeling_custom.{named}" for kind, named in classes.items()}
        config["model_type"] = "custom_llama"
        (place / name / "config.json").write_text(json.dumps(config))
    return {name: str(place / name) for name in KINDS}


class Silent:
    """A standard input on which nobody answers; any use of it is counted."""

    def __init__(self):
        self.uses = []

    def __getattr__(self, name):
        self.uses.append(name)
        raise EOFError(f"stdin.{name}")


@pytest.fixture(autouse=True)
def nobody_answers(tmp_path, monkeypatch):
    """Any question fails the test. Code of models goes to a folder of the test's."""
    stdin = Silent()
    asked = []
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(builtins, "input", lambda question="": asked.append(question) or stdin.readline())
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "transformers_modules":
            del sys.modules[name]
    assert asked == [] and stdin.uses == []
    assert "input" not in vars(dynamic_module_utils)


def trusting(folder, model, **overrides):
    arguments = {"model": model, "processing_class": None, **overrides.pop("trainer_arguments", {})}
    settings = {"trust_remote_code": True, "total_episodes": 10, **overrides}
    return tiny_trainer(folder, trainer_arguments=arguments, **settings)


IDS = torch.tensor([[5, 9, 11, 7]])


def values(trainer):
    critic = trainer.actor_critic.critic
    with torch.no_grad():
        return critic.head(critic.backbone.eval()(IDS).last_hidden_state[:, -1]).values


def test_policy_and_critic_are_saved_with_their_code(folders, tmp_path):
    trainer = trusting(tmp_path, folders["policy"])
    trainer.train()
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "final/policy", trust_remote_code=True)
    critic = load_critic(str(tmp_path / "final/value"), trust_remote_code=True)
    models = (policy, critic.backbone)
    assert [type(model).__name__ for model in models] == ["CustomForCausalLM", "CustomModel"]
    assert all(has_remote_code(model) and "final" not in type(model).__module__ for model in models)
    with torch.no_grad():
        assert_close(critic.head(critic.backbone.eval()(IDS).last_hidden_state[:, -1]).values, values(trainer))
        assert_close(policy.eval()(IDS).logits, trainer.actor_critic.policy.model.eval()(IDS).logits)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "final/value", trust_remote_code=True)) == 64
    card = (tmp_path / "final/policy/README.md").read_text()
    assert 'AutoModelForCausalLM.from_pretrained("path/to/this/folder", trust_remote_code=True)' in card
    assert (
        'load_critic("path/to/this/folder", trust_remote_code=True)' in (tmp_path / "final/value/README.md").read_text()
    )


@pytest.mark.proof
@pytest.mark.parametrize("trust", [True, False])
def test_a_critic_without_a_classifier_of_its_own_is_saved_with_its_code_too(trust, folders, tmp_path):
    model = folders["alone"]
    if not trust:
        # Whoever passes a model in memory has run its code; the run then runs no more of it.
        model = AutoModelForCausalLM.from_pretrained(folders["policy"], trust_remote_code=True)
    trainer = trusting(
        tmp_path, model, trust_remote_code=trust, trainer_arguments={"processing_class": tiny_tokenizer()}
    )
    trainer.train()
    folder = str(tmp_path / "final/value")
    with torch.no_grad():
        critic = load_critic(folder, trust_remote_code=True)
        assert_close(critic.head(critic.backbone(IDS).last_hidden_state[:, -1]).values, values(trainer))
    assert type(critic.backbone).__name__ == "CustomModel"
    assert (
        'load_critic("path/to/this/folder", trust_remote_code=True)' in (tmp_path / "final/value/README.md").read_text()
    )
    with pytest.raises(ValueError, match=f"'{folder}' comes with code of its own; read"):
        load_critic(folder)
    # Saved again as the start of another run's critic.
    again = trusting(tmp_path / "again", folders["policy"], trainer_arguments={"value_model": folder})
    assert_close(values(again), values(trainer))


@pytest.mark.proof
def test_a_reward_model_that_builds_another_model_scores_and_starts_a_critic(folders, tmp_path):
    arguments = {"reward_funcs": [folders["reward"]], "processing_class": tiny_tokenizer()}
    trainer = trusting(tmp_path, tiny_causal_lm("llama"), init_value_with_reward=True, trainer_arguments=arguments)
    trainer.train()
    critic = load_critic(str(tmp_path / "final/value"), trust_remote_code=True)
    with torch.no_grad():
        assert_close(critic.head(critic.backbone.eval()(IDS).last_hidden_state[:, -1]).values, values(trainer))


@pytest.mark.proof
def test_an_adapter_is_merged_into_a_base_with_code(folders, tmp_path):
    arguments = {"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")}
    settings = {"critic_layout": "adapter"}
    base = AutoModelForCausalLM.from_pretrained(folders["policy"], dtype=torch.bfloat16, trust_remote_code=True)
    arguments["processing_class"] = tiny_tokenizer()
    trainer = trusting(tmp_path, base, trainer_arguments=arguments, **settings)
    trainer.train()
    save_merged(tmp_path / "merged", trainer.actor_critic.policy, tiny_tokenizer())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", trust_remote_code=True)
    assert type(merged).__name__ == "CustomForCausalLM" and merged.dtype == torch.float32
    assert "trust_remote_code=True" in (tmp_path / "final/policy/README.md").read_text()


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("policy", lambda folder, out: tiny_trainer(out, trainer_arguments={"model": folder})),
        ("reward", lambda folder, out: tiny_trainer(out, trainer_arguments={"reward_funcs": [folder]})),
        ("reward", lambda folder, out: tiny_trainer(out, trainer_arguments={"value_model": folder})),
        ("policy", lambda folder, out: tiny_trainer(out, reference=folder)),
        ("policy", lambda folder, out: without_weights(AutoModelForCausalLM, folder, trust_remote_code=False)),
    ],
    ids=["policy", "reward", "value model", "reference", "memory estimate"],
)
def test_code_that_is_not_trusted_is_an_error_that_names_model_and_option(name, load, folders, tmp_path):
    message = f"'{folders[name]}' comes with code of its own; .*trust_remote_code: true"
    with pytest.raises(ValueError, match=message):
        load(folders[name], tmp_path)


def test_a_tokenizer_with_code_that_is_not_trusted_is_named(tmp_path, folders):
    tiny_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": [None, "tokenization_custom.Custom"]}, "tokenizer_class": "Custom"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"'{tmp_path}' comes with code of its own"):
        load_processing_class(str(tmp_path))
    with pytest.raises(ValueError, match=f"'{tmp_path}' comes with code of its own"):
        tiny_sequence_classifier("llama").save_pretrained(tmp_path)
        build_reward(str(tmp_path))


def test_other_errors_and_outer_blocks_stay_as_they_are():
    with pytest.raises(ValueError, match="^mine$"), remote_code("model", trust=False):
        raise ValueError("mine")
    with pytest.raises(ValueError, match="^trust_remote_code=True$"), remote_code("model", trust=True):
        raise ValueError("trust_remote_code=True")
    with remote_code("outer", trust=True):
        with remote_code("inner", trust=False):
            assert dynamic_module_utils.input("?") == "no"
        assert dynamic_module_utils.input("?") == "yes"


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match="no model: .*model.safetensors is damaged .*No such file"):
        with loading("no model", str(tmp_path), "look at it"):
            raise OSError("no weights")


def test_a_missing_package_keeps_its_error():
    with pytest.raises(ImportError, match="sentencepiece"), loading("no tokenizer", "folder", "look at it"):
        raise ImportError("sentencepiece is missing")
