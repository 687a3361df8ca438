"""The model cards in the folders that a run leaves behind."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from alpaca_ppo.atomic_io import StrPath, write_text_atomically


def write_model_card(
    folder: StrPath, *, figures: Mapping[str, float], config: Mapping[str, Any], base_model: str | None
) -> None:
    """Writes README.md into `folder`: front matter, the run's figures as a table, how to load it, its configuration.

    Args:
        folder: of the policy.
        figures: names and numbers; timings (`time/`) are left out.
        config: plain values.
        base_model: hub id or folder that training started from. A folder is not named, the hub could not link it.
    """
    adapter = (Path(folder) / "adapter_config.json").exists()
    front: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "pipeline_tag": "text-generation"}
    if base_model and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base_model) and not Path(base_model).exists():
        front["base_model"] = base_model
    front["tags"] = ["alpaca_ppo", "ppo", "rlhf"]
    rows = [f"| `{name}` | {figures[name]:.4g} |" for name in sorted(figures) if not name.startswith("time/")]
    text = _CARD.format(
        front=yaml.safe_dump(front, sort_keys=False).strip(),
        figures="\n".join(["| Figure | Last step |", "| --- | ---: |", *rows]) if rows else "None were recorded.",
        package="peft" if adapter else "transformers",
        loader="AutoPeftModelForCausalLM" if adapter else "AutoModelForCausalLM",
        config=yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True).strip(),
    )
    write_text_atomically(Path(folder) / "README.md", text)


_CARD = """\
---
{front}
---

# A language model trained with PPO

Trained by `alpaca_ppo` with PPO; the configuration below says with which advantages and which KL penalty.

## Figures

{figures}

`objective/*` are of the rollouts, `ppo/*` of the updates, `eval/*` of held-out prompts; KL is in nats.

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


_STARTS = """
A later run starts from it with `value_model`.
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
