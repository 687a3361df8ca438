"""Folders of runs made by hand, without training: small numbers, long tables, hostile texts, turns with a tool."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HOSTILE = (
    '</script><script>window.stolen = 1</script><!-- <img src=x onerror="window.stolen = 2"> '
    "& \" ' \u202e \u2028 @@data@@"
)
HALF_PAIR = "\ud83d"
"""Half of a surrogate pair, which a tokenizer that cuts bytes can leave in JSON."""


def token(text: str, number: int, **numbers: Any) -> dict[str, Any]:
    """An entry of `tokens` whose numbers are easy to tell apart."""
    given = {"logprobs": -0.5 - number, "ref_logprobs": -0.25 - number, "kl": -0.25, "values": 0.125 * number}
    given |= {"shaped_rewards": 0.0, "advantages": number - 1.5, "returns": 1.0}
    return {"id": 100 + number, "text": text, **given, **numbers}


def answer(prompt_id: int, text: str, **values: Any) -> dict[str, Any]:
    """A row of a table, with a token for each word."""
    words = text.split(" ")
    tokens = [token(word if k == 0 else f" {word}", k) for k, word in enumerate(words)]
    row = {"prompt_id": prompt_id, "sample_id": 0, "prompt": f"Question {prompt_id}?", "response": text, "score": 0.5}
    return {**row, "stopped": True, "length": len(words), "tokens": tokens, **values}


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line; half a surrogate pair is written as its escape."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_run(path: Path, *, seed: int = 1, steps: int = 4, **config: Any) -> Path:
    """A run of `steps` steps with two reward sources: its reward rises by 1 a step from `seed`."""
    lines = []
    for step in range(1, steps + 1):
        line: dict[str, Any] = {
            "step": step,
            "objective/scores": float(seed + step),
            "objective/kl_sum_seq": 0.5 * step,
        }
        line |= {"objective/scores/gold": 2.0 * step, "objective/scores/model": float(seed + step)}
        lines.append(line | {"ppo/policy/grad_norm": None if step == 2 else 1.0, "time/step": 3.0})
    write_lines(path / "metrics.jsonl", lines)
    options = {"output_dir": str(path), "seed": seed, "learning_rate": 1e-3, **config}
    (path / "run.yaml").write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items()))
    return path


def make_whole_run(path: Path) -> Path:
    """A run with every kind of answer: scores by source, entropies and ratio, an evaluation, turns, hostile texts."""
    make_run(path)
    for step in (1, 2, 3, 4):
        rows = [
            answer(7, f"the answer of step {step}", score=float(step), scores={"gold": 2.0 * step, "model": None}),
            answer(8, "the same words", score=0.25, stopped=step != 2),
        ]
        if step == 1:
            for row in rows:
                row["tokens"] = [{**entry, "entropies": 0.75, "ratio": 1.0625} for entry in row["tokens"]]
        write_lines(path / f"rollouts/step_{step:06d}.jsonl", rows)
    turns = [{"role": "policy", "text": "call tool"}, {"role": "environment", "text": " tool says 42"}]
    turns.append({"role": "policy", "text": " so 42"})
    tokens = [token("call", 0), token(" tool", 1), {"id": 5, "text": " tool says 42", "environment": True}]
    tokens.append(token(" so 42", 2))
    conversation = answer(9, "call tool tool says 42 so 42", score=9.0, turns=turns, tokens=tokens)
    hostile = answer(
        10, HOSTILE, score=-9.0, prompt=HOSTILE, source=HOSTILE, tokens=[token(HOSTILE, 0), token("\n", 1)]
    )
    hostile["tokens"][1]["text"] = HALF_PAIR
    write_lines(path / "rollouts/step_000004.jsonl", [*rows, conversation, hostile])
    for step, text, kl in ((0, "before all training", 0.0), (2, "half way", 1.0), (4, "after training", 2.0)):
        row = answer(0, text, score=float(step), kl=kl, columns={"answer": "forty-two"})
        for entry in row["tokens"]:
            entry["kl"] = kl
        other = answer(1, text, score=1.0)
        for k, entry in enumerate(other["tokens"]):
            entry["kl"] = 0.5 if k else 0.0
        write_lines(path / f"eval/step_{step:06d}.jsonl", [row, other])
    finding = {"rule": "kl_runaway", "severity": "error", "sentence": "The KL runs away: 2.0"}
    finding |= {"step": 3, "remedy": "lower learning_rate"}
    write_lines(
        path / "findings.jsonl",
        [finding, finding | {"rule": "uniform_groups", "severity": "warning", "sentence": "no gradient"}],
    )
    return path


def make_chat_run(path: Path) -> Path:
    """A run whose prompts repeat a system text, with a metric at its second step alone, and findings with addresses."""
    make_run(path, steps=9)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines[1]["objective/entropies"] = 1.5
    write_lines(path / "metrics.jsonl", lines)
    prompts = {k: f"<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\nWhat is {k} + 3?" for k in (2, 4)}
    rows = [answer(k, "five", prompt=prompt, question=f"What is {k} + 3?") for k, prompt in prompts.items()]
    write_lines(path / "rollouts/step_000001.jsonl", rows)
    finding = {"step": 1, "rule": "all_truncated", "severity": "error", "sentence": "all; https://host/why."}
    write_lines(path / "findings.jsonl", [finding | {"remedy": "see docs/a.md#b; then docs/c.md, or stop"}])
    return path


def make_worse_run(path: Path) -> Path:
    """A run of 20 steps whose final models are those of the best checkpoint, which is worse than before training."""
    make_run(path, steps=20)
    steps = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    steps[1]["eval/scores"] = 3.0
    steps = [{**step, "objective/rewards": step["objective/scores"]} for step in steps]
    write_lines(path / "metrics.jsonl", [{"step": 0, "eval/scores": 5.0}, *steps])
    write_lines(path / "final/step.json", [{"step": 2, "trained_steps": 20, "metric": "eval/scores", "value": 3.0}])
    finding = {"step": 2, "rule": "eval_falling", "severity": "error", "sentence": "worse: 5 -> 3"}
    write_lines(path / "findings.jsonl", [finding | {"remedy": "stop; see docs/troubleshooting.md#a-heading"}])
    return path


def make_evaluated_run(path: Path, *, preset: str, commit: str) -> Path:
    """A run that logs everything that an overview could hold: two eval sets with standard errors, three sources."""
    every = ("response_length", "truncated_fraction", "lr", "scores/a", "scores/b", "scores/c")
    lines = []
    for step in range(5):
        line: dict[str, Any] = {"step": step}
        if step:
            line |= {f"objective/{name}": 0.125 * step + k for k, name in enumerate(every)}
            line |= {"objective/scores": 1.0 * step, "objective/kl_sum_seq": 0.25 * step, "ppo/policy/entropy": 2.0}
            line |= {"objective/entropies": 2.0} if step == 1 else {}
            line |= {"ppo/val/explained_variance": 0.5, "ppo/policy/approx_kl_k3": 0.01, "ppo/policy/clipfrac": 0.0}
            line |= {"ppo/policy/grad_norm": 1.0, "ppo/val/grad_norm": 1.0, "tokens/per_second": 900.0}
        if step % 2 == 0:
            for k, name in enumerate(("easy", "hard")):
                right = 0.25 + (0.125 if k else 0.03125) * step
                line |= {f"eval/{name}/pass_at_1": right, f"eval/{name}/avg_at_4": right, f"eval/{name}/scores": -1.0}
                line |= {f"eval/{name}/pass_at_1_se": 0.0625, f"eval/{name}/pass_at_4": right + 0.25}
                line |= {f"eval/{name}/win_rate": 0.5}
                line |= {f"eval/{name}/kl_sum_seq": 2.0 * step, f"eval/{name}/response_length": 9.0}
        lines.append(line)
    write_lines(path / "metrics.jsonl", lines)
    provenance = {"started": "2026-01-02T03:04:05+00:00", "command_line": f"train --preset {preset}", "launcher": None}
    provenance |= {"presets": [preset], "config_files": ["my.yaml"], "hardware": {"processes": 2, "device": "cuda"}}
    provenance |= {"git": {"commit": commit, "branch": "main", "dirty": True}, "versions": {"torch": "2.11.0"}}
    options = {"metric_for_best_model": "eval/hard/pass_at_1", "provenance": provenance}
    (path / "run.yaml").write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items()))
    columns = {"instruction": "Where is the duck?", "input": "In the  cellar.", "empty": "", "solution": "cellar"}
    columns["asks"] = "duck"
    row = answer(0, "In the cellar.", prompt="### Where is the duck?\nIn the cellar.\n", columns=columns, correct=True)
    write_lines(path / "rollouts/step_000001.jsonl", [row])
    return path


def conversation(**values: Any) -> dict[str, Any]:
    """A row of several turns: the policy calls a tool, which answers, as does a user; the policy goes on."""
    turns = [("policy", "call"), ("tool", " 42"), ("environment", " sure?"), ("policy", " so 42")]
    tokens = [token("call", 0), {"id": 5, "text": " 42", "environment": True}]
    tokens += [{"id": 6, "text": " sure?", "environment": True}, token(" so", 1), token(" 42", 2)]
    row = {"prompt_id": 3, "sample_id": 0, "prompt": "Use the tool.", "response": "call 42 sure? so 42", "score": 1.0}
    row |= {"stopped": True, "length": 3, "tokens": tokens}
    return row | {"turns": [{"role": role, "text": text} for role, text in turns]} | values
