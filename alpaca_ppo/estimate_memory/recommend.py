"""Changes of a run's settings that save memory, with the peak after each one and after all of them.

Which single changes to combine is left to the user.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.script_arguments import LoraArguments
from alpaca_ppo.estimate_memory.sharding import Sharding

Change = dict[str, Any]
"""New values of options: fields of PPOConfig, `use_peft`, `zero_stage`."""


@dataclass(frozen=True)
class Settings:
    """What decides the memory of a run besides its models."""

    args: PPOConfig
    lora: LoraArguments
    sharding: Sharding
    starts_from_adapter: bool = False
    """Whether the policy is an adapter that is trained further."""

    @property
    def has_adapters(self) -> bool:
        """Whether the policy's base is frozen."""
        return self.lora.use_peft or self.starts_from_adapter

    def after(self, change: Change) -> "Settings":
        """These settings with `change` applied."""
        fields = {name: value for name, value in change.items() if name not in ("use_peft", "zero_stage")}
        return replace(
            self,
            args=replace(self.args, **fields),
            lora=LoraArguments(use_peft=True) if "use_peft" in change else self.lora,
            sharding=self.sharding.at(change.get("zero_stage", self.sharding.stage)),
        )


PeakOf = Callable[[Settings], float]
"""Peak memory of settings, in bytes; raises ValueError for settings that a run would refuse."""


def single_changes(settings: Settings, peak_of: PeakOf, limit: float) -> list[dict[str, Any]]:
    """The peak after each single change, the least intrusive first.

    A change with several strengths (halvings of a batch size) is listed once: at the weakest strength that fits, or at
    full strength if none does.

    Returns:
        For each change its text (`change`), the `peak` in bytes and whether it `fits` into `limit` bytes. Changes that
        a run would refuse are left out.
    """
    found = []
    for strengths in changes(settings):
        change, peak = _weakest_that_fits(settings, strengths, peak_of, limit)
        if peak is not None:
            found.append({"change": _text(change), "peak": peak, "fits": peak <= limit})
    return found


def _weakest_that_fits(
    settings: Settings, strengths: list[Change], peak_of: PeakOf, limit: float
) -> tuple[Change, float | None]:
    """The weakest change that fits, or else the strongest one, with its peak; None if a run would refuse them all."""
    found: tuple[Change, float | None] = {}, None
    for change in reversed(strengths):
        peak = _peak_or_none(settings.after(change), peak_of)
        if peak is None:
            continue
        if found[1] is None or peak <= limit:
            found = change, peak
        if peak > limit:
            # A weaker change saves even less.
            break
    return found


def all_changes(settings: Settings, peak_of: PeakOf, limit: float) -> dict[str, Any]:
    """All changes together, each at full strength, without those that a run would refuse after the earlier ones.

    Returns:
        The text of each option to change (`changes`), the `peak` in bytes and whether it `fits` into `limit` bytes.
    """
    together: Change = {}
    peak = peak_of(settings)
    for i in range(len(changes(settings))):
        # Which changes are left depends on those made before.
        for change in reversed(changes(settings)[i]):
            changed = settings.after(change)
            if (found := _peak_or_none(changed, peak_of)) is not None:
                together, settings, peak = together | change, changed, found
                break
    texts = [_text({name: value}) for name, value in together.items()]
    return {"changes": texts, "peak": peak, "fits": peak <= limit}


def _peak_or_none(settings: Settings, peak_of: PeakOf) -> float | None:
    try:
        return peak_of(settings)
    except ValueError:
        return None


def _text(change: Change) -> str:
    return ", ".join(
        f"{name}: {str(value).lower() if isinstance(value, bool) else value}" for name, value in change.items()
    )


def changes(settings: Settings) -> list[list[Change]]:
    """The changes that save memory, the least intrusive first; each as a list of strengths, the weakest first.

    The list always has the same length: a change that is of no use has no strengths.
    """
    args, sharding, adapters = settings.args, settings.sharding, settings.has_adapters
    copied, in_float32 = args.reference.startswith("copy"), args.dtype == "float32"
    own_backbone = args.uses_critic and args.critic_layout == "separate"
    reference: list[Change] = []
    if adapters and copied:
        reference = [{"reference": "adapter_off"}]
    elif not adapters and args.reference in ("auto", "copy") and not args.use_cpu:
        reference = [{"reference": "copy_offloaded"}]
    lora: Change = {} if adapters else {"use_peft": True}
    if lora and copied:
        # With LoRA the base without the adapter is the reference; a copy of it is not needed.
        lora["reference"] = "adapter_off"
    # On a base in bfloat16, autocast would only add copies of the adapters.
    half: Change = {"dtype": "bfloat16", **({"bf16": False} if args.bf16 else {})}
    # A critic that trains the policy's states cannot take steps of its own (`config.checks`).
    layouts = ["adapter"] if adapters else []
    layouts += ["shared"] if not args.separate_critic_steps else []
    # What a run refuses together with 4 bits.
    needs_whole_weights = copied or own_backbone or args.use_cpu or sharding.stage == 3
    default_budget, longest = args.max_tokens_per_micro_batch is None, args.longest_row
    last_stage = 0 if sharding.processes == 1 else 2 if args.load_in_4bit else 3
    return [
        [] if args.gradient_checkpointing else [{"gradient_checkpointing": True}],
        # It sets the default of the budget, and limits rows where they are padded.
        _halvings("step_per_device_batch_size", args.step_per_device_batch_size) if default_budget else [],
        [] if default_budget else _halvings("max_tokens_per_micro_batch", args.micro_batch_tokens, longest),
        _halvings("rollout_per_device_batch_size", args.rollout_per_device_batch_size),
        _halvings("logprob_chunk_size", args.logprob_chunk_size, 128),
        reference,
        [{"bf16": True}] if in_float32 and not args.bf16 else [],
        ([lora] if lora else []) + ([lora | half] if in_float32 else []),
        [{"critic_layout": name} for name in layouts] if own_backbone and not args.init_value_with_reward else [],
        [{"load_in_4bit": True}] if adapters and not (args.load_in_4bit or needs_whole_weights) else [],
        [{"zero_stage": stage} for stage in range(sharding.stage + 1, last_stage + 1)],
    ]


def _halvings(name: str, value: int, least: int = 1) -> list[Change]:
    found: list[Change] = []
    while (value := value // 2) >= least:
        found.append({name: value})
    return found
