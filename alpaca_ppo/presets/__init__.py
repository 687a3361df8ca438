"""Presets: the published defaults of other implementations and settings of papers as YAML files, for `--config <name>`.

They set the algorithm and the batch sizes. Models, rewards and most of the data stay for the user to name.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent


def preset_names() -> tuple[str, ...]:
    """The names of all presets, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def preset_path(name: str) -> Path:
    """The YAML file of the preset `name`.

    Raises:
        ValueError: when there is no such preset; lists those there are.
    """
    if name not in preset_names():
        raise ValueError(f"there is no preset {name!r}; choose one of {', '.join(preset_names())}")
    return _FOLDER / f"{name}.yaml"
