"""Presets for `--preset <name>`: defaults of other implementations and settings of papers, each with its reason.

They set the algorithm and the batch sizes. Models, rewards and most of the data are left to the user.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent


def preset_names() -> tuple[str, ...]:
    """The names of all presets, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def preset_path(name: str) -> Path:
    """The YAML file of the preset `name`, which may not exist."""
    return _FOLDER / f"{name}.yaml"
