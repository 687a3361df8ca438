"""Commands that start a script on one process, or on several under a launcher."""

import os
import sys
from pathlib import Path

LAUNCH_CONFIG = Path(__file__).parents[2] / "examples/accelerate_configs/ddp.yaml"
LAUNCHERS = {
    "accelerate": ("-m", "accelerate.commands.launch", "--config_file", str(LAUNCH_CONFIG), "--main_process_port", "0"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone"),
}
PROCESSES = {"accelerate": "--num_processes", "torchrun": "--nproc_per_node"}


def command(script: Path, *arguments: str, processes: int = 1, launcher: str = "accelerate") -> list[str]:
    """What starts `script` on `processes`; one process has no launcher."""
    own = [str(script), *arguments]
    if processes == 1:
        return [sys.executable, *own]
    return [sys.executable, *LAUNCHERS[launcher], PROCESSES[launcher], str(processes), *own]


def environment() -> dict[str, str]:
    """One thread for each process."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}
