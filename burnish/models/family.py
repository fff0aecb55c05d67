"""Results of the model family checks, and their cache folder.

The checks themselves are in ``family_check.py`` (layouts) and ``rollout/local/engine.py``
(sampling). This module imports neither torch nor transformers, so a cached result only costs
reading a file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

log = logging.getLogger("burnish")

PACKED = "burnish"
"""Name under which ``attention.py`` registers its attention in transformers."""

Decoding = Literal["batched", "cached", "recomputed"]
"""How the local engine decodes. ``batched``: many rows together with a slot cache. ``cached``: one
row at a time with the model's own cache. ``recomputed``: one row at a time without a cache."""
_WORDS = {
    "batched": "batches of rows with a slot cache",
    "cached": "single rows with the model's own cache",
    "recomputed": "single rows without a cache",
}


class CheckResult(Protocol):
    """A JSON-serializable dataclass with the outcome of a check."""

    @property
    def refusal(self) -> str:
        """Why the model cannot be used; empty if it can."""


Result = TypeVar("Result", bound=CheckResult)


@dataclass(frozen=True)
class ModelSupport:
    """The layout in which a model family runs, and the evidence for it.

    Example: ``ModelSupport("llama", "burnish", {"padded": 5e-07, "packed": 5e-07, ...})``.
    """

    model_type: str
    attention: str
    """``burnish`` for packed rows, else the transformers implementation for padded rows."""
    differences: dict[str, float] = field(default_factory=dict)
    """Layout -> largest difference of log-probs from transformers' forward of each single row, in
    nats, fp32."""
    reason: str = ""
    """Why packed rows are not used; empty if they are."""
    refusal: str = ""
    """Why the model cannot be used; empty if it can."""

    @property
    def packed(self) -> bool:
        """Return whether packed and shared-prefix rows are exact."""
        return self.attention == PACKED

    def refusal_of(self, name: str) -> str:
        """Return the error message for the model ``name``, with a suggested fix."""
        return (
            f"{name} cannot be used: {self.refusal.removesuffix('; use another model')}; use "
            "another model (docs/models.md lists those that work)"
        )

    def sentence(self) -> str:
        """The result in one sentence, for logs."""
        if self.refusal:
            return self.refusal_of(self.model_type)
        worst = max(self.differences.values(), default=0.0)
        if self.packed:
            return f"{self.model_type}: packed rows are exact (largest difference {worst:.1e} nats)"
        return (
            f"{self.model_type}: {self.reason}; rows are padded and computed by transformers' own "
            f"{self.attention} attention (largest difference {worst:.1e} nats)"
        )


@dataclass(frozen=True)
class DecodingSupport:
    """How the local engine samples from a model family, and the evidence for it."""

    decoding: Decoding | None
    """None if it cannot sample from it."""
    difference: float = 0.0
    """Largest difference of the log-probs of greedy tokens from transformers' forward, in nats."""
    reason: str = ""
    """Why no faster method is used; empty for ``batched``."""

    @property
    def refusal(self) -> str:
        """Why the local engine cannot sample from it; empty if it can."""
        return self.reason if self.decoding is None else ""

    def sentence(self) -> str:
        """The result in one sentence, for logs."""
        if self.decoding is None:
            return f"the local engine cannot sample from it ({self.reason})"
        text = f"the local engine samples {_WORDS[self.decoding]}"
        return f"{text}, because {self.reason}" if self.reason else text


def words(decoding: Decoding) -> str:
    """Return a description of ``decoding`` for messages."""
    return _WORDS[decoding]


def key_of(kind: type[object], name: str, content: Iterable[bytes]) -> str:
    """Return the cache key of a result of ``kind``.

    The key contains ``name``, for readable file names, and a digest of ``content``, of the torch
    and transformers versions, and of the code of the checks.
    """
    digest = hashlib.sha256()
    for part in (*content, *_versions()):
        digest.update(hashlib.sha256(part).digest())
    return f"{kind.__name__}-{name}-{digest.hexdigest()[:16]}"


def recall(kind: type[Result], key: str) -> Result | None:
    """Return the cached result for ``key``; None if there is none or its file is unreadable."""
    try:
        return kind(**recall_json("families", key))
    except TypeError:
        return None


def keep(key: str, result: Any) -> None:
    """Cache ``result``, a JSON-serializable dataclass, under ``key``. The write is atomic."""
    store_json("families", key, dataclasses.asdict(result))


def recall_json(folder: str, key: str) -> Any:
    """Return the cached value; None if there is none or its file is unreadable."""
    try:
        return json.loads(_file(folder, key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def store_json(folder: str, key: str, value: Any) -> None:
    """Cache a JSON-serializable value in ``folder`` of the user's cache. The write is atomic."""
    file = _file(folder, key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=file.parent, prefix=f".{key}")
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            json.dump(value, opened)
        Path(partial).replace(file)
    except OSError as error:  # a read-only home: the check runs again next time
        log.debug("the result of a check (%s) is not cached: %s", folder, error)


@cache
def _versions() -> tuple[bytes, ...]:
    """Return the library versions and the source code that results depend on."""
    package = Path(__file__).parents[1]
    files = [
        *sorted((package / "models").rglob("*.py")),
        *sorted((package / "rollout").rglob("*.py")),
    ]
    versions = [importlib.metadata.version(name).encode() for name in ("torch", "transformers")]
    return (*versions, *(file.read_bytes() for file in files))


def _file(folder: str, key: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "burnish" / folder / f"{key}.json"
