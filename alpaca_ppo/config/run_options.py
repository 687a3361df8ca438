"""`RunOptions`, the part of `PPOConfig` that comes first: what a run reports and saves, and its seed."""

from dataclasses import dataclass

from alpaca_ppo.config.fields import argument, when
from alpaca_ppo.config.foreign_names import ExplainsUnknownNames


@dataclass(frozen=True)
class RunOptions(ExplainsUnknownNames):
    """The options of the run as a whole, tracking and checkpoints."""

    output_dir: str = argument(
        "outputs/ppo", "Folder for checkpoints, final models, metrics.jsonl and logs.", group="Run and tracking"
    )
    run_name: str | None = argument(None, "Name of the run in the trackers; null = the name of output_dir.")
    seed: int = argument(
        42, "Seed of prompt order, sampling, mini-batches and, in train(), the global generators.", at_least=0
    )
    report_to: list[str] | str = argument(
        ["tensorboard"], "Accelerate's trackers to log to, such as tensorboard or wandb; all, or none."
    )
    logging_steps: int = argument(
        1, "Steps between two console lines and reports to the trackers; metrics.jsonl gets every step.", at_least=1
    )
    entropy_logging_steps: int = argument(
        10,
        "Steps between two with the metrics objective/entropies, objective/ref_entropies and ppo/policy/entropy, "
        "which the first step has too and entropy_coef in every step.",
        at_least=1,
    )
    num_logged_rollouts: int = argument(
        8, "Samples per step written to rollouts/ with their per-token numbers; 0 = none.", at_least=0
    )
    num_inspected_prompts: int = argument(
        4,
        "Prompts whose answers the report follows through training, token by token: the first of the eval dataset, or "
        "else of the training data at up to eleven steps, greedily and without a score. 0 = none.",
        at_least=0,
    )
    report: bool = argument(
        True, "Write report.html into output_dir at the end of the run, and refresh it while the run trains."
    )
    report_token_mb: float = argument(20.0, "Megabytes of per-token numbers in report.html at most.", at_least=0)

    stop_on: list[str] | None = argument(
        None,
        "Findings of the doctor that end the run, with a checkpoint: severities (error, warning) or rules "
        "(docs/doctor.md).",
    )

    save_steps: int = argument(
        20,
        "Steps between two checkpoints, from which a killed run resumes; the last step has one too. 0 = only the "
        "final models are saved.",
        at_least=0,
        group="Checkpoints",
    )
    save_total_limit: int | None = argument(
        2,
        "Checkpoints to keep, including the newest and the best (1 keeps both); null = all.",
        at_least=1,
        needs=when("save_steps"),
    )
    metric_for_best_model: str | None = argument(
        None,
        "Metric that selects the best checkpoint; null = none is kept. With an eval/* metric, every best evaluation "
        "so far saves one; a metric of the steps chooses among those of save_steps.",
        needs=when("save_steps"),
    )
    greater_is_better: bool = argument(
        True, "Whether a higher metric_for_best_model is better.", needs=when("metric_for_best_model")
    )
    load_best_model_at_end: bool = argument(
        False,
        "End with the weights of the best checkpoint, in the trainer and in final/, instead of the last step's.",
        needs=when("metric_for_best_model"),
    )
    overwrite_output_dir: bool = argument(
        False,
        "Delete the earlier run in output_dir when a new one starts there, which is refused otherwise; a run that "
        "resumes keeps everything.",
    )
    ignore_changes: list[str] | None = argument(
        None,
        "Resume even if these differ from the checkpoint's: data (the training rows), model (the starting policy or "
        "the reference), reward (sources, weights, environments).",
    )
    push_to_hub: bool = argument(False, "Upload final/policy to hub_model_id at the end.", needs=when("hub_model_id"))
    hub_model_id: str | None = argument(None, "Hub repository for push_to_hub.")
