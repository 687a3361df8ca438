"""Publishes sharded weights to vLLM servers, then with one tensor of one rank as it was before, which must be refused.

Usage, by `accelerate launch`: run_vllm_stale.py OUTPUT_DIR URL
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.tiny_models import tiny_causal_lm  # noqa: E402
from tests.tiny_runs import tiny_trainer  # noqa: E402

NAMES = ("layers.0.self_attn.q_proj.weight", "embed_tokens.weight", "model.norm.weight")


def shard(parameter: Any) -> torch.Tensor:
    """What this rank has of a parameter of ZeRO 3 or FSDP2."""
    return parameter.ds_tensor.data if hasattr(parameter, "ds_tensor") else parameter.detach().to_local()


def main(output_dir: str, url: str) -> None:
    options: dict[str, Any] = {"generation_backend": "vllm", "vllm_urls": [url], "mismatch_action": "ignore"}
    model = tiny_causal_lm("llama", tie_word_embeddings=True)
    trainer = tiny_trainer(Path(output_dir), model=model, total_episodes=10, **options)
    trainer.train()
    engine, backend, accelerator = trainer.updater.engine, trainer.collector.backend, trainer.accelerator
    policy = trainer.actor_critic.policy
    for rank in range(accelerator.num_processes):
        for name in NAMES:
            (changed,) = (parameter for key, parameter in policy.model.named_parameters() if key.endswith(name))
            mine = shard(changed)
            old, new = mine.clone(), mine * 1.01
            mine.copy_(new)
            backend.sync(policy, engine.policy_weights)

            def stale(rank: int = rank, mine: Any = mine, old: Any = old, new: Any = new, **how: bool) -> Iterator[Any]:
                if accelerator.process_index == rank:
                    mine.copy_(old)
                yield from engine.policy_weights(**how)
                mine.copy_(new)

            # A rank may have no part of a small tensor.
            has_part = torch.tensor([float(not torch.equal(old, new))])
            parts = accelerator.gather(has_part.to(accelerator.device)).tolist()
            try:
                backend.sync(policy, stale)
                outcome = "accepted"
            except (ValueError, RuntimeError) as error:
                outcome = "refused" if "not the policy's" in str(error) and name in str(error) else str(error)
            assert outcome == ("refused" if parts[rank] else "accepted"), (rank, name, outcome)
            accelerator.print(f"{name} of rank {rank}: {outcome}", flush=True)
    backend.sync(policy, engine.policy_weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
