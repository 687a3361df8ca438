"""The READMEs in the folders of final models: the policy's model card and the value model's.

They may be published, so they name no local path. The complete configuration, with its paths, is in run.yaml.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from huggingface_hub import ModelCardData, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers.utils import CONFIG_NAME

from alpaca_ppo.atomic_io import StrPath, write_text_atomically
from alpaca_ppo.checkpoint.training_curve import training_curve
from alpaca_ppo.registry import ADV_ESTIMATORS
from alpaca_ppo.tracking.start_and_end import better_before_training, means_in_words, start_and_end
from alpaca_ppo.tracking.weights_step import WeightsStep


def write_model_card(
    folder: StrPath,
    *,
    step: WeightsStep,
    metrics: Mapping[str, float],
    config: Mapping[str, Any],
    base_model: str | None,
    reward_weights: Mapping[str, float] | None = None,
    own_code: bool = False,
) -> None:
    """Writes the policy's README.md: front matter, what it was trained from, on and for, its key figures from start to
    end with a curve (training_curve.svg), how to load it, the last metrics and the run's configuration.

    The figures come from the run's metrics.jsonl, data and reward from its run.yaml, as far as these are there.

    Args:
        folder: of the policy.
        step: which step of the run the weights are from.
        metrics: metrics of that step by name; timings (`time/`) are left out.
        config: plain values. A local path is shortened to its last part.
        base_model: hub id or folder that training started from. It is named only if the hub's cache shows that it was
            downloaded: a relative folder that has been removed since looks like a hub id.
        reward_weights: the weight of each reward source by name, in the order of the sources; None = not known.
        own_code: whether the model, or an adapter's base, runs code of its own.
    """
    adapter = (Path(folder) / "adapter_config.json").exists()
    shown = yaml.safe_dump(
        {name: _without_folders(name, value) for name, value in config.items()}, sort_keys=False, allow_unicode=True
    ).strip()
    # A code block ends at the first fence of at least its own length.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", shown)), default=0))
    front = ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=base_model if base_model and _is_downloaded(base_model) else None,
        tags=["alpaca_ppo", "ppo", "rlhf"],
    )
    rows = [f"| `{name}` | {metrics[name]:.4g} |" for name in sorted(metrics) if not name.startswith("time/")]
    table = "\n".join([f"| Metric | Step {step.step} |", "| --- | ---: |", *rows])
    records, script = _read_run(config.get("output_dir"))
    of_weights = [record for record in records if record["step"] <= step.step]
    curve = training_curve(records)
    if curve:
        write_text_atomically(Path(folder) / _CURVE, curve)
    text = _CARD.format(
        front=front.to_yaml(),
        step=step,
        warning=_worse_than_before(step, records, greater_is_better=config.get("greater_is_better", True)),
        recipe=_recipe(config, script, reward_weights or {}, records, base_model),
        figures=_key_figures(of_weights) + (f"\n\n![Reward and KL over the run]({_CURVE})" if curve else ""),
        metrics=table if rows else "No metrics were logged.",
        package="peft" if adapter else "transformers",
        loader="AutoPeftModelForCausalLM" if adapter else "AutoModelForCausalLM",
        trust=_TRUST if own_code else "",
        config=shown,
        fence=fence,
    )
    write_text_atomically(Path(folder) / "README.md", text)


def _read_run(output_dir: str | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The lines of metrics.jsonl, and run.yaml, of the run in `output_dir`; empty without them."""
    metrics, options = (Path(output_dir or "") / name for name in ("metrics.jsonl", "run.yaml"))
    if not output_dir or not metrics.exists():
        return [], {}
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return lines, yaml.safe_load(options.read_text()) if options.exists() else {}


