"""``report.html``: the page of one run as a file that works from disk, without network access.

All text from models and data rows is embedded as JSON and displayed through ``textContent``. In
addition, the page's content security policy blocks all requests and only runs scripts with a nonce,
which data cannot predict.
"""

from __future__ import annotations

import secrets
from functools import cache
from importlib import resources
from itertools import groupby
from pathlib import Path

import jinja2
from plotly.offline import get_plotlyjs

from burnish.errors import BurnishError
from burnish.observe.files import write_text
from burnish.observe.metrics import METRICS_FILE
from burnish.observe.public_recipe import CONFIG_FILE
from burnish.report.catalog import MORE, OMITTED_IF_ZERO, arrange
from burnish.report.figures import curve_figure, split_figure
from burnish.report.page import page_of, with_fewer_names
from burnish.report.samples import embed_samples
from burnish.runs.curves import curves_of
from burnish.runs.folder import Run, RunFolderError

REPORT_FILE = "report.html"


class ReportError(BurnishError, ValueError):
    """No report can be generated from a folder. The message contains the reason."""


def build_report(run_dir: Path) -> Path:
    """Write ``run_dir/report.html`` from the current content of the run folder, and return its
    path.

    Works for every job, also while it is running; missing measurements are omitted. Raises
    ReportError if ``run_dir`` is not a run folder (no config.yaml and no metrics.jsonl) or if one
    of the two cannot be read.
    """
    run_dir = Path(run_dir)
    path = run_dir / REPORT_FILE
    _check_folder(run_dir)
    run = Run(run_dir)
    try:
        page = page_of(run)
    except RunFolderError as error:
        raise ReportError(str(error)) from error
    curves = curves_of(with_fewer_names(run.lines)[0])
    drawn = [n for n, c in curves.items() if n not in OMITTED_IF_ZERO or any(c.values)]
    sections = [
        {
            "title": title,
            "anchor": title.lower().replace(" ", "-"),
            "figures": [curve_figure(chart, curves) for chart in group],
            "folded": title == MORE,
        }
        for title, group in groupby(arrange(drawn), key=lambda chart: chart.section)
    ]
    text = _template().render(
        title=page.title,
        job=page.job,
        facts=page.facts,
        tiles=page.tiles,
        sections=sections,
        times=[(split_figure(split.chart), split) for split in page.times],
        memory=page.memory,
        samples=embed_samples(run_dir),
        warnings=page.warnings,
        config=page.recipe,
        css=_asset("page.css"),
        js=_asset("page.js"),
        plotly=get_plotlyjs() if page.sections else "",
        num_steps=page.num_steps,
        nonce=secrets.token_urlsafe(16),
    )
    write_text(path, text)
    return path


def _check_folder(run_dir: Path) -> None:
    """Raise ReportError if ``run_dir`` is not a run folder or cannot get a report."""
    if (run_dir / REPORT_FILE).is_dir():
        raise ReportError(f"{run_dir / REPORT_FILE} is a folder; move it away")
    if any((run_dir / name).is_file() for name in (CONFIG_FILE, METRICS_FILE)):
        return
    problem = "is a file" if run_dir.is_file() else "does not exist"
    if run_dir.is_dir():
        problem = "has neither config.yaml nor metrics.jsonl"
    raise ReportError(
        f"{run_dir} is not a run folder: it {problem}; give the folder that a job wrote "
        "(run_dir in its recipe, printed when the job starts)"
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # Scripts of plotly's fragments run only with the nonce of the page.
    environment.filters["with_nonce"] = lambda fragment, nonce: fragment.replace(
        "<script", f'<script nonce="{nonce}"', 1
    )
    return environment.from_string(_asset("page.html.j2"))


def _asset(name: str) -> str:
    return (resources.files("burnish.report") / "assets" / name).read_text(encoding="utf-8")
