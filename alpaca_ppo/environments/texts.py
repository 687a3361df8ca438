"""Texts of what users and policies bring, whatever it does when it is written out."""

from typing import Any


def encodable(text: str) -> str:
    """`text` with a question mark for each half of a surrogate pair, which neither tokenizers nor files take."""
    return text.encode("utf-8", "replace").decode()


def shown(value: Any) -> str:
    """The beginning of how `value` is written; its type if it cannot be written."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= 300 else f"{text[:300]} ... ({len(text)} characters)"
