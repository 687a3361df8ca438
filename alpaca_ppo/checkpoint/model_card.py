"""The READMEs in the folders of final models: the policy's model card and the value model's.

They may be published, so they name no local path. The complete configuration, with its paths, is in run.yaml.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from huggingface_hub import ModelCardData, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers.utils import CONFIG_NAME

from alpaca_ppo.atomic_io import StrPath, write_text_atomically


def write_model_card(
    folder: StrPath,
    *,
    metrics: Mapping[str, float],
    config: Mapping[str, Any],
    base_model: str | None,
    own_code: bool = False,
) -> None:
    """Writes the policy's README.md: front matter, final metrics, how to load the model, the run's configuration.

    Args:
        folder: of the policy.
        metrics: metrics by name; timings (`time/`) are left out.
        config: plain values. A local path is shortened to its last part.
        base_model: hub id or folder that training started from. It is named only if the hub's cache shows that it was
            downloaded: a relative folder that has been removed since looks like a hub id.
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
    text = _CARD.format(
        front=front.to_yaml(),
        metrics="\n".join(["| Metric | Last step |", "| --- | ---: |", *rows]) if rows else "No metrics were logged.",
        package="peft" if adapter else "transformers",
        loader="AutoPeftModelForCausalLM" if adapter else "AutoModelForCausalLM",
        trust=_TRUST if own_code else "",
        config=shown,
        fence=fence,
    )
    write_text_atomically(Path(folder) / "README.md", text)


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
    form: Literal["classifier", "critic", "adapter", "critic_adapter", "side"],
    *,
    own_code: bool = False,
    privileged_column: str | None = None,
) -> None:
    """Writes the value model's README.md.

    Args:
        folder: of the value model.
        form: "classifier", a sequence classifier; "critic", a backbone and head for `models.load_critic`; "adapter" and
            "critic_adapter", the same two as adapters on the policy's base; "side", a network on the policy's states.
        own_code: whether the model, or an adapter's base, runs code of its own.
        privileged_column: where the text comes from that the critic has read before the prompt; None = it read none.
    """
    start = "" if form in ("adapter", "critic_adapter") else _START
    use = {"classifier": _CLASSIFIER_USE, "adapter": _ADAPTER_USE, "side": _SIDE_USE}.get(form, _HEAD_USE)
    text = (_VALUE_CARD + start + use).format(trust=_TRUST if own_code else "")
    if privileged_column is not None:
        text += _PRIVILEGED.format(column=privileged_column)
    write_text_atomically(Path(folder) / "README.md", text)


_PATH_OPTIONS = ("output_dir", "deepspeed")
_MODEL_OPTIONS = ("reference", "reward_adapter")
"""Options that are paths, hub ids, or words such as `copy`."""
_TRUST = ", trust_remote_code=True"

_CARD = """\
---
{front}
---

# A language model trained with PPO

Trained with PPO by `alpaca_ppo`. The complete configuration, including the advantage estimator and the KL penalty, is
below; of local paths, only the last part.

## Metrics

{metrics}

`objective/*` describe the rollouts, `ppo/*` the updates and `eval/*` the held-out prompts. KL is in nats.

## Use

```python
from {package} import {loader}
from transformers import AutoTokenizer

model = {loader}.from_pretrained("path/to/this/folder"{trust})
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder"{trust})
```

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


_PRIVILEGED = """
It was trained with `privileged_column: {column}`: begin `input_ids` with the text of that column and a newline, before
the prompt, and set the option where another run starts from this critic.
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


_SIDE_USE = """
It reads the hidden states of the policy that it was trained with, the folder `policy` beside this one.

```python
from alpaca_ppo.models import load_critic

critic = load_critic("path/to/this/folder")
hidden = critic.side.states_of(policy, input_ids)  # policy: the causal language model of the folder beside this one
values = critic.head(hidden[:, -1]).values  # the expected return after reading all of input_ids
```
"""
