"""Secrets of a configuration, kept out of what is written or shown of it.

A key belongs into a file that the configuration names (`api_key_file`). But `env` of an MCP server and the options of
users' own functions hold what the user puts there, and a configuration is copied into config.json, checkpoints, logs,
reports and trackers of experiments, which others read. What counts as a secret goes by names, so that settings stay
readable: a token named `x` is not recognised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"

_SECRET = re.compile(
    r"(?:.*_)?(?:passwd|password|pwd|passphrase|secret|credentials?|authorization|bearer|cookie|"
    r"(?:api|access|auth|private|secret|signing|encryption|openai|anthropic|hf|wandb|aws|azure|google)_?key|"
    r"(?:api|access|auth|bearer|refresh|session|id|client|hf|hub|gh|github|gitlab|slack|wandb|bot|personal_access)"
    r"_?token"
    r")|token"
)
"""Whole names, in lower case with underscores. Not `token` behind other words: eos_token, yes_token."""
_TABLES = frozenset({"env", "environ", "headers", "cookies", "auth"})
"""Tables of which every value is one."""
_USER_INFO = re.compile(r"(?<=://)[^/?#\s]+(?=@)")
"""Name and password in a URL; a password may have an `@` itself."""
_QUERY = re.compile(r"(?<=[?&])([\w-]+)=([^&#\s]+)")
_ASSIGNED = re.compile(r"""(--?)?([A-Za-z][\w-]*)(["']?\s*[=:]\s*["']?|\s+["']?)([^\s"',;}\]]+)""")
"""A word and what stands behind it in a text that is no list or table, such as a table that lacks a bracket."""
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def masked(value: Any, name: str = "") -> Any:
    """`value`, as JSON has it, with MASK in place of secrets; name: the key that it stands under.

    Masked are the values of `env` and `headers`, what stands under a name such as `api_key` or `password` or behind a
    flag of such a name in a list of words, name and password in a URL, and such parameters of its query. An empty value
    or None is shown: that a secret is missing is what its reader looks for.
    """
    if value is None or value in ("", b"") or isinstance(value, bool):
        return value
    hidden = _plain(name) in _TABLES
    if isinstance(value, Mapping):
        if hidden or _is_secret(name):
            return {key: MASK if item not in ("", None) else item for key, item in value.items()}
        return {key: masked(item, str(key)) for key, item in value.items()}
    if hidden or _is_secret(name):
        return MASK
    if isinstance(value, str):
        return _in_urls(value)
    if isinstance(value, Sequence):
        return _words(value)
    return value


def masked_text(text: str) -> str:
    """A text whose structure is unknown, for an error that quotes it: what follows the name of a secret is masked."""

    def shown(found: re.Match[str]) -> str:
        flag, name, between, _ = found.groups()
        assigned = flag or "=" in between or ":" in between
        return f"{flag or ''}{name}{between}{MASK}" if assigned and _is_secret(name) else found.group()

    return _ASSIGNED.sub(shown, _in_urls(text))


def _in_urls(text: str) -> str:
    hidden = _USER_INFO.sub(MASK, text)
    return _QUERY.sub(lambda found: f"{found[1]}={MASK}" if _is_secret(found[1]) else found.group(), hidden)


def _words(values: Sequence[Any]) -> list[Any]:
    """Of a command line, what stands behind `--api-key`, `--api-key=` or `API_KEY=`; of other lists each entry."""
    shown: list[Any] = []
    hide = False
    for value in values:
        if not isinstance(value, str):
            shown.append(masked(value))
            continue
        flag, equals, rest = value.partition("=")
        if hide:
            shown.append(MASK)
        elif equals and rest and _is_secret(flag.lstrip("-")):
            shown.append(f"{flag}={MASK}")
        else:
            shown.append(_in_urls(value))
        hide = not hide and not equals and value.startswith("-") and _is_secret(value.lstrip("-"))
    return shown


def _is_secret(name: str) -> bool:
    return _SECRET.fullmatch(_plain(name)) is not None


def _plain(name: str) -> str:
    return _CAMEL.sub("_", name).lower().replace("-", "_").strip("_")
