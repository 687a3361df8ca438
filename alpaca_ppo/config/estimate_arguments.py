"""`EstimateArguments`: the devices for which the memory of a run is estimated."""

from dataclasses import dataclass

from alpaca_ppo.config.fields import argument
from alpaca_ppo.config.run_file import MODELS
from alpaca_ppo.config.script_arguments import ScriptArguments

RESERVE_GIB = 1.0
"""GiB of an accelerator's memory that tensors cannot use: CUDA context, kernel workspaces, fragmentation."""


@dataclass(frozen=True)
class EstimateArguments(ScriptArguments):
    """`ScriptArguments`, of which the models are used, and whether there are environments or tools; and the devices to
    estimate for.

    Raises:
        ValueError: for a missing model, or a value out of range.
    """

    num_processes: int = argument(1, "Processes, one per device.", at_least=1)
    zero_stage: int = argument(0, "DeepSpeed ZeRO stage, 1 to 3; 0 = none.", at_least=0, at_most=3)
    device_gib: float | None = argument(
        None,
        f"Memory of a device in GiB, of which {RESERVE_GIB:g} is reserved; the output then shows whether the run fits.",
        above=RESERVE_GIB,
    )
    json: bool = argument(False, "Print JSON, in bytes, instead of a table.")

    required = ("model_name_or_path",)
    needed_objects = MODELS
