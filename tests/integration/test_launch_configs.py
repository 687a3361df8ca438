"""Every configuration file that users get for `accelerate launch` and `--deepspeed` starts a run, to the same figures.

All of them start on a machine without a GPU: the files are those of a machine with GPUs.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DeepSpeedPlugin
from deepspeed.runtime.config import DeepSpeedConfig

from tests.integration.launching import ENVIRONMENT, HANG, ROOT, command, start, write_run
from tests.tiny_runs import metric_lines

LAUNCH = {path.stem: path for path in (ROOT / "examples/accelerate_configs").glob("*.yaml")}
DEEPSPEED = {path.stem: path for path in (ROOT / "examples/deepspeed_configs").glob("*.json")}
# two_nodes.yaml is started by test_two_nodes.py.
STARTED = sorted(set(LAUNCH) - {"single", "two_nodes"})
# The others start forked processes: ddp.yaml, from scratch in test_dying.py, and what is zero3.yaml with another
# DeepSpeed file, which is read when a run starts.
FROM_SCRATCH = {"single", "zero3"}
# The DeepSpeed files that no launch configuration names, by `--deepspeed` under ddp.yaml.
GIVEN = sorted(set(DEEPSPEED) - set(LAUNCH))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run of two steps, with its run.yaml."""
    return write_run(tmp_path_factory.mktemp("run")).parent


@pytest.fixture(scope="module")
def alone(run) -> list[dict[str, Any]]:
    """The metrics of the run under single.yaml."""
    return launch(run, "single")


def launch(run: Path, config: str, *flags: str) -> list[dict[str, Any]]:
    """The metrics of `accelerate launch --config_file ... examples/train_ppo.py`, started where and as users do."""
    python = sys.executable if config in FROM_SCRATCH and not flags else None
    name = "-".join([config, *(Path(flag).name for flag in flags)])
    flags = ("--config", str(run / "run.yaml"), "--output_dir", str(run / name), *flags)
    outcome = start("examples/train_ppo.py", *flags, config=config, python=python)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert f"each of {1 if config == 'single' else 2} processes" in outcome.stdout, outcome.stdout
    assert (run / name / "final/policy/model.safetensors").is_file()
    return metric_lines(run / name)


