"""Checks the names of models, folders and servers that users give: a folder, a hub id, an address.

Most hub ids are first looked up when the model is loaded, but those without an owner at once (`_ask_hub`).
"""

import os
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from alpaca_ppo.library_output import say

# Of a model, or of an adapter.
_CONFIGS = ("config.json", "adapter_config.json")
_CLASSIFIER = re.compile(r'"architectures":\s*\[\s*"(\w+ForSequenceClassification)"|"task_type":\s*"SEQ_CLS"')
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
# Names of the loopback interface that not every machine can look up.
_LOOPBACK = re.compile(r"(.+\.)?localhost[46]?(\.localdomain[46]?)?|ip6-(localhost|loopback)")


def check_model_name(field: str, name: str | None) -> None:
    """Raises a `ValueError` if `name`, the value of the option `field`, is neither a folder, nor a hub id, nor None.

    "outputs/ppo" counts as a missing folder, not as a hub id, if there is a folder `outputs`; so does a name without a
    slash if a folder has a similar name.
    """
    if name is None or os.path.isdir(name):
        return
    if _HUB_ID.fullmatch(name) is None:
        problem = f"neither a folder nor a hub id (name or owner/name):{path_problem(name)}"
        raise ValueError(f"{field} is {name!r}, {problem}")
    is_misspelt = "/" not in name and not os.path.isfile(name) and _similar_path(name, "folder")
    would_be_in_a_folder = os.path.isdir(os.path.dirname(name))
    if is_misspelt or would_be_in_a_folder:
        problem = f"but{path_problem(name)} (for one on the hub, start from another folder)"
        raise ValueError(f"{field} is {name!r}, {problem}")


def model_folder(field: str, name: Any, *, part: str | None = "policy", writes_text: bool = True) -> Any:
    """The folder or hub id from which to load the model `name`.

    Of a run's folder, final/`part` is taken, and a printed line says so. A model in memory is returned unchanged.

    Args:
        field: the option, for errors.
        part: policy or value; None if the folder of a run is not valid.
        writes_text: whether the model must write text, so that a classifier is refused.

    Raises:
        ValueError: as `check_model_name`; for a name without an owner that the hub does not have; for a folder without
            a model, such as a checkpoint; for a classifier that is to write text.
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
    configs = [path for name in _CONFIGS if (path := Path(folder, name)).is_file()]
    if not configs:
        remedy = "; name one with a config.json, such as alpaca-ppo reward writes"
        if part is not None:
            make = f"make FOLDER/{part} of a checkpoint with alpaca-ppo export {name} --to FOLDER"
            remedy = f" or a run's final/{part}; {make}"
        raise ValueError(f"{field} is {name!r}, a folder without a model{remedy}")
    classifier = _CLASSIFIER.search(configs[0].read_text(errors="replace"))
    if writes_text and classifier:
        kind = classifier[1] or "reward adapter"
        raise ValueError(f"{field} is {name!r}, a {kind}, which writes no text; name a causal language model")
    return folder


def _ask_hub(field: str, name: str) -> None:
    """Raises a `ValueError` if `name` has no owner, so may be a misspelt folder, and the hub has no such model or
    cannot be asked. Libraries would try to load it for minutes.
    """
    # Imported only now, because it takes half a second.
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        if "/" in name or any(try_to_load_from_cache(name, file) is not None for file in _CONFIGS):
            return
        get_hf_file_metadata(hf_hub_url(name, _CONFIGS[0]))
        return
    except GatedRepoError:
        # Loading says how to get access.
        return
    except RepositoryNotFoundError:
        reason = "has no model of that name"
    except HfHubHTTPError:
        # An adapter has no config.json, or the hub is busy; loading it tells more.
        return
    # Which HTTP library raises depends on the version; the hub's own checks the name.
    except Exception as error:
        reason = f"cannot be asked ({error})"
    problem = f"{field} is {name!r}, but{path_problem(name)}, and the hub {reason}"
    raise ValueError(f"{problem}; give a folder, or owner/name")


def check_folder(field: str, name: str) -> Path:
    """The folder `name`, or a `ValueError` with folders of similar names if there is none."""
    if not os.path.isdir(name):
        raise ValueError(f"{field} is {name!r}, but{path_problem(name)}")
    return Path(name)


def path_problem(name: str, *, what: Literal["folder", "file"] = "folder") -> str:
    """Why the path `name` is no `what`, for the end of an error, so it begins with a space: it is a folder or file
    instead, or does not exist, with the most similar name beside it.
    """
    if os.path.isfile(name) and what == "folder":
        return " it is a file, not a folder"
    if os.path.isdir(name) and what == "file":
        return " it is a folder, not a file"
    base = "" if Path(name).is_absolute() else f" (relative paths count from {Path.cwd()})"
    hint = _similar_path(name, what)
    return f" there is no such {what}{base}" + (f";{hint}" if hint else "")


def _similar_path(name: str, what: str) -> str:
    """`did_you_mean` of the folders beside `name`, or of files and folders if `what` is file."""
    # ValueError for a name that no file can have.
    with suppress(OSError, ValueError):
        siblings = [path for path in sorted(Path(name).parent.iterdir()) if path.is_dir() or what == "file"]
        return did_you_mean(str(Path(name)), map(str, siblings))
    return ""


def did_you_mean(word: str, known: Iterable[str], *, likeness: float = 0.75, prefix: str = "") -> str:
    """ " did you mean x?" for the one of `known` that is most similar to `word`, after `prefix`; empty if none is
    similar.
    """
    close = get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f" did you mean {prefix}{close[0]}?" if close else ""


def check_url(field: str, url: str) -> None:
    """Raises ValueError unless `url`, the value of the option `field`, is an address of http or https."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and " " not in url
    # The port is no number, or brackets do not match.
    except ValueError:
        valid = False
    if not valid or not url.isprintable():
        # By hand, because urlsplit does not recognise user and password in an address without a scheme, and a password
        # may hold what begins a query.
        place, _, rest = re.sub("[?#]", "?", url).partition("?")
        without_credentials = repr(place.rpartition("@")[2]) if "@" not in rest else "text with credentials"
        raise ValueError(f"{field} holds {without_credentials}, no address such as http://localhost:8000/score")


def is_server(name: str | None) -> bool:
    """Whether an option that names a model holds the address of a server instead."""
    return name is not None and name.startswith(("http://", "https://"))


def is_this_machine(url: str) -> bool:
    """Whether the host of `url` is known to be this machine."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


@cache
def leads_to_this_machine(host: str) -> bool:
    """Whether `host` is a name or an address of this machine: one to which a socket can be bound."""
    if _LOOPBACK.fullmatch(host.rstrip(".").lower()):
        return True
    # UnicodeError for what no name can be.
    with suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as trial:
                trial.bind(address)
                return True
    return False


def shown_url(url: str) -> str:
    """`url` for messages, without the parts that may hold a credential: user, password, query and fragment."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
