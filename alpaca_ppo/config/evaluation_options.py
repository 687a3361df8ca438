"""`EvaluationOptions`, the part of `PPOConfig` about held-out prompts: how they are sampled, and what is computed."""

from dataclasses import dataclass

from alpaca_ppo.config.fields import argument, when
from alpaca_ppo.config.run_options import RunOptions


@dataclass(frozen=True)
class EvaluationOptions(RunOptions):
    """The options of evaluations, after those of the run."""

    eval_steps: int = argument(
        0,
        "Steps between two evaluations; 0 = only before and after training.",
        at_least=0,
        group="Evaluation",
        needs=when("eval set"),
    )
    eval_top_p: float | None = argument(
        None, "Nucleus sampling in evaluation.", above=0, at_most=1, needs=when("eval_temperature")
    )
    eval_top_k: int | None = argument(None, "Top-k sampling in evaluation.", at_least=1, needs=when("eval_temperature"))
    eval_temperature: float = argument(0.0, "Temperature of the responses in evaluation; 0 = greedy.", at_least=0)
    eval_num_samples: int = argument(
        1, "Responses to each prompt in evaluation.", at_least=1, needs=when("eval_temperature")
    )
    eval_success_above: float | None = argument(
        None,
        "A response whose eval_success_by is above this is correct: adds pass@k and avg@n; null = neither.",
        needs=when("eval set"),
    )
    eval_success_by: str = argument(
        "scores",
        "What eval_success_above reads: scores, rewards (with penalties), a reward source (scores/<source>) or a "
        "metric_funcs.",
    )
    eval_opponent: str | None = argument(
        None,
        "Whose answers the policy's are compared with: reference, column:<name> of the eval set, or a .jsonl file "
        "with prompt and response, as alpaca-ppo evaluate writes it; null = no win-rate.",
        needs=when("eval set"),
    )
    eval_judge: str = argument(
        "scores",
        "What decides which answer is better: scores, a reward source, a metric_funcs, or a function, as "
        "module:function or file.py:function.",
        needs=when("eval_opponent"),
    )
