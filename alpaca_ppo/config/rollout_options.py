"""`RolloutOptions`, the part of `PPOConfig` about what is sampled and how it is scored."""

from dataclasses import dataclass
from typing import Any, Literal

from alpaca_ppo.config.evaluation_options import EvaluationOptions
from alpaca_ppo.config.fields import argument, unless, when, when_trait
from alpaca_ppo.registry import ADV_ESTIMATORS, GENERATION_BACKENDS


@dataclass(frozen=True)
class RolloutOptions(EvaluationOptions):
    """The options of prompts, batch sizes, generation and rewards."""

    query_len: int = argument(192, "Maximum length of a prompt, in tokens.", at_least=1, group="Prompts")
    overlong_prompts: Literal["drop", "truncate", "error"] = argument(
        "drop",
        "Prompts longer than query_len are dropped and counted, lose their beginning and are counted, or are an error.",
    )
    prompt_column: str = argument(
        "prompt", "Dataset column that holds the prompt, as text or messages.", needs=unless("prompt_template")
    )
    prompt_template: str | None = argument(
        None, "Named template or format string over the dataset's columns, instead of prompt_column."
    )
    chat_template_kwargs: dict[str, Any] | None = argument(
        None,
        "Arguments of the chat template, such as enable_thinking: false for Qwen3, as YAML or JSON; reward models "
        "keep their own template as it is.",
        needs=when("prompts that are messages"),
    )
    total_epochs: int | None = argument(
        None, "Passes over the prompts; null = 1, unless total_episodes or max_steps is set.", at_least=1
    )
    total_episodes: int | None = argument(
        None, "Number of prompts to sample in the whole run, instead of total_epochs.", at_least=1
    )
    max_steps: int | None = argument(
        None, "Steps of the whole run, each a rollout with its updates, instead of total_epochs.", at_least=1
    )

    rollout_batch_size: int = argument(
        128, "Prompts per step, over all processes.", at_least=1, group="Batch sizes and epochs"
    )
    num_return_sequences: int = argument(1, "Responses sampled for each prompt.", at_least=1)
    dynamic_sampling: int = argument(
        0,
        "Times in a step that prompts whose responses all have the same score, before any penalty, are replaced by "
        "fresh ones, such as 3; the dataset is gone through faster than epochs are counted. 0 = none.",
        at_least=0,
        needs=unless("num_return_sequences", 1),
    )
    rollout_per_device_batch_size: int = argument(32, "Responses that a process samples or scores at once.", at_least=1)
    step_batch_size: int = argument(64, "Responses per optimizer step, over all processes.", at_least=1)
    step_per_device_batch_size: int = argument(
        8,
        "Responses per micro-batch where a single process pads them; otherwise only the default of "
        "max_tokens_per_micro_batch.",
        at_least=1,
    )
    max_tokens_per_micro_batch: int | None = argument(
        None,
        "Tokens per micro-batch on one device; null = step_per_device_batch_size * (query_len + response_len).",
        at_least=1,
    )
    ppo_epochs: int = argument(2, "Passes over each step's rollouts.", at_least=1)

    response_len: int = argument(300, "Maximum length of a response, in tokens.", at_least=1, group="Generation")
    temperature: float = argument(1.0, "Temperature of the sampling and of every log-probability.", above=0)
    generation_backend: str = argument(
        "auto",
        "slots gives the places of ended rows to waiting prompts; generate runs model.generate on one batch after the "
        "other; auto takes slots, or generate where the model or sharded parameters do not allow them.",
        registry=GENERATION_BACKENDS,
    )
    truncate_tokens: list[str | int] | None = argument(
        None, "Additional stop tokens: the text or the id of one token each (on the command line, digits are an id)."
    )
    truncate_after: int = argument(
        0,
        "Number of tokens that a response must have before truncate_tokens can stop it.",
        at_least=0,
        needs=when("truncate_tokens"),
    )
    stop_strings: list[str] | None = argument(
        None, "Texts that end a response, with the token that completes one of them; the response keeps its text."
    )

    reward_weights: list[float] | None = argument(None, "Weight of each reward source; null = 1 each.", group="Rewards")
    reward_adapter: str | None = argument(
        None, "LoRA reward model (folder or hub id) on the policy's base, as alpaca-ppo reward --use_peft writes it."
    )
    reward_retries: int = argument(
        0,
        "Times that a reward function is called again after it has raised.",
        at_least=0,
        needs=when("reward functions"),
    )
    failed_rewards: Literal["error", "mask"] = argument(
        "error",
        "A response whose reward function raises or returns no finite score, or for which every source returns None: "
        "error ends the run; mask trains without the response and counts it.",
        needs=when("reward functions"),
    )
    penalty_reward_value: float | None = argument(
        None, "Score of a response that ends without a stop token; null = its own score."
    )
    overlong_buffer_len: int | None = argument(
        None,
        "Tokens before response_len over which a penalty on the length grows from 0 to 1; null = no penalty.",
        at_least=1,
    )
    whiten_rewards: bool = argument(
        False,
        "Scale the shaped rewards to unit variance before the advantages are estimated (AlpacaFarm).",
        needs=when_trait(ADV_ESTIMATORS, "needs_critic"),
    )
