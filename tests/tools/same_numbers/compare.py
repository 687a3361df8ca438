"""Compares what two runs left, to the last bit: metrics, tables of responses, final weights, and checkpoints as far as
they have the same files.

Left out is what the clock and the memory decide, and every file that holds no number of the training (run.yaml,
configurations, tokenizers, cards). Metrics may have another name, by RENAMED.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

RENAMED: dict[str, str] = {
    "objective/unstopped_share": "objective/truncated_fraction",
    "eval/unstopped_share": "eval/truncated_fraction",
    "ppo/padding_share": "ppo/padding_fraction",
    "tokens/response": "tokens/sampled",
}
"""Old name of a metric, or of a column of a table, to its new one. Both runs are read under the new names."""
ADDED = re.compile(
    r"(sample_id|turns|scores|columns)\b.*|tokens\[\d+\]\.(entropies|ratio|text)"
    r"|eval/.*_se|eval/scores/.*|objective/(scores_std/.*|identical_responses|uniform_groups)"
    r"|(objective|eval)/(.*/)?empty_fraction|ppo/policy/(approxkl|approx_kl_k1|empty_updates)"
)
"""Columns of tables and metrics that earlier commits do not write, or (`text`) write without the space before a word,
and estimates of the KL that only they write; they are left out, as the ids and the third estimate tell the same."""

_MEASURED = ("time/", "memory/")
_MEASURED_RATE = "per_second"
_RECORDS = ("metrics.jsonl", "skipped_updates.jsonl", "rollouts/*.jsonl", "eval/*.jsonl")
_FINAL_WEIGHTS = "final/policy/*.safetensors"
_CHECKPOINTS = "checkpoint-*/**/*.safetensors"


@dataclass
class Comparison:
    """What was found equal, and what was not."""

    numbers: int = 0
    """Values of metrics and tables that were compared."""
    tensors: int = 0
    """Tensors that were compared."""
    differences: list[str] = field(default_factory=list)
    """A line for each, with the file, the place and both values."""
    notes: list[str] = field(default_factory=list)
    """What could not be compared but is no difference."""


def compare_runs(base: Path, tree: Path) -> Comparison:
    """Compares the output folders of a run at the base commit and in the working tree.

    A run without metrics or without final weights is a difference: there would be nothing to compare.
    """
    found = Comparison()
    for names in _file_names(base, tree, _RECORDS, found):
        found.numbers += _compare_records(base / names, tree / names, names, found)
    for names in _file_names(base, tree, (_FINAL_WEIGHTS,), found):
        found.tensors += _compare_tensors(base / names, tree / names, names, found)
    found.tensors += _compare_dictionaries(_critic(base), _critic(tree), "final/value", found)
    if not (base / "metrics.jsonl").exists() or not any(base.glob(_FINAL_WEIGHTS)):
        found.differences.append("base left no metrics.jsonl or no final weights, so there is nothing to compare")
    _compare_checkpoints(base, tree, found)
    return found


def _file_names(base: Path, tree: Path, patterns: Iterable[str], found: Comparison) -> list[str]:
    """Relative names of the files that both have; those of one alone are differences."""
    ours, theirs = (_names(folder, patterns) for folder in (base, tree))
    found.differences += [f"{name}: only in base" for name in sorted(ours - theirs)]
    found.differences += [f"{name}: only in tree" for name in sorted(theirs - ours)]
    return sorted(ours & theirs)


def _names(folder: Path, patterns: Iterable[str]) -> set[str]:
    return {path.relative_to(folder).as_posix() for pattern in patterns for path in folder.glob(pattern)}


def _compare_records(base: Path, tree: Path, name: str, found: Comparison) -> int:
    """Compares two files of a JSON object a line; returns how many values it compared."""
    ours, theirs = (path.read_text(encoding="utf-8").splitlines() for path in (base, tree))
    if len(ours) != len(theirs):
        found.differences.append(f"{name}: {len(ours)} lines in base, {len(theirs)} in tree")
    count = 0
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False), 1):
        records = [renamed(json.loads(line)) for line in (one, other)]
        values, others = (
            {key: value for key, value in _leaves(_unmeasured(record)) if not ADDED.fullmatch(key)}
            for record in records
        )
        place = f"{name} line {number}" + (f" (step {records[0]['step']})" if "step" in records[0] else "")
        for key in sorted(values.keys() ^ others.keys()):
            found.differences.append(f"{place} {key}: only in {'base' if key in values else 'tree'}")
        for key in sorted(values.keys() & others.keys()):
            count += 1
            # repr tells the sign of zero too, and gives a double back to the last bit.
            if repr(values[key]) != repr(others[key]):
                found.differences.append(f"{place} {key}: {values[key]!r} in base, {others[key]!r} in tree")
    return count


def renamed(record: Any) -> Any:
    """`record`, a value from JSON, with the new names of RENAMED for the keys of every mapping in it.

    Raises:
        ValueError: where a mapping has a key under both names.
    """
    if isinstance(record, list):
        return [renamed(entry) for entry in record]
    if not isinstance(record, Mapping):
        return record
    both = [old for old, new in RENAMED.items() if old in record and new in record]
    if both:
        raise ValueError(f"a record has {both} and the new names too ({[RENAMED[old] for old in both]}); see RENAMED")
    return {RENAMED.get(key, key): renamed(value) for key, value in record.items()}


def _unmeasured(record: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in record.items() if not k.startswith(_MEASURED) and _MEASURED_RATE not in k}


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every number, text or null in `value`, with its place (`tokens[3].kl`); empty lists and mappings too."""
    if isinstance(value, Mapping) and value:
        for key, entry in value.items():
            yield from _leaves(entry, f"{place}.{key}" if place else key)
    elif isinstance(value, list) and value:
        for index, entry in enumerate(value):
            yield from _leaves(entry, f"{place}[{index}]")
    else:
        yield place, value


