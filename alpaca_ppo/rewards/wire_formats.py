"""What is sent to a reward server and what its answer must be: a plain form, and that of OpenRLHF's reward servers.

Sending is in `http_client`, servers and their turns in `remote`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from alpaca_ppo.config.fields import shown
from alpaca_ppo.rewards.batch import Prompt, RewardBatch

WIRE_FORMATS = ("plain", "openrlhf")
_MAX_FLOAT32 = 3.4028234663852886e38
_MAX_METRICS = 100


class RemoteScores(NamedTuple):
    """What a server answered for B rows."""

    rewards: list[float | list[float] | None]
    """Of each row: a number, one for each token, or None to leave the row to other sources."""
    metrics: dict[str, list[float]]
    """The values of each metric that it logs, one for each row."""


def plain_request(batch: RewardBatch) -> bytes:
    """Returns {"prompts": [...], "completions": [...], "completion_ids": [[...]], "columns": {name: [...]}} as JSON.

    Raises:
        ValueError: for a column that JSON cannot hold.
    """
    request = {
        "prompts": batch.prompts,
        "completions": batch.completions,
        "completion_ids": batch.completion_ids,
        "columns": batch.columns,
    }
    return _encoded(request, batch.columns)


def openrlhf_request(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]) -> bytes:
    """Returns {"query": [...], "prompts": [...], "labels": [...]} as JSON.

    Args:
        queries: the whole text of each row, prompt and response.
        prompts: the text of each prompt alone.
        labels: of each row.

    Raises:
        ValueError: for labels that JSON cannot hold.
    """
    request = {"query": queries, "prompts": prompts, "labels": labels}
    return _encoded(request, {"reward_url_labels": labels})


def rendered(
    prompts: Sequence[Prompt], completions: Sequence[Prompt], tokenizer: Any, keywords: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Returns the query and the prompt of each row as text, messages by the chat template of `tokenizer`.

    One assistant message continues the rendered prompt as it was sampled. Of several, the conversation is rendered.

    Raises:
        ValueError: for messages without a tokenizer that has a chat template.
    """
    queries, texts = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        if isinstance(prompt, str):
            texts.append(prompt)
            queries.append(prompt + str(completion))
            continue
        if tokenizer is None or tokenizer.chat_template is None:
            raise ValueError(
                "the prompts are messages, which the openrlhf form sends as text; give "
                "RemoteReward(processing_class=tokenizer) with a chat template, or use the plain form"
            )
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **keywords)
        texts.append(str(text))
        whole = (
            texts[-1] + str(completion[0]["content"])
            if isinstance(completion, list) and len(completion) == 1
            else str(tokenizer.apply_chat_template([*prompt, *completion], tokenize=False, **keywords))
        )
        queries.append(whole)
    return queries, texts


def plain_scores(answer: Any, tokens: Sequence[int]) -> RemoteScores:
    """Returns the scores in {"rewards": [...]}, with {"metrics": {...}} if there are any; other keys are ignored.

    Args:
        answer: the JSON value.
        tokens: how many tokens the response of each row has.

    Raises:
        ValueError: for another form, as the end of a sentence that begins with the server.
    """
    rewards = _rewards(answer, len(tokens))
    scores: list[float | list[float] | None] = []
    for row, (reward, count) in enumerate(zip(rewards, tokens, strict=True)):
        place = f"rewards[{row}]"
        if not isinstance(reward, list):
            scores.append(
                None if reward is None else _number(reward, place, "a number, null, or a number for each token")
            )
            continue
        if len(reward) != count:
            raise ValueError(f"sent {len(reward)} scores in {place}, a response of {count} tokens; send one for each")
        scores.append([_number(entry, f"{place}[{token}]", "a number") for token, entry in enumerate(reward)])
    return RemoteScores(scores, _metrics(answer, "metrics", len(tokens)))


