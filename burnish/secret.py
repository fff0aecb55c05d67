"""Detect and read environment variables with secrets, and redact their values in texts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

_PARTS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
_MIN_CHARS = 16
"""Shorter values, such as the ``false`` of TOKENIZERS_PARALLELISM, are not treated as secrets."""
_MIN_HIDDEN = 8
"""Shorter secrets are not searched for in texts: they may be words."""
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_WORDS = ("secret", "password", "passwd", "credential", "credentials", "authorization", "apikey")
_QUERY = re.compile(r"\b\w+://[^\s?#]+[?#](?P<secret>[^\s'\",)\]}]+)")
_OPTION = re.compile(
    r"(?i)--[\w-]*(?:key|token|secret|passw(?:or)?d|credentials?)(?:=|\s+)[\"']?(?P<secret>[^\s\"']+)"
)
_SCHEME = re.compile(r"(?i)\b(?:bearer|basic)\s+(?P<secret>[\w.~+/=-]{8,})")
_TOKEN = re.compile(
    r"\b(?P<secret>(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA)[\w-]{16,})"
)
"""Tokens of the hub, of OpenAI and Anthropic, of GitHub, GitLab, Slack and AWS."""
_ASSIGNMENT = re.compile(r"\b(?P<name>[A-Z0-9_]++)=[\"']?(?P<secret>[^\s\"';&|]{8,})")
"""Environment variables that a shell command sets."""
_SETTING = re.compile(r"(?P<name>[\w-]+)(?P<sign>=|:\s*)(?P<value>.+)", re.DOTALL)


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Return whether a variable of this name may contain a secret, such as ``HF_TOKEN``."""
    return any(part in name.upper() for part in _PARTS)


def read_token(variable: str) -> str:
    """Return the bearer token in an environment variable, stripped of white space.

    Raises ValueError if the variable is not set or is not a valid bearer token. The message does
    not contain the value.
    """
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ValueError(
            f"token_env names the environment variable {variable}, which is not set or is empty; "
            f"export {variable}=..., or remove token_env"
        )
    if not re.fullmatch(r"[A-Za-z0-9._~+/-]+=*", token):  # RFC 6750, 2.1
        raise ValueError(
            f"the environment variable {variable} (token_env) contains characters that are not "
            "valid in a bearer token; set it to the token alone: letters, digits and -._~+/, with "
            "= at the end"
        )
    return token


def without_secrets(text: str) -> str:
    """Return ``text`` with the values of secret environment variables and the user part of URLs
    replaced by ``***``.

    >>> without_secrets("http://me:password@10.0.0.5/score")
    'http://***@10.0.0.5/score'
    """
    secrets = {v for k, v in os.environ.items() if len(v) >= _MIN_CHARS and is_secret(k)}
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, "***")
    return _USER_IN_URL.sub("***@", text)


def without_secret_values(node: Any) -> Any:
    """Return a tree of mappings and lists with values that may be secrets replaced by ``***``.

    Those are the values of keys such as ``api_key``, all values of ``env`` and ``headers``, the
    arguments of options such as ``--api-key``, headers and settings such as ``HF_TOKEN=...`` in
    lists, users and queries of URLs, tokens in the usual forms (``hf_...``), and the values of
    secret environment variables. Keys that end with ``_env`` name a variable, and are kept.

    >>> without_secret_values({"api_key": "x", "token_env": "A", "args": ["--token", "y"]})
    {'api_key': '***', 'token_env': 'A', 'args': ['--token', '***']}
    """
    return _hidden(node, set())


def secret_texts(node: Any) -> set[str]:
    """Return the texts that :func:`without_secret_values` replaces, for a search in other texts.
    Those of fewer than 8 characters are left out.

    >>> sorted(secret_texts({"api_key": "abcdefgh", "urls": ["http://h/p?key=12345678"]}))
    ['12345678', 'abcdefgh', 'key=12345678']
    """
    secrets: set[str] = set()
    _hidden(node, secrets)
    parts = {part for text in secrets for part in re.split("[&;]", text)}
    values = {value for part in parts for _, _, value in [part.partition("=")] if value}
    secrets |= parts | {match["secret"] for text in secrets for match in _SCHEME.finditer(text)}
    return {text for text in secrets | values if len(text) >= _MIN_HIDDEN}


def without_texts(text: str, hidden: Iterable[str]) -> str:
    """Return ``text`` with its secrets, and every text in ``hidden``, replaced by ``***``."""
    for value in sorted(hidden, key=len, reverse=True):
        text = text.replace(value, "***")
    return _text(text, set())


def _hidden(node: Any, secrets: set[str]) -> Any:
    """Return ``node`` with its secrets replaced, and add them to ``secrets``."""
    if isinstance(node, dict):
        return {key: _value(str(key), value, secrets) for key, value in node.items()}
    if isinstance(node, list | tuple):
        pairs = zip([None, *node], node, strict=False)
        return [_argument(value, previous, secrets) for previous, value in pairs]
    return _text(node, secrets) if isinstance(node, str) else node


def _text(text: str, secrets: set[str]) -> str:
    """Return a text with the secrets in it replaced."""

    def hide(match: re.Match[str]) -> str:
        if match.re is _ASSIGNMENT and not is_secret(match["name"]):
            return match[0]
        secrets.add(match["secret"])
        return match[0].replace(match["secret"], "***")

    for pattern in (_QUERY, _OPTION, _SCHEME, _TOKEN, _ASSIGNMENT):
        text = pattern.sub(hide, text)
    return without_secrets(text)


def _all_of(value: Any, secrets: set[str]) -> Any:
    """Replace every text in ``value``, which is secret."""
    if isinstance(value, dict):
        return {key: _all_of(each, secrets) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_all_of(each, secrets) for each in value]
    if value is not None and not isinstance(value, bool):
        secrets.add(str(value))
    return "***"


def _value(key: str, value: Any, secrets: set[str]) -> Any:
    if key.lower() in ("env", "headers", "environ") and isinstance(value, dict | list):
        return _all_of(value, secrets)
    if isinstance(value, str) and value and _is_secret_key(key, value):
        return _all_of(value, secrets)
    return _hidden(value, secrets)


def _argument(value: Any, previous: Any, secrets: set[str]) -> Any:
    """Return an entry of a list, which may be an argument of the option before it."""
    if not isinstance(value, str):
        return _hidden(value, secrets)
    if isinstance(previous, str) and re.fullmatch(r"--?[\w-]+", previous) and _names(previous):
        return _all_of(value, secrets)
    match = _SETTING.fullmatch(value)
    if match is not None and _names(match["name"]):
        secrets.update((match["value"], *match["value"].split()[:1]))
        return f"{match['name']}{match['sign']}***"
    return _hidden(value, secrets)


def _is_secret_key(key: str, value: str) -> bool:
    """Return whether a key of a recipe names a secret, not a variable, a column or a special
    token."""
    certain = _names(key) - {"token", "key"}
    return bool(certain) or (bool(_names(key)) and len(value) >= _MIN_CHARS)


def _names(key: str) -> set[str]:
    """Return the words of a key that name a secret; none if it names an environment variable."""
    words = set(re.split(r"[^a-z]+", key.lower()))
    suspicious = words & {*_WORDS, "token", "key"}
    return (
        set()
        if "env" in words
        else suspicious | ({"api key"} if words >= {"api", "key"} else set())
    )
