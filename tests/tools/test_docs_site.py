"""The documentation site: every page is in the navigation, all links and anchors of the HTML exist,
and pages work from files, without a network. Building it needs the extra `docs`."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from chromium import chromium

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"[\w./-]+\.md")
needs_mkdocs = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material")),
    reason="mkdocs-material is not installed: pip install 'burnish[docs]'",
)


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def build(folder: Path, pages: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Build these pages with the settings of the project into ``folder / "site"``. The navigation
    has the first one, and ``nav.md``."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    settings |= {"docs_dir": str(folder / "docs"), "site_dir": str(folder / "site")}
    settings["nav"] = [name for name in pages if name in ("index.md", "nav.md")]
    settings["hooks"] = [str(ROOT / name) for name in settings["hooks"]]
    settings["theme"]["custom_dir"] = str(ROOT / settings["theme"]["custom_dir"])
    (folder / "docs").mkdir()
    for name, text in pages.items():
        (folder / "docs" / name).write_text(text)
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    return run("--config-file", folder / "mkdocs.yml")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = run("--site-dir", folder)
    assert done.returncode == 0, done.stderr
    return folder


class Links(HTMLParser):
    """The ids, links and loaded files of one page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag in ("link", "script", "img", "iframe", "source"):
            self.loaded += [values[name] for name in ("href", "src") if values.get(name)]
        elif values.get("href"):
            self.links.append(values["href"])


def broken(page: Path, pages: dict[Path, Links]) -> Iterator[str]:
    """The addresses on a page whose file or anchor is missing; those with a scheme are not
    opened."""
    for address in pages[page].links + pages[page].loaded:
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            continue
        file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        anchors = pages[file].ids if file in pages else set()
        if not file.is_file() or (parts.fragment and unquote(parts.fragment) not in anchors):
            yield address


def test_every_page_is_in_the_navigation_once():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    named = sorted(name for name in NAMED.findall(str(nav)) if not name.startswith("../"))
    assert named == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


@needs_mkdocs
def test_every_link_of_every_page_resolves(site):
    pages = {page.resolve(): Links(page) for page in site.rglob("*.html")}
    assert len(pages) >= 40 and sum(len(page.links) for page in pages.values()) > 3000
    # (The page for servers' errors is shown at any address, and therefore has absolute ones.)
    wrong = {page.name: list(broken(page, pages)) for page in pages if page.name != "404.html"}
    assert {name: found for name, found in wrong.items() if found} == {}


@needs_mkdocs
def test_no_page_loads_a_file_from_elsewhere(site):
    for page in site.rglob("*.html"):
        outside = [address for address in Links(page).loaded if urlsplit(address).netloc]
        assert outside == [], page.name
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert re.findall(r"@import|url\([\"']?(?:https?:)?//", text) == [], sheet.name


@needs_mkdocs
@pytest.mark.parametrize(
    ("pages", "reason"),
    [
        ({"index.md": "# A\n\n[x](none.md)"}, "'none.md'"),
        ({"index.md": "# A\n\n[x](../burnish/none.py)"}, "none.py"),
        ({"index.md": "# A\n\n[x](#none)"}, "'#none'"),
        ({"index.md": "# A\n\n[x](nav.md#none)", "nav.md": "# B"}, "'#none'"),
        ({"index.md": "# A", "other.md": "# B"}, 'not included in the "nav"'),
    ],
)
def test_a_wrong_link_and_a_page_out_of_the_navigation_stop_the_build(pages, reason, tmp_path):
    done = build(tmp_path, pages)
    assert done.returncode != 0 and reason in done.stderr


@needs_mkdocs
def test_a_page_is_read_as_on_a_forge(tmp_path):
    """Anchors of equal headings, files out of docs/, escaped signs, words after the language of a
    block; the name of a page as the text of a link becomes its title."""
    index = (
        "# First\n\n[a](#limits-1) [b](../NOTICE) [nav.md](nav.md#a--b) \\<c>\n\n"
        "## Limits\n\n## Limits\n\n```yaml recipe\njob: rl\n```\n\n| x |\n| --- |\n| `p\\|q` |\n"
    )
    done = build(tmp_path, {"index.md": index, "nav.md": "# Other page\n\n## A & b\n"})
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert '<a href="project/NOTICE.html">b</a>' in text and "<code>p|q</code>" in text
    assert '<a href="nav.html#a--b">Other page</a>' in text and "&lt;c" in text
    assert '<span class="nt">job</span>' in text and "recipe" not in text
    assert (tmp_path / "site" / "project" / "NOTICE.html").is_file()


@pytest.mark.slow
@needs_mkdocs
def test_pages_are_shown_from_files_without_errors_requests_or_sideways_scrolling(site):
    """In Chromium, at both widths and in both schemes, and the search finds a key."""
    problems: list[str] = []
    with chromium() as browser:
        for width, scheme, name in ((1400, "dark", "slate"), (360, "light", "default")):
            context = browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme=scheme
            )
            page = context.new_page()
            page.on("console", lambda message: problems.append(message.text))
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on(
                "request",
                lambda r: r.url.startswith("file:") or problems.append(f"request {r.url}"),
            )
            for file in ("index", "config", "watch", "algorithms", "project/CHANGELOG"):
                page.goto(f"file://{site}/{file}.html")
                assert page.evaluate("document.body.dataset.mdColorScheme") == name
                wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
                assert wide <= 0, f"{file} is {wide} pixels too wide at {width}"
            page.goto(f"file://{site}/index.html?q=dynamic_sampling")
            page.wait_for_selector(".md-search-result__item")
            titles = page.locator(".md-search-result__item h1").all_inner_texts()
            assert "Configuration" in titles
            context.close()
    assert problems == []
