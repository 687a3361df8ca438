"""Keeps credentials out of what a run writes: API keys, tokens, and passwords in URLs.

A credential is recognised by the name of its option (`api_key`, `token`, `--judge-password`) or by its form (`hf_...`,
`sk-...`, `https://user:password@host`). One with neither is not.
"""

import re
from collections.abc import Mapping
from typing import Any

REMOVED = "<credential removed>"
"""Replaces a credential; a configuration file that holds it is refused (`config.run_file`)."""

_SECRET_WORDS = {
    "apikey", "auth", "authorization", "bearer", "cookie", "credential", "credentials", "key", "passphrase", "passwd",
    "password", "pat", "pwd", "secret", "secrets", "token",
}  # fmt: skip
# Names such as pad_token and sort_key, which end in "token" or "key" but name no credential.
_HARMLESS_NAMES = re.compile(
    r"^((pad|eos|bos|unk|sep|cls|mask|image|special|stop|per|max|min|first|last|decoder_start|sort|group|primary|row)"
    r"_)+(token|key)$"
)
_SECRET_FORMS = re.compile(
    r"\b(?:(?:hf_|gh[pousr]_|gsk_|AKIA)[A-Za-z0-9]{16,}"
    r"|(?:sk-|glpat-|xox[abprs]-|AIza|github_pat_|wandb_v1_)[A-Za-z0-9_-]{16,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)"
)
_BEARER = re.compile(r"(?i)\b((?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}")
# Up to the last @, because a password may contain one.
_URL_USER = re.compile(r"(?<=://)[^/?#\s]+(?=@)")
_URL_QUERY = re.compile(r"(?<=[?&])([A-Za-z0-9_.-]+)=([^&#\s]+)")


def without_credentials(value: Any, name: str = "") -> Any:
    """`value` of the option `name`, with `REMOVED` in place of every credential, also inside mappings and lists."""
    if isinstance(value, Mapping):
        return {key: without_credentials(entry, str(key)) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_credentials(entry, name) for entry in value]
    if isinstance(value, bool | None) or value == "":
        return value
    if _names_a_credential(name):
        return REMOVED
    return _clean_text(value) if isinstance(value, str) else value


def without_credential_arguments(words: tuple[str, ...] | list[str]) -> list[str]:
    """The words of a command line, with `REMOVED` in place of every credential."""
    cleaned, option = [], ""
    for word in words:
        flag, equals, value = word.partition("=")
        if flag.startswith("-"):
            option = "" if equals else flag.lstrip("-")
            cleaned.append(f"{flag}={without_credentials(value, flag.lstrip('-'))}" if equals else word)
        else:
            cleaned.append(without_credentials(word, option))
    return cleaned


def _names_a_credential(name: str) -> bool:
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").replace(".", "_").lower()
    return plain.rpartition("_")[2] in _SECRET_WORDS and not _HARMLESS_NAMES.match(plain)


def _clean_text(text: str) -> str:
    def in_query(match: re.Match[str]) -> str:
        return f"{match[1]}={REMOVED}" if _names_a_credential(match[1]) else match[0]

    text = _URL_USER.sub(REMOVED, text)
    text = _URL_QUERY.sub(in_query, text)
    text = _SECRET_FORMS.sub(REMOVED, text)
    return _BEARER.sub(rf"\g<1>{REMOVED}", text)
