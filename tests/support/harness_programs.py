"""Coding agents of other projects, installed when they are first needed and kept.

``python tests/support/harness_programs.py NAME...`` prints the folders of their programs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from client_venvs import cache, interpreter

PACKAGES = {
    "claude_code": "@anthropic-ai/claude-code@2.1.332",
    "codex": "@openai/codex@0.171.0",
    "node": "node@22",
    "opencode": "opencode-ai@1.18.33",
    "pi": "@earendil-works/pi-coding-agent@1.6.0",
    "qwen_code": "@qwen-code/qwen-code@0.24.4",
}
"""Name -> npm package. ``node`` is the interpreter that pi and Qwen Code need."""


def program_folders(name: str) -> list[Path]:
    """The folders that have to be in PATH for a program."""
    if name not in PACKAGES:
        return [interpreter(name).parent]
    folders = [_installed(name)]
    return [*folders, _installed("node")] if name in ("pi", "qwen_code") else folders


def _installed(name: str) -> Path:
    package = PACKAGES[name]
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError(f"npm installs {package}; install it (Debian: npm), or choose others")
    mark = hashlib.sha256(package.encode()).hexdigest()[:8]
    folder = cache() / f"npm-{name}-{mark}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = [npm, "install", "--no-audit", "--no-fund", "--loglevel=error", package]
        environment = {**os.environ, "npm_config_cache": str(cache() / "npm-cache")}
        subprocess.run(command, cwd=folder, env=environment, check=True)
        (folder / "complete").touch()
    return folder / "node_modules/.bin"


if __name__ == "__main__":
    for chosen in sys.argv[1:] or PACKAGES:
        print(chosen, *program_folders(chosen), sep=os.pathsep)
