"""Builds what a trainer needs for tools and environments: their kinds, the prompts they answer, and their rewards."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset

from alpaca_ppo.config.modules import load_function
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.script_arguments import ScriptArguments
from alpaca_ppo.environments.conversation import Conversation
from alpaca_ppo.environments.episode import EpisodeSettings
from alpaca_ppo.environments.episodes import Environments, kind_of
from alpaca_ppo.environments.kinds import (
    EnvironmentFactory,
    NoEnvironment,
    can_answer,
    make_kinds,
    rewarding_classes,
)
from alpaca_ppo.environments.tool_calls import ToolCallParser
from alpaca_ppo.generation.sampling_params import SamplingParams
from alpaca_ppo.rewards import FunctionReward, RewardScorer


class GivenEnvironments:
    """The tools and environments that a trainer was given, looked through.

    Args:
        tools: functions that the policy can call.
        environment_factory: makes environments.
        tool_call_parser: of the user; None = the tokenizer's own, or JSON.

    Raises:
        ValueError: see `make_kinds`.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None = None,
        tool_call_parser: ToolCallParser | None = None,
    ) -> None:
        self.kinds, self.tool_call_parser = make_kinds(tools, environment_factory), tool_call_parser

    @property
    def source_names(self) -> list[str]:
        """The names of the environments' reward sources."""
        return rewarding_classes(self.kinds)

    @property
    def answer(self) -> bool:
        """Whether a response can have more than one turn."""
        return can_answer(self.kinds)


NO_ENVIRONMENTS = GivenEnvironments()


def named_environments(script_args: ScriptArguments) -> dict[str, Any]:
    """The arguments of `PPOTrainer` that the options `environments`, `tools` and `tool_call_parser` name.

    Raises:
        ValueError: for what cannot be imported, and for several environments of which one has no name of its own.
    """
    specs = [spec.rpartition("=") for spec in script_args.environments or ()]
    factory: Any = None
    if len(specs) == 1 and not specs[0][0]:
        factory = load_function(specs[0][2], what="environment")
    elif specs:
        names = [name for name, _, _ in specs]
        if not all(names) or len(set(names)) < len(names):
            raise ValueError(
                f"environments is {script_args.environments}; give each of several a name of its own: "
                "name=module:class. The dataset's column environment chooses among the names"
            )
        factory = {name: load_function(spec, what="environment") for name, _, spec in specs}
    parser = script_args.tool_call_parser
    return {
        "environment_factory": factory,
        "tools": [load_function(spec, what="tool") for spec in script_args.tools or ()] or None,
        "tool_call_parser": None if parser is None else load_function(parser, what="tool_call_parser"),
    }


def prompt_rows(dataset: Any, given: GivenEnvironments, processing_class: Any, args: PPOConfig) -> Any:
    """`dataset`, with blank prompts where environments make them: without a dataset, or without the prompt column.

    Raises:
        ValueError: without a dataset, for several environments, or without `max_steps`; for a column that a `reset`
            requires and no row has.
    """
    made = _with_blank_prompts(dataset, given, processing_class, args)
    if isinstance(made, Dataset):
        for kind in given.kinds.values():
            kind.reset_arguments(dict.fromkeys([*made.column_names, "prompt"]), 0)
    return made


def _with_blank_prompts(dataset: Any, given: GivenEnvironments, processing_class: Any, args: PPOConfig) -> Any:
    kinds = given.kinds
    blank: Any = [{"role": "user", "content": ""}] if processing_class.chat_template else ""
    if dataset is None:
        if not any(kind.environment_class is not NoEnvironment for kind in kinds.values()):
            raise ValueError(
                "train_dataset is None; pass the prompts, or an environment_factory whose reset returns them"
            )
        if len(kinds) > 1:
            raise ValueError(
                f"environment_factory names {list(kinds)}, but train_dataset is None, so nothing says which prompt is "
                "whose; pass a dataset with a column environment"
            )
        if args.max_steps is None:
            raise ValueError(
                "train_dataset is None, so that the environment makes the prompts, but max_steps is null; set "
                "max_steps to the length of the run"
            )
        (name,) = kinds
        routed = {} if name is None else {"environment": name}
        return Dataset.from_list([{args.prompt_column: blank, **routed}] * args.rollout_batch_size)
    columns = getattr(dataset, "column_names", [])
    has_prompt = args.prompt_template or args.prompt_column in columns or "instruction" in columns
    if not kinds or not isinstance(dataset, Dataset) or has_prompt:
        return dataset
    return dataset.add_column(args.prompt_column, [blank] * len(dataset))


def schemas_of(given: GivenEnvironments) -> Callable[[Mapping[str, Any]], list[Mapping[str, Any]]] | None:
    """Returns a function of a dataset row: the tools that its prompt shows; None without environments."""
    return (lambda row: [tool.schema for tool in kind_of(given.kinds, row).tools]) if given.kinds else None


def make_environments(
    given: GivenEnvironments,
    processing_class: Any,
    sampling_params: SamplingParams,
    scorer: RewardScorer,
    args: PPOConfig,
    *,
    messages: bool,
) -> Environments | None:
    """What answers the policy, or None without tools and environments. Its rewards are added to `scorer`, with weight
    1 each.

    Args:
        given: by the user.
        processing_class: the policy's tokenizer.
        sampling_params: of the run.
        scorer: the reward sources.
        args: of the run.
        messages: whether the prompts are messages.

    Raises:
        ValueError: when tools or replies cannot be written in the conversation, for options without effect, and when
            there is no reward at all.
    """
    environments = None
    if given.kinds:
        conversation = Conversation(
            processing_class,
            messages=messages,
            chat_template_kwargs=args.chat_template_kwargs,
            stop_token_ids=(*sampling_params.stop_token_ids, *sampling_params.truncate_token_ids),
        )
        for kind in given.kinds.values():
            if kind.answers:
                schemas = [tool.schema for tool in kind.tools]
                conversation.check(schemas, replies=kind.has_reply, max_turns=args.max_turns)
        environments = Environments(
            given.kinds,
            EpisodeSettings(
                conversation,
                response_len=args.response_len,
                max_turns=args.max_turns,
                max_turn_tokens=args.max_turn_tokens,
                tool_timeout=args.tool_timeout,
                tool_call_parser=given.tool_call_parser,
            ),
        )
        for name, function in environments.reward_functions():
            scorer.add(FunctionReward(function, name=name), 1.0)
    if not scorer.sources:
        raise ValueError(
            "there is no reward: reward_funcs is empty, and no environment has get_reward or reply; pass reward_funcs, "
            "or give the environment a method get_reward"
        )
    return environments
