"""Rollouts as rows of plain values for reading: texts, scores, and the numbers of every token."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, cast

from torch import Tensor

from alpaca_ppo.functional.shaping import response_lengths
from alpaca_ppo.types import Rollouts

TOKEN_COLUMNS = (
    "logprobs", "ref_logprobs", "kl", "values", "shaped_rewards", "advantages", "returns", "entropies", "ratio",
)  # fmt: skip


def rollout_rows(
    rollouts: Rollouts, processing_class: Any, *, source_names: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Returns a row for each rollout. Its `tokens` has an entry for each token of the response, stop token included,
    with id, text and the `TOKEN_COLUMNS` that are in `rollouts`, or `environment: true` instead of these columns if the
    policy did not choose the token. With `source_names`, the row also has the `scores` of each source.
    """
    rows = []
    for i in range(rollouts["responses"].size(0)):
        row = _summary(rollouts, processing_class, i)
        if source_names:
            scores = zip(source_names, rollouts["scores_by_source"][i], strict=True)
            row["scores"] = {name: rounded(score) for name, score in scores}
        rows.append(row | {"tokens": token_entries(rollouts, processing_class, i)})
    return rows


def token_entries(rollouts: Rollouts, processing_class: Any, i: int) -> list[dict[str, Any]]:
    """Returns the `tokens` of row `i`, as in `rollout_rows`."""
    mask, ids = rollouts["response_mask"][i], _written_ids(rollouts, i)
    tensors = cast(Mapping[str, Tensor], rollouts)
    columns = {name: tensors[name][i] for name in TOKEN_COLUMNS if name in tensors}
    entries = []
    for t, text in enumerate(_token_texts(ids, processing_class)):
        entry: dict[str, Any] = {"id": ids[t], "text": text}
        if mask[t]:
            entry |= {name: rounded(values[t]) for name, values in columns.items()}
        else:
            entry["environment"] = True
        entries.append(entry)
    return entries


def evaluation_rows(rollouts: Rollouts, processing_class: Any) -> list[dict[str, Any]]:
    """Returns a row for each evaluated response, whose KL is the k1 estimate in nats, summed over the response."""
    kl = (rollouts["logprobs"] - rollouts["ref_logprobs"]).sum(dim=1)
    return [_summary(rollouts, processing_class, i) | {"kl": rounded(kl[i])} for i in range(kl.size(0))]


def sample_rows(rollouts: Rollouts, processing_class: Any) -> list[dict[str, Any]]:
    """Returns the responses with the highest and the lowest score, or the first one if all have the same; `rank` says
    which. The KL is by `kl_estimator`.
    """
    scores = rollouts["scores"]
    if not len(scores):
        return []
    chosen = {"highest score": int(scores.argmax()), "lowest score": int(scores.argmin())}
    if scores.min() == scores.max():
        chosen = {"all scores equal": 0}
    return [
        _summary(rollouts, processing_class, i)
        | {"kl": rounded(rollouts["kl"][i].sum()), "rank": f"{name} of {len(scores)}"}
        for name, i in chosen.items()
    ]


def add_columns(rows: Sequence[dict[str, Any]], prompts: Any, prompt_column: str) -> None:
    """Adds to each row the last message of the user, if the prompt has one, as `question`, and the dataset's other
    columns as `columns`. A value that JSON cannot hold, such as an image, becomes the name of its type. `prompts` is a
    `PromptDataset`.
    """
    for row in rows:
        dataset_row = prompts[row["prompt_id"]]["row"]
        for message in dataset_row["prompt"] if isinstance(dataset_row["prompt"], list) else []:
            if message["role"] == "user" and message.get("content", "").strip():
                row["question"] = message["content"]
        others = {name: value for name, value in dataset_row.items() if name not in ("prompt", prompt_column)}
        if others:
            row["columns"] = json.loads(json.dumps(others, default=lambda value: f"<{type(value).__name__}>"))


def rounded(value: float | Tensor) -> float:
    """Returns `value` with six significant digits, to keep files small."""
    return float(f"{float(value):.6g}")


def _summary(rollouts: Rollouts, processing_class: Any, i: int) -> dict[str, Any]:
    """Returns what every table has of response `i`."""
    prompt = rollouts["queries"][i][rollouts["query_attn_masks"][i].bool()].tolist()
    written = _written_ids(rollouts, i)
    row = {
        "prompt_id": int(rollouts["prompt_ids"][i]),
        "sample_id": int(rollouts["sample_ids"][i]),
        "prompt": processing_class.decode(prompt),
        "response": processing_class.decode(written),
        "score": rounded(rollouts["scores"][i]),
        "stopped": bool(rollouts["stopped"][i]),
        "length": int(rollouts["response_mask"][i].sum()),
    }
    return row | _turns(written, rollouts, i, processing_class)


def _token_texts(ids: Sequence[int], processing_class: Any) -> list[str]:
    """Returns the text of each token with the space before it, which many tokenizers drop from a token that is decoded
    alone.
    """
    alone = [processing_class.decode([token]) for token in ids]
    texts = alone[:1]
    for i in range(1, len(ids)):
        pair = processing_class.decode([ids[i - 1], ids[i]])
        texts.append(pair.removeprefix(alone[i - 1]) if pair.startswith(alone[i - 1]) else alone[i])
    return texts


def _written_ids(rollouts: Rollouts, i: int) -> list[int]:
    """Returns the tokens of response `i` up to the last one that the policy chose."""
    length = int(response_lengths(rollouts["response_mask"][i : i + 1]))
    return list(rollouts["responses"][i, :length].tolist())


def _turns(written: Sequence[int], rollouts: Rollouts, i: int, processing_class: Any) -> dict[str, Any]:
    """Returns who wrote which text of the response, as `turns`; empty if the policy wrote all."""
    roles = ["policy" if chosen else "environment" for chosen in rollouts["response_mask"][i, : len(written)].tolist()]
    if "tool_tokens" in rollouts:
        for t in rollouts["tool_tokens"][i, : len(written)].nonzero().flatten().tolist():
            roles[t] = "tool"
    if set(roles) <= {"policy"}:
        return {}
    parts = groupby(zip(roles, written, strict=True), key=itemgetter(0))
    texts = [(role, processing_class.decode([token for _, token in part])) for role, part in parts]
    return {"turns": [{"role": role, "text": text} for role, text in texts]}
