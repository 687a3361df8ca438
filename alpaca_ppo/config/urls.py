"""Addresses of HTTP servers in options: what one must look like, and how it is shown without its credentials."""

from urllib.parse import urlsplit


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