def assert_same(lines: list[dict[str, Any]], alone: list[dict[str, Any]], tolerance: float) -> None:
    """The first step is that of one process; the second is there, from weights that moved."""
    assert [line["step"] for line in lines] == [line["step"] for line in alone] == [1, 2]
    for name, value in alone[0].items():
        if "padding" not in name and not name.startswith("mismatch"):
            assert lines[0][name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    assert lines[1]["objective/kl_sum_seq"] != 0.0


@pytest.mark.proof
@pytest.mark.parametrize("config", STARTED)
def test_a_launch_configuration_starts_the_run_of_one_process(run, alone, config):
    assert_same(launch(run, config), alone, tolerance=1e-4)


@pytest.mark.proof
@pytest.mark.parametrize("config", GIVEN)
def test_a_deepspeed_configuration_starts_by_flag(run, alone, config):
    half = config.endswith("_bf16")
    flags = ["--deepspeed", str(DEEPSPEED[config]), *(["--bf16", "true"] if half else [])]
    lines = launch(run, "ddp", *flags)
    if not half:
        assert_same(lines, alone, tolerance=1e-4)
    assert [line["step"] for line in lines] == [1, 2]


def test_the_configurations_are_those_that_the_readme_names():
    assert set(LAUNCH) == {"single", "ddp", "zero1", "zero2", "zero3", "zero3_offload", "fsdp", "two_nodes"}
    assert set(DEEPSPEED) == {"zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_bf16"}


@pytest.mark.parametrize("config", sorted(set(STARTED) - FROM_SCRATCH - {"ddp", "fsdp"}))
def test_what_is_started_in_forked_processes_differs_from_zero3_in_the_deepspeed_file_alone(config):
    settings, scratch = (yaml.safe_load(LAUNCH[name].read_text()) for name in (config, "zero3"))
    assert settings["deepspeed_config"].pop("deepspeed_config_file") == f"examples/deepspeed_configs/{config}.json"
    assert scratch["deepspeed_config"].pop("deepspeed_config_file") == "examples/deepspeed_configs/zero3.json"
    assert settings == scratch


@pytest.mark.parametrize("config", sorted(LAUNCH))
def test_a_launch_configuration_holds_only_what_accelerate_knows(config):
    loaded = load_config_from_file(str(LAUNCH[config]))
    assert isinstance(loaded, ClusterConfig)
    flags = vars(launch_command_parser().parse_args(["script.py"]))
    # Accelerate hands these to the launcher by name and does not refuse the ones that it does not know.
    assert loaded.deepspeed_config.keys() | loaded.fsdp_config.keys() <= flags.keys()
    assert (ROOT / loaded.deepspeed_config.get("deepspeed_config_file", ".")).exists()
    assert loaded.mixed_precision is None, "the run's bf16 decides"


@pytest.mark.parametrize("config", sorted(DEEPSPEED))
def test_a_deepspeed_configuration_holds_only_what_deepspeed_knows(config):
    text = DEEPSPEED[config].read_text()
    plugin = DeepSpeedPlugin(hf_ds_config=json.loads(text), zero3_init_flag=False)
    decided = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16.enabled": config.endswith("_bf16"),
        "zero_optimization.reduce_bucket_size": 64,
        "zero_optimization.stage3_prefetch_bucket_size": 64,
        "zero_optimization.stage3_param_persistence_threshold": 64,
    }
    plugin.deepspeed_config_process(must_match=False, **decided)
    filled = plugin.deepspeed_config
    assert "auto" not in json.dumps(filled)
    # Sections refuse unknown keys; at the top level DeepSpeed ignores them.
    parsed = DeepSpeedConfig(filled)
    assert parsed.zero_optimization_stage == int(config[len("zero")])
    assert json.loads(text).keys() == {*list(decided)[:4], "bf16", "zero_optimization"}
    offload = {"optimizer", "param"} if config == "zero3_offload" else {"optimizer"} if "offload" in config else set()
    for name in ("optimizer", "param"):
        part = getattr(parsed.zero_config, f"offload_{name}")
        assert (part is not None and part.device == "cpu") == (name in offload)


@pytest.mark.proof
def test_a_launch_configuration_is_honoured_refused_or_listed(run, alone):
    """By processes that the launcher itself starts, whose command names the file."""
    settings = yaml.safe_load(LAUNCH["fsdp"].read_text())
    settings["fsdp_config"] |= {"fsdp_reshard_after_forward": False, "fsdp_state_dict_type": "FULL_STATE_DICT"}
    file = run / "asking.yaml"
    file.write_text(yaml.safe_dump(settings))
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), "--main_process_port", "0"]
    words += ["examples/train_ppo.py", "--config", str(run / "run.yaml"), "--output_dir", str(run / "asking")]
    outcome = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    line = "without effect on this run: FSDP_STATE_DICT_TYPE=FULL_STATE_DICT\n"
    assert outcome.stderr.count(line) == 1, outcome.stderr
    assert_same(metric_lines(run / "asking"), alone, tolerance=1e-4)
    words[5:5] = ["--mixed_precision", "bf16"]
    words[-1] = str(run / "refused")
    outcome = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG)
    assert outcome.returncode != 0 and "mixed_precision is 'bf16'; use bf16: true" in outcome.stderr, outcome.stderr


LAST_WORDS = """
import sys
from tests.tiny_runs import tiny_trainer
trainer = tiny_trainer(sys.argv[1], total_episodes=10)
trainer.train()
# Threads take turns only where one waits, so that those of gloo are as late as on a busy machine.
sys.setswitchinterval(100)
trainer.updater.engine.weights()
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.proof
def test_a_script_that_gathers_weights_at_its_end_ends_with_its_own_exit_status(tmp_path):
    (tmp_path / "script.py").write_text(LAST_WORDS)
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    for number, status in enumerate((0, 0, 0, 0, 0, 0, 0, 5)):
        whole = command(tmp_path / "script.py", tmp_path / str(number), str(status), config="fsdp")
        ended = subprocess.run(whole, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG)
        assert "SIGABRT" not in ended.stderr and "exitcode  : -6" not in ended.stderr, ended.stderr
        assert (ended.returncode == 0) == (status == 0), ended.stderr
