"""Keep full garbage collections of a test process short: what is loaded stays frozen.

A full collection walks the million objects of torch, transformers and vLLM, 0.6 s each time, and
several libraries ask for one whenever an engine starts or ends. vLLM asks five times per start and
three times per end, freezes the objects of its engine, and undoes every freeze at the end."""

from __future__ import annotations

import gc

_freeze = gc.freeze


def skip_loaded() -> None:
    """Collect garbage, and leave out what there is now from later collections."""
    gc.collect()
    _freeze()


def keep_frozen() -> None:
    """Disable the freezes of libraries, and their ends: objects of an engine stay collectable, and
    what :func:`skip_loaded` left out stays left out."""
    gc.freeze = gc.unfreeze = _nothing


def _nothing() -> None:
    pass
