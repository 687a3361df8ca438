"""Names that users give to models, runs and servers: a folder, the id of a model on the hub, an address.

Whether the hub has a model shows when it is loaded; a name that can only be a folder is refused before, and one without
an owner is looked up at once.
"""

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from alpaca_ppo.library_output import say

_CLASSIFIER = re.compile(r'"architectures":\s*\[\s*"(\w+ForSequenceClassification)"')
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def check_model_name(field: str, name: str | None) -> None:
    """Checks that `name` is a folder or could be a hub id.

    "outputs/ppo" could be both. If there is a folder `outputs` and no `ppo` in it, the former is meant; and so it is
    if a folder has almost the name.

    Args:
        field: the option or argument that has the name, for the error.
        name: of a model; None is valid.

    Raises:
        ValueError: for a name that is neither, with the folders of similar names.
    """
    if name is None or os.path.isdir(name):
        return
    if _HUB_ID.fullmatch(name) is None:
        raise ValueError(
            f"{field} is {name!r}, which is neither a folder nor a hub id (name or owner/name):{where(name)}"
        )
    there = where(name)
    if os.path.isdir(os.path.dirname(name)) or ("/" not in name and "did you mean" in there):
        raise ValueError(
            f"{field} is {name!r}, but{there} (for a model of that name on the hub, start from another folder)"
        )


def model_folder(field: str, name: Any, *, part: str | None = "policy", writes_text: bool = True) -> Any:
    """Returns what to load for the model `name`: of a run's folder, as is printed, `part` of its final models; anything
    else, also what is no name, as it is.

    Args:
        field: the option or argument that has the name, for the error.
        name: of a model.
        part: policy or value; None where no model of a run will do.
        writes_text: whether a classifier is refused.

    Raises:
        ValueError: as `check_model_name`; for a name without an owner that the hub does not have; for a folder that
            holds no model, such as a checkpoint; for a classifier.
    """
    if not isinstance(name, str):
        return name
    check_model_name(field, name)
    if not os.path.isdir(name):
        _ask_hub(field, name)
        return name
    folder = name
    if part is not None and os.path.isdir(final := os.path.join(name, "final", part)):
        say(f"{field} is {name!r}, a run, whose final/{part} is taken")
        folder = final
    config = Path(folder, "config.json")
    if not config.is_file() and not Path(folder, "adapter_config.json").is_file():
        remedy = "; name one with a config.json, such as alpaca-ppo reward writes"
        if part is not None:
            made = f"make FOLDER/{part} of a checkpoint with alpaca-ppo export {name} --to FOLDER"
            remedy = f" or a run's final/{part}; {made}"
        raise ValueError(f"{field} is {name!r}, a folder without a model{remedy}")
    if writes_text and config.is_file() and (found := _CLASSIFIER.search(config.read_text(errors="replace"))):
        raise ValueError(f"{field} is {name!r}, a {found[1]}, which writes no text; name a causal language model")
    return folder


def _ask_hub(field: str, name: str) -> None:
    """Asks the hub once for `name`, which may well be a folder misspelled: to load it, libraries try for minutes."""
    # Half a second.
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    files = ("config.json", "adapter_config.json")
    if "/" in name or any(try_to_load_from_cache(name, file) is not None for file in files):
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, files[0]))
        return
    except RepositoryNotFoundError:
        reason = "has no model of that name"
    except HfHubHTTPError:
        # Such as an adapter, or a hub too busy: there the libraries know more.
        return
    # Of the HTTP library, which depends on the version.
    except Exception as error:
        reason = f"cannot be asked ({error})"
    raise ValueError(f"{field} is {name!r}, but{where(name)}, and the hub {reason}; give a folder, or owner/name")


def check_folder(field: str, name: str) -> Path:
    """Returns the folder `name`.

    Raises:
        ValueError: if it is not one, with the folders of similar names.
    """
    if not os.path.isdir(name):
        raise ValueError(f"{field} is {name!r}, but{where(name)}")
    return Path(name)


def where(name: str, *, what: str = "folder") -> str:
    """ " there is no such folder ...", with those of similar names beside it.

    Args:
        name: of something that does not exist.
        what: "folder", or "file", for which files are looked at too.
    """
    if os.path.isfile(name) and what == "folder":
        return " it is a file, not a folder"
    base = "" if Path(name).is_absolute() else f" (relative paths count from {Path.cwd()})"
    try:
        beside = [e for e in sorted(Path(name).parent.iterdir()) if e.is_dir() or what == "file"]
    # ValueError for a name that no file can have.
    except (OSError, ValueError):
        beside = []
    close = did_you_mean(str(Path(name)), map(str, beside))
    return f" there is no such {what}{base}{close and f';{close}'}"


def did_you_mean(word: str, known: Iterable[str], *, likeness: float = 0.75) -> str:
    """ " did you mean x?" for the one of `known` that is spelled almost as `word` is; empty if none is."""
    close = get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f" did you mean {close[0]}?" if close else ""


def check_url(name: str, url: str) -> None:
    """Checks that `url` is an address that requests can be sent to.

    Raises:
        ValueError: naming the option `name`, the address without its credentials, and the remedy.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and " " not in url
    # A port that is no number, or brackets that do not match.
    except ValueError:
        valid = False
    if not valid or not url.isprintable():
        # Without a scheme, the user and password at the front are not known as such.
        raise ValueError(
            f"{name} holds {url.rpartition('@')[2].partition('?')[0]!r}, which is no address; write one such as "
            "http://localhost:8000/score"
        )


def shown_url(url: str) -> str:
    """`url` for messages: without user, password, query and fragment, any of which may hold a credential."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
