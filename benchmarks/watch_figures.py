"""Take the screenshots of docs/watch.md: ``python benchmarks/watch_figures.py RUN``.

It serves a run folder with ``burnish watch``, opens the views in Chromium, and writes
``docs/figures/watch-*.png``. RUN is a run of RL, such as that of ``burnish demo``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import Page, ViewportSize
from watch_page import opened

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
SIZE: ViewportSize = {"width": 1280, "height": 800}


def take(page: Page, address: str) -> None:
    """Write a figure of the curves, of the groups of the last step, and of the tokens of a
    sample."""
    page.goto(address)
    page.locator("tbody th a").click()
    page.wait_for_selector(".u-over")
    page.wait_for_timeout(500)
    page.screenshot(path=FIGURES / "watch-run.png")
    page.get_by_role("link", name="Samples").click()
    page.locator(".numbers a").first.click()
    page.wait_for_selector(".group")
    page.screenshot(path=FIGURES / "watch-step.png")
    page.locator(".group .text").nth(1).click()
    page.wait_for_selector(".token")
    page.locator(".tokens-section").scroll_into_view_if_needed()
    page.locator(".token.hot, .token.cold").first.hover()
    page.screenshot(path=FIGURES / "watch-tokens.png")


def main() -> None:
    """Take the screenshots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    with opened(run, SIZE) as chromium:
        take(chromium.page, chromium.address)


if __name__ == "__main__":
    main()
