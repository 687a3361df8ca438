"""Which of the exported files name a path of this machine."""

from pathlib import Path

import pytest
import yaml
from peft import AutoPeftModelForCausalLM, LoraConfig

from tests.tiny_models import tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import count_even, prompts, tiny_trainer

LORA = {"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")}


def naming(folder: Path, text: str) -> set[str]:
    """The files below `folder` that contain `text`."""
    paths = [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]
    return {path.relative_to(folder).as_posix() for path in paths}


@pytest.mark.parametrize(
    ("arguments", "settings", "expected"),
    [
        ({}, {}, set()),
        # PEFT finds the base by this path; without it the adapter could not be loaded.
        (LORA, {"critic_layout": "adapter"}, {"policy/adapter_config.json", "value/adapter_config.json"}),
    ],
)
def test_no_exported_file_but_an_adapter_s_names_a_local_path(arguments, settings, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, model in {"base": tiny_causal_lm("llama"), "judge": tiny_sequence_classifier("llama")}.items():
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    prompts().to_json(tmp_path / "train.jsonl")
    given = {
        "model": str(tmp_path / "base"),
        "reward_funcs": [count_even, str(tmp_path / "judge")],
        "processing_class": None,
        **arguments,
    }
    settings = {"reference": str(tmp_path / "base"), "total_episodes": 10, **settings}
    trainer = tiny_trainer(tmp_path / "run", trainer_arguments=given, **settings)
    trainer.train()
    assert naming(tmp_path / "run/final", str(tmp_path)) == expected
    card = (tmp_path / "run/final/policy/README.md").read_text()
    assert "\nreference: base\n" in card and "\noutput_dir: run\n" in card and "objective/scores/judge" in card
    assert "base_model" not in yaml.safe_load(card.split("---")[1])
    # On this machine, run.yaml says where everything was.
    assert str(tmp_path / "base") in (tmp_path / "run/run.yaml").read_text()
    if arguments:
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run/final/policy")
