"""Rollouts as rows that a person reads: text, scores, and what policy, reference and critic thought of every token."""

from typing import Any

from torch import Tensor

from alpaca_ppo.types import Rollouts

PER_TOKEN = ("logprobs", "ref_logprobs", "kl", "values", "shaped_rewards", "advantages", "returns")


def rollout_rows(rollouts: Rollouts, processing_class: Any, count: int) -> list[dict[str, Any]]:
    """The first `count` rollouts as JSON-ready rows; `tokens` holds one entry per response token, the stop token
    included.

    Log-probabilities and KL are in nats, rewards, values, advantages and returns in reward units.
    """
    rows = []
    for i in range(min(count, rollouts["responses"].size(0))):
        kept = rollouts["response_mask"][i].nonzero().squeeze(1).tolist()
        row = _head(rollouts, processing_class, i)
        row["tokens"] = [
            {
                "id": int(rollouts["responses"][i, t]),
                "text": processing_class.decode([int(rollouts["responses"][i, t])]),
                **{name: _number(rollouts[name][i, t]) for name in PER_TOKEN if name in rollouts},  # type: ignore[literal-required]
            }
            for t in kept
        ]
        rows.append(row)
    return rows


def evaluation_rows(rollouts: Rollouts, processing_class: Any) -> list[dict[str, Any]]:
    """Every evaluated response as a JSON-ready row: prompt, response, score, length in tokens, KL to the reference in
    nats.
    """
    kl = (rollouts["logprobs"] - rollouts["ref_logprobs"]).sum(dim=1)
    return [_head(rollouts, processing_class, i) | {"kl": _number(kl[i])} for i in range(kl.size(0))]


def _head(rollouts: Rollouts, processing_class: Any, i: int) -> dict[str, Any]:
    prompt = rollouts["queries"][i][rollouts["query_attn_masks"][i].bool()].tolist()
    response = rollouts["responses"][i][rollouts["response_mask"][i]].tolist()
    return {
        "prompt_id": int(rollouts["prompt_ids"][i]),
        "prompt": processing_class.decode(prompt),
        "response": processing_class.decode(response),
        "score": _number(rollouts["scores"][i]),
        "stopped": bool(rollouts["stopped"][i]),
        "length": len(response),
    }


def _number(value: Tensor) -> float:
    """Six significant digits: enough to read, and files stay small."""
    return float(f"{float(value):.6g}")
