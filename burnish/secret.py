"""Detect and read environment variables with secrets, and redact their values in texts."""

from __future__ import annotations

import os
import re
from typing import Any

_PARTS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
_MIN_CHARS = 16
"""Shorter values, such as the ``false`` of TOKENIZERS_PARALLELISM, are not treated as secrets."""
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_WORDS = ("secret", "password", "passwd", "credential", "credentials", "authorization", "apikey")
_QUERY = re.compile(r"(https?://[^\s?]+)\?\S+")


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
    secrets = {v for k, v in os.environ.items() if is_secret(k) and len(v) >= _MIN_CHARS}
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, "***")
    return _USER_IN_URL.sub("***@", text)


def without_secret_values(node: Any) -> Any:
    """Return a tree of mappings and lists with values that may be secrets replaced by ``***``.

    Those are the values of keys such as ``api_key``, all values of ``env`` and ``headers``, the
    arguments of options such as ``--api-key`` in lists, and queries of URLs. Keys that end with
    ``_env`` name a variable, and are kept.

    >>> without_secret_values({"api_key": "x", "token_env": "A", "args": ["--token", "y"]})
    {'api_key': '***', 'token_env': 'A', 'args': ['--token', '***']}
    """
    if isinstance(node, dict):
        return {key: _value(str(key), value) for key, value in node.items()}
    if isinstance(node, list):
        pairs = zip([None, *node], node, strict=False)
        return [_argument(value, previous) for previous, value in pairs]
    return _QUERY.sub(r"\1?***", node) if isinstance(node, str) else node


def _value(key: str, value: Any) -> Any:
    if key.lower() in ("env", "headers", "environ") and isinstance(value, dict):
        return dict.fromkeys(value, "***")
    if isinstance(value, str) and value and _is_secret_key(key, value):
        return "***"
    return without_secret_values(value)


def _argument(value: Any, previous: Any) -> Any:
    """Return an entry of a list, which may be an argument of the option before it."""
    if not isinstance(value, str):
        return without_secret_values(value)
    if isinstance(previous, str) and re.fullmatch(r"--?[\w-]+", previous) and _names(previous):
        return "***"
    option, equals, _ = value.partition("=")
    if equals and re.fullmatch(r"[\w-]+", option) and _names(option):
        return f"{option}=***"
    return without_secret_values(value)


def _is_secret_key(key: str, value: str) -> bool:
    """Return whether a key of a recipe names a secret, not a variable, a column or a special
    token."""
    certain = _names(key) - {"token", "key"}
    return bool(certain) or (bool(_names(key)) and len(value) >= _MIN_CHARS)


def _names(key: str) -> set[str]:
    """Return the words of a key that name a secret; none if it names an environment variable."""
    words = set(re.split(r"[^a-z]+", key.lower()))
    found = words & {*_WORDS, "token", "key"}
    return set() if "env" in words else found | ({"api key"} if words >= {"api", "key"} else set())
