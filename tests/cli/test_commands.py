"""The dispatcher: what it prints without a subcommand, how a mistake ends, and that every entry has its function."""

import os
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml

import alpaca_ppo
from alpaca_ppo.cli import commands
from alpaca_ppo.cli.commands import COMMANDS, exit_status, main


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "ALPACA_PPO_TRACEBACK"):
        # Set before it is deleted, so that it is restored even if the test sets it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_the_help_lists_every_subcommand_and_a_wrong_one_names_the_right(capsys):
    for argv in ([], ["--help"], ["-h"]):
        assert main(argv) == 0
        shown = capsys.readouterr().out
        assert all(f"  {name} " in shown and summary in shown for name, (_, summary) in COMMANDS.items())
    assert main(["trian"]) == 2
    assert "error: there is no subcommand 'trian'; did you mean train?" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("alpaca_ppo 0.")


def test_every_subcommand_has_its_function():
    for name, (place, _) in COMMANDS.items():
        assert resolve_name(f"alpaca_ppo.cli.{place}").__name__ == name.replace("-", "_")


def test_a_mistake_is_a_message_and_status_2(capsys):
    def fail(argv):
        assert argv == ["--seed", "1"]
        raise ValueError("seed is 1; choose another")

    assert exit_status(fail, ["--seed", "1"]) == 2
    assert capsys.readouterr().err == "error: seed is 1; choose another\n"
    with pytest.raises(ValueError):
        exit_status(fail, ["--seed", "1", "--traceback"])


def test_ctrl_c_is_a_line_and_status_130(monkeypatch, capsys):
    def interrupt(argv):
        raise KeyboardInterrupt

    assert exit_status(interrupt, []) == 130
    assert capsys.readouterr().err == "interrupted\n"
    monkeypatch.setenv("RANK", "1")
    assert exit_status(interrupt, []) == 130
    assert capsys.readouterr().err == ""
    with pytest.raises(KeyboardInterrupt):
        exit_status(interrupt, ["--traceback"])


def test_ctrl_c_in_the_import_of_a_subcommand_has_no_traceback(tmp_path):
    """A process of its own: the import machinery would be in the traceback."""
    (tmp_path / "yaml.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n")
    # A shell lets its background jobs ignore SIGINT, and these tests may be one.
    code = "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from alpaca_ppo.cli.commands import main\nsys.path.insert(0, sys.argv[1])\n"
    code += "sys.exit(main(['train']))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_process_with_the_traceback_variable_shows_it(monkeypatch):
    monkeypatch.setenv("ALPACA_PPO_TRACEBACK", "1")
    with pytest.raises(OSError):
        exit_status(lambda argv: open("/no/such/file").close() or 0, [])


