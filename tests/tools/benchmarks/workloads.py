"""What every program of the benchmark is given: prompts, response lengths, random models. torch and transformers only.

**How the lengths are imposed.** Each program samples with its own code, and must still produce responses of the same
lengths. So the lengths are in the policy's weights: a token belongs to a class, and a token of class k is followed by
one of class k - 1, down to class 0, which is the eos alone. A prompt whose last token is of class L has a response of L
tokens. Embeddings and head hold one orthogonal direction for each class, about 30 nats strong; which token of a class
is drawn is up to the random weights. No program is told, patched or slowed down, and the model costs what any Phi of
its shape costs.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SMOLLM2 = {"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}
"""Width, depth and vocabulary of SmolLM2-135M."""
QUICK = {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 2048}
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
EMBEDDING_NORM = 32.0
"""Of a class's direction in the residual stream, to which the random layers add about 6."""
LOGIT_PER_NORM = 2.0
"""Norm of a class's direction in the head: after the last layer norm a state has the norm sqrt(hidden size)."""


@dataclass(frozen=True)
class Workload:
    """Sizes of one benchmark. Every program runs every step on the same prompts, in an order of its own."""

    lengths: tuple[int, ...]
    """Tokens of the response to each prompt, the eos included."""
    response_len: int
    """The most tokens that a program reckons with."""
    prompt_lengths: tuple[int, ...]
    """Tokens of each prompt."""
    vocab_size: int = 8192
    hidden_size: int = 256
    num_hidden_layers: int = 4
    head_size: int = 64
    ppo_epochs: int = 2
    step_batch_size: int = 16
    micro_batch_size: int = 8
    settings: dict[str, Any] = field(default_factory=dict)
    """Options of this package's runs, in place of the benchmark's."""
    has_reward_model: bool = True
    """Otherwise the reward is the number of a response's tokens, which costs nothing."""

    def __post_init__(self) -> None:
        assert 1 <= min(self.lengths) and max(self.lengths) <= self.response_len, self.lengths
        assert len(self.prompt_lengths) == len(self.lengths)
        # One direction for each class, and one for the mean, which a layer norm removes.
        assert max(self.lengths) + 1 < self.hidden_size, "more lengths than the hidden size has directions"

    @property
    def num_prompts(self) -> int:
        """Prompts of a step."""
        return len(self.lengths)

    @property
    def prompt_len(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.prompt_lengths)


def spread_lengths(count: int, mean: int) -> tuple[int, ...]:
    """`count` lengths of mean `mean`: one token, and the quantiles of an exponential distribution. Most responses are
    short and a few are long, as those of a model that ends a response with the same probability at every token.
    """

    def area(share: float) -> float:
        """Integral of the quantile function up to `share`."""
        rest = 1 - share
        return (mean - 1) * (share + (rest * math.log(rest) if rest else 0.0))

    ends = [round(count * area((i + 1) / count)) for i in range(count)]
    return tuple(1 + end - start for start, end in zip([0, *ends], ends, strict=False))


def realistic(num_prompts: int = 32, mean: int = 16, prompt_len: int = 32, **sizes: Any) -> Workload:
    """Lengths as they are in practice: at most eight times their mean is allowed for."""
    return Workload(spread_lengths(num_prompts, mean), 8 * mean, (prompt_len,) * num_prompts, **sizes)


def fixed(num_prompts: int = 32, length: int = 64, prompt_len: int = 32, **sizes: Any) -> Workload:
    """All responses equally long: nothing to pad, and no tail."""
    return Workload((length,) * num_prompts, length, (prompt_len,) * num_prompts, **sizes)


def token_classes(workload: Workload) -> torch.Tensor:
    """(V,) int64: the class of each token; -1 for special tokens, which nothing leads to, but 0 for the eos."""
    classes = 1 + (torch.arange(workload.vocab_size) - len(SPECIAL)) % max(workload.lengths)
    classes[: len(SPECIAL)] = -1
    classes[EOS] = 0
    return classes


def _config(workload: Workload, **fields: Any) -> PreTrainedConfig:
    heads = workload.hidden_size // workload.head_size
    return AutoConfig.for_model(
        "phi",
        vocab_size=workload.vocab_size,
        hidden_size=workload.hidden_size,
        intermediate_size=4 * workload.hidden_size,
        num_hidden_layers=workload.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        # Phi's own, with one operator of torch where transformers' `gelu_new` is a chain of eight.
        hidden_act="gelu_pytorch_tanh",
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **fields,
    )


@torch.no_grad()
def policy(workload: Workload) -> PreTrainedModel:
    """A random Phi whose responses have the lengths that the prompts ask for; see the module's docstring."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_config(workload))
    hidden, classes = workload.hidden_size, token_classes(workload)
    directions = torch.linalg.qr(torch.cat([torch.ones(hidden, 1), torch.randn(hidden, hidden - 1)], dim=1)).Q.T[1:]
    known = classes >= 0
    model.get_input_embeddings().weight[known] += EMBEDDING_NORM * directions[classes[known]]
    # The last class follows no other.
    follows = known & (classes < max(workload.lengths))
    model.get_output_embeddings().weight[follows] += LOGIT_PER_NORM * directions[classes[follows] + 1]
    return model


def classifier(workload: Workload, seed: int) -> PreTrainedModel:
    """A random Phi with one label, for a critic or a reward model."""
    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_config(_config(workload, num_labels=1))


def prompt_ids(workload: Workload) -> list[list[int]]:
    """The token ids of the prompts; the last token of each decides the length of its response."""
    generator = torch.Generator().manual_seed(0)
    shape = (workload.num_prompts, workload.prompt_len)
    ids = torch.randint(len(SPECIAL), workload.vocab_size, shape, generator=generator)
    # The first token of class L is the one with id 3 + L.
    ids[:, -1] = torch.tensor(workload.lengths) + len(SPECIAL) - 1
    return [row[-length:] for row, length in zip(ids.tolist(), workload.prompt_lengths, strict=True)]


def prompt_texts(workload: Workload) -> list[str]:
    """The prompts as text. They end with a blank, so that a response that is appended stays apart from its prompt."""
    return [" ".join(f"w{i}" for i in ids) + " " for ids in prompt_ids(workload)]


def tokenizer(workload: Workload) -> PreTrainedTokenizerFast:
    """A word-level tokenizer: the special tokens, then `w4`, `w5` and so on."""
    entries = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), workload.vocab_size))]
    words = Tokenizer(WordLevel({entry: i for i, entry in enumerate(entries)}, unk_token=SPECIAL[UNK]))
    words.pre_tokenizer = WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        padding_side="left",
        model_max_length=workload.prompt_len + workload.response_len,
        **names,
    )
