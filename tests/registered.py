"""Choices that a test registers, and that are gone when it ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from alpaca_ppo import registry

FAMILIES = (
    registry.ADV_ESTIMATORS,
    registry.KL_ESTIMATORS,
    registry.POLICY_LOSSES,
    registry.CRITIC_HEADS,
    registry.GENERATION_BACKENDS,
)


@contextmanager
def temporary_choices() -> Iterator[None]:
    """Inside, choices may be registered in every family; afterwards the families are as before."""
    before: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [(f, dict(f.traits), dict(f._targets)) for f in FAMILIES]
    try:
        yield
    finally:
        for family, traits, targets in before:
            family.traits, family._targets = traits, targets
