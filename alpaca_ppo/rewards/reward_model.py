"""A sequence classifier as a reward source, with its own tokenizer and chat template; padding does not change a score.

Reward models sharded over devices are not supported. A reward adapter on the policy's base is in `adapter_model`.
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

from alpaca_ppo.damaged_files import loading
from alpaca_ppo.remote_code import remote_code
from alpaca_ppo.rewards.batch import Prompt, RewardBatch, RewardError


class ModelReward:
    """A sequence classifier with one label; the score of a response is its logit, in float32.

    A text prompt is scored as prompt + completion, tokenized as one text with the tokenizer's special tokens. Messages
    go through the tokenizer's chat template. A sequence longer than the model's context is an error, not truncated:
    truncation would change its score.

    Args:
        model: the classifier.
        tokenizer: the tokenizer that it was trained with.
        name: name of the source in metrics and errors.
        batch_size: sequences in one forward pass.

    Raises:
        ValueError: if the model's `num_labels` is not 1.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, name: str, batch_size: int
    ) -> None:
        _check_one_label(model.config, name)
        self.model = model
        # A multimodal model keeps the text model's settings in a nested configuration.
        self._config: Any = model.config.get_text_config()
        self.tokenizer = tokenizer
        self.name = name
        self.batch_size = batch_size

    @torch.no_grad()
    def __call__(self, batch: RewardBatch) -> list[float]:
        """Returns the B scores. The model scores in eval mode, in batches of similar length.

        Raises:
            RewardError: if a row is too long for the model, or consists of messages although the
                tokenizer has no chat template.
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
        """Moves the model to `device`."""
        # transformers' type stub declares `to` without arguments.
        torch.nn.Module.to(self.model, device)

    def _tokenize(self, batch: RewardBatch) -> list[list[int]]:
        # BLOOM's configuration, for one, has no max_position_embeddings.
        positions = getattr(self._config, "max_position_embeddings", self.tokenizer.model_max_length)
        limit = min(positions, self.tokenizer.model_max_length)
        sequences = []
        for row, (prompt, completion) in enumerate(zip(batch.prompts, batch.completions, strict=True)):
            encoded: Any
            if isinstance(prompt, str) and isinstance(completion, str):
                encoded = self.tokenizer(prompt + completion)
            elif self.tokenizer.chat_template is None:
                problem = "has a tokenizer without a chat template, but got messages; set tokenizer.chat_template"
                raise RewardError(self.name, problem, batch, row)
            else:
                messages = [*_messages(prompt, "user"), *_messages(completion, "assistant")]
                encoded = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
            ids = list(encoded["input_ids"])
            if not 0 < len(ids) <= limit:
                problem = f"takes 1 to {limit} tokens but got {len(ids)}; change query_len or response_len"
                raise RewardError(self.name, problem, batch, row)
            sequences.append(ids)
        return sequences

    def _score(self, sequences: Sequence[list[int]]) -> Tensor:
        """Returns (rows,) float32 scores on the CPU. Rows are padded on the right, which causal attention ignores."""
        pad = _padding_id(self._config, sequences)
        width = max(len(ids) for ids in sequences)
        input_ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids in sequences])
        attention_mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in sequences])
        device = next(self.model.parameters()).device
        with _scoring_config(self._config, pad):
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
    """Returns the reward source of a model in memory, or of a folder or hub id, which is loaded from safetensors.

    The source is named after the last part of the model's path or hub id.

    Args:
        source: the model, or where to load it from.
        tokenizer: its tokenizer; None loads the one from the model's folder or hub id.
        batch_size: sequences in one forward pass.
        dtype: of the weights of a model that is loaded.
        trust_remote_code: run code that comes with the model.

    Raises:
        ValueError: if the model does not exist, is damaged, is an adapter, does not have exactly one label or
            lacks weights (a language model has no trained score head), comes with code that it may not run, or if
            there is no tokenizer.
    """
    origin = source if isinstance(source, str) else source.config.name_or_path or ""
    name = Path(origin).name or type(source).__name__
    with remote_code(origin, trust=trust_remote_code):
        model = _load_model(source, dtype, trust_remote_code) if isinstance(source, str) else source
        if tokenizer is None:
            tokenizer = _load_tokenizer(origin, name, trust_remote_code)
    return ModelReward(model, tokenizer, name=name, batch_size=batch_size)


def _load_model(origin: str, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    problem = f"cannot load a reward model from {origin!r}"
    remedy = (
        "an entry of reward_funcs is module:function, file.py:function or a model, and a model "
        "(reward_model_name_or_path) is an existing folder with safetensors weights or a hub id that can be downloaded"
    )
    with loading(problem, origin, remedy):
        adapter = find_adapter_config_file(origin)
    if adapter is not None:
        raise ValueError(
            f"reward_model_name_or_path (or an entry of reward_funcs) is {origin!r}, an adapter and not a full model; "
            "pass it as reward_adapter, which puts it on the policy's base, or merge it into its base model and save "
            "that"
        )
    with loading(problem, origin, remedy):
        config = AutoConfig.from_pretrained(origin, trust_remote_code=trust_remote_code)
    _check_one_label(config, origin)
    with loading(problem, origin, remedy):
        model, report = AutoModelForSequenceClassification.from_pretrained(
            origin, dtype=dtype, trust_remote_code=trust_remote_code, use_safetensors=True, output_loading_info=True
        )
    if report["missing_keys"]:
        raise ValueError(
            f"reward model {origin!r} lacks the weights {sorted(report['missing_keys'])}, which would be initialized "
            "at random; use a trained sequence classifier, not a language model"
        )
    return model


def _load_tokenizer(origin: str, name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    if not origin:
        raise ValueError(
            f"reward model {name!r} was built in memory and has no tokenizer; pass one in reward_processing_classes"
        )
    problem = f"reward model {origin!r} has no tokenizer in its folder"
    with loading(problem, origin, "pass one in reward_processing_classes"):
        return AutoTokenizer.from_pretrained(origin, trust_remote_code=trust_remote_code)


def _check_one_label(config: Any, name: str) -> None:
    if config.num_labels != 1:
        raise ValueError(
            f"reward model {name!r} has num_labels {config.num_labels}; a reward model must be a sequence classifier "
            "with num_labels=1 (2 is the default, which language models report too)"
        )


def _messages(content: Prompt, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": content}] if isinstance(content, str) else content


def _padding_id(config: Any, sequences: Sequence[list[int]]) -> int:
    """Returns the id to pad with, so that a padded row is scored at the same token as the row without padding.

    A classifier reads the score at the last token that is not `config.pad_token_id`, so rows must be padded with that
    id, whatever the tokenizer's pad token is. Without a pad id in the configuration, an unpadded row is scored at its
    last token, so any id works that no row ends with.
    """
    pad = config.pad_token_id
    # Old Llama configurations use -1 for "no pad token".
    if pad is not None and 0 <= pad < config.vocab_size:
        return int(pad)
    ends = {ids[-1] for ids in sequences}
    return next(token for token in range(config.vocab_size) if token not in ends)


@contextmanager
def _scoring_config(config: Any, pad_token_id: int) -> Iterator[None]:
    """Temporarily sets the pad id, which the model reads from its configuration, and turns the key-value cache off."""
    settings = {"pad_token_id": pad_token_id, "use_cache": False}
    # Encoders have no `use_cache`.
    before = {name: getattr(config, name) for name in settings if hasattr(config, name)}
    for name in before:
        setattr(config, name, settings[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
