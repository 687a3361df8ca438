"""The READMEs in the folders of final models, from the templates in cards/.

They may be published, so local paths are shortened to their last part. run.yaml has them in full.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from alpaca_ppo.config.learning_options import chosen_rate
from alpaca_ppo.config.parser import as_yaml
from alpaca_ppo.doctor.examination import read_config, read_lines
from alpaca_ppo.models.saved_critic import has_reader
from alpaca_ppo.registry import ADV_ESTIMATORS
from alpaca_ppo.tracking.results import Ends, WeightsStep, better_before_training, means_in_words, start_and_end

_TEMPLATES = Path(__file__).with_name("cards")
# The last two may also be hub ids, or words such as `copy`.
_PATH_OPTIONS = ("output_dir", "deepspeed", "reference", "reward_adapter")
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
    """What a card shows of a run, besides key figures and the name of the data, which are read in its `folder`."""

    folder: Path
    step: WeightsStep
    metrics: Mapping[str, float]  # of that step; the card leaves out timings (`time/`)
    config: Mapping[str, Any]  # the options as plain values
    reward_weights: Mapping[str, float] | None = None  # by name of the reward source; None = not known


def write_model_card(folder: Path, run: TrainedRun, *, base_model: str | None, own_code: bool = False) -> None:
    """Writes the policy's README.md.

    Args:
        base_model: hub id or folder that training started from; the front matter names only a hub id.
        own_code: whether the model, or an adapter's base, needs `trust_remote_code`.
    """
    config, step = run.config, run.step
    adapter = (folder / "adapter_config.json").exists()
    metrics = run.folder / "metrics.jsonl"
    records = list(read_lines(metrics)) if metrics.exists() else []
    data = read_config(run.folder).get("dataset_name") if metrics.exists() else None
    records_of_weights = [record for record in records if record["step"] <= step.step]
    greater = config.get("greater_is_better", True)
    options = as_yaml({name: _without_folders(name, value) for name, value in config.items()}).strip()
    front_matter = ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=base_model if base_model and _is_hub_id(base_model) else None,
        tags=["alpaca_ppo", "ppo", "rlhf"],
    )
    card = ModelCard.from_template(
        front_matter,
        template_path=str(_TEMPLATES / "policy.md"),
        run=run,
        before=better_before_training(records, step.metric, step.value, greater_is_better=greater),
        base_model=_model_name(base_model),
        data=_model_name(data),
        with_critic="adv_estimator" in config and ADV_ESTIMATORS.trait(config["adv_estimator"], "needs_critic"),
        rate=chosen_rate(config.get("learning_rate"), has_adapter=adapter),
        steps=max((record["step"] for record in records), default=0),
        figures=_key_figures(records_of_weights),
        means=means_in_words(records_of_weights),
        adapter=adapter,
        own_code=own_code,
        options=options,
        # A code block ends at the first fence of at least its own length.
        fence="`" * max(3, 1 + max(map(len, re.findall("`+", options)), default=0)),
    )
    card.save(folder / "README.md")


def write_value_card(folder: Path, *, own_code: bool) -> None:
    """Writes the critic's README.md; for `own_code` see `write_model_card`."""
    front = ModelCardData(library_name="transformers", tags=["alpaca_ppo", "ppo", "value-model"])
    reads_policy = has_reader(str(folder))
    card = ModelCard.from_template(front, str(_TEMPLATES / "value.md"), own_code=own_code, reads_policy=reads_policy)
    card.save(folder / "README.md")


def _key_figures(records: Sequence[Mapping[str, Any]]) -> dict[str, Ends]:
    """Those of `_KEY_FIGURES` that were measured, each at the start and the end of the run."""
    figures = {}
    for meaning, names in _KEY_FIGURES.items():
        measured = [ends for name in names if (ends := start_and_end(records, name))]
        if measured:
            # Which of the two entropies is measured in every step depends on old_policy.
            figures[meaning] = max(measured, key=lambda ends: ends.measured)
    return figures


def _model_name(name: str | None) -> str | None:
    """A hub id as it is; of a local path the last part."""
    return name if not name or _is_hub_id(name) else os.path.basename(os.path.abspath(name))


def _is_hub_id(name: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)) and not Path(name).exists()


def _without_folders(option: str, value: Any) -> Any:
    """`value` of `option`, with local paths shortened to their last part."""
    if isinstance(value, Mapping):
        return {key: _without_folders(option, entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_folders(option, entry) for entry in value]
    # An option of a user's subclass may be a path too. A prompt template may begin with a slash, but does not exist.
    if isinstance(value, str) and (option in _PATH_OPTIONS or (os.path.isabs(value) and os.path.exists(value))):
        # "/" has no last part.
        return _model_name(value) or value
    return value
