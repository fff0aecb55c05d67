"""``report.html``: the page of one run as a file that works from disk, without network access.

The table of a chart is also its data: a script draws the chart from it, and without scripts the
tables are open. Samples are embedded as compressed JSON and displayed through ``textContent``. The
page's content security policy blocks all requests, and runs only scripts and styles with a nonce,
which data cannot predict.
"""

from __future__ import annotations

import json
import secrets
from functools import cache
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from burnish.errors import BurnishError
from burnish.observe.files import write_text
from burnish.observe.metrics import METRICS_FILE
from burnish.observe.public_recipe import CONFIG_FILE
from burnish.report.charts import ChartData
from burnish.report.page import date_text, page_of
from burnish.report.samples import embed_samples
from burnish.runs.errors import RunFolderError
from burnish.runs.folder import Run

REPORT_FILE = "report.html"
SCRIPTS = ("uPlot.iife.min.js", "charts.js", "samples.js", "report.js")
"""Scripts of the page, in the order in which they run."""


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
    try:
        write_text(path, report_html(Run(run_dir)))
    except RunFolderError as error:
        raise ReportError(str(error)) from error
    return path


def report_html(run: Run) -> str:
    """Return the report of a run. Raises RunFolderError if its recipe or metrics cannot be read."""
    page = page_of(run)
    return _template().render(
        page=page,
        state="" if page.state.kind == "running" else page.state.kind,  # it is out of date soon
        samples=embed_samples(run.folder),
        marks=json.dumps([{"x": r.step, "label": "resumed"} for r in page.resumes]),
        styles=f"{_asset('uPlot.min.css')}\n{_asset('page.css')}",
        scripts=[f"/*\n{_asset('uPlot.LICENSE')}*/", *map(_asset, SCRIPTS)],
        nonce=secrets.token_urlsafe(16),
    )


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


def _scale(chart: ChartData) -> tuple[float, str]:
    """Return the divisor of a chart's values, and the unit of the quotients."""
    if chart.unit == "fraction":
        return 0.01, "percent"
    if chart.unit != "bytes":
        return 1, chart.unit
    top = max(value for line in chart.lines for value in line.values if value is not None)
    return (2**30, "GiB") if top >= 2**30 else (2**20, "MiB")


def _rows(chart: ChartData) -> Markup:
    """Return the rows of a chart's table, with six digits of each value."""
    factor, _ = _scale(chart)
    digits = 15 if chart.log else 6
    columns = [[_digits(value, factor, digits) for value in line.values] for line in chart.lines]
    rows = zip(chart.x, *columns, strict=True)
    return Markup("\n".join(f"<tr><th>{x}<td>{'<td>'.join(cells)}" for x, *cells in rows))


def _digits(value: float | None, factor: float, digits: int) -> str:
    if value is None:
        return ""
    return (
        f"{value / factor:.{digits}g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["factor"] = lambda chart: f"{_scale(chart)[0]:.12g}"
    environment.filters["unit"] = lambda chart: _scale(chart)[1]
    environment.filters["rows"] = _rows
    environment.filters["date"] = date_text
    return environment.from_string(_asset("page.html.j2"))


def _asset(name: str) -> str:
    return (resources.files("burnish.report") / "assets" / name).read_text(encoding="utf-8")
