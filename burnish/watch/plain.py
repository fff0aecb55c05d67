"""Pages without scripts: the runs as a table, a message, and the form for the token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from html import escape
from typing import Any
from urllib.parse import quote

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="stylesheet" href="/assets/page.css">
<link rel="stylesheet" href="/assets/watch.css">
</head>
<body>
<main class="wrap plain">
<h1>{title}</h1>
{body}
</main>
</body>
</html>
"""


def plain_runs(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the table of runs; each links to its report."""
    heads = ("Run", "State", "Changed", "Job", "Model", "Step", "Headline")
    lines = ["<tr>" + "".join(f'<th scope="col">{head}</th>' for head in heads) + "</tr>"]
    for row in rows:
        changed = row.get("changed")
        headline = row.get("headline") or {}
        texts = (
            row.get("error") or " ".join(filter(None, (row["state"], row["reason"]))),
            "" if changed is None else f"{datetime.fromtimestamp(changed):%Y-%m-%d %H:%M}",
            row.get("job", ""),
            row.get("model", ""),
            "" if row.get("step") is None else str(row["step"]),
            f"{headline['label']} {headline['last']}" if headline else "",
        )
        link = f'<a href="/report?run={quote(row["id"])}">{escape(row["name"])}</a>'
        cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
        lines.append(f'<tr><th scope="row">{link}</th>{cells}</tr>')
    body = f'<div class="scroll"><table class="grid">{"".join(lines)}</table></div>'
    return _PAGE.format(title="Runs", body=body)


def message_page(message: str) -> str:
    """Return a page with a message and the way back."""
    body = f'<p class="problem">{escape(message)}</p><p><a href="/">All runs</a></p>'
    return _PAGE.format(title="Burnish", body=body)


def login_page(problem: str) -> str:
    """Return the form for the token."""
    shown = f'<p class="problem" role="alert">{escape(problem)}</p>' if problem else ""
    form = (
        '<form method="post" action="/login"><label for="token">Token of this server</label> '
        '<input id="token" name="token" type="password" autocomplete="current-password" required '
        'autofocus> <button type="submit">Open</button></form>'
        '<script src="/assets/login.js"></script>'
    )
    return _PAGE.format(title="Burnish", body=shown + form)