def _recipe(
    config: Mapping[str, Any],
    script: Mapping[str, Any],
    reward_weights: Mapping[str, float],
    records: Sequence[Mapping[str, Any]],
    base_model: str | None,
) -> str:
    """Base model, data, reward and recipe as a list; what is not known is left out."""
    lines = [("Base model", f"`{_model_name(base_model)}`" if base_model else "")]
    lines += [("Data", f"`{_model_name(script['dataset_name'])}`" if script.get("dataset_name") else "")]
    weighted = any(weight != 1 for weight in reward_weights.values())
    sources = [
        f"`{source}`" + (f" (weight {weight:g})" if weighted else "") for source, weight in reward_weights.items()
    ]
    lines += [("Reward", ", ".join(sources))]
    if "adv_estimator" in config:
        lines += [("Recipe", _method(config, records))]
    return "\n".join(f"- **{what}**: {value}" for what, value in lines if value)


def _method(config: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    with_critic = ADV_ESTIMATORS.trait(config["adv_estimator"], "needs_critic")
    critic = f"a {config['critic']} critic ({config['critic_layout']})" if with_critic else "no critic"
    kl = f"a KL penalty of {config['kl_coef']:g} in the reward" if config["use_kl_in_reward"] else "no KL in the reward"
    kl += f", a KL loss of {config['kl_loss_coef']:g}" if config["use_kl_loss"] else ""
    steps = max((record["step"] for record in records), default=0)
    return (
        f"`{config['adv_estimator']}` advantages, the `{config['policy_loss']}` loss, {critic}, {kl}; "
        f"{config['rollout_batch_size']} prompts with {config['num_return_sequences']} response(s) a step, "
        f"learning rate {config['learning_rate']:g}" + (f", {steps} steps" if steps else "")
    )


def _key_figures(records: Sequence[Mapping[str, Any]]) -> str:
    """A table of the metrics that matter at both ends, as `start_and_end` has them; of one measured once, the first
    alone.
    """
    rows = []
    for meaning, names in _KEY_FIGURES.items():
        # Which of the two entropies is measured in every step depends on old_policy.
        measured = [ends for name in names if (ends := start_and_end(records, name))]
        if measured:
            ends = max(measured, key=lambda each: each.measured)
            end = f" {ends.end:.4g}" if ends.measured > 1 else ""
            rows.append(f"| {meaning} | {ends.start:.4g} |{end} |")
    if not rows:
        return "No metrics were logged."
    table = "\n".join(["| | Start | End |", "| --- | ---: | ---: |", *rows])
    if means := means_in_words(records):
        table += f"\n\n{means.capitalize()}; on held-out prompts, the first and the last evaluation."
    return table


def _worse_than_before(step: WeightsStep, records: Sequence[Mapping[str, Any]], *, greater_is_better: bool) -> str:
    """A paragraph for the weights of a best checkpoint that are worse than those that training began with; or ""."""
    if step.metric is None or step.value is None:
        return ""
    before = better_before_training(records, step.metric, step.value, greater_is_better=greater_is_better)
    if before is None:
        return ""
    return (
        f"**These weights are worse than those before training**: `{step.metric}` was {before:.4g}, and is "
        f"{step.value:.4g}.\n\n"
    )


def _model_name(name: str) -> str:
    """A hub id as it is, and of a local path the last part."""
    return name if _is_hub_id(name) else os.path.basename(os.path.abspath(name))


def _is_hub_id(name: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)) and not Path(name).exists()


def _is_downloaded(name: str) -> bool:
    try:
        return _is_hub_id(name) and isinstance(try_to_load_from_cache(name, CONFIG_NAME), str)
    except HFValidationError:
        return False


