"""A sequence classifier as a reward source: its own tokenizer, its own chat template, scores that padding does not
touch.

Leaves out sharded reward models and reward adapters on a shared base.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.peft_utils import find_adapter_config_file

from alpaca_ppo.rewards.batch import Prompt, RewardBatch, RewardError


class ModelReward:
    """A sequence classifier with one label; a response's score is its logit, in float32.

    Text prompts are scored as prompt + completion, tokenised as one text with the special tokens that the tokenizer
    adds; messages go through the tokenizer's chat template. Sequences longer than the model's context are an error: a
    cut response has another score.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, name: str, batch_size: int
    ) -> None:
        _check_one_label(model.config, name)
        self.model = model
        # The classifier's own rules are read from here; a model of several modalities keeps them one level down.
        self._config: Any = model.config.get_text_config()
        self.tokenizer = tokenizer
        self.name = name
        self.batch_size = batch_size

    @torch.no_grad()
    def __call__(self, batch: RewardBatch) -> list[float]:
        """B scores. The model is in eval mode while it scores; rows are batched by length.

        Raises:
            RewardError: where a row is too long for the model, or is messages and the tokenizer has no chat template.
        """
        sequences = self._tokenize(batch)
        scores = torch.zeros(len(batch), dtype=torch.float32)
        order = sorted(range(len(batch)), key=lambda i: len(sequences[i]), reverse=True)
        training = self.model.training
        self.model.eval()
        try:
            for start in range(0, len(order), self.batch_size):
                chunk = order[start : start + self.batch_size]
                scores[chunk] = self._score([sequences[i] for i in chunk])
        finally:
            self.model.train(training)
        return scores.tolist()

    def to(self, device: torch.device | str) -> None:
        """Moves the model."""
        # The stub of `to` in transformers declares no arguments.
        torch.nn.Module.to(self.model, device)

    def _tokenize(self, batch: RewardBatch) -> list[list[int]]:
        # Some architectures (BLOOM) have no limit in their configuration.
        positions = getattr(self._config, "max_position_embeddings", self.tokenizer.model_max_length)
        limit = min(positions, self.tokenizer.model_max_length)
        sequences = []
        for row, (prompt, completion) in enumerate(zip(batch.prompts, batch.completions, strict=True)):
            encoded: Any
            if isinstance(prompt, str) and isinstance(completion, str):
                encoded = self.tokenizer(prompt + completion)
            elif self.tokenizer.chat_template is None:
                problem = "has a tokenizer without chat template, but got messages; set tokenizer.chat_template"
                raise RewardError(self.name, problem, batch, row)
            else:
                messages = [*_messages(prompt, "user"), *_messages(completion, "assistant")]
                encoded = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
            ids = list(encoded["input_ids"])
            if not 0 < len(ids) <= limit:
                problem = f"takes 1 to {limit} tokens and got {len(ids)}; change query_len or response_len"
                raise RewardError(self.name, problem, batch, row)
            sequences.append(ids)
        return sequences

    def _score(self, sequences: Sequence[list[int]]) -> Tensor:
        """(rows,) float32 on the CPU. Padding stands on the right, where causal attention never sees it."""
        fill = _fill_id(self._config, sequences)
        width = max(len(ids) for ids in sequences)
        input_ids = torch.tensor([ids + [fill] * (width - len(ids)) for ids in sequences])
        attention_mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in sequences])
        device = next(self.model.parameters()).device
        with _scoring(self._config, fill):
            output = self.model(input_ids=input_ids.to(device), attention_mask=attention_mask.to(device))
        return output.logits.squeeze(-1).float().cpu()


def build_model_reward(
    source: str | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    batch_size: int,
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> ModelReward:
    """The reward of a model in memory, or of a folder or hub id, whose weights are read from safetensors as `dtype`.

    Without `tokenizer` it is the one that lies where the model came from. The last part of that place is the name.

    Raises:
        ValueError: where there is no such model, it is an adapter, has not exactly one label or lacks weights (a
            language model has no trained score head), or no tokenizer is found.
    """
    origin = source if isinstance(source, str) else source.config.name_or_path or ""
    name = Path(origin).name or type(source).__name__
    model = _load_model(source, dtype, trust_remote_code) if isinstance(source, str) else source
    if tokenizer is None:
        tokenizer = _load_tokenizer(origin, name, trust_remote_code)
    return ModelReward(model, tokenizer, name=name, batch_size=batch_size)


def _load_model(origin: str, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    try:
        if find_adapter_config_file(origin) is not None:
            raise ValueError(
                f"reward_model_name_or_path (or an entry of reward_funcs) is {origin!r}, an adapter, no whole model; "
                "give it as reward_adapter, which puts it on the policy's base, or merge it into its base and save that"
            )
        _check_one_label(AutoConfig.from_pretrained(origin, trust_remote_code=trust_remote_code), origin)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            origin, dtype=dtype, trust_remote_code=trust_remote_code, use_safetensors=True, output_loading_info=True
        )
    except OSError as error:
        raise ValueError(
            f"no reward model can be loaded from {origin!r} ({error}); an entry of reward_funcs is module:function or "
            "file.py:function, a model (reward_model_name_or_path) is an existing folder with safetensors weights, or "
            "a hub id within reach"
        ) from error
    if report["missing_keys"]:
        raise ValueError(
            f"reward model {origin!r} lacks the weights {sorted(report['missing_keys'])}, which would be random; "
            "give a trained sequence classifier, not a language model"
        )
    return model


def _load_tokenizer(origin: str, name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    if not origin:
        raise ValueError(
            f"reward model {name!r} was built in memory and has no tokenizer; give one in reward_processing_classes"
        )
    try:
        return AutoTokenizer.from_pretrained(origin, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"reward model {origin!r} has no tokenizer beside it ({error}); give one in reward_processing_classes"
        ) from error


def _check_one_label(config: Any, name: str) -> None:
    if config.num_labels != 1:
        raise ValueError(
            f"reward model {name!r} has num_labels {config.num_labels}; a reward model is a sequence classifier with "
            "num_labels=1 (2 is also what a language model's configuration reports)"
        )


def _messages(said: Prompt, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": said}] if isinstance(said, str) else said


def _fill_id(config: Any, sequences: Sequence[list[int]]) -> int:
    """The id to pad with, such that a padded row is scored at the token at which the model alone would score it.

    Classifiers read the score at the last token that is not `config.pad_token_id`: that id must fill the rows,
    whatever the tokenizer pads with. With no pad id in the configuration the score of a single row stands at its very
    last token, so any id will do that no row ends with.
    """
    pad = config.pad_token_id
    # Old Llama configurations say -1, which has no embedding and stands for "none".
    if pad is not None and 0 <= pad < config.vocab_size:
        return int(pad)
    ends = {ids[-1] for ids in sequences}
    return next(token for token in range(config.vocab_size) if token not in ends)


@contextmanager
def _scoring(config: Any, pad_token_id: int) -> Iterator[None]:
    """The configuration as a forward pass needs it: the model looks up there which id pads a batch, and would keep keys
    and values for tokens that never come."""
    wanted = {"pad_token_id": pad_token_id, "use_cache": False}
    # Encoders have no cache.
    before = {name: getattr(config, name) for name in wanted if hasattr(config, name)}
    for name in before:
        setattr(config, name, wanted[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
