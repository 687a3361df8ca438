"""PPO by TRL's `PPOTrainer` on the laboratory's models. `against_trl` runs this in TRL's own virtual environment, where
this package is not installed.

It writes what a run of this package writes, as far as the comparison reads it: metrics.jsonl and final/policy.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TrainerCallback,
    set_seed,
)

from examples.mini_farm.annotators import gold_score
from examples.mini_farm.splits import Row, prompt_of, read_rows


class BeforeEos(nn.Module):
    """A causal backbone whose last states at an eos token are those of the token before it."""

    def __init__(self, backbone: nn.Module, eos: int) -> None:
        super().__init__()
        self.backbone, self.eos = backbone, eos

    def forward(self, input_ids: Tensor, **given: Any) -> Any:
        """As the backbone, with `input_ids` (B, T)."""
        output: Any = self.backbone(input_ids=input_ids, **given)
        *lower, states = output.hidden_states
        at_eos = (input_ids == self.eos).unsqueeze(-1)
        output.hidden_states = (*lower, torch.where(at_eos, states.roll(1, dims=1), states))
        return output


class TextClassifier(nn.Module):
    """A reward model that scores an answer by its text, as this package does, where TRL reads the score at the eos.

    The laboratory's reward model has never seen an eos. Without this, TRL would learn from other scores.
    """

    base_model_prefix = "backbone"
    """TRL reads the backbone's name here, and the head as `score`."""

    def __init__(self, classifier: Any, eos: int) -> None:
        super().__init__()
        self.backbone = BeforeEos(classifier.base_model, eos)
        self.score = classifier.score


class Recorder:
    """Writes a line of metrics.jsonl for each of TRL's updates, under this package's names.

    Args:
        path: the file.
        tokenizer: the policy's.
        rows: the prompts' rows, by which the annotators score answers.
        eos_penalty: what TRL subtracts from the score of an answer without an eos.
    """

    def __init__(self, path: Path, tokenizer: Any, rows: Sequence[Row], *, eos_penalty: float) -> None:
        self._path, self._tokenizer, self._eos_penalty = path, tokenizer, eos_penalty
        self._rows = {prompt_of(row): row for row in rows}
        self._start = time.perf_counter()
        self._optimizer_steps = 0
        self._step = 0
        self._queries = self._responses = torch.empty(0, 0)

    def begin(self) -> None:
        """An update begins."""
        self._start, self._optimizer_steps = time.perf_counter(), 0

    def count_step(self, *_: Any) -> None:
        """A hook for torch's optimizer, which has made a step."""
        self._optimizer_steps += 1

    def watch(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Returns TRL's `generate` of (model, queries, ...), whose answers are kept until the update ends."""

        def watched(model: Any, queries: Tensor, *args: Any, **kwargs: Any) -> Any:
            ids, logits = generate(model, queries, *args, **kwargs)
            self._queries, self._responses = queries, ids[:, queries.size(1) :]
            return ids, logits

        return watched

    def write(self, logs: Mapping[str, float]) -> None:
        """An update has ended with TRL's metrics `logs`."""
        is_eos = self._responses == self._tokenizer.eos_token_id
        # Nothing counts after the first eos.
        kept = is_eos.cumsum(dim=1) - is_eos.long() == 0
        ids = torch.where(kept, self._responses, self._tokenizer.pad_token_id)
        prompts, answers = (
            self._tokenizer.batch_decode(part, skip_special_tokens=True) for part in (self._queries, ids)
        )
        gold = [gold_score(answer, self._rows[prompt]) for prompt, answer in zip(prompts, answers, strict=True)]
        truncated = 1 - is_eos.any(dim=1).float().mean().item()
        self._step += 1
        line = {
            "step": self._step,
            "objective/kl_sum_seq": logs["objective/kl"],
            "objective/scores": logs["objective/scores"] + self._eos_penalty * truncated,
            "objective/scores/gold": sum(gold) / len(gold),
            "objective/response_length": kept.sum(dim=1).float().mean().item(),
            "objective/truncated_fraction": truncated,
            "objective/lr": logs["lr"],
            "ppo/policy/optimizer_steps": self._optimizer_steps,
            "time/step": time.perf_counter() - self._start,
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def classifier_of(folder: str, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Returns the sequence classifier in `folder`; a language model there gets a new head."""
    return AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32, pad_token_id=tokenizer.pad_token_id
    )


def trainer_of(
    run: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    reward_model: nn.Module,
    prompts: Sequence[Sequence[int]],
) -> Any:
    """Returns TRL's trainer.

    Args:
        run: `policy` and `value_model` (folders; a value model that is the policy's folder gets a head of zeros, as
            this package's critic), `output_dir`, and `settings`, the arguments of TRL's `PPOConfig`.
        tokenizer: the policy's, which pads on the left.
        reward_model: has a backbone and a `score`, as TRL's `get_reward` calls them.
        prompts: token ids of each.
    """
    # In TRL's environment only.
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    args = PPOConfig(output_dir=run["output_dir"], **run["settings"])
    set_seed(args.seed)
    value_model = classifier_of(run["value_model"], tokenizer)
    if run["value_model"] == run["policy"]:
        nn.init.zeros_(value_model.score.weight)
    dataset = Dataset.from_list([{"input_ids": ids} for ids in prompts])
    return PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(run["policy"], dtype=torch.float32),
        ref_model=None,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=dataset,
        # TRL's constructor reads its length.
        eval_dataset=dataset,
    )


def train(run: Mapping[str, Any]) -> None:
    """Trains with TRL.

    Args:
        run: as for `trainer_of`, with `reward_model` (a folder) and `prompts` (a .jsonl file of rows).
    """
    # In TRL's environment only.
    from trl.experimental.ppo import ppo_trainer

    output = Path(run["output_dir"])
    tokenizer = AutoTokenizer.from_pretrained(run["policy"], padding_side="left")
    judge = TextClassifier(classifier_of(run["reward_model"], tokenizer), tokenizer.eos_token_id)
    rows = read_rows(Path(run["prompts"]))
    trainer = trainer_of(run, tokenizer, judge, [tokenizer(prompt_of(row))["input_ids"] for row in rows])
    eos_penalty = trainer.args.missing_eos_penalty or 0.0
    recorder = Recorder(output / "metrics.jsonl", tokenizer, rows, eos_penalty=eos_penalty)
    ppo_trainer.batch_generation = recorder.watch(ppo_trainer.batch_generation)

    class Metrics(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            recorder.begin()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            recorder.write(logs)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            recorder.begin()

    trainer.add_callback(Metrics())
    trainer.optimizer.optimizer.register_step_post_hook(recorder.count_step)
    trainer.train()
    trainer.policy_model.save_pretrained(output / "final" / "policy")
    tokenizer.save_pretrained(output / "final" / "policy")


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
