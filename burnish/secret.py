"""Detect and read environment variables with secrets, and redact their values in texts."""

from __future__ import annotations

import os
import re

_PARTS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
_MIN_CHARS = 16
"""Shorter values, such as the ``false`` of TOKENIZERS_PARALLELISM, are not treated as secrets."""
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")


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
