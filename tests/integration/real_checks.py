"""SmolLM2-135M-Instruct takes a step with each sampler and layout, resumes, and is exported (`make real-test`).

Not collected by pytest itself: it needs the model of `make real`, the vLLM of `make vllm-test`, and minutes.
"""

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig, PeftModel
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from alpaca_ppo import PPOConfig, PPOTrainer
from alpaca_ppo.cli.commands import main as alpaca_ppo
from examples.long_horizon.pipeline import flags_of
from examples.sentences.task import HELD_OUT, TRAINING, draw_prompts, share_used
from tests.tiny_runs import metric_lines, weights

MODEL = Path("outputs/sentences/SmolLM2-135M-Instruct").resolve()
PYTHON = os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python")
PROOF = pytest.mark.proof
"""What `.ci/run` leaves out: more than half of the minutes."""
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SETTINGS: dict[str, Any] = {
    "query_len": 96,
    "response_len": 12,
    "temperature": 0.7,
    "eval_temperature": 0.7,
    "rollout_batch_size": 4,
    "num_return_sequences": 2,
    "step_batch_size": 8,
    "ppo_epochs": 1,
    "max_steps": 1,
    "learning_rate": 1e-5,
    "lr_scheduler_type": "constant",
    "save_steps": 0,
    "report": False,
    "report_to": "none",
    "use_cpu": True,
}


@pytest.fixture(autouse=True)
def no_other_trainer() -> Iterator[None]:
    """Trainers are in cycles of references, and each of these takes 2 GiB."""
    yield
    gc.collect()
    # The next one may have another precision.
    AcceleratorState._reset_state(reset_partial_state=True)


def trainer_of(folder: Path, *, use_peft: bool = False, **settings: Any) -> PPOTrainer:
    """One step over four prompts, two answers each."""
    return PPOTrainer(
        model=str(MODEL),
        peft_config=LoraConfig(r=8, target_modules="all-linear") if use_peft else None,
        args=PPOConfig(output_dir=str(folder), **{**SETTINGS, **settings}),
        reward_funcs=share_used,
        train_dataset=Dataset.from_list(draw_prompts(16, split=TRAINING, seed=0)),
        eval_dataset=Dataset.from_list(draw_prompts(4, split=HELD_OUT, seed=0)),
    )


def step_of(folder: Path) -> dict[str, Any]:
    """The metrics of the last step."""
    return [line for line in metric_lines(folder) if "ppo/loss/policy" in line][-1]


@pytest.mark.parametrize(
    ("settings", "nats"),
    [
        pytest.param({}, 1e-4, id="slots"),
        pytest.param({"generation_backend": "generate"}, 1e-4, id="model.generate", marks=PROOF),
        pytest.param(
            {"generation_backend": "vllm", "vllm_python": PYTHON, "vllm_dtype": "float32"}, 1e-4, id="vLLM", marks=PROOF
        ),
        pytest.param({"use_peft": True}, 1e-4, id="LoRA"),
        pytest.param({"use_peft": True, "critic_layout": "adapter"}, 1e-4, id="LoRA, two adapters", marks=PROOF),
        pytest.param({"critic_layout": "separate", "critic_epochs": 1}, 1e-4, id="separate critic", marks=PROOF),
        pytest.param({"critic_layout": "shared"}, 1e-4, id="shared critic", marks=PROOF),
        pytest.param({"adv_estimator": "grpo"}, 1e-4, id="GRPO", marks=PROOF),
        pytest.param({"bf16": True}, 0.1, id="bf16"),
        pytest.param(
            {"bf16": True, "use_peft": True, "dtype": "bfloat16"}, 0.1, id="bf16, LoRA on a bf16 base", marks=PROOF
        ),
    ],
)
def test_a_step_with_each_sampler_and_layout(settings, nats, tmp_path):
    trainer = trainer_of(tmp_path, **settings)
    trained = {name: p for name, p in trainer.actor_critic.policy.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    trainer.train()
    step = step_of(tmp_path)
    moved = [not torch.equal(p, before[name]) for name, p in trained.items()]
    assert len(moved) > 200 and sum(moved) > 0.45 * len(moved) and 0 < step["objective/scores"] <= 1
    assert 0 <= step["mismatch/logprob_abs_mean"] < nats


def test_a_run_in_two_parts_ends_with_the_weights_of_one_run(tmp_path):
    whole = trainer_of(tmp_path / "whole", max_steps=2)
    whole.train()
    expected = weights(whole)
    del whole
    trainer_of(tmp_path / "parts", max_steps=1, save_steps=1).train()
    rest = trainer_of(tmp_path / "parts", max_steps=2, save_steps=1)
    rest.train(resume_from_checkpoint=True)
    for name, weight in weights(rest).items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("use_peft", [False, True])
def test_the_exported_model_answers_as_the_trained_one(use_peft, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, draw_prompts(4, split=TRAINING, seed=0))))
    run, reward = tmp_path / "run", "examples.sentences.task:share_used"
    given = {"model_name_or_path": MODEL, "dataset_name": rows, "reward_funcs": reward, "output_dir": run}
    settings = {**SETTINGS, **given, "use_peft": use_peft, "save_steps": 1, "learning_rate": 1e-3}
    assert alpaca_ppo(["train", *flags_of(settings)]) == 0
    merge = ["--merge"] if use_peft else []
    assert alpaca_ppo(["export", str(run), "--to", str(tmp_path / "exported"), *merge]) == 0
    folder = tmp_path / "exported" / ("merged" if use_peft else "policy")
    exported, base = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (folder, MODEL))
    trained = AutoModelForCausalLM.from_pretrained(MODEL if use_peft else run / "final/policy", dtype=torch.float32)
    if use_peft:
        trained = PeftModel.from_pretrained(trained, run / "final/policy")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        logits, of_run, of_base = (model(**prompt).logits for model in (exported, trained, base))
    assert_close(logits, of_run, atol=1e-3, rtol=1e-4)
    assert (logits - of_base).abs().max() > 0.1


def test_it_answers_a_question_and_evaluates_twice_alike(tmp_path, capsys):
    assert alpaca_ppo(["sample", str(MODEL), "--prompt", QUESTION[0]["content"], "--temperature", "0"]) == 0
    assert "Paris" in capsys.readouterr().out
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, draw_prompts(4, split=HELD_OUT, seed=0))))
    found = []
    for name in ("one", "other"):
        flags = {
            "model": MODEL,
            "model_name_or_path": MODEL,
            "eval_dataset_name": rows,
            "reward_funcs": "examples.sentences.task:share_used",
            "results_dir": tmp_path / name,
            "response_len": 12,
            "use_cpu": True,
        }
        assert alpaca_ppo(["evaluate", *flags_of(flags)]) == 0
        results = json.loads((tmp_path / name / "results.json").read_text())["metrics"]
        found.append({k: v for k, v in results.items() if not k.startswith(("time/", "memory/"))})
    assert found[0] == found[1] and 0 < found[0]["eval/scores"] <= 1
