"""A report as a browser splits it, and texts that try to become markup or scripts."""

from __future__ import annotations

import base64
import gzip
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \u2028 'quoted' \"twice\""
)

PAYLOADS = (
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "<!--<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "<a href=javascript:alert(1)>x</a>",
    "javascript:alert(1)",
    "' onmouseover='alert(1)",
    '" autofocus onfocus="alert(1)',
    "`${alert(1)}`",
    "{{ 7 * 7 }}{% for x in ().__class__.__mro__ %}{{ x }}{% endfor %}",
    "]]><script>alert(1)</script>",
    "</style><script>alert(1)</script>",
    "</textarea></title><script>alert(1)</script>",
    "\u2028alert(1)\u2029",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "<math><mi xlink:href=data:x,<script>alert(1)</script>>",
)


class Page(HTMLParser):
    """Tags, attributes, script bodies and visible text of a page, split as a browser does."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data + " "

    def samples(self) -> dict[str, Any]:
        number = [a.get("id") for t, a in self.tags if t == "script"].index("samples-data")
        return samples_of(gzip.decompress(base64.b64decode(self.scripts[number])))


def samples_of(text: str | bytes) -> dict[str, Any]:
    """The embedded samples of a page, with a dictionary per row."""
    data: dict[str, Any] = json.loads(text)
    data["rows"] = [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]
    return data
