"""Peak memory, time and gradients of ways to get log-probabilities from hidden states, forward and backward.

    python -m tests.tools.benchmarks.chunked_logprobs [--tokens 4096] [--vocab 131072] [--hidden 64] [--chunk-size 256]

Each way runs in a process of its own, so that its peak is its own: the process's peak resident memory less that
before the forward pass. Ends with status 1 where the chunked form's peak is above a quarter of the plain one's, or
its gradients differ.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from alpaca_ppo.functional import chunked_logprobs, entropy_from_logits, token_logprobs

TEMPERATURE = 0.7
PEAK_LIMIT = 0.25
GRADIENT_LIMIT = 1e-4


def plain(hidden, weight, labels, chunk_size):
    logits = F.linear(hidden, weight) / TEMPERATURE
    return token_logprobs(logits, labels), entropy_from_logits(logits)


def chunked(hidden, weight, labels, chunk_size):
    return chunked_logprobs(hidden, weight, labels, temperature=TEMPERATURE, chunk_size=chunk_size)


def plain_without_entropy(hidden, weight, labels, chunk_size):
    return token_logprobs(F.linear(hidden, weight), labels, temperature=TEMPERATURE), None


def chunked_without_entropy(hidden, weight, labels, chunk_size):
    return chunked_logprobs(hidden, weight, labels, temperature=TEMPERATURE, chunk_size=chunk_size, with_entropy=False)


def torch_linear_cross_entropy(hidden, weight, labels, chunk_size):
    options = torch.nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=chunk_size)
    losses = F.linear_cross_entropy(hidden / TEMPERATURE, weight, labels, reduction="none", options=options)
    return -losses, None


WAYS = {way.__name__: way for way in (plain, chunked, plain_without_entropy, chunked_without_entropy)}
if hasattr(torch.nn, "LinearCrossEntropyOptions"):
    WAYS[torch_linear_cross_entropy.__name__] = torch_linear_cross_entropy


def peak_bytes():
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forward_and_backward(way, tokens, vocab, hidden_size, chunk_size, dtype, seed=0):
    """Gradients of hidden states and weight, seconds, and the rise of this process's peak memory in bytes."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, hidden_size, generator=generator) for n in (tokens, vocab))
    hidden, weight = (tensor.mul(hidden_size**-0.25).to(dtype).requires_grad_() for tensor in (hidden, weight))
    labels = torch.randint(vocab, (tokens,), generator=generator)
    upstream = torch.randn(2, tokens, generator=generator)
    before, start = peak_bytes(), time.perf_counter()
    logprobs, entropies = way(hidden, weight, labels, chunk_size)
    loss = (upstream[0] * logprobs).sum()
    if entropies is not None:
        loss = loss + (upstream[1] * entropies).sum()
    loss.backward()
    return hidden.grad, weight.grad, time.perf_counter() - start, peak_bytes() - before


def measure(name, tokens, vocab, hidden_size, chunk_size, dtype="float32"):
    """Runs one way in its own process; returns its figures and its two gradients."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gradients.pt"
        arguments = [name, str(path), *map(str, (tokens, vocab, hidden_size, chunk_size)), dtype]
        command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, "--child", *arguments]
        root = Path(__file__).resolve().parents[3]
        output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout
        return json.loads(output.splitlines()[-1]), torch.load(path, weights_only=True)


def child(name, path, tokens, vocab, hidden_size, chunk_size, dtype):
    sizes = [int(size) for size in (tokens, vocab, hidden_size, chunk_size)]
    dtype = getattr(torch, dtype)
    # A small run first: libraries that load at first use are no part of the figure.
    forward_and_backward(WAYS[name], 8, 16, 4, 4, dtype)
    *gradients, seconds, rise = forward_and_backward(WAYS[name], *sizes, dtype)
    torch.save(gradients, path)
    print(json.dumps({"peak_mib": rise / 2**20, "seconds": seconds}))


def compare(sizes, dtype):
    """Prints one line a way; returns whether both chunked ways keep to the limits."""
    kept = True
    for reference, others in (
        ("plain", ["chunked"]),
        ("plain_without_entropy", ["chunked_without_entropy", "torch_linear_cross_entropy"]),
    ):
        figures, gradients = measure(reference, *sizes, dtype)
        print(f"{reference:28} {figures['peak_mib']:9.0f} MiB {figures['seconds']:7.2f} s", flush=True)
        for name in (other for other in others if other in WAYS):
            own, own_gradients = measure(name, *sizes, dtype)
            ratio = own["peak_mib"] / figures["peak_mib"]
            difference = max(
                float((a.float() - b.float()).abs().max() / b.float().abs().max())
                for a, b in zip(own_gradients, gradients, strict=True)
            )
            print(
                f"{name:28} {own['peak_mib']:9.0f} MiB {own['seconds']:7.2f} s   peak {ratio:.3f} of plain, "
                f"largest gradient difference {difference:.1e} of the largest gradient",
                flush=True,
            )
            if name in ("chunked", "chunked_without_entropy"):
                limit = GRADIENT_LIMIT if dtype == "float32" else 2e-2
                kept = kept and ratio <= PEAK_LIMIT and difference <= limit
    return kept


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 4096), ("vocab", 131_072), ("hidden", 64), ("chunk-size", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {vars(args)}")
    return 0 if compare((args.tokens, args.vocab, args.hidden, args.chunk_size), args.dtype) else 1


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(*sys.argv[sys.argv.index("--child") + 1 :])
    else:
        sys.exit(main())
