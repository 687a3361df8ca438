"""A sequence classifier as a reward source, with its own tokenizer and chat template. Reward models sharded over
devices are not supported; a reward adapter on the policy's base is in `adapter_model`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from alpaca_ppo.adapters.files import is_adapter
from alpaca_ppo.config.checks import template_options
from alpaca_ppo.config.names import model_folder
from alpaca_ppo.control_tokens import ControlTokens
from alpaca_ppo.functional.packing import RowLayout, pack_rows
from alpaca_ppo.models.loading import load_complete
from alpaca_ppo.models.packed_attention import sequence_keywords
from alpaca_ppo.models.policy import difference, eval_mode
from alpaca_ppo.models.trial import Trial, packing_problem
from alpaca_ppo.rewards.adapter_model import AdapterClassifier
from alpaca_ppo.rewards.batch import Prompt, RewardBatch, RewardError
from alpaca_ppo.saved_models import loading, remote_code


class ModelReward:
    """A sequence classifier with one label; the score of a response is its logit in float32, whatever the padding.

    Prompt and completion are tokenized as one text with the tokenizer's special tokens; messages go through its chat
    template. A sequence longer than the model's context is an error, because truncation would change its score.

    Args:
        tokenizer: the tokenizer that the model was trained with.
        name: of the source in metrics and errors.
        batch_size: a forward pass has at most this many times the tokens of the longest row.
        padding_free: lays rows end to end if the model can read them so. False pads them, `batch_size` rows in each
            forward pass.

    Raises:
        ValueError: if the model's `num_labels` is not 1.
    """

    def __init__(
        self,
        model: PreTrainedModel | AdapterClassifier,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        batch_size: int,
        padding_free: bool = True,
    ) -> None:
        if model.config.num_labels != 1:
            raise ValueError(f"reward model {name!r} has num_labels {model.config.num_labels}; use one that has 1")
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.batch_size, self.padding_free = batch_size, padding_free
        # True = the number of passes depends on the number of rows only.
        self._equal_passes = not padding_free

    def prepare(self, *, equal_passes: bool, packs_everywhere: Callable[[bool], bool] = bool) -> None:
        """Tries whether the model can read rows end to end, before its parameters are sharded.

        Args:
            equal_passes: whether ranks with equally many rows must make equally many forward passes.
            packs_everywhere: returns whether all ranks can lay rows end to end, given whether this one can.
        """
        self._equal_passes = equal_passes or not self.padding_free
        self._packs = packs_everywhere(self._packs)

    @torch.no_grad()
    def __call__(self, batch: RewardBatch) -> list[float]:
        """Returns the B scores, from the model in eval mode.

        Raises:
            RewardError: if a row has no tokens, or more than the model or its tokenizer takes.
            ValueError: if a row consists of messages although the tokenizer has no chat template.
        """
        sequences = self._tokenize(batch)
        scores = torch.zeros(len(batch), dtype=torch.float32)
        with eval_mode(self.model):
            score = _score_packed if self._packs else _score_padded
            for rows in self._groups([len(ids) for ids in sequences]):
                scores[rows] = score(self.model, [sequences[i] for i in rows]).float()
        return scores.tolist()

    def to(self, device: torch.device | str) -> None:
        # transformers' type stub declares `to` without arguments.
        torch.nn.Module.to(self.model, device)

    def _tokenize(self, batch: RewardBatch) -> list[Tensor]:
        """Returns the token ids of each row; raises `RewardError` for a row with none or too many."""
        longest = self.tokenizer.model_max_length
        # A multimodal model nests the text model's settings; BLOOM's, for one, have no max_position_embeddings.
        limit = min(getattr(self.model.config.get_text_config(), "max_position_embeddings", longest), longest)
        sequences = []
        for row in range(len(batch)):
            ids = self._row_ids(batch, row)
            if not 0 < len(ids) <= limit:
                problem = f"takes 1 to {limit} tokens but got {len(ids)}; change query_len or response_len"
                raise RewardError(self.name, problem, batch, row)
            sequences.append(torch.tensor(ids))
        return sequences

    def _row_ids(self, batch: RewardBatch, row: int) -> list[int]:
        """Returns the token ids of prompt and completion as one text."""
        prompt, completion = batch.prompts[row], batch.completions[row]
        protects = bool(batch.episodes) and not batch.episodes[row].trusted
        if protects:
            prompt, completion = batch.episodes[row].protected(completion, self._control_tokens)
        # Special tokens by the tokenizer's default, which is not always to add them.
        options = {}
        if isinstance(prompt, str) and isinstance(completion, str):
            text: Any = prompt + completion
        else:
            messages = [*_messages("user", prompt), *_messages("assistant", completion)]
            columns = {name: values[row] for name, values in batch.columns.items()}
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **template_options(columns))
            # The template wrote them.
            options = {"add_special_tokens": False}
        if protects:
            return self._control_tokens.encode(text, **options)
        return list(self.tokenizer(text, **options)["input_ids"])

    def _groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """Returns the rows of each forward pass, longest first."""
        order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        if self._equal_passes or not order:
            return [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        groups = [order[:1]]
        for row in order[1:]:
            group = [*groups[-1], row]
            # With padding, every row is as wide as the first, the longest.
            tokens = sum(lengths[i] for i in group) if self._packs else lengths[group[0]] * len(group)
            if tokens <= self.batch_size * lengths[order[0]]:
                groups[-1] = group
            else:
                groups.append([row])
        return groups

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self.tokenizer)

    @cached_property
    def _packs(self) -> bool:
        """Whether rows are laid end to end."""
        if isinstance(self.model, AdapterClassifier):
            # Tried when the policy was loaded; by now the base may be sharded.
            return self.padding_free and self.model.padding_free
        return self.padding_free and not (packing_problem(self.model) or _packed_scores_problem(self.model))


def _messages(role: str, content: Prompt) -> list[dict[str, Any]]:
    return [{"role": role, "content": content}] if isinstance(content, str) else content


def _packed_scores_differ(model: Any) -> str | None:
    """Compares scores of rows end to end with those of each row alone; one ends with the pad id, one has it inside."""
    config = model.config.get_text_config()
    pad = _padding_id(config, [])
    plain = [[i * 7 % config.vocab_size for i in range(1, 2 + length)] for length in (5, 3, 3)]
    ends_with_pad, has_pad_inside = [*plain[0], pad], [plain[0][0], pad, plain[0][1]]
    rows = [torch.tensor(row) for row in (*plain, ends_with_pad, has_pad_inside)]
    return difference(_score_packed(model, rows), torch.cat([_score_padded(model, [row]) for row in rows]), "scores")


_packed_scores_problem = Trial(_packed_scores_differ)


def _score_padded(model: Any, sequences: Sequence[Tensor]) -> Tensor:
    """Returns (rows,) scores on the CPU. Rows are padded on the right, which causal attention ignores."""
    config = model.config.get_text_config()
    pad = _padding_id(config, sequences)
    input_ids = pad_sequence(list(sequences), batch_first=True, padding_value=pad)
    attention_mask = pad_sequence([torch.ones_like(ids) for ids in sequences], batch_first=True)
    device = next(model.parameters()).device
    with _scoring_config(config, pad):
        scores: Tensor = model(input_ids=input_ids.to(device), attention_mask=attention_mask.to(device)).logits
    return scores.squeeze(-1).cpu()


def _score_packed(model: Any, sequences: Sequence[Tensor]) -> Tensor:
    """Returns the scores of `_score_padded` from rows laid end to end."""
    config = model.config.get_text_config()
    pad = _padding_id(config, sequences)
    queries = pad_sequence(list(sequences), batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones_like(ids) for ids in sequences], batch_first=True, padding_side="left")
    # Stands for the token that a row's last hidden state would predict; `states` are the columns of last tokens.
    response = torch.zeros(len(sequences), 1, dtype=torch.long)
    layout, device = RowLayout(padding_free=True), next(model.parameters()).device
    packed = pack_rows(queries, mask, response, response == 0, layout=layout, device=device)
    # transformers reads the score at the last token that is not `pad`, or else at the first.
    scored = [int(real[-1]) if len(real := (ids != pad).nonzero()) else 0 for ids in sequences]
    tokens_after = torch.tensor([len(ids) - 1 - column for ids, column in zip(sequences, scored, strict=True)])
    columns = packed.states - tokens_after.to(packed.states.device)
    if isinstance(model, AdapterClassifier):
        keywords = sequence_keywords(model.adapters.model.base_model, packed)
        return model(packed.input_ids, columns=columns, **keywords).logits.squeeze(-1).cpu()
    logits: list[Tensor] = []
    # The model's own forward pass gathers sharded parameters, but returns the score of one row only. The hook reads the
    # scores of all tokens from the head, which transformers calls `score`.
    hook = model.score.register_forward_hook(lambda module, inputs, output: logits.append(output))
    with hook, _scoring_config(config, pad):
        model(input_ids=packed.input_ids, **sequence_keywords(model.base_model, packed))
    return logits[0][0, columns].squeeze(-1).cpu()


def build_model_reward(
    source: str | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    batch_size: int = 16,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    padding_free: bool = True,
) -> ModelReward:
    """Returns the reward source of a model in memory, or of a folder or hub id, which is loaded from safetensors.

    Args:
        tokenizer: None loads the one from the model's folder or hub id.
        batch_size, padding_free: see `ModelReward`.
        dtype: of a model that is loaded; a model in memory keeps its own.
        trust_remote_code: run code that comes with the model.

    Raises:
        ValueError: if the model does not exist, is damaged, is an adapter, does not have exactly one label, lacks
            weights, comes with code that it may not run, or has no tokenizer.
    """
    origin, name = _origin(source), model_name(source)
    model: Any = source
    if isinstance(source, str):
        field = "reward_model_name_or_path (or an entry of reward_funcs, whose functions are module:function)"
        # Only checks it.
        model_folder(field, source, part=None, writes_text=False)
        if is_adapter(source):
            raise ValueError(f"{field} is {source!r}, an adapter; pass it as reward_adapter, or merge it into its base")
        remedy = "a source is module:function, file.py:function, or a model: a folder with safetensors or a hub id"
        options: Any = {"trust_remote_code": trust_remote_code, "dtype": dtype, "remedy": remedy}
        model = load_complete(AutoModelForSequenceClassification, source, **options)
    if tokenizer is None:
        remedy = "pass one in reward_processing_classes"
        if not origin:
            raise ValueError(f"reward model {name!r} was built in memory and has no tokenizer; {remedy}")
        problem = f"reward model {origin!r} has no tokenizer in its folder"
        with remote_code(origin, trust=trust_remote_code), loading(problem, origin, remedy):
            tokenizer = AutoTokenizer.from_pretrained(origin, trust_remote_code=trust_remote_code)
    return ModelReward(model, tokenizer, name=name, batch_size=batch_size, padding_free=padding_free)


def model_name(source: Any) -> str:
    """Returns the name of a model in metrics: the last part of its path or hub id."""
    return Path(_origin(source)).name or type(source).__name__


def _origin(source: Any) -> str:
    return str(source if isinstance(source, str) else source.config.name_or_path or "")


def _padding_id(config: Any, sequences: Sequence[Tensor]) -> int:
    """Returns the id to pad with: `config.pad_token_id`, because a classifier scores the last token that is another.
    Without one, it scores the last token, so any id works that no row ends with.
    """
    pad = config.pad_token_id
    # Old Llama configurations use -1 for "no pad token".
    if pad is not None and 0 <= pad < config.vocab_size:
        return int(pad)
    ends = {int(ids[-1]) for ids in sequences}
    return next(token for token in range(config.vocab_size) if token not in ends)


@contextmanager
def _scoring_config(config: Any, pad_token_id: int) -> Iterator[None]:
    """Temporarily sets the model's pad id and turns its key-value cache off."""
    settings = {"pad_token_id": pad_token_id, "use_cache": False}
    # Encoders have no `use_cache`.
    before = {name: getattr(config, name) for name in settings if hasattr(config, name)}
    config.update({name: settings[name] for name in before})
    try:
        yield
    finally:
        config.update(before)