def openrlhf_scores(answer: Any, count: int) -> RemoteScores:
    """Returns the scores in {"rewards": [...], "scores": [...], "extra_logs": {...}}, the last two optional.

    `scores` is logged as a metric, as what is in `extra_logs` is. A reward may be a list of one number, as a
    classifier's logits are; of a single row, the number may be alone.

    Args:
        answer: the JSON value.
        count: of rows.

    Raises:
        ValueError: for another form, as the end of a sentence that begins with the server.
    """
    found = answer.get("rewards") if isinstance(answer, dict) else None
    is_alone = count == 1 and isinstance(found, int | float)
    rewards = _rewards({"rewards": [found]} if is_alone else answer, count)
    scores: list[float | list[float] | None] = []
    for row, reward in enumerate(rewards):
        only = reward[0] if isinstance(reward, list) and len(reward) == 1 else reward
        scores.append(None if only is None else _number(only, f"rewards[{row}]", "a number"))
    metrics = _metrics(answer, "extra_logs", count)
    if answer.get("scores") is not None:
        metrics |= _metrics({"its": {"scores": answer["scores"]}}, "its", count)
    return RemoteScores(scores, metrics)


def max_answer_bytes(tokens: Sequence[int]) -> int:
    """Returns how large an answer may be: a mebibyte, and much more than numbers take for each row and token."""
    return 2**20 + sum(4096 + 64 * count for count in tokens)


def _encoded(request: Mapping[str, Any], columns: Mapping[str, Sequence[Any]]) -> bytes:
    try:
        return json.dumps(request, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        name = next((name for name, values in columns.items() if not _is_json(values)), "prompts")
        raise ValueError(
            f"the column {name!r} cannot be sent as JSON ({type(error).__name__}: {error}); store text, numbers, "
            "lists and dictionaries in it, or name the columns to send, RemoteReward(columns=[...])"
        ) from error


def _is_json(values: Any) -> bool:
    try:
        json.dumps(values, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _rewards(answer: Any, count: int) -> list[Any]:
    if not isinstance(answer, dict) or "rewards" not in answer:
        raise ValueError(f'sent {shown(answer)}; it must send {{"rewards": [...]}}')
    rewards = answer["rewards"]
    if not isinstance(rewards, list):
        raise ValueError(f"sent {shown(rewards)} as rewards; it must be a list with one entry for each row")
    if len(rewards) != count:
        raise ValueError(f"sent {len(rewards)} rewards for {count} rows; it must send one for each, null for none")
    return rewards


def _number(value: Any, place: str, wanted: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN is not within the bounds, and an integer may be too large for a float.
    if not is_number or not -_MAX_FLOAT32 <= value <= _MAX_FLOAT32:
        kind = "which is not finite in float32" if is_number else f"a {type(value).__name__}"
        raise ValueError(f"sent {shown(value)}, {kind}, in {place}; it must be {wanted}")
    return float(value)


def _metrics(answer: Mapping[str, Any], key: str, count: int) -> dict[str, list[float]]:
    given = answer.get(key)
    if given is None:
        return {}
    if not isinstance(given, dict) or len(given) > _MAX_METRICS:
        raise ValueError(f"sent {shown(given)} as {key}; it must be up to {_MAX_METRICS} metrics by name")
    metrics = {}
    for name, values in given.items():
        # One character such as a blank would end the run in `log_metric`.
        if not name or not name.isprintable() or any(c.isspace() for c in name) or len(name) > _MAX_METRICS:
            raise ValueError(f"sent the metric {shown(name)} in {key}; a name is a word without blanks")
        listed = values if isinstance(values, list) else [values] * count
        if len(listed) != count:
            raise ValueError(
                f"sent {len(listed)} values of {name} in {key} for {count} rows; send one, or one for each"
            )
        flat = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in listed]
        metrics[name] = [_number(value, f"{key}[{name!r}]", "a number") for value in flat]
    assert all(math.isfinite(value) for values in metrics.values() for value in values)
    return metrics
