"""The READMEs in the folders of final models: the policy's model card and the value model's."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from huggingface_hub import ModelCardData

from alpaca_ppo.atomic_io import StrPath, write_text_atomically


def write_model_card(
    folder: StrPath, *, metrics: Mapping[str, float], config: Mapping[str, Any], base_model: str | None
) -> None:
    """Writes the policy's README.md: front matter, final metrics, how to load the model, the run's configuration.

    Args:
        folder: of the policy.
        metrics: metrics by name; timings (`time/`) are left out.
        config: plain values.
        base_model: hub id or folder that training started from. Only a hub id is named, which the hub can link.
    """
    adapter = (Path(folder) / "adapter_config.json").exists()
    is_hub_id = base_model and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base_model) and not Path(base_model).exists()
    front = ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=base_model if is_hub_id else None,
        tags=["alpaca_ppo", "ppo", "rlhf"],
    )
    rows = [f"| `{name}` | {metrics[name]:.4g} |" for name in sorted(metrics) if not name.startswith("time/")]
    text = _CARD.format(
        front=front.to_yaml(),
        metrics="\n".join(["| Metric | Last step |", "| --- | ---: |", *rows]) if rows else "No metrics were logged.",
        package="peft" if adapter else "transformers",
        loader="AutoPeftModelForCausalLM" if adapter else "AutoModelForCausalLM",
        config=yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True).strip(),
    )
    write_text_atomically(Path(folder) / "README.md", text)


def write_value_card(folder: StrPath, form: Literal["classifier", "critic", "adapter", "critic_adapter"]) -> None:
    """Writes the value model's README.md.

    Args:
        folder: of the value model.
        form: "classifier", a sequence classifier; "critic", a backbone and head for `models.load_critic`; "adapter" and
            "critic_adapter", the same two as adapters on the policy's base.
    """
    start = "" if form in ("adapter", "critic_adapter") else _START
    use = {"classifier": _CLASSIFIER_USE, "adapter": _ADAPTER_USE}.get(form, _HEAD_USE)
    write_text_atomically(Path(folder) / "README.md", _VALUE_CARD + start + use)


_CARD = """\
---
{front}
---

# A language model trained with PPO

Trained with PPO by `alpaca_ppo`. The complete configuration, including the advantage estimator and the KL penalty, is
below.

## Metrics

{metrics}

`objective/*` describe the rollouts, `ppo/*` the updates and `eval/*` the held-out prompts. KL is in nats.

## Use

```python
from {package} import {loader}
from transformers import AutoTokenizer

model = {loader}.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

## Configuration

```yaml
{config}
```
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

critic = AutoModelForSequenceClassification.from_pretrained("path/to/this/folder", num_labels=1)
hidden = critic.base_model(input_ids).last_hidden_state
values = critic.score(hidden)  # values[:, t] is the expected return after reading tokens 0..t
```
"""


_ADAPTER_USE = """
```python
from peft import AutoPeftModelForSequenceClassification

critic = AutoPeftModelForSequenceClassification.from_pretrained("path/to/this/folder", num_labels=1)
values = critic(input_ids).logits  # the expected return after reading all of input_ids
```
"""


_HEAD_USE = """
```python
from alpaca_ppo.models import load_critic

critic = load_critic("path/to/this/folder")
hidden = critic.backbone(input_ids).last_hidden_state
values = critic.head(hidden[:, -1]).values  # the expected return after reading all of input_ids
```
"""
