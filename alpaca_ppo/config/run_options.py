"""`RunOptions`, the part of `PPOConfig` that comes first: what a run reports, saves and evaluates, and its seed."""

from dataclasses import dataclass
from typing import Literal

from alpaca_ppo.config.fields import argument, unless, when
from alpaca_ppo.config.foreign_names import ExplainsUnknownNames
from alpaca_ppo.registry import DoctorRule, DoctorSeverity


@dataclass(frozen=True)
class RunOptions(ExplainsUnknownNames):
    """The options of tracking, checkpoints and evaluation."""

    output_dir: str = argument("outputs/ppo", group="Run and tracking")
    """Folder for checkpoints, final models, metrics.jsonl and logs."""
    run_name: str | None = argument(None, needs=unless("report_to", ["none"]))
    """Name of the run in the trackers; null = the name of output_dir."""
    seed: int = argument(42, ge=0)
    """Seed of prompt order, sampling, mini-batches and, in train(), the global generators."""
    report_to: list[str] | str = argument(["tensorboard"])
    """Accelerate's trackers to log to, such as tensorboard or wandb; all, or none."""
    logging_steps: int = argument(1, ge=1)
    """Steps between two console lines and reports to the trackers; metrics.jsonl gets every step, with the entropies in
    the first and every tenth one."""
    num_logged_rollouts: int = argument(8, ge=0)
    """Samples per step written to rollouts/ with their per-token numbers; 0 = none."""
    num_inspected_prompts: int = argument(4, ge=0)
    """Prompts whose answers the report follows through training, token by token: the first of the eval dataset, or else
    of the training data at up to eleven steps, greedily and without a score. 0 = none."""
    report: bool = True
    """Write report.html into output_dir at the end of the run, and refresh it while the run trains."""
    stop_on: list[DoctorSeverity | DoctorRule] | None = None
    """Findings of the doctor that end the run, with a checkpoint: severities (error, warning) or rules
    (docs/doctor.md)."""

    save_steps: int = argument(20, ge=0, group="Checkpoints")
    """Steps between two checkpoints, from which a killed run resumes; the last step has one too. 0 = only the final
    models are saved."""
    save_total_limit: int | None = argument(2, ge=1, needs=when("save_steps"))
    """Checkpoints to keep, including the newest and the best (1 keeps both); null = all."""
    metric_for_best_model: str | None = argument(None, needs=when("save_steps"))
    """Metric that selects the best checkpoint; null = none is kept. With an eval/* metric, every best evaluation so far
    saves one; a metric of the steps chooses among those of save_steps."""
    greater_is_better: bool = argument(True, needs=when("metric_for_best_model"))
    """Whether a higher metric_for_best_model is better."""
    load_best_model_at_end: bool = argument(False, needs=when("metric_for_best_model"))
    """End with the weights of the best checkpoint, in the trainer and in final/, instead of the last step's."""
    overwrite_output_dir: bool = False
    """Delete the earlier run in output_dir when a new one starts there, which is refused otherwise; a run that resumes
    keeps everything."""
    ignore_changes: list[Literal["data", "model", "reward"]] | None = None
    """Resume even if these differ from the checkpoint's: data (the training rows), model (the starting policy or the
    reference), reward (sources, weights, environments)."""
    hub_model_id: str | None = None
    """Repository on the hub to which final/policy is uploaded at the end; null = none."""

    eval_steps: int = argument(0, ge=0, group="Evaluation", needs=when("eval set"))
    """Steps between two evaluations; 0 = only before and after training."""
    eval_top_p: float | None = argument(None, gt=0, le=1, needs=when("eval_temperature"))
    """Nucleus sampling in evaluation."""
    eval_top_k: int | None = argument(None, ge=1, needs=when("eval_temperature"))
    """Top-k sampling in evaluation."""
    eval_temperature: float = argument(0.0, ge=0)
    """Temperature of the responses in evaluation; 0 = greedy."""
    eval_num_samples: int = argument(1, ge=1, needs=when("eval_temperature"))
    """Responses to each prompt in evaluation."""
    eval_success_above: float | None = argument(None, needs=when("eval set"))
    """A response whose eval_success_by is above this is correct: adds pass@k and avg@n; null = neither."""
    eval_success_by: str = argument("scores", needs=when("eval_success_above"))
    """What eval_success_above reads: scores, rewards (with penalties), a reward source (scores/<source>) or a
    metric_funcs."""
    eval_opponent: str | None = argument(None, needs=when("eval set"))
    """Whose answers the policy's are compared with: reference, column:<name> of the eval set, or a .jsonl file with
    prompt and response, as alpaca-ppo evaluate writes it; null = no win-rate."""
    eval_judge: str = argument("scores", needs=when("eval_opponent"))
    """What decides which answer is better: scores, a reward source, a metric_funcs, or a function, as module:function
    or file.py:function."""
