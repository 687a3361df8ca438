"""The laboratory's data on disk: AlpacaFarm's four splits, in Alpaca's JSON schema.

    sft          instruction, input, output: demonstrations of mixed quality
    preference   instructions whose answers are sampled from the supervised model and compared in pairs
    unlabeled    instructions for PPO, without any answer
    val          held-out instructions, for evaluation

A row also has `asks` and `avoids`, which only the annotators use. No pair of instruction and input occurs in two rows,
in the same split or in different ones.
"""

import itertools
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from examples.mini_farm.demonstrations import demonstrate
from examples.mini_farm.grammar import Task, tasks

PROMPT_TEMPLATE = "{instruction} {input}\n"
SPLITS = ("sft", "preference", "unlabeled", "val")

Row = dict[str, Any]


def draw_splits(seed: int, sizes: Mapping[str, int]) -> dict[str, list[Row]]:
    """Returns the rows of each split; `sizes` has their numbers. Only `sft` rows have a non-empty `output`."""
    endless = tasks(seed)
    drawn = {
        split: [_row(task) for task in itertools.islice(endless, sizes[split])] for split in SPLITS if split != "sft"
    }
    rng = random.Random(seed)
    demonstrated = [(task, demonstrate(task, rng)) for task in itertools.islice(endless, sizes["sft"])]
    return {"sft": [_row(task) | {"output": output} for task, output in demonstrated], **drawn}


def _row(task: Task) -> Row:
    return {
        "instruction": task.instruction,
        "input": task.input,
        "output": "",
        "asks": list(task.asks),
        "avoids": list(task.avoids),
    }


def prompt_of(row: Mapping[str, Any]) -> str:
    """Returns the text that a model answers."""
    return PROMPT_TEMPLATE.format(**row)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[Row]:
    """Reads rows that `write_rows` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
