"""Real processes: the run is the same however many there are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close

from tests.tiny_models import tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import metric_lines

SCRIPT = Path(__file__).with_name("run_tiny.py")
LAUNCH_CONFIG = Path(__file__).parents[2] / "examples/accelerate_configs/ddp.yaml"


def launch(output_dir: Path, *settings: str, processes: int) -> None:
    """run_tiny.py on its own, or under `accelerate launch` with the configuration file that users get."""
    command = [sys.executable, str(SCRIPT), str(output_dir), *settings]
    if processes > 1:
        config = ["--config_file", str(LAUNCH_CONFIG), "--num_processes", str(processes), "--main_process_port", "0"]
        command = [sys.executable, "-m", "accelerate.commands.launch", *config, *command[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    outcome = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert f"each of {processes} processes" in outcome.stdout


def save_reward_adapter(folder: Path) -> None:
    """A reward adapter whose scores differ from row to row."""
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")
    peft = get_peft_model(tiny_sequence_classifier("llama"), lora)
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    peft.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


IQN = ("critic=iqn", "num_quantiles=4", "critic_warmup_steps=1", "target_kl_stop=0.001")
GSPO = ("policy_loss=gspo", "loss_agg_mode=seq-mean-token-mean", "use_kl_loss=true", "entropy_coef=0.01")
RLOO = ("adv_estimator=rloo", "num_return_sequences=2", "loss_agg_mode=seq-mean-token-sum-norm", "old_policy=correct")


@pytest.mark.parametrize(
    "settings",
    [
        ("total_episodes=11",),
        ("rollout_batch_size=7", "num_return_sequences=2", "critic_layout=shared"),
        (*IQN, *GSPO),
        RLOO,
        ("lora=true", "critic_layout=adapter", "loss_agg_mode=seq-mean-token-sum"),
        ("lora=true", "critic_layout=adapter", "gradient_checkpointing=true", "critic_warmup_steps=1"),
        ("lora=true", "critic_layout=separate"),
        ("lora=true", "critic_layout=adapter", "gradient_checkpointing=true", "reward_adapter=saved"),
        ("lora=true", "critic_layout=shared", "gradient_checkpointing=true", "critic=c51", "critic_warmup_steps=1"),
    ],
)
def test_two_processes_train_the_same_model_as_one(settings, tmp_path):
    settings = [setting.replace("=saved", f"={tmp_path / 'reward'}") for setting in settings]
    save_reward_adapter(tmp_path / "reward")
    # 11 prompts at 10 a step leave one for the last step, and one rank without; 20 at 7 leave ragged step batches.
    launch(tmp_path / "one", *settings, processes=1)
    launch(tmp_path / "two", *settings, processes=2)
    one, two = (torch.load(tmp_path / name / "weights.pt", weights_only=True) for name in ("one", "two"))
    for name in one:
        assert_close(two[name], one[name], rtol=1e-6, atol=1e-6)
    for first, second in zip(metric_lines(tmp_path / "one"), metric_lines(tmp_path / "two"), strict=True):
        assert first.keys() == second.keys()
        for name in first:
            if "padding" not in name:
                assert second[name] == pytest.approx(first[name], rel=1e-6, abs=1e-8), name
