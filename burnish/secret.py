"""Names of environment variables whose values are never written anywhere."""

from __future__ import annotations

_PARTS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")


def is_secret(name: str) -> bool:
    """Whether a variable of this name may hold a secret, such as ``HF_TOKEN``."""
    return any(part in name.upper() for part in _PARTS)
