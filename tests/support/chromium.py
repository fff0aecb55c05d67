"""Chromium of the system, for tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from playwright import sync_api


@contextmanager
def chromium() -> Iterator[Any]:
    """Start the browser, which ``.ci/run`` installs. Fails the test without it."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.fail("the tests of pages need Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        started = psutil.Process().children(recursive=True)
        try:
            yield browser
        finally:
            started = {*started, *psutil.Process().children(recursive=True)}
            browser.close()
    _, left = psutil.wait_procs([p for p in started if "chrom" in _name(p)], timeout=20)
    assert not left, f"processes of the browser are left: {left}"


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""