def _without_folders(option: str, value: Any) -> Any:
    """`value` of `option` with each path of this machine in it shortened to its last part."""
    if isinstance(value, Mapping):
        return {key: _without_folders(option, entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_folders(option, entry) for entry in value]
    # abspath, because "." has no last part. Neither has "/", which names nothing.
    return os.path.basename(os.path.abspath(value)) or value if _is_local_path(option, value) else value


def _is_local_path(option: str, value: Any) -> bool:
    """Whether the value of `option` is the path of a file or folder of this machine."""
    if not isinstance(value, str):
        return False
    if option in _MODEL_OPTIONS:
        return not _is_hub_id(value)
    if option in _PATH_OPTIONS:
        return True
    # An option that a subclass of the configuration adds. A prompt template may begin with a slash too.
    return os.path.isabs(value) and os.path.exists(value)


def write_value_card(
    folder: StrPath,
    form: Literal["classifier", "critic", "adapter", "critic_adapter"],
    *,
    own_code: bool = False,
) -> None:
    """Writes the value model's README.md.

    Args:
        folder: of the value model.
        form: "classifier", a sequence classifier; "critic", a backbone and head for `models.load_critic`; "adapter" and
            "critic_adapter", the same two as adapters on the policy's base.
        own_code: whether the model, or an adapter's base, runs code of its own.
    """
    start = "" if form in ("adapter", "critic_adapter") else _START
    use = {"classifier": _CLASSIFIER_USE, "adapter": _ADAPTER_USE}.get(form, _HEAD_USE)
    text = (_VALUE_CARD + start + use).format(trust=_TRUST if own_code else "")
    write_text_atomically(Path(folder) / "README.md", text)


_PATH_OPTIONS = ("output_dir", "deepspeed")
_MODEL_OPTIONS = ("reference", "reward_adapter")
"""Options that are paths, hub ids, or words such as `copy`."""
_TRUST = ", trust_remote_code=True"

_CURVE = "training_curve.svg"
_KEY_FIGURES = {
    "Reward on held-out prompts": ("eval/scores",),
    "Reward on training prompts": ("objective/scores",),
    "KL to the reference, nats per response": ("objective/kl_sum_seq",),
    "Response length, tokens": ("objective/response_length",),
    "Responses cut off, share": ("objective/truncated_fraction",),
    "Entropy, nats per token": ("objective/entropies", "ppo/policy/entropy"),
    "Explained variance of the critic": ("ppo/val/explained_variance",),
}

_CARD = """\
---
{front}
---

# A language model trained with PPO

Trained by `alpaca_ppo`; the weights are those of {step}. The complete
configuration is below; of local paths, only the last part.

{warning}{recipe}

## Key figures

{figures}

## Use

```python
from {package} import {loader}
from transformers import AutoTokenizer

model = {loader}.from_pretrained("path/to/this/folder"{trust})
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder"{trust})
```

## Metrics

{metrics}

`objective/*` describe the rollouts, `ppo/*` the updates and `eval/*` the held-out prompts. KL is in nats.

## Configuration

{fence}yaml
{config}
{fence}
"""


_VALUE_CARD = """\
---
library_name: transformers
tags:
- alpaca_ppo
- ppo
- value-model
---

# The critic of a PPO run
"""


_START = """
To start the critic of another run from it, pass this folder as `value_model`.
"""


_CLASSIFIER_USE = """
```python
from transformers import AutoModelForSequenceClassification

critic = AutoModelForSequenceClassification.from_pretrained("path/to/this/folder", num_labels=1{trust})
hidden = critic.base_model(input_ids).last_hidden_state
values = critic.score(hidden)  # values[:, t] is the expected return after reading tokens 0..t
```
"""


_ADAPTER_USE = """
```python
from peft import AutoPeftModelForSequenceClassification

critic = AutoPeftModelForSequenceClassification.from_pretrained("path/to/this/folder", num_labels=1{trust})
values = critic(input_ids).logits  # the expected return after reading all of input_ids
```
"""


_HEAD_USE = """
```python
from alpaca_ppo.models import load_critic

critic = load_critic("path/to/this/folder"{trust})
hidden = critic.backbone(input_ids).last_hidden_state
values = critic.head(hidden[:, -1]).values  # the expected return after reading all of input_ids
```
"""
