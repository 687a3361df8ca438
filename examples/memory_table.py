"""The memory of one PPO step under each layout of critic and reference: `python -m examples.memory_table`, or `make
memory-table`.

A column is a model of random weights and its batch, a row a layout; every row has a reward model, a frozen classifier
of its own, in the last row an adapter on the policy's base. A cell is run in a process of its own: the most bytes of
live tensors in the second step on a CPU, torch.cuda.max_memory_allocated on a GPU, beside what
`alpaca_ppo.estimate_memory` predicts. Where a cell has no room (on a CPU: a model of a billion weights or more has
none) the plan stands alone and is called that. Writes `examples/memory_table.md` and, with all the shapes, its table
into the README.

    python -m examples.memory_table --shapes llama-7b qwen2.5-7b     # on a GPU: the two 7B shapes alone
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from alpaca_ppo.config.fields import argument, check_fields
from alpaca_ppo.config.parser import parse_args
from alpaca_ppo.estimate_memory.estimator import GIB
from examples.memory_cells import FAMILIES, LAYOUTS, SHAPES, SIZES, Cell, count_weights, run_cell

REPORT = Path(__file__).with_suffix(".md")
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- make memory-table writes this -->", "<!-- until here -->"
CARD_GIB = 24
"""The memory of the card that the layout of four roles is for."""


@dataclass(frozen=True)
class TableArguments:
    """The columns, and what differs from their own settings.

    Raises:
        ValueError: for a shape, a dtype or a layout that there is not.
    """

    shapes: list[str] = argument(list(SHAPES), f"Columns: {', '.join(SHAPES)}.")
    dtype: str | None = argument(None, "float32 or bfloat16, instead of the shape's own.")
    gradient_checkpointing: bool | None = argument(None, "Instead of the shape's own.")
    rows: int | None = argument(None, "Prompts of the step, sampled and scored at once; null = the shape's own.")
    micro_rows: int | None = argument(None, "Responses of a micro-batch; null = the shape's own.")
    query_len: int | None = argument(None, "Tokens of a prompt; null = the shape's own.")
    response_len: int | None = argument(None, "Tokens of a response; null = the shape's own.")
    hidden_size: int | None = argument(None, "Of the model; null = the shape's own.")
    intermediate_size: int | None = argument(None, "Of the model; null = the shape's own.")
    num_hidden_layers: int | None = argument(None, "Of the model; null = the shape's own.")
    lora_rank: int = argument(16, "Of every adapter.")
    report: str = argument(str(REPORT), "File to write.")
    only: str | None = argument(None, f"One cell alone, of the first shape, as JSON: {', '.join(LAYOUTS)}.")

    def __post_init__(self) -> None:
        check_fields(self)
        for shape in self.shapes:
            if shape not in SHAPES:
                raise ValueError(f"shapes holds {shape!r}; choose of {', '.join(SHAPES)}")
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}; choose float32 or bfloat16, or leave it out")
        if self.only is not None and self.only not in LAYOUTS:
            raise ValueError(f"only is {self.only!r}; choose one of {', '.join(LAYOUTS)}")

    def of(self, shape: str) -> dict[str, Any]:
        """The settings of a column."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        sizes = dict(zip(SIZES, FAMILIES[SHAPES[shape]["family"]][1], strict=True))
        own = {**SHAPES[shape], **sizes, "lora_rank": self.lora_rank}
        return {name: value if given.get(name) is None else given[name] for name, value in own.items()}


def table(cells: dict[str, dict[str, Cell]]) -> str:
    """The Markdown table of cells by shape and layout, with its verdicts on the 7B shapes."""
    lines = [f"| layout | {' | '.join(cells)} |", "|---" * (len(cells) + 1) + "|"]
    for layout, (label, _) in LAYOUTS.items():
        lines.append(f"| {label} | {' | '.join(_text(column[layout]) for column in cells.values())} |")
    lines += ["", "GiB; in brackets what was planned, where it was measured too.", ""]
    for shape, column in cells.items():
        found = column["reward"]
        value = found["planned"] if found["measured"] is None else found["measured"]
        if not shape.endswith("7b") or value is None:
            continue
        how = "planned, not measured" if found["measured"] is None else "measured"
        verdict = "under" if value < CARD_GIB * GIB else "NOT under"
        lines.append(f"Four roles on one {shape} base: {value / GIB:.2f} GiB ({how}), {verdict} {CARD_GIB} GiB.")
    return "\n".join(lines).rstrip() + "\n"


def _text(cell: Cell) -> str:
    plan, found = cell["planned"] or 0.0, cell["measured"]
    return f"planned {plan / GIB:.2f}" if found is None else f"{found / GIB:.2f} ({plan / GIB:.2f})"


def describe(columns: dict[str, dict[str, Any]], device: str) -> str:
    """What each column is, and how it was measured."""
    what = "bytes of live tensors" if device == "CPU" else "torch.cuda.max_memory_allocated"
    lines = [
        f"The most memory of one PPO step, measured on a {device} ({what}) where it has room, else planned by "
        "`alpaca_ppo.estimate_memory` and not measured. Random weights; a reward model of the policy's size in every "
        "row but the last, whose reward model is an adapter; in bfloat16 the first row keeps float32 weights and makes "
        "its passes in bfloat16. Written by `make memory-table`.",
        "",
    ]
    for shape, column in columns.items():
        kept = "with" if column["gradient_checkpointing"] else "without"
        lines.append(
            f"- {shape}: {count_weights(column) / 1e6:.0f} million weights, {column['dtype']}, {kept} gradient "
            f"checkpointing; {column['rows']} prompts of {column['query_len']} tokens with responses of at most "
            f"{column['response_len']}, micro-batches of {column['micro_rows']}, LoRA rank {column['lora_rank']}."
        )
    return "\n".join(lines) + "\n"


def write_into_readme(path: Path, text: str) -> None:
    """Puts `text` between the two marks of the file at `path`."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs every cell, prints the table and writes it to `report` and into the README."""
    given = list(sys.argv[1:] if argv is None else argv)
    (chosen,) = parse_args([TableArguments], given)
    columns = {shape: chosen.of(shape) for shape in chosen.shapes}
    if chosen.only is not None:
        print(json.dumps(run_cell(columns[chosen.shapes[0]], chosen.only)))
        return
    cells: dict[str, dict[str, Cell]] = {shape: {} for shape in columns}
    for shape in columns:
        for layout in LAYOUTS:
            command = [sys.executable, "-m", "examples.memory_table", *given, f"--shapes={shape}", f"--only={layout}"]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            cells[shape][layout] = json.loads(output.splitlines()[-1])
            print(f"{shape}, {layout}: {_text(cells[shape][layout])}", flush=True)
    text = table(cells)
    print(text)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    Path(chosen.report).write_text(f"{describe(columns, device)}\n{text}", encoding="utf-8")
    if chosen.report == str(REPORT) and chosen.shapes == list(SHAPES):
        write_into_readme(README, text)


if __name__ == "__main__":
    main()
