"""Rollouts as JSON-ready rows for reading: text, scores, and the numbers of every token. Writing is in `run_log`."""

from typing import Any

from torch import Tensor

from alpaca_ppo.types import Rollouts

TOKEN_COLUMNS = ("logprobs", "ref_logprobs", "kl", "values", "shaped_rewards", "advantages", "returns")


def rollout_rows(rollouts: Rollouts, processing_class: Any, count: int) -> list[dict[str, Any]]:
    """Returns the first `count` rollouts as rows, in which `tokens` has an entry for each chosen token.

    The stop token is included. Log-probabilities and KL are in nats; rewards, values, advantages and returns are in
    reward units.
    """
    rows = []
    for i in range(min(count, rollouts["responses"].size(0))):
        kept = rollouts["response_mask"][i].nonzero().squeeze(1).tolist()
        row = _summary(rollouts, processing_class, i)
        row["tokens"] = [
            {
                "id": int(rollouts["responses"][i, t]),
                "text": processing_class.decode([int(rollouts["responses"][i, t])]),
                **{name: _number(rollouts[name][i, t]) for name in TOKEN_COLUMNS if name in rollouts},  # type: ignore[literal-required]
            }
            for t in kept
        ]
        rows.append(row)
    return rows


def evaluation_rows(rollouts: Rollouts, processing_class: Any) -> list[dict[str, Any]]:
    """Returns a row for each evaluated response: prompt, response, score, length in tokens, KL to the reference.

    The KL is the k1 estimate in nats, summed over the response.
    """
    kl = (rollouts["logprobs"] - rollouts["ref_logprobs"]).sum(dim=1)
    return [_summary(rollouts, processing_class, i) | {"kl": _number(kl[i])} for i in range(kl.size(0))]


def _summary(rollouts: Rollouts, processing_class: Any, i: int) -> dict[str, Any]:
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
    """Rounds to six significant digits, to keep the files small."""
    return float(f"{float(value):.6g}")
