"""Notebooks in a real Jupyter kernel: a run that is interrupted as by the stop button and goes on in the next cell, and
the notebooks of examples/, small.
"""

import json
import re
from pathlib import Path
from statistics import fmean

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from examples.mini_farm.splits import read_rows
from tests.integration.launching import HANG, ROOT
from tests.tiny_runs import metric_lines
from tests.tools.warm_python import warm_python

NOTEBOOKS = ROOT / "examples/notebooks"
MAKE = """
import signal
from tests.tiny_runs import prompts, tiny_trainer
from transformers import TrainerCallback

class Stop(TrainerCallback):
    def on_step_begin(self, args, state, control, **context):
        if state.global_step == 1 and not again:
            signal.raise_signal(signal.SIGINT)

again = False
data = {"eval_dataset": prompts(2), "callbacks": [Stop]}
trainer = tiny_trainer(FOLDER, trainer_arguments=data)
"""
SMALL_LABORATORY = {
    "sft_rows": 400,
    "preference_rows": 80,
    "held_out_pairs": 16,
    "unlabeled_rows": 64,
    "val_rows": 16,
    "vocab_size": 600,
    "hidden_size": 32,
    "num_layers": 1,
    "sft_epochs": 2.0,
    "reward_epochs": 1.0,
}


def execute(notebook, folder, *, cwd=ROOT, allow_errors=False):
    """Executes the cells of `notebook` in `cwd`, in a kernel that need not import torch first."""
    # The tests' own environment has no kernel of this name.
    spec = folder / "kernels" / "warm"
    spec.mkdir(parents=True)
    argv = [warm_python(), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "warm", "language": "python"}))
    specs = KernelSpecManager(kernel_dirs=[str(folder / "kernels")])
    manager = AsyncKernelManager(kernel_name="warm", kernel_spec_manager=specs)
    resources = {"metadata": {"path": str(cwd)}}
    NotebookClient(notebook, km=manager, timeout=HANG, allow_errors=allow_errors, resources=resources).execute()