def _compare_checkpoints(base: Path, tree: Path, found: Comparison) -> None:
    """Compares the tensors that both have under the same names; how a checkpoint is laid out may change."""
    ours, theirs = (_names(folder, (_CHECKPOINTS,)) for folder in (base, tree))
    for name in sorted(ours & theirs):
        found.tensors += _compare_tensors(base / name, tree / name, name, found, names_may_differ=True)
    if ours != theirs:
        found.notes.append(f"checkpoint files in one only, not compared: {', '.join(sorted(ours ^ theirs))}")


def _compare_tensors(base: Path, tree: Path, name: str, found: Comparison, *, names_may_differ: bool = False) -> int:
    """Compares two safetensors files; returns how many tensors it compared."""
    return _compare_dictionaries(load_file(base), load_file(tree), name, found, names_may_differ=names_may_differ)


def _compare_dictionaries(
    ours: Mapping[str, torch.Tensor],
    theirs: Mapping[str, torch.Tensor],
    name: str,
    found: Comparison,
    *,
    names_may_differ: bool = False,
) -> int:
    if names_may_differ:
        if ours.keys() != theirs.keys():
            found.notes.append(f"{name}: {len(ours.keys() ^ theirs.keys())} tensors in one only, not compared")
    else:
        for key in sorted(ours.keys() ^ theirs.keys()):
            found.differences.append(f"{name} {key}: only in {'base' if key in ours else 'tree'}")
    shared = sorted(ours.keys() & theirs.keys())
    for key in shared:
        difference = tensor_difference(ours[key], theirs[key])
        if difference is not None:
            found.differences.append(f"{name} {key}: {difference}")
    return len(shared)


def _critic(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of `final/value`. Earlier commits saved a scalar critic as a sequence classifier."""
    critic = {}
    for path in sorted(folder.glob("final/value/*.safetensors")):
        tensors = load_file(path)
        score = next((name for name in tensors if name.endswith("score.weight")), None)
        if path.name == "critic_head.safetensors":
            tensors = {f"head.{name}": value for name, value in tensors.items()}
        elif score is not None:
            head = {"head.weight": tensors.pop(score)}
            # A classifier has its backbone under a name; an adapter file has the same names in both forms.
            prefix = "" if score != "score.weight" else next(iter(tensors)).partition(".")[0] + "."
            tensors = head | {name.removeprefix(prefix): value for name, value in tensors.items()}
        critic |= tensors
    return critic


def tensor_difference(base: torch.Tensor, tree: torch.Tensor) -> str | None:
    """How many elements differ in any bit, with the first of them; None for none."""
    if (base.dtype, base.shape) != (tree.dtype, tree.shape):
        kinds = (f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (base, tree))
        return "{} in base, {} in tree".format(*kinds)
    elements = [tensor.contiguous().reshape(-1) for tensor in (base, tree)]
    if not elements[0].numel():
        return None
    # Bytes: as numbers, NaN is not itself, and 0 equals -0.
    bits = [tensor.view(dtype=torch.uint8).reshape(tensor.numel(), -1) for tensor in elements]
    differing = (bits[0] != bits[1]).any(dim=1).nonzero().reshape(-1).tolist()
    if not differing:
        return None
    one, other = (tensor[differing[0]].item() for tensor in elements)
    count = f"{len(differing)} of {len(bits[0])} elements differ"
    return f"{count}, first element {differing[0]}: {one!r} in base, {other!r} in tree"
