"""The cheapest change of a run's settings that fits a device: single changes in order of what they cost the user, then
several together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.script_arguments import LoraArguments
from alpaca_ppo.estimate_memory.sharding import Sharding

PASS_SETTINGS = (
    "gradient_checkpointing",
    "step_per_device_batch_size",
    "rollout_per_device_batch_size",
    "logprob_chunk_size",
)
"""What changes the passes alone: weights, gradients and the optimizer's state stay as they are."""


@dataclass(frozen=True)
class Settings:
    """What decides the memory of a run, beside its models."""

    args: PPOConfig
    lora: LoraArguments
    sharding: Sharding
    starts_from_adapter: bool = False
    """Whether the policy is an adapter that training goes on from."""

    @property
    def has_adapters(self) -> bool:
        """Whether the policy's base is frozen."""
        return self.lora.use_peft or self.starts_from_adapter


Option = tuple[str, Settings]
"""A change as one would write it in the run's YAML file, and the settings with it."""


def fitting_changes(settings: Settings, fits: Callable[[Settings], bool]) -> tuple[list[str], Settings] | None:
    """The changes to `settings` after which they fit, and the settings with them; None where none are enough.

    Where no single change fits, changes are added in order of their cost until the whole fits; then those that are not
    needed go again, the dearest first, and each is made as mild as it can be.

    `fits` raises a ValueError for settings that a run would refuse together.
    """
    for kind in _KINDS:
        for label, changed in kind(settings):
            if _accepted(changed, fits):
                return [label], changed
    chosen: list[int | None] = []
    for kind in _KINDS:
        options = list(kind(_apply(settings, chosen)[1]))
        # One that the run refuses would have it refuse all that follow.
        verdicts = ((index, _accepted(options[index][1], fits)) for index in reversed(range(len(options))))
        index, enough = next((found for found in verdicts if found[1] is not None), (None, False))
        chosen.append(index)
        if enough:
            return _apply(settings, _milder(settings, chosen, fits))
    return None


def _accepted(settings: Settings, fits: Callable[[Settings], bool]) -> bool | None:
    """Whether `settings` fit; None where a run would refuse them."""
    try:
        return fits(settings)
    except ValueError:
        return None


def _apply(settings: Settings, chosen: Sequence[int | None]) -> tuple[list[str], Settings]:
    """The labels of the chosen option of each kind (None = none of it), and the settings after all of them."""
    labels = []
    for kind, index in zip(_KINDS, chosen, strict=False):
        options = list(kind(settings))
        if index is not None and options:
            label, settings = options[min(index, len(options) - 1)]
            labels.append(label)
    return labels, settings


def _milder(settings: Settings, chosen: list[int | None], fits: Callable[[Settings], bool]) -> Sequence[int | None]:
    for place in reversed(range(len(chosen))):
        strongest = chosen[place]
        for milder in (None, *range(strongest or 0)):
            tried = [*chosen[:place], milder, *chosen[place + 1 :]]
            if strongest is not None and _accepted(_apply(settings, tried)[1], fits):
                chosen = tried
                break
    return chosen


def _checkpointing(settings: Settings) -> Iterator[Option]:
    if not settings.args.gradient_checkpointing:
        yield "gradient_checkpointing: true", _with(settings, gradient_checkpointing=True)


def _halved(name: str, least: Callable[[PPOConfig], int] = lambda args: 1) -> Callable[[Settings], Iterator[Option]]:
    def options(settings: Settings) -> Iterator[Option]:
        value = getattr(settings.args, name) // 2
        while value >= least(settings.args):
            yield f"{name}: {value}", _with(settings, **{name: value})
            value //= 2

    return options


def _reference(settings: Settings) -> Iterator[Option]:
    choice = settings.args.reference
    if settings.has_adapters:
        if choice.startswith("copy"):
            yield "reference: adapter_off", _with(settings, reference="adapter_off")
    elif choice in ("auto", "copy") and not settings.args.use_cpu:
        yield "reference: copy_offloaded", _with(settings, reference="copy_offloaded")


def _bf16(settings: Settings) -> Iterator[Option]:
    if not settings.args.bf16 and settings.args.dtype == "float32":
        yield "bf16: true", _with(settings, bf16=True)


def _adapters(settings: Settings) -> Iterator[Option]:
    labels = []
    if not settings.has_adapters:
        labels.append("use_peft: true")
        settings = replace(settings, lora=LoraArguments(use_peft=True))
        # With LoRA a copy of the base is idle, also where `_reference` has just asked for it.
        for label, without_copy in _reference(settings):
            labels.append(label)
            settings = without_copy
        yield ", ".join(labels), settings
    if settings.args.dtype == "float32":
        yield ", ".join([*labels, "dtype: bfloat16"]), _with(settings, dtype="bfloat16")


def _layout(settings: Settings) -> Iterator[Option]:
    if (
        not settings.args.uses_critic
        or settings.args.critic_layout != "separate"
        or settings.args.init_value_with_reward
    ):
        return
    for layout in ("adapter", "shared") if settings.has_adapters else ("shared",):
        yield f"critic_layout: {layout}", _with(settings, critic_layout=layout)


def _four_bit(settings: Settings) -> Iterator[Option]:
    args = settings.args
    copied = args.reference.startswith("copy") or (args.uses_critic and args.critic_layout == "separate")
    refused = copied or args.merge_on_save or args.use_cpu or settings.sharding.stage == 3
    if settings.has_adapters and not (refused or args.load_in_4bit):
        yield "load_in_4bit: true", _with(settings, load_in_4bit=True)


def _zero(settings: Settings) -> Iterator[Option]:
    if settings.sharding.processes > 1:
        # Weights of 4 bits cannot be divided.
        for stage in range(settings.sharding.stage + 1, 3 if settings.args.load_in_4bit else 4):
            yield f"ZeRO stage {stage}", replace(settings, sharding=settings.sharding.at(stage))


def _with(settings: Settings, **values: object) -> Settings:
    return replace(settings, args=replace(settings.args, **values))  # type: ignore[arg-type]


_KINDS: tuple[Callable[[Settings], Iterator[Option]], ...] = (
    _checkpointing,
    _halved("step_per_device_batch_size"),
    _halved("rollout_per_device_batch_size", lambda args: args.num_return_sequences),
    _halved("logprob_chunk_size", lambda args: 128),
    _reference,
    _bf16,
    _adapters,
    _layout,
    _four_bit,
    _zero,
)
