"""Virtual environments of the clients, made when they are first needed and kept.

``python tests/support/client_venvs.py NAME...`` prints the interpreter of each.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

REQUIREMENTS = {
    "openai-agents": ("openai-agents==0.24.0",),
    "smolagents": ("smolagents[openai]==1.26.0",),
    "litellm": ("litellm==1.106.2", "mcp==2.3.0"),
    "verifiers": ("verifiers==0.4.0", "uv==0.13.9"),
    "trackio": ("trackio==0.43.0",),
    "mini_swe_agent": ("mini-swe-agent==2.4.6",),
    "lm-eval": ("lm-eval==0.4.13", "aiohttp", "tenacity", "tiktoken"),
}


@lru_cache  # tests set another HOME
def cache() -> Path:
    """The folder of all environments, which may be deleted at any time."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("BURNISH_CLIENTS") or Path(base) / "burnish-clients")


def interpreter(name: str) -> Path:
    """The interpreter of a client's environment."""
    wanted = REQUIREMENTS[name]
    mark = hashlib.sha256(repr((wanted, sys.version)).encode()).hexdigest()[:8]
    folder = cache() / f"{name}-{mark}"
    python, complete = folder / "bin/python", folder / "complete"
    if not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
        complete.touch()
    return python


if __name__ == "__main__":
    for chosen in sys.argv[1:] or REQUIREMENTS:
        print(interpreter(chosen))