def executed(name, folder, **parameters):
    """The code cells of a notebook of examples/, executed with `parameters` in place of its own."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    assert set(re.findall(r"^(\w+) =", cell.source, flags=re.MULTILINE)) == set(parameters)
    cell.source = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    execute(notebook, folder, cwd=NOTEBOOKS)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def cell_with(cells, text):
    (found,) = [cell for cell in cells if text in cell.source]
    return found


def printed(cell, stream="stdout"):
    return "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == stream)


def shown(cell, kind):
    return [out.data[kind] for out in cell.outputs if "data" in out and kind in out.data]


@pytest.mark.proof
def test_a_notebook_is_interrupted_and_goes_on(tmp_path):
    cells = [
        MAKE.replace("FOLDER", repr(str(tmp_path / "run"))),
        "trainer.train()",
        "again = True\nstats = trainer.train(resume_from_checkpoint=True)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    execute(notebook, tmp_path, allow_errors=True)
    made, stopped, resumed = notebook.cells
    assert not [out for out in made.outputs if out.output_type == "error"], made.outputs
    errors = [(out.ename, out.evalue) for out in stopped.outputs if out.output_type == "error"]
    assert errors == [("KeyboardInterrupt", "SIGINT")]
    assert f"SIGINT: run saved to {tmp_path / 'run' / 'checkpoint-1'}" in printed(stopped)
    assert " 1/2 " in printed(stopped)
    assert " 2/2 " in printed(resumed)
    assert "\nreport:      alpaca-ppo report " in printed(resumed)
    assert not [out for out in resumed.outputs if out.output_type == "error"]
    assert printed(resumed, "stderr") == ""
    assert [line["step"] for line in metric_lines(tmp_path / "run")] == [0, 1, 2]


@pytest.mark.proof
def test_the_notebook_about_your_own_reward(tmp_path):
    cells = executed("your_own_reward.ipynb", tmp_path, FOLDER=str(tmp_path / "out"), STEPS=10)
    assert printed(cell_with(cells, "csv.writer")).startswith("112 tickets to train on, 32 held out\n")

    # Right: 1 + 0.3. Another team: 0.3. Three words, one a team: 0.3 - 2 * 0.1. Two of three answers are one word.
    by_hand = cell_with(cells, "right_team(completions=")
    assert json.loads(shown(by_hand, "text/plain")[0]) == pytest.approx([1.3, 0.3, 0.1])
    assert printed(by_hand) == f"one_word {2 / 3}\n"

    metrics = metric_lines(tmp_path / "out/good")
    rewards = [line["eval/scores"] for line in metrics if "eval/scores" in line]
    assert [line["step"] for line in metrics if "eval/scores" in line] == [0, 10] and rewards[1] > rewards[0] + 0.2
    assert metrics[-1]["reward/one_word"] > metrics[1]["reward/one_word"]
    assert len(shown(cell_with(cells, "pyplot.subplots"), "image/png")) == 1

    # Of four answers to each ticket: the mean, and whether one is right.
    tables = {}
    for row in read_rows(tmp_path / "out/good/eval/step_000010.jsonl"):
        right = row["response"] == f"{row['columns']['team']} <eos>"
        tables.setdefault(row["prompt_id"], []).append(right)
    assert {len(answers) for answers in tables.values()} == {4} and len(tables) == 32
    best = printed(cell_with(cells, "step.json"))
    assert best.startswith("final/ is from step 10\n")
    assert f"{fmean(fmean(answers) for answers in tables.values()):.2f} ± " in best.splitlines()[1]
    assert f"{fmean(map(any, tables.values())):.2f} ± " in best.splitlines()[2]
    assert len(re.findall(r" (?:right|wrong, it is \w+)$", printed(cell_with(cells, "from_pretrained")), re.M)) == 6

    assert "step 3: error [constant_reward]" in printed(cell_with(cells, "def wrong_case"))
    found = printed(cell_with(cells, "check_run(folder"))
    assert found.startswith("broken: 2 findings\n  error [constant_reward] every response gets the same reward")
    # Before training, the small model does not stop.
    assert found.count("  warning [all_truncated]") == 2, found
    address = printed(cell_with(cells, "as_uri()")).strip()
    assert "</html>" in Path(address.removeprefix("file://")).read_text()


@pytest.mark.proof
def test_the_notebook_of_the_laboratory(tmp_path):
    root = tmp_path / "lab"
    cells = executed("laboratory.ipynb", tmp_path, ROOT=str(root), SIZES=SMALL_LABORATORY, EPISODES=128, SEED=2)
    first = read_rows(root / "data/sft.jsonl")[0]
    text = f"{first['instruction']} {first['input']}\n    {first['output']}\n"
    assert text in printed(cell_with(cells, "demonstrations[:5]"))
    # The stages' own output goes to their logs.
    stages = re.sub(" +", " ", printed(cell_with(cells, "lab.sft}")))
    assert re.fullmatch(
        rf" tokenizer and untrained model \d+ s\n supervised fine-tuning \d+ s\ntrained in {root}/sft\n", stages
    )
    assert "train_loss" in (root / "sft/log.txt").read_text()
    agreement = json.loads((root / "reward_model/agreement.json").read_text())["reward_model_agrees_with_gold"]
    assert f"agrees with gold on {agreement:.0%} of" in printed(cell_with(cells, "agreement.json"))

    # 64 prompts a step: there are no more.
    run = root / "notebook_ppo"
    assert [line["step"] for line in metric_lines(run)] == [0, 1, 2]
    assert " 2/2 " in printed(cell_with(cells, "trainer.train()"))
    assert len(shown(cell_with(cells, "pyplot.subplots"), "image/png")) == 1
    answers = cell_with(cells, "win_rate(new")
    before, after = (read_rows(run / f"eval/step_{step:06d}.jsonl") for step in (0, 2))
    (table,) = shown(answers, "text/html")
    assert table.count("<tr>") == 7 and "eos" not in table
    for name, rows in {"reference": before, "policy": after}.items():
        assert re.search(rf"{name} +gold {fmean(row['scores/gold'] for row in rows):.2f}\n", printed(answers))
    assert "of 16 x 8 votes" in printed(answers)
    assert re.match(r"\d+ findings\n", printed(cell_with(cells, "check_run(run)")))
    (link,) = shown(cell_with(cells, "relpath"), "text/html")
    (href,) = re.findall('href="([^"]+)"', link)
    assert "</html>" in (NOTEBOOKS / href).read_text()


@pytest.mark.proof
def test_a_cell_that_fails_is_an_error(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(notebook, tmp_path)
