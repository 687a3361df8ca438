"""`RunOptions`, the first part of `PPOConfig`: what a run reports, saves and evaluates; how it samples and scores."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from alpaca_ppo.config.fields import CheckedArguments, argument, unless, when, when_trait
from alpaca_ppo.registry import ADV_ESTIMATORS, GENERATION_BACKENDS, DoctorRule, DoctorSeverity

SEVERAL_TURNS = when("environments or tools")

_VLLM = when("generation_backend", "vllm")
_OWN_SERVER = (_VLLM, unless("vllm_urls"))


@dataclass(frozen=True)
class RunOptions(CheckedArguments):
    """The options of tracking, checkpoints, evaluation, prompts, batch sizes, generation, rewards and environments."""

    output_dir: str = argument("outputs/ppo", group="Run and tracking")
    """Folder for checkpoints, final models, metrics.jsonl and logs."""
    run_name: str | None = argument(None, needs=unless("report_to", ["none"]))
    """Name of the run in the trackers; null = the name of output_dir."""
    seed: int = argument(42, ge=0)
    """Seed of prompt order, sampling, mini-batches and, in train(), the global generators."""
    report_to: list[str] | str = argument(["tensorboard"])
    """Accelerate's trackers to log to, such as tensorboard or wandb; all, or none."""
    logging_steps: int = argument(1, ge=1)
    """Steps between two lines on the console, and between two reports to the trackers; metrics.jsonl gets every step.
    Entropies are in the first and every tenth step."""
    num_logged_rollouts: int = argument(8, ge=0)
    """Samples per step written to rollouts/ with their per-token numbers; 0 = none."""
    num_inspected_prompts: int = argument(4, ge=0)
    """Prompts whose answers the report follows token by token: of the eval dataset or, without one, of the training
    data, answered greedily at up to eleven steps and not scored. 0 = none."""
    report: bool = True
    """Write report.html into output_dir at the end of the run, and refresh it while the run trains."""
    stop_on: list[DoctorSeverity | DoctorRule] | None = None
    """Findings of the doctor that end the run: severities (error, warning) or rules (docs/doctor.md)."""
    stop_at: str | None = None
    """Condition that ends the run, with a checkpoint and the final models: a metric of steps or evaluations, >=, <=, >
    or <, and a number, such as eval/scores >= 0.8."""

    save_steps: int = argument(20, ge=0, group="Checkpoints")
    """Steps between two checkpoints; the last step is saved too. 0 = only the final models are saved."""
    save_total_limit: int | None = argument(2, ge=1, needs=when("save_steps"))
    """Checkpoints to keep, including the newest and the best (1 keeps both); null = all."""
    metric_for_best_model: str | None = argument(None, needs=(when("save_steps"), when("eval_steps")))
    """Metric of evaluations (eval/*) that selects the best checkpoint; each new best saves one. null = none."""
    greater_is_better: bool = argument(True, needs=when("metric_for_best_model"))
    """Whether a higher metric_for_best_model is better."""
    load_best_model_at_end: bool = argument(False, needs=when("metric_for_best_model"))
    """End with the weights of the best checkpoint, in the trainer and in final/, instead of the last step's."""
    overwrite_output_dir: bool = False
    """Delete an earlier run in output_dir, which is otherwise an error; a resumed run deletes nothing."""
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
    """A response whose eval_success_by is above this is correct, for pass@k and avg@n; null = neither."""
    eval_success_by: str = argument("scores", needs=when("eval_success_above"))
    """What eval_success_above limits: scores, rewards (with penalties), scores/<source> or one of metric_funcs."""
    eval_opponent: str | None = argument(None, needs=when("eval set"))
    """Whose answers the policy's are compared with: reference, column:<name> of the eval set, or a .jsonl file with
    prompt and response, as alpaca-ppo evaluate writes it; null = no win-rate."""
    eval_judge: str = argument("scores", needs=when("eval_opponent"))
    """Judge of the answers: scores, a reward source, one of metric_funcs, module:function or file.py:function."""

    query_len: int = argument(192, ge=1, group="Prompts")
    """Maximum length of a prompt, in tokens."""
    overlong_prompts: Literal["drop", "truncate", "error"] = "drop"
    """Prompts longer than query_len: drop them, truncate their beginning (both are counted), or end with an error."""
    prompt_column: str = argument("prompt", needs=(unless("prompt_template"), unless("user_template")))
    """Dataset column that holds the prompt, as text or messages. If there is none, Alpaca's columns instruction and
    input become a user message if the tokenizer has a chat template, else text of the template alpaca."""
    prompt_template: str | None = None
    """Named template or format string over the dataset's columns, for plain text without the chat template."""
    user_template: str | None = argument(None, needs=unless("prompt_template"))
    """Format string over the columns for a user message, such as "{instruction}\n{input}"; input may be empty."""
    system_prompt: str | None = argument(None, needs=unless("prompt_template"))
    """System message before the user's, unless the row has one; text in prompt_column is then the user's message."""
    chat_template_kwargs: dict[str, JsonValue] | None = argument(None, needs=when("prompts that are messages"))
    """Arguments of the chat template, such as {enable_thinking: false}; reward models do not get them."""
    control_tokens_from: Literal["template", "prompts", "everything"] = "prompts"
    """Whose text may contain control tokens, such as <|im_end|>: the chat template's only; the prompts' too; or
    everything, tools and environments included. In other text, the same characters become ordinary tokens."""
    total_epochs: int | None = argument(None, ge=1)
    """Passes over the prompts; null = 1, unless total_episodes or max_steps is set."""
    total_episodes: int | None = argument(None, ge=1)
    """Number of prompts to sample in the whole run, instead of total_epochs."""
    max_steps: int | None = argument(None, ge=1)
    """Steps of the whole run, each a rollout with its updates, instead of total_epochs."""

    rollout_batch_size: int = argument(128, ge=1, group="Batch sizes and epochs")
    """Prompts per step, over all processes."""
    num_return_sequences: int = argument(1, ge=1)
    """Responses sampled for each prompt."""
    dynamic_sampling: int = argument(0, ge=0, needs=unless("num_return_sequences", 1))
    """How often in a step prompts whose responses all have the same score, before any penalty, are replaced, such as 3.
    Replacements do not count in total_epochs, so the run goes through the dataset more often. 0 = never."""
    rollout_per_device_batch_size: int = argument(32, ge=1)
    """Responses that a process samples or scores at once."""
    step_batch_size: int = argument(64, ge=1)
    """Responses per optimizer step, over all processes."""
    step_per_device_batch_size: int = argument(8, ge=1)
    """Responses per micro-batch if one process trains on padded rows; otherwise it only sets the default of
    max_tokens_per_micro_batch."""
    max_tokens_per_micro_batch: int | None = argument(None, ge=1)
    """Tokens per micro-batch on one device; null = step_per_device_batch_size * (query_len + response_len)."""
    ppo_epochs: int = argument(2, ge=1)
    """The policy's epochs over each step's rollouts; critic_epochs are the critic's."""

    response_len: int = argument(300, ge=1, group="Generation")
    """Maximum length of a response, in tokens."""
    temperature: float = argument(1.0, gt=0)
    """Temperature of the sampling and of every log-probability."""
    generation_backend: str = argument("auto", registry=GENERATION_BACKENDS)
    """slots starts a waiting prompt as soon as a response ends; generate runs model.generate on one batch after the
    other; auto is slots, or generate where the model or sharded parameters do not allow slots; vllm uses servers."""
    vllm_python: str | None = argument(None, needs=_OWN_SERVER)
    """Python interpreter with vLLM (alpaca-ppo vllm-env), which runs a server per process; null = use vllm_urls."""
    vllm_urls: list[str] | None = argument(None, min_length=1, needs=_VLLM)
    """Addresses of vLLM servers that run already, such as http://127.0.0.1:8000; null = start them (vllm_python)."""
    vllm_dtype: Literal["float32", "bfloat16", "float16"] | None = argument(None, needs=_VLLM)
    """Data type in which vLLM computes; null = that of the policy's passes."""
    vllm_gpu_memory_utilization: float = argument(0.4, gt=0, lt=1, needs=_OWN_SERVER)
    """Share of a GPU's memory that a server takes while it samples."""
    vllm_args: list[str] | None = argument(None, needs=_OWN_SERVER)
    """Further words of the command that starts a server, such as [--max-num-seqs, "512"]."""
    truncate_tokens: list[str | int] | None = None
    """Additional stop tokens: the text or the id of one token each (on the command line, digits are an id)."""
    truncate_after: int = argument(0, ge=0, needs=when("truncate_tokens"))
    """Number of tokens that a response must have before truncate_tokens can stop it."""
    stop_strings: list[Annotated[str, Field(min_length=1)]] | None = None
    """Texts that end a response as soon as a token completes one of them; the response keeps the text."""

    reward_weights: list[float] | None = argument(None, min_length=1, group="Rewards")
    """Weight of each reward source; null = 1 each."""
    reward_adapter: str | None = None
    """LoRA reward model (folder or hub id) on the policy's base, as alpaca-ppo reward --use_peft writes it."""
    reward_retries: int = argument(0, ge=0, needs=when("reward functions"))
    """Times that a reward function is called again after it has raised."""
    failed_rewards: Literal["error", "mask"] = argument("error", needs=when("reward functions"))
    """A response whose reward function raises or returns no finite score, or for which every source returns None: error
    ends the run; mask leaves the response out of the training and counts it."""
    penalty_reward_value: float | None = None
    """Score of a response that ends without a stop token; null = its own score."""
    overlong_buffer_len: int | None = argument(None, ge=1)
    """Tokens before response_len over which a penalty on the length grows from 0 to 1; null = no penalty."""
    whiten_rewards: bool = argument(False, needs=when_trait(ADV_ESTIMATORS, "needs_critic"))
    """Scale the shaped rewards to unit variance before the advantages are estimated (AlpacaFarm)."""

    max_turns: int | None = argument(None, ge=1, group="Environments", needs=SEVERAL_TURNS)
    """Turns of the policy after which an episode ends as truncated; null = no limit."""
    max_turn_tokens: int | None = argument(None, ge=1, needs=SEVERAL_TURNS)
    """Most tokens of a turn of the policy; null = up to response_len."""
    tool_timeout: float | None = argument(None, gt=0, needs=SEVERAL_TURNS)
    """Time limit in seconds for a call: of a tool, after which the policy reads an error, or of an environment, after
    which the run stops; null = no limit."""
