"""`Provenance`: where the options of a run come from, for its run.yaml."""

from dataclasses import dataclass
from typing import Any

from alpaca_ppo.config.script_arguments import LoraArguments, ScriptArguments


@dataclass(frozen=True)
class Provenance:
    """What a command knows of a run beyond its `PPOConfig`.

    Attributes:
        command_line: the words of the command that this process runs, the program first.
        launcher: the command line of what started this process (torchrun, accelerate, `alpaca-ppo train` with several
            processes); None if it was started directly.
        presets: names of the presets that were read, in order.
        config_files: paths of the YAML files that were read, in order, as given.
        script: models, rewards and data.
        lora: the options of LoRA.
    """

    command_line: tuple[str, ...]
    launcher: tuple[str, ...] | None
    presets: tuple[str, ...]
    config_files: tuple[str, ...]
    script: ScriptArguments
    lora: LoraArguments

    def options(self) -> dict[str, Any]:
        """The options of `script` and `lora` by name, as a YAML file of a run holds them."""
        return {**vars(self.script), **vars(self.lora)}
