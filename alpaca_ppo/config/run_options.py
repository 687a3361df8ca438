"""`RunOptions`, the part of `PPOConfig` that comes first: what a run reports, saves and evaluates, and its seed."""

from dataclasses import dataclass

from alpaca_ppo.config.fields import argument


@dataclass(frozen=True)
class RunOptions:
    """The options of the run as a whole, tracking, checkpoints and evaluation."""

    output_dir: str = argument(
        "outputs/ppo", "Folder for checkpoints, final models, metrics.jsonl and logs.", group="Run and tracking"
    )
    run_name: str | None = argument(None, "Name of the run in the trackers; null = the name of output_dir.")
    seed: int = argument(
        42,
        "Seed of the prompt order, the sampling, the mini-batches and, in train(), the global generators.",
        at_least=0,
    )
    report_to: list[str] | str = argument(
        ["tensorboard"], "Accelerate's trackers to log to, such as tensorboard or wandb; all, or none."
    )
    logging_steps: int = argument(
        1, "Steps between two reports to the trackers; metrics.jsonl gets every step.", at_least=1
    )
    entropy_logging_steps: int = argument(
        10,
        "Steps between two with the metrics objective/entropies, objective/ref_entropies and ppo/policy/entropy; the "
        "first step has them too. In other steps no entropies are computed, unless entropy_coef needs them.",
        at_least=1,
    )
    num_logged_rollouts: int = argument(
        8, "Samples per step written to rollouts/ with their per-token numbers; 0 = none.", at_least=0
    )

    save_steps: int = argument(
        0, "Steps between two checkpoints; 0 = only the final model is saved.", at_least=0, group="Checkpoints"
    )
    save_total_limit: int | None = argument(
        None,
        "Number of checkpoints to keep, including the newest and the best (1 keeps both); null = all.",
        at_least=1,
    )
    metric_for_best_model: str | None = argument(
        None, "Metric that selects the best checkpoint, such as eval/scores; null = no best checkpoint is kept."
    )
    greater_is_better: bool = argument(True, "Whether a higher metric_for_best_model is better.")
    ignore_data_change: bool = argument(
        False, "Resume even if the training data differ from the checkpoint's; the remaining steps use the new data."
    )
    ignore_model_change: bool = argument(
        False,
        "Resume even if the starting policy or the reference differs from the checkpoint's; the remaining steps "
        "measure the KL to the new reference.",
    )
    ignore_reward_change: bool = argument(
        False,
        "Resume even if reward sources or their weights differ from the checkpoint's; the remaining steps use the new "
        "ones.",
    )
    merge_on_save: bool = argument(False, "Also save final/merged, the policy with its adapter merged into the base.")
    push_to_hub: bool = argument(False, "Upload final/policy to the hub at the end.")
    hub_model_id: str | None = argument(None, "Hub repository for push_to_hub.")

    eval_steps: int = argument(
        0, "Steps between two evaluations; 0 = only before and after training.", at_least=0, group="Evaluation"
    )
    eval_do_sample: bool = argument(False, "Evaluate sampled responses instead of greedy ones.")
    eval_top_p: float | None = argument(None, "Nucleus sampling in evaluation.", above=0, at_most=1)
    eval_top_k: int | None = argument(None, "Top-k sampling in evaluation.", at_least=1)
