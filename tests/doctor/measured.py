"""Metrics of real runs, for the tests of the doctor: `python -m tests.doctor.measured RUN ...` packs them anew.

The runs are of examples/mini_farm and examples/long_horizon; `GOOD` have learned what they should, and `OVEROPTIMIZED`
are those of the experiment on over-optimization, whose gold score falls while the reward model's rises.
"""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from alpaca_ppo.doctor.examination import read_lines

PACKED = Path(__file__).parent / "measured.json.gz"
OVEROPTIMIZED = ("overopt", "ov_A", "ov_B")


def read() -> dict[str, dict[str, Any]]:
    """The `config` and the `rows` of metrics.jsonl of each run, by name."""
    return json.loads(gzip.decompress(PACKED.read_bytes()))


def pack(folders: list[Path]) -> bytes:
    """The runs of `folders`, numbers with four significant digits."""
    runs = {}
    for folder in folders:
        config = yaml.safe_load((folder / "run.yaml").read_text())
        del config["output_dir"]
        rows = list(read_lines(folder / "metrics.jsonl"))
        rounded = [{k: v if v is None else float(f"{v:.4g}") for k, v in row.items()} for row in rows]
        runs[folder.name] = {"config": config, "rows": [{**row, "step": int(row["step"])} for row in rounded]}
    return gzip.compress(json.dumps(runs, separators=(",", ":")).encode(), 9, mtime=0)


if __name__ == "__main__":
    PACKED.write_bytes(pack([Path(argument) for argument in sys.argv[1:]]))
