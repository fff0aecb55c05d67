"""The page of ``burnish watch`` in Chromium, for scripts that measure it or take its pictures."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Page, ViewportSize, sync_playwright


@dataclass(frozen=True)
class OpenPage:
    """An empty page, and the server whose address it can open."""

    page: Page
    address: str
    pid: int
    """Process of the server."""


@contextmanager
def served(root: Path) -> Iterator[tuple[str, int]]:
    """Run ``burnish watch`` on a folder; yield its address and process id."""
    command = [sys.executable, "-m", "burnish", "watch", str(root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            if found is None:
                raise SystemExit(f"error: {' '.join(command)} did not start")
            yield found[0], process.pid
        finally:
            process.send_signal(signal.SIGTERM)


@contextmanager
def opened(root: Path, size: ViewportSize | None = None) -> Iterator[OpenPage]:
    """Serve a folder and start the system's Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        raise SystemExit("error: needs Chromium: apt-get install chromium")
    with served(root) as (address, pid), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield OpenPage(browser.new_page(viewport=size), address, pid)
        finally:
            browser.close()
