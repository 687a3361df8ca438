"""Addresses of HTTP servers in options: what one must look like, and how it is shown without its credentials."""

from urllib.parse import urlsplit


def check_url(name: str, url: str) -> None:
    """Checks that `url` is an address that requests can be sent to.

    Raises:
        ValueError: naming the option `name`, the address without its credentials, and the remedy.
    """
    problem = ""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            problem = "does not begin with http:// or https://"
        elif not parts.hostname:
            problem = "names no host"
        elif parts.port == 0 or any(character.isspace() or not character.isprintable() for character in url):
            problem = "has port 0 or a blank in it"
    # A port that is no number, or brackets that do not match.
    except ValueError as error:
        problem = f"cannot be read ({str(error).rpartition('@')[2]})"
    if problem:
        # Without a scheme, the user and password at the front are not known as such.
        raise ValueError(
            f"{name} holds {url.rpartition('@')[2].partition('?')[0]!r}, which {problem}; write an address such as "
            "http://localhost:8000/score"
        )


def shown_url(url: str) -> str:
    """`url` for messages: without user, password, query and fragment, any of which may hold a credential."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
