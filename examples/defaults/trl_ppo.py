"""PPO by TRL's `PPOTrainer` on a task without an environment. `trl_run` runs this in TRL's own virtual environment.

It writes the policy at points of the run, and points.json with the responses and processor seconds until each. What
the policies are worth is not measured here.
"""

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from examples.defaults.trl_points import Points
from examples.mini_farm.splits import read_rows
from examples.mini_farm.trl_ppo import TextClassifier, classifier_of, trainer_of


class FunctionBackbone(nn.Module):
    """A backbone whose last states (B, T, 1) are, at every position, the score of the row's text.

    Args:
        function: returns the scores of prompts and completions.
        tokenizer: the policy's.
        query_len: columns of the prompts, which are padded on the left.
    """

    def __init__(
        self, function: Callable[..., list[float]], tokenizer: PreTrainedTokenizerBase, *, query_len: int
    ) -> None:
        super().__init__()
        self._function, self._tokenizer, self._query_len = function, tokenizer, query_len

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        """`input_ids` (B, T) of prompts and completions; the mask is False at padding, which TRL has replaced."""
        rows, mask = input_ids, attention_mask.bool()
        prompts, completions = (
            self._tokenizer.batch_decode(
                [ids[kept].tolist() for ids, kept in zip(rows[:, part], mask[:, part], strict=True)],
                skip_special_tokens=True,
            )
            for part in (slice(self._query_len), slice(self._query_len, None))
        )
        scores = torch.tensor(self._function(prompts=prompts, completions=completions), dtype=torch.float32)
        return SimpleNamespace(hidden_states=(scores[:, None, None].expand(*input_ids.shape, 1),))


class FunctionReward(nn.Module):
    """A reward function in the shape in which TRL calls a reward model: `score` of the backbone's last states."""

    base_model_prefix = "backbone"

    def __init__(
        self, function: Callable[..., list[float]], tokenizer: PreTrainedTokenizerBase, *, query_len: int
    ) -> None:
        super().__init__()
        self.backbone = FunctionBackbone(function, tokenizer, query_len=query_len)
        self.score = nn.Identity()


def reward_of(run: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """Returns the reward model of `run`, or its reward function as one."""
    if "reward_model" in run:
        return TextClassifier(classifier_of(run["reward_model"], tokenizer), int(tokenizer.eos_token_id))
    module, _, name = run["reward_function"].partition(":")
    return FunctionReward(getattr(importlib.import_module(module), name), tokenizer, query_len=run["query_len"])


def train(run: Mapping[str, Any]) -> None:
    """Trains with TRL.

    Args:
        run: as for `trainer_of`, with `reward_model` (a folder) or `reward_function` ("module:function"), `prompts`
            (a .jsonl file of rows), `prompt_template` and `query_len` of the prompts, and `points`, how often the
            policy is saved.
    """
    output = Path(run["output_dir"])
    tokenizer = AutoTokenizer.from_pretrained(run["policy"], padding_side="left")
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        # TRL takes every pad token for padding, also one that ends a turn of a chat template.
        tokenizer.pad_token = tokenizer.unk_token
    texts = [run["prompt_template"].format(**row) for row in read_rows(Path(run["prompts"]))]
    prompts = [ids for ids in tokenizer(texts)["input_ids"] if len(ids) <= run["query_len"]]
    width = max(map(len, prompts))
    # All of one width, so that a reward function finds where answers begin.
    prompts = [[tokenizer.pad_token_id] * (width - len(ids)) + ids for ids in prompts]
    trainer = trainer_of(run, tokenizer, reward_of({**run, "query_len": width}, tokenizer), prompts)
    optimizer_steps = 0

    def count_step(*_: Any) -> None:
        nonlocal optimizer_steps
        optimizer_steps += 1

    points = Points(output, run["points"], tokenizer, lambda: trainer.policy_model, lambda state: state.episode)
    trainer.add_callback(points)
    trainer.optimizer.optimizer.register_step_post_hook(count_step)
    trainer.train()
    points.write(optimizer_steps=optimizer_steps, num_ppo_epochs=trainer.args.num_ppo_epochs)


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
