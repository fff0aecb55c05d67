"""Burnish: reinforcement learning for language models. The Python API; everything loads when first
used.

``load_config`` reads a recipe, ``run`` runs it, ``export`` turns a checkpoint into a HuggingFace
folder, ``build_report`` writes a run's page. Reading order of the code: ``types.py``,
``steps/rl.py``, then what it calls."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from burnish.checkpoint.export import export
    from burnish.config import load_config
    from burnish.driver.errors import Interrupted
    from burnish.jobs.run import RunResult, run
    from burnish.report.build import build_report
    from burnish.runs.folder import Run, load_run

# bitsandbytes warns at import that optional matmul kernels from a hub are missing; it has others.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

__version__ = "0.1.0"

_HOMES = {
    "Interrupted": "burnish.driver.errors",
    "Run": "burnish.runs.folder",
    "RunResult": "burnish.jobs.run",
    "build_report": "burnish.report.build",
    "export": "burnish.checkpoint.export",
    "load_config": "burnish.config.load",
    "load_run": "burnish.runs.folder",
    "run": "burnish.jobs.run",
}

__all__ = [
    "Interrupted",
    "Run",
    "RunResult",
    "__version__",
    "build_report",
    "export",
    "load_config",
    "load_run",
    "run",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module at first use (PEP 562), so that ``import burnish`` is
    quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'burnish' has no attribute {name!r}")
    from pkgutil import resolve_name

    value = resolve_name(f"{_HOMES[name]}:{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
