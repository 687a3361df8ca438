"""Presets: the published defaults of other implementations and settings of papers as YAML files, for `--preset <name>`.

They set the algorithm and the batch sizes, where those differ from the defaults, each option with the reason beside it.
Models, rewards and most of the data stay for the user to name.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent


def preset_names() -> tuple[str, ...]:
    """The names of all presets, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def preset_path(name: str) -> Path:
    """The YAML file of the preset `name`; whether there is one, `config.parser.read_preset` checks."""
    return _FOLDER / f"{name}.yaml"
