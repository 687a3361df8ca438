"""`RolloutOptions`, the part of `PPOConfig` about what is sampled, in how many turns, and how it is scored."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from alpaca_ppo.config.fields import argument, unless, when, when_trait
from alpaca_ppo.config.run_options import RunOptions
from alpaca_ppo.registry import ADV_ESTIMATORS, GENERATION_BACKENDS

_SEVERAL_TURNS = when("environments or tools")


@dataclass(frozen=True)
class RolloutOptions(RunOptions):
    """The options of prompts, batch sizes, generation, rewards and environments."""

    query_len: int = argument(192, ge=1, group="Prompts")
    """Maximum length of a prompt, in tokens."""
    overlong_prompts: Literal["drop", "truncate", "error"] = "drop"
    """Prompts longer than query_len are dropped and counted, lose their beginning and are counted, or are an error."""
    prompt_column: str = argument("prompt", needs=unless("prompt_template"))
    """Dataset column that holds the prompt, as text or messages."""
    prompt_template: str | None = None
    """Named template or format string over the dataset's columns, instead of prompt_column."""
    chat_template_kwargs: dict[str, JsonValue] | None = argument(None, needs=when("prompts that are messages"))
    """Arguments of the chat template, such as enable_thinking: false for Qwen3, as YAML or JSON; reward models keep
    their own template as it is."""
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
    """Times in a step that prompts whose responses all have the same score, before any penalty, are replaced by fresh
    ones, such as 3; the dataset is gone through faster than epochs are counted. 0 = none."""
    rollout_per_device_batch_size: int = argument(32, ge=1)
    """Responses that a process samples or scores at once."""
    step_batch_size: int = argument(64, ge=1)
    """Responses per optimizer step, over all processes."""
    step_per_device_batch_size: int = argument(8, ge=1)
    """Responses per micro-batch where a single process pads them; otherwise only the default of
    max_tokens_per_micro_batch."""
    max_tokens_per_micro_batch: int | None = argument(None, ge=1)
    """Tokens per micro-batch on one device; null = step_per_device_batch_size * (query_len + response_len)."""
    ppo_epochs: int = argument(2, ge=1)
    """Passes over each step's rollouts."""

    response_len: int = argument(300, ge=1, group="Generation")
    """Maximum length of a response, in tokens."""
    temperature: float = argument(1.0, gt=0)
    """Temperature of the sampling and of every log-probability."""
    generation_backend: str = argument("auto", registry=GENERATION_BACKENDS)
    """slots gives the places of ended rows to waiting prompts; generate runs model.generate on one batch after the
    other; auto takes slots, or generate where the model or sharded parameters do not allow them."""
    truncate_tokens: list[str | int] | None = None
    """Additional stop tokens: the text or the id of one token each (on the command line, digits are an id)."""
    truncate_after: int = argument(0, ge=0, needs=when("truncate_tokens"))
    """Number of tokens that a response must have before truncate_tokens can stop it."""
    stop_strings: list[Annotated[str, Field(min_length=1)]] | None = None
    """Texts that end a response, with the token that completes one of them; the response keeps its text."""

    reward_weights: list[float] | None = argument(None, min_length=1, group="Rewards")
    """Weight of each reward source; null = 1 each."""
    reward_adapter: str | None = None
    """LoRA reward model (folder or hub id) on the policy's base, as alpaca-ppo reward --use_peft writes it."""
    reward_retries: int = argument(0, ge=0, needs=when("reward functions"))
    """Times that a reward function is called again after it has raised."""
    failed_rewards: Literal["error", "mask"] = argument("error", needs=when("reward functions"))
    """A response whose reward function raises or returns no finite score, or for which every source returns None: error
    ends the run; mask trains without the response and counts it."""
    penalty_reward_value: float | None = None
    """Score of a response that ends without a stop token; null = its own score."""
    overlong_buffer_len: int | None = argument(None, ge=1)
    """Tokens before response_len over which a penalty on the length grows from 0 to 1; null = no penalty."""
    whiten_rewards: bool = argument(False, needs=when_trait(ADV_ESTIMATORS, "needs_critic"))
    """Scale the shaped rewards to unit variance before the advantages are estimated (AlpacaFarm)."""

    max_turns: int | None = argument(None, ge=1, group="Environments", needs=_SEVERAL_TURNS)
    """Turns of the policy after which an episode ends as truncated; null = no limit."""
    max_turn_tokens: int | None = argument(None, ge=1, needs=_SEVERAL_TURNS)
    """Most tokens of a turn of the policy; null = up to response_len."""
    tool_timeout: float | None = argument(None, gt=0, needs=_SEVERAL_TURNS)
    """Seconds for a call of a tool, after which the policy reads an error, or of an environment, after which the run
    stops; null waits."""
