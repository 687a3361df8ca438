"""`alpaca-ppo train` and the processes that it starts."""

import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from alpaca_ppo.cli.commands import main
from alpaca_ppo.cli.launch import launch, split_flags
from alpaca_ppo.cli.train import run_training


@pytest.fixture(autouse=True)
def outside_of_a_launcher(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "ALPACA_PPO_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


def test_without_flags_about_processes_nothing_is_launched():
    assert split_flags(["--config", "run.yaml", "--lam_policy", "-1"]) == (
        None,
        ["--config", "run.yaml", "--lam_policy", "-1"],
    )
    assert split_flags(["--num_processes", "1", "--seed", "2"]) == (None, ["--seed", "2"])
    assert split_flags(["--num_processes", "null", "--gpu_ids=none", "--seed", "2"]) == (None, ["--seed", "2"])


def test_several_processes_are_ddp_at_a_free_port():
    (option, config, *flags), rest = split_flags(["--seed", "2", "--num-processes", "4", "--bf16"])
    assert (option, Path(config).name) == ("--config_file", "ddp.yaml") and Path(config).is_file()
    assert (flags, rest) == (["--num_processes", "4", "--main_process_port", "0"], ["--seed", "2", "--bf16"])


def test_a_named_configuration_finds_its_deepspeed_file_outside_the_clone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (_, config, name, path, *port), _ = split_flags(["--accelerate_config", "zero2"])
    assert Path(config).name == "zero2.yaml"
    assert name == "--deepspeed_config_file" and path.endswith("deepspeed_configs/zero2.json")
    assert port == ["--main_process_port", "0"]
    # A file of the user's own, at the place that the configuration names, stays.
    own = tmp_path / "examples/deepspeed_configs/zero2.json"
    own.parent.mkdir(parents=True)
    own.write_text("{}")
    assert split_flags(["--accelerate_config", "zero2"])[0][2:] == ["--main_process_port", "0"]


def test_words_after_the_value_of_a_flag_are_the_run_s():
    assert split_flags(["--num_processes", "1", "actor.lr=1e-6"]) == (None, ["actor.lr=1e-6"])


def test_nodes_keep_their_port_and_a_file_is_taken_as_it_is(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_machines: 2\n")
    words = ["--machine_rank", "1", "--main_process_ip", "10.0.0.1"]
    flags = ["--config_file", str(path), *words]
    assert split_flags(["--accelerate_config", str(path), *words]) == (flags, [])
    # So does one node whose file has a port.
    path.write_text("distributed_type: MULTI_GPU\nmain_process_port: 29501\n")
    assert split_flags(["--accelerate_config", str(path)]) == (["--config_file", str(path)], [])
    path.write_text("- a")
    with pytest.raises(ValueError, match=f"^--accelerate_config {path} holds a list"):
        split_flags(["--accelerate_config", str(path)])
    # One process without torchrun has no port.
    assert split_flags(["--accelerate_config", "single"])[0][2:] == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_processes", "0"], "num_processes is 0; "),
        (["--num_processes", "two"], "num_processes is 'two'; it should be a valid integer"),
        (["--num-processes"], "--num_processes needs a value after it"),
        (["--accelerate_config", "zerro2"], "is 'zerro2', neither a file nor one of .* did you mean zero2"),
    ],
)
def test_flags_about_processes_are_checked(flags, message):
    with pytest.raises(ValueError, match=message):
        split_flags(flags)


def test_a_process_of_a_launcher_starts_no_others(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--num_processes starts processes, but a launcher has"):
        split_flags(["--num_processes", "2"])
    assert split_flags(["--seed", "1"]) == (None, ["--seed", "1"])


def test_a_mistake_in_the_options_ends_before_processes_start(monkeypatch, capsys):
    monkeypatch.setattr("alpaca_ppo.cli.train.launch", lambda how, words: pytest.fail("launched"))
    assert main(["train", "--num_processes", "2", "--learning_rat", "1"]) == 2
    assert "learning_rat: did you mean learning_rate?" in capsys.readouterr().err
    started = []
    monkeypatch.setattr("alpaca_ppo.cli.train.launch", lambda how, words: started.append(words) or 7)
    run = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "a:b"]
    assert main(["train", *run, "--num_processes", "2"]) == 7
    assert started == [run]


def failure(exitcode: int, timestamp: int) -> SimpleNamespace:
    return SimpleNamespace(exitcode=exitcode, timestamp=timestamp, signal_name=lambda: "SIGKILL")


@pytest.mark.parametrize(
    ("codes", "status", "message"),
    [
        ({0: 2, 1: -signal.SIGTERM}, 2, ""),
        ({0: -signal.SIGTERM}, 143, "error: rank 0 was ended by SIGKILL"),
        ({1: 2}, 2, ""),
        ({0: 3, 1: 3}, 3, ""),
        ({0: 143, 1: 143}, 143, ""),
        ({1: 1}, 1, "error: rank 1 ended with exit status 1"),
        ({3: -9}, 137, "error: rank 3 was ended by SIGKILL"),
    ],
)
def test_failures_of_processes_become_an_exit_status(codes, status, message, monkeypatch, capsys):
    error = ChildFailedError.__new__(ChildFailedError)
    error.failures = {rank: failure(code, rank) for rank, code in codes.items()}

    def fail(args):
        assert (args.module, args.training_script) == (True, "alpaca_ppo.cli")
        assert args.training_script_args == ["train", "--seed", "1"]
        raise error

    monkeypatch.setattr("accelerate.commands.launch.launch_command", fail)
    assert launch(["--num_processes", "2"], ["--seed", "1"]) == status
    shown = capsys.readouterr().err
    assert message in shown and (message or not shown)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (subprocess.CalledProcessError(3, "train"), 3),
        (subprocess.CalledProcessError(-9, "train"), 137),
        (SignalException("stop", signal.SIGTERM), 143),
    ],
)
def test_other_ends_of_a_launcher_become_an_exit_status(error, status, monkeypatch):
    def end(args):
        raise error

    monkeypatch.setattr("accelerate.commands.launch.launch_command", end)
    assert launch(["--num_processes", "2"], []) == status


def test_every_configuration_names_a_deepspeed_file_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("ddp", "single", "two_nodes", "zero1", "zero2", "zero3", "zero3_offload"):
        flags, _ = split_flags(["--accelerate_config", name])
        files = [word for word in flags if word.endswith(".json")]
        assert [Path(file).name for file in files] == ([f"{name}.json"] if name.startswith("zero") else [])


def test_a_configuration_in_the_place_of_the_runs_record_is_not_replaced(tmp_path):
    (tmp_path / "run.yaml").write_text(f"model_name_or_path: m\ndataset_name: d\noutput_dir: {tmp_path}\n")
    with pytest.raises(ValueError, match=f"--config {tmp_path}/run.yaml .* output_dir"):
        run_training(["--config", str(tmp_path / "run.yaml"), "--overwrite_output_dir"])
