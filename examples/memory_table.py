"""The memory of one PPO step under each layout of critic and reference: `python -m examples.memory_table`, or `make
memory-table`.

A column is a model with random weights and its batch; a row is a layout. Every row has a reward model: a frozen
classifier of its own, in the last row an adapter on the policy's base. Each cell runs in its own process and shows the
peak of the second step (live tensors on a CPU, torch.cuda.max_memory_allocated on a GPU) with the estimate of
`alpaca_ppo.estimate_memory`, or only the estimate if there is not enough memory (on a CPU: for a billion weights or
more). Writes `examples/memory_table.md` and, if all shapes are chosen, the table in docs/memory.md.

    python -m examples.memory_table --shapes llama-7b qwen2.5-7b     # on a GPU: only the two 7B shapes
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
PAGE = Path(__file__).parents[1] / "docs/memory.md"
BEGIN, END = "<!-- make memory-table writes this -->", "<!-- until here -->"
CARD_GIB = 24
"""Memory of the GPU that four roles on one 7B base are meant to fit."""


@dataclass(frozen=True)
class TableArguments:
    """The columns of the table, and settings that override theirs.

    Raises:
        ValueError: for an unknown shape, dtype or layout.
    """

    shapes: list[str] = argument(list(SHAPES), f"Columns: {', '.join(SHAPES)}.")
    dtype: str | None = argument(None, "float32 or bfloat16; null = the shape's own.")
    gradient_checkpointing: bool | None = argument(None, "Recompute activations; null = the shape's own.")
    rows: int | None = argument(None, "Prompts per step, sampled and scored at once; null = the shape's own.")
    micro_rows: int | None = argument(None, "Responses in a micro-batch; null = the shape's own.")
    query_len: int | None = argument(None, "Tokens per prompt; null = the shape's own.")
    response_len: int | None = argument(None, "Tokens per response; null = the shape's own.")
    hidden_size: int | None = argument(None, "Of the models; null = the shape's own.")
    intermediate_size: int | None = argument(None, "Of the models; null = the shape's own.")
    num_hidden_layers: int | None = argument(None, "Of the models; null = the shape's own.")
    lora_rank: int = argument(16, "Of every adapter.")
    report: str = argument(str(REPORT), "File to write.")
    only: str | None = argument(None, f"Run one cell of the first shape and print it as JSON: {', '.join(LAYOUTS)}.")

    def __post_init__(self) -> None:
        check_fields(self)
        for shape in self.shapes:
            if shape not in SHAPES:
                raise ValueError(f"shapes holds {shape!r}; choose from {', '.join(SHAPES)}")
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}; choose float32 or bfloat16, or leave it out")
        if self.only is not None and self.only not in LAYOUTS:
            raise ValueError(f"only is {self.only!r}; choose one of {', '.join(LAYOUTS)}")

    def of(self, shape: str) -> dict[str, Any]:
        """The settings of the column `shape`."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        sizes = dict(zip(SIZES, FAMILIES[SHAPES[shape]["family"]][1], strict=True))
        own = {**SHAPES[shape], **sizes, "lora_rank": self.lora_rank}
        return {name: value if given.get(name) is None else given[name] for name, value in own.items()}


def table(cells: dict[str, dict[str, Cell]]) -> str:
    """The Markdown table of cells by shape and layout, and whether four roles fit on the 7B shapes."""
    lines = [f"| layout | {' | '.join(cells)} |", "|---" * (len(cells) + 1) + "|"]
    for layout, (label, _) in LAYOUTS.items():
        lines.append(f"| {label} | {' | '.join(_text(column[layout]) for column in cells.values())} |")
    lines += ["", "In GiB. Measured values are followed by the estimate in brackets.", ""]
    for shape, column in cells.items():
        found = column["reward"]
        value = found["estimated"] if found["measured"] is None else found["measured"]
        if not shape.endswith("7b") or value is None:
            continue
        source = "estimated, not measured" if found["measured"] is None else "measured"
        verdict = "under" if value < CARD_GIB * GIB else "NOT under"
        lines.append(f"Four roles on one {shape} base: {value / GIB:.2f} GiB ({source}), {verdict} {CARD_GIB} GiB.")
    return "\n".join(lines).rstrip() + "\n"


def _text(cell: Cell) -> str:
    estimated, found = cell["estimated"] or 0.0, cell["measured"]
    return f"estimated {estimated / GIB:.2f}" if found is None else f"{found / GIB:.2f} ({estimated / GIB:.2f})"


def describe(columns: dict[str, dict[str, Any]], device: str) -> str:
    """What the columns are, and how they were measured."""
    what = "bytes of live tensors" if device == "CPU" else "torch.cuda.max_memory_allocated"
    lines = [
        f"The peak memory of one PPO step, measured on a {device} ({what}) if memory suffices, otherwise estimated by "
        "`alpaca_ppo.estimate_memory`. Weights are random. Every row but the last has a reward model of the policy's "
        "size; in the last row it is an adapter. In the bfloat16 columns the first row keeps float32 weights and runs "
        "its passes in bfloat16. Written by `make memory-table`.",
        "",
    ]
    for shape, column in columns.items():
        checkpointing = "with" if column["gradient_checkpointing"] else "without"
        lines.append(
            f"- {shape}: {count_weights(column) / 1e6:.0f} million weights, {column['dtype']}, {checkpointing} "
            f"gradient checkpointing; {column['rows']} prompts of {column['query_len']} tokens with responses of at "
            f"most {column['response_len']}, micro-batches of {column['micro_rows']}, LoRA rank {column['lora_rank']}."
        )
    return "\n".join(lines) + "\n"


def write_between_markers(path: Path, text: str) -> None:
    """Replaces what is between the two markers in the file at `path` by `text`."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs every cell, prints the table and writes it to `report` and into docs/memory.md."""
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
        write_between_markers(PAGE, text)


if __name__ == "__main__":
    main()