def test_other_ranks_report_a_mistake_later_than_the_first(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(commands.time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "3")
    assert exit_status(lambda argv: int("x"), []) == 2
    assert capsys.readouterr().err.startswith("error on rank 3: invalid literal")
    assert waited == [20.0]


def test_an_error_in_a_function_of_the_users_keeps_its_traceback(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text("def f(x):\n    return int(x)\n\nf('one')\n")
    monkeypatch.chdir(tmp_path)
    run = ["train", "--model_name_or_path", "m", "--dataset_name", "d", "--import_modules"]
    with pytest.raises(ValueError, match="invalid literal") as caught:
        main([*run, "mine.py"])
    assert f"f ({tmp_path}/mine.py, line 2)" in caught.value.__notes__[0]
    (tmp_path / "broken.py").write_text("def f(:\n")
    assert main([*run, "broken.py"]) == 2
    assert "invalid syntax (broken.py, line 1)" in capsys.readouterr().err
    assert main([*run, "missing.py"]) == 2
    assert "missing.py does not exist" in capsys.readouterr().err


LIBRARIES = [str(Path(module.__file__).parents[1]) for module in (yaml, alpaca_ppo)]


@pytest.mark.parametrize("layout", [".pth", "user", "PYTHONPATH"])
def test_a_mistake_is_a_sentence_wherever_the_libraries_live(layout, tmp_path):
    """PyYAML finds the tab, in a folder that is not the interpreter's site-packages."""
    (tmp_path / "run.yaml").write_text("seed:\t1\n\t- 2\n")
    code = "import sys\nfrom alpaca_ppo.cli.commands import main\nsys.exit(main(['train', '--config', 'run.yaml']))"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    flags: list[str] = []
    if layout == ".pth":
        (tmp_path / "libraries.pth").write_text("\n".join(LIBRARIES))
        flags, code = ["-S"], f"import site\nsite.addsitedir({str(tmp_path)!r})\n{code}"
    elif layout == "user":
        folder = tmp_path / f"base/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        folder.mkdir(parents=True)
        for source in (path for library in LIBRARIES for path in Path(library).iterdir()):
            if source.name == "alpaca_ppo" or source.parent == Path(LIBRARIES[0]):
                (folder / source.name).symlink_to(source)
        environment["PYTHONUSERBASE"] = str(tmp_path / "base")
    else:
        flags, environment["PYTHONPATH"] = ["-S"], os.pathsep.join(LIBRARIES)
    python = sys._base_executable if layout == "user" else sys.executable
    command = [python, *flags, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr.count("\n  File ")) == (2, 0), done.stderr
    assert done.stderr.startswith("error: --config run.yaml cannot be read as YAML")


TRAIN = ["train", "--model", "m", "--dataset_name", "d", "--reward_funcs", "my:f"]


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (TRAIN, 7, "loading the libraries ...\n"),
        ([*TRAIN, "--num_processes", "2"], 7, "loading the libraries ...\n"),
        (["sft", "--model", "m", "--dataset_name", "d"], 7, "loading the libraries ...\n"),
        (["reward", "--model", "m", "--dataset_name", "d"], 7, "loading the libraries ...\n"),
        (["evaluate", "--model", "org/m", "--eval_dataset_name", "d"], 7, "loading the libraries ...\n"),
        (["sample", "org/m", "--prompt", "x"], 7, "loading the libraries ...\n"),
        (["estimate-memory", "--model", "org/m"], 7, "loading the libraries ...\n"),
        (["estimate-memory", "sft", "--model", "org/m"], 7, "loading the libraries ...\n"),
        ([*TRAIN, "--eval_steps", "3"], 2, "error: eval_steps is 3, without effect: needs eval set"),
        ([*TRAIN, "--lr_scheduler_type", "zigzag"], 2, "error: lr_scheduler_type is 'zigzag'"),
        ([*TRAIN[:2], "./none", *TRAIN[3:]], 2, "error: model_name_or_path is './none'"),
        ([*TRAIN, "--num_processes", "2", "--eval_steps", "3"], 2, "error: eval_steps is 3"),
    ],
)
def test_loading_is_said_first_and_a_mistake_before_it(argv, status, said, tmp_path):
    for library in ("torch", "transformers", "accelerate", "datasets", "numpy", "peft", "tokenizers"):
        (tmp_path / f"{library}.py").write_text("raise SystemExit(7)\n")
    code = "import sys\nfrom alpaca_ppo.cli.commands import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *argv]
    path = os.pathsep.join([str(tmp_path), str(Path(alpaca_ppo.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == status and done.stderr.startswith(said), done.stderr


def test_help_and_light_subcommands_import_no_library():
    """What takes time is importing them: without, each command needs a fraction of a second."""
    code = (
        "import sys\nfrom alpaca_ppo.cli.commands import main\n"
        "for argv in (['--help'], ['train', '--help'], ['sft', '--help'], ['reward', '--help'], ['sample', '--help'],\n"
        "             ['export', '--help'], ['estimate-memory', '--help'], ['presets'], ['presets', 'vapo']):\n"
        "    try:\n        main(argv)\n    except SystemExit as end:\n        assert end.code == 0, argv\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'datasets', 'numpy', 'peft'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for words in ("Processes:", "--num_processes", "--config", "--adv_estimator", "--completion_column"):
        assert words in done.stdout
    assert commands.usage() in done.stdout
