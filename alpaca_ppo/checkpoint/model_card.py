"""The READMEs in the folders of final models, from the templates in cards/.

They may be published, so they name no local path. The complete configuration, with its paths, is in run.yaml.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from alpaca_ppo.config.parser import as_yaml
from alpaca_ppo.registry import ADV_ESTIMATORS
from alpaca_ppo.tracking.results import Ends, WeightsStep, better_before_training, means_in_words, start_and_end

_TEMPLATES = Path(__file__).with_name("cards")
_PATH_OPTIONS = ("output_dir", "deepspeed", "reference", "reward_adapter")
"""Options that are paths; the last two may also be hub ids, or words such as `copy`."""
_CURVE = "training_curve.svg"
_LEAST_STEPS = 5
"""Of a run that logged fewer, there is no curve to see."""
_KEY_FIGURES = {
    "Reward on held-out prompts": ("eval/scores",),
    "Reward on training prompts": ("objective/scores",),
    "KL to the reference, nats per response": ("objective/kl_sum_seq",),
    "Response length, tokens": ("objective/response_length",),
    "Responses cut off, share": ("objective/truncated_fraction",),
    "Entropy, nats per token": ("objective/entropies", "ppo/policy/entropy"),
    "Explained variance of the critic": ("ppo/val/explained_variance",),
}


@dataclass(frozen=True)
class TrainedRun:
    """What a card tells of a run.

    Its figures come from the run's metrics.jsonl and the data from its run.yaml, as far as these are there.
    """

    step: WeightsStep
    metrics: Mapping[str, float]
    """Metrics of that step by name; timings (`time/`) are left out."""
    config: Mapping[str, Any]
    """The options as plain values. A local path is shortened to its last part."""
    reward_weights: Mapping[str, float] | None = None
    """The weight of each reward source by name, in the order of the sources; None = not known."""


def write_model_card(folder: Path, run: TrainedRun, *, base_model: str | None, own_code: bool = False) -> None:
    """Writes the policy's README.md: front matter, what it was trained from, on and for, its key figures from start to
    end with a curve (training_curve.svg), how to load it, the last metrics and the run's configuration.

    Args:
        folder: of the policy.
        run: what is told.
        base_model: hub id or folder that training started from. The front matter names it if it is no folder.
        own_code: whether the model, or an adapter's base, runs code of its own.
    """
    adapter, config, step = (folder / "adapter_config.json").exists(), run.config, run.step
    records, data = _read_run(config.get("output_dir"))
    of_weights = [record for record in records if record["step"] <= step.step]
    before = None
    if step.metric is not None and step.value is not None:
        greater = config.get("greater_is_better", True)
        before = better_before_training(records, step.metric, step.value, greater_is_better=greater)
    shown = as_yaml({name: _without_folders(name, value) for name, value in config.items()}).strip()
    card = ModelCard.from_template(
        ModelCardData(
            library_name="peft" if adapter else "transformers",
            pipeline_tag="text-generation",
            base_model=base_model if base_model and _is_hub_id(base_model) else None,
            tags=["alpaca_ppo", "ppo", "rlhf"],
        ),
        template_path=str(_TEMPLATES / "policy.md"),
        run=run,
        before=before,
        base_model=_model_name(base_model),
        data=_model_name(data),
        with_critic="adv_estimator" in config and ADV_ESTIMATORS.trait(config["adv_estimator"], "needs_critic"),
        steps=max((record["step"] for record in records), default=0),
        figures=_key_figures(of_weights),
        means=means_in_words(of_weights),
        curve=_CURVE if _write_curve(records, folder / _CURVE) else None,
        adapter=adapter,
        own_code=own_code,
        options=shown,
        # A code block ends at the first fence of at least its own length.
        fence="`" * max(3, 1 + max(map(len, re.findall("`+", shown)), default=0)),
    )
    card.save(folder / "README.md")


def write_value_card(folder: Path, *, own_code: bool) -> None:
    """Writes the critic's README.md; with `own_code` the model, or an adapter's base, runs code of its own."""
    front = ModelCardData(library_name="transformers", tags=["alpaca_ppo", "ppo", "value-model"])
    card = ModelCard.from_template(front, str(_TEMPLATES / "value.md"), own_code=own_code)
    card.save(folder / "README.md")


def _read_run(output_dir: str | None) -> tuple[list[dict[str, Any]], str | None]:
    """The lines of metrics.jsonl, and the name of the data in run.yaml, of the run in `output_dir`."""
    metrics, options = (Path(output_dir or "") / name for name in ("metrics.jsonl", "run.yaml"))
    if not output_dir or not metrics.exists():
        return [], None
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return lines, yaml.safe_load(options.read_text()).get("dataset_name") if options.exists() else None


def _key_figures(records: Sequence[Mapping[str, Any]]) -> dict[str, Ends]:
    """The metrics that matter at both ends, as `start_and_end` has them; of one measured once, the first alone."""
    found = {}
    for meaning, names in _KEY_FIGURES.items():
        # Which of the two entropies is measured in every step depends on old_policy.
        measured = [ends for name in names if (ends := start_and_end(records, name))]
        if measured:
            found[meaning] = max(measured, key=lambda each: each.measured)
    return found


def _write_curve(records: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draws rewards and KL over the steps; returns whether there were enough of them."""
    if len(records) < _LEAST_STEPS:
        return False
    # Half a second, which a run without a curve need not wait for.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 2.6), layout="constrained")
    rewards = figure.add_subplot(xlabel="step", ylabel="reward")
    kl = rewards.twinx()
    kl.set_ylabel("KL to the reference, nats")
    for axis, name, label, color in (
        (rewards, "objective/scores", "reward, training prompts", "#1f5fa8"),
        (rewards, "eval/scores", "reward, held-out prompts", "#c2570c"),
        (kl, "objective/kl_sum_seq", "KL (right)", "#6b7280"),
    ):
        points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
        if points:
            axis.plot(*zip(*points, strict=True), label=label, color=color)
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize="small")
    # Text as text, and no date or random ids.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "alpaca_ppo"}):
        figure.savefig(path, metadata={"Date": None})
    return True


def _model_name(name: str | None) -> str | None:
    """A hub id as it is, and of a local path the last part."""
    return name if not name or _is_hub_id(name) else os.path.basename(os.path.abspath(name))


def _is_hub_id(name: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)) and not Path(name).exists()


def _without_folders(option: str, value: Any) -> Any:
    """`value` of `option` with each path of this machine in it shortened to its last part."""
    if isinstance(value, Mapping):
        return {key: _without_folders(option, entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_folders(option, entry) for entry in value]
    # An option that a subclass of the configuration adds may be a path; a prompt template may begin with a slash too.
    if isinstance(value, str) and (option in _PATH_OPTIONS or (os.path.isabs(value) and os.path.exists(value))):
        # "/" has no last part, and names nothing.
        return _model_name(value) or value
    return value
