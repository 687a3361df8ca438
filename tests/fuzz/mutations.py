"""Mutations that know the structure of what they change: bytes of a file, and trees of plain values."""

import copy
import datetime
import math
from typing import Any

from hypothesis import strategies as st

LONG_TEXT = "long " * 2000
TEXTS = (
    *"x no on null none None true NaN -inf 1e5 1_000 0o7 0x1F 007 -1 1e400 2020-01-01 2020-01-01T10:00:00Z".split(),
    "",
    " ",
)
TEXTS += ("é🦙", "\u202eabc", "a\0b", "\ud800", "\ufeffx", "a\r\nb", "%s", "{x}")
TEXTS += ("{", "{0.__class__}", "../x", "/", "~", "*a", "&a", "!!int x", "<<", "#", "9" * 400, "9" * 5000, LONG_TEXT)

texts = st.sampled_from(TEXTS)
numbers = st.sampled_from(
    [0, 1, -1, 2, 7, True, False, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**70), 10**400]
    + [0.0, -0.0, 0.5, 1.0, -1.5, 1e-320, 1e308, math.inf, -math.inf, math.nan]
)
scalars = st.none() | numbers | texts


def deep(levels: int, *, mapping: bool = False) -> Any:
    """A list in a list, or a mapping in a mapping, `levels` times."""
    value: Any = {} if mapping else []
    for _ in range(levels):
        value = {"k": value} if mapping else [value]
    return value


def _containers(entries: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(entries, max_size=3) | st.dictionaries(texts | st.just("role"), entries, max_size=3)


values = scalars | st.recursive(scalars, _containers, max_leaves=4) | st.builds(deep, st.sampled_from([5, 60]))
"""Plain values as JSON has them: of every type, short and long, flat and nested, good and bad."""

yaml_values = values | st.sampled_from(
    [datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1, 2, 3), b"bytes", {"a", "b"}, {1: 2}, {None: True}]
)


@st.composite
def mutated_tree(draw: Any, tree: Any, *, values: st.SearchStrategy[Any] = values, most: int = 3) -> Any:
    """A copy of `tree` (lists and dictionaries of plain values) with one to `most` of its entries deleted, duplicated,
    replaced, nested or swapped.
    """
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, most))):
        places = list(_places(tree))
        if not places:
            return copy.deepcopy(draw(values))
        # By index: sampled_from would keep and show entries that are changed below.
        parent, key = places[draw(st.integers(0, len(places) - 1))]
        kind = draw(st.sampled_from(["replace", "replace", "delete", "nest", "duplicate", "swap", "negate"]))
        if kind == "replace":
            parent[key] = copy.deepcopy(draw(values))
        elif kind == "delete":
            del parent[key]
        elif kind == "nest":
            parent[key] = [parent[key]] if draw(st.booleans()) else {"k": parent[key]}
        elif kind == "duplicate" and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        elif kind == "duplicate":
            parent[draw(texts)] = copy.deepcopy(parent[key])
        elif kind == "swap":
            other, place = places[draw(st.integers(0, len(places) - 1))]
            value = copy.deepcopy(other[place])
            other[place] = copy.deepcopy(parent[key])
            parent[key] = value
        elif isinstance(parent[key], int | float):
            parent[key] = -parent[key]
    return tree


def _places(tree: Any, depth: int = 0) -> Any:
    """Every entry of `tree`, twenty levels deep, as its list or dictionary with index or key; of a long list, the
    first ones.
    """
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree[: 50 if len(tree) < 50 else 2])
    for key, entry in list(entries)[:50]:
        yield tree, key
        if isinstance(entry, dict | list) and depth < 20:
            yield from _places(entry, depth + 1)


_TOKENS = (*(bytes([byte]) for byte in b"\0\xff\r\n\"',:{}[]"), b"\xef\xbb\xbf", b"\r\n", b"null")
_TOKENS += (b"NaN", b"1e999", b"-", b"\\ud800", b"\\u0000", b"\xed\xa0\x80", b"9" * 400, b"9" * 5000, b"[" * 400, b"\t")
_TOKENS += (b"&a ", b"*a", b"<<: ", b"!!bool ", b"!!python/object:x ", b"---\n", b"# ", b"\xe2\x80\xa8")


@st.composite
def mutated_bytes(draw: Any, content: bytes) -> bytes:
    """`content` with one to three changes: cut off, cut out, doubled, a flipped bit, or bytes put in that mean
    something to a parser; or another encoding or line ending.
    """
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["cut", "remove", "double", "flip", "insert", "insert", "whole"]))
        start = draw(st.integers(0, max(0, len(content) - 1)))
        stop = draw(st.integers(start, min(len(content), start + 40)))
        if kind == "cut":
            content = content[:start]
        elif kind == "remove":
            content = content[:start] + content[stop:]
        elif kind == "double":
            content = content[:stop] + content[start:]
        elif kind == "flip" and content:
            flipped = content[start] ^ (1 << draw(st.integers(0, 7)))
            content = content[:start] + bytes([flipped]) + content[start + 1 :]
        elif kind == "insert":
            content = content[:start] + draw(st.sampled_from(_TOKENS)) + content[start:]
        elif kind == "whole":
            how = draw(st.sampled_from(["empty", "bom", "crlf", "cr", "utf-16", "latin-1", "twice", "blank"]))
            text = content.decode("utf-8", errors="replace")
            content = {
                "empty": b"",
                "bom": b"\xef\xbb\xbf" + content,
                "crlf": content.replace(b"\n", b"\r\n"),
                "cr": content.replace(b"\n", b"\r"),
                "utf-16": text.encode("utf-16"),
                "latin-1": text.encode("latin-1", errors="replace") + b"\xe9",
                "twice": content + content,
                "blank": b" \n\n" + content + b"\n \n",
            }[how]
    return content
