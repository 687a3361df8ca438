"""How fast the sampler is, in ratios of one run: `python -m tests.tools.benchmarks.sampler` (two minutes, idle core).

Not a test: it prints, and asserts nothing, because times on a shared machine are no claim that a build should fail on.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import GenerationConfig, PreTrainedModel

from alpaca_ppo.generation import SamplingParams, generate
from alpaca_ppo.generation.token_sampling import choose_tokens
from alpaca_ppo.types import PromptBatch
from tests.tiny_models import PAD, tiny_causal_lm

VOCAB, BATCH, NEW_TOKENS, REPEATS = 512, 64, 64, 3


def seconds(*calls: Callable[[], object]) -> list[float]:
    """The median processor time of each call, taken in turns so that a slow spell of the machine hits all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(REPEATS):
        for call, spent in zip(calls, times, strict=True):
            start = time.process_time()
            call()
            spent.append(time.process_time() - start)
    return [statistics.median(spent) for spent in times]


def model_of(hidden: int) -> PreTrainedModel:
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 4}
    return tiny_causal_lm("llama", vocab_size=VOCAB, num_key_value_heads=4, **shape)


def prompts(rows: int, length: int, varied: bool) -> PromptBatch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(length // 2, length + 1, (rows, 1), generator=generator) if varied else length
    mask = (torch.arange(length).flip(0) < lengths).expand(rows, length).long()
    queries = torch.randint(3, VOCAB, (rows, length), generator=generator).where(mask.bool(), PAD)
    return PromptBatch(queries=queries, query_attn_masks=mask, prompt_ids=torch.arange(rows), rows=[])


def params(new_tokens: int, stops: Sequence[int], **how: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=new_tokens, temperature=1.0, pad_token_id=PAD, stop_token_ids=tuple(stops), **how
    )


def against_transformers(model: PreTrainedModel, stops: list[int], length: int) -> None:
    batch, how = prompts(BATCH, length, varied=True), params(NEW_TOKENS, stops)

    def ours(backend: str = "slots"):
        return generate(model, batch, how, backend=backend)

    plain = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=True, top_k=0, pad_token_id=PAD, eos_token_id=stops)

    def theirs():
        torch.manual_seed(0)
        return model.generate(batch["queries"], attention_mask=batch["query_attn_masks"], generation_config=plain)

    lengths = ours().response_mask.sum(dim=1).float()
    slots, fallback, library = seconds(ours, lambda: ours("generate"), theirs)
    print(
        f"prompts <= {length}, lengths {lengths.min():.0f} to {lengths.max():.0f}, mean {lengths.mean():.0f}: "
        f"slots {slots:.3f} s; library / that {library / slots:.2f}, fallback {fallback / slots:.2f}"
    )


def refilled(model: PreTrainedModel) -> None:
    batch, how = prompts(4 * BATCH, 32, varied=True), params(2 * NEW_TOKENS, range(2, 18))
    one_by_one, refilling = seconds(
        *(partial(generate, model, batch, how, backend=name, rows_at_once=BATCH) for name in ("generate", "slots"))
    )
    rows = len(batch["queries"])
    print(f"{rows} prompts, {BATCH} at once: one batch after the other / refilled {one_by_one / refilling:.2f}")


def prefill_once(model: PreTrainedModel) -> None:
    batch, how = prompts(8, 256, varied=False), params(16, [2])
    queries, mask = (batch[key].repeat_interleave(4, 0) for key in ("queries", "query_attn_masks"))
    repeated = PromptBatch(queries=queries, query_attn_masks=mask, prompt_ids=torch.arange(32), rows=[])
    once, each = seconds(
        lambda: generate(model, batch, params(16, [2], num_return_sequences=4)), lambda: generate(model, repeated, how)
    )
    print(f"4 samples of 256-token prompts: a prefill for each / one for all {each / once:.2f} ({once:.3f} s)")


def choosing(rows: int, vocab: int, hidden: int) -> None:
    logits = torch.randn(rows, vocab) * 3
    numbers = torch.rand(rows, dtype=torch.float64)
    state, head = torch.randn(rows, hidden), torch.randn(vocab, hidden)
    ours, multinomial, projection = seconds(
        lambda: choose_tokens(logits, numbers, temperature=0.7),
        lambda: torch.multinomial((logits / 0.7).softmax(dim=-1), 1),
        lambda: state @ head.T,
    )
    print(
        f"a token from {rows} x {vocab} logits, with its log-prob: {ours * 1e3:.2f} ms; softmax and multinomial / that "
        f"{multinomial / ours:.2f}, an LM head of hidden size {hidden} / that {projection / ours:.2f}"
    )


def main() -> None:
    model = model_of(128)
    # A likelier stop set spreads the ends over the whole range; the weights' wide spread makes some tokens frequent.
    for length in (32, 256):
        for stops in ([], [2], list(range(2, 18))):
            against_transformers(model, stops, length)
    refilled(model)
    prefill_once(model)
    choosing(32, 128_256, 1024)
    choosing(BATCH, VOCAB, 128)


if __name__ == "__main__":
    main()
