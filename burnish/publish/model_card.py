"""Model card (README.md) of an exported model: the recipe, the data, the metrics by step, and the
versions.

Cards are published, so secrets and the folders of local paths are removed from the recipe. The
license is not guessed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal

import yaml
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from burnish.checkpoint import CheckpointStore, verify
from burnish.config.train import better
from burnish.driver.errors import RunError
from burnish.models.scalar_model import OWN_CLASS
from burnish.observe.files import write_text
from burnish.observe.metrics import read_metrics
from burnish.observe.public_recipe import read_recipe
from burnish.report.catalog import CHARTS, LEARNING
from burnish.secret import without_secret_values, without_secrets

CARD = "README.md"
MAX_METRICS = 12
"""Metrics in the table of final and best values. One that is measured on several evaluation sets
counts once, and has a row for each."""
MAX_CURVES = 4
"""Columns of the table of values by step."""
MAX_POINTS = 20
"""Rows of the table of values by step."""

Lines = Sequence[Mapping[str, Any]]


def write_card(
    folder: Path, checkpoint: Path, *, model: str, lora: Literal["merge", "adapter"], title: str
) -> Path | None:
    """Write ``folder/README.md``, unless it exists, and return its path; None if it exists.

    * ``folder``: an exported model, of ``model`` (``policy``, ``reward-ema``, ...) of
      ``checkpoint``, a run folder or one of its checkpoints.
    * A checkpoint outside of a run folder has no recipe and no metrics; the card says so.

    Raises RunError if the recipe or the metrics of the run cannot be read.
    """
    path = folder / CARD
    if path.exists():
        return None
    run_dir, step = _run_and_step(checkpoint)
    try:
        recipe = read_recipe(run_dir)[1] if run_dir else {}
        lines = read_metrics(run_dir) if run_dir else []
    except (OSError, ValueError) as error:
        raise RunError(
            f"the model is in {folder}, but its model card cannot be written: {error}; correct the "
            "file, or write README.md yourself"
        ) from error
    until = [line for line in lines if step is None or line["step"] <= step]
    body = [
        _metadata(recipe, model, "peft" if lora == "adapter" else _library(folder)),
        f"# {title}\n\n{_summary(recipe, model, step=step, lora=lora)}",
        _data_section(recipe),
        _metrics_section(until, recipe),
        _recipe_section(recipe),
        _versions_section(),
    ]
    write_text(path, without_secrets("\n\n".join(part for part in body if part) + "\n"))
    return path


def _run_and_step(checkpoint: Path) -> tuple[Path | None, int | None]:
    """Return the run folder of a checkpoint, if any, and the step of the exported weights."""
    if (checkpoint / "checkpoints").is_dir():
        run_dir = checkpoint
        store = CheckpointStore(run_dir / "checkpoints", keep_last=1, best_mode="max")
        good = [path for path in store.all() if not verify(path, checksums=False)]
        name = good[-1].name if good else ""
    else:
        run_dir, name = checkpoint.resolve().parent.parent, checkpoint.resolve().name
    match = re.search(r"step_(\d+)", name)
    step = int(match[1]) if match else None
    return (run_dir if (run_dir / "config.yaml").is_file() else None), step


def _metadata(recipe: Mapping[str, Any], model: str, library: str) -> str:
    """Return the YAML block that the hub reads. Only facts of the run are in it."""
    has_lora = bool(_below(recipe, "model", "lora"))
    entries: dict[str, Any] = {}
    base = _below(recipe, "model", "path")
    if isinstance(base, str) and not model.startswith("critic") and _is_hub_name(base):
        entries["base_model"] = base
    entries["library_name"] = library
    kind = _below(recipe, "algorithm", "advantage", "kind")
    tags = ["burnish", recipe.get("job"), kind, "lora" if has_lora else None]
    entries["tags"] = [tag for tag in tags if isinstance(tag, str)]
    datasets = [
        source["path"]
        for source in _sources(recipe)
        if source.get("kind") == "dataset" and _is_hub_name(str(source.get("path")))
    ]
    if datasets:
        entries["datasets"] = sorted(set(datasets))
    return f"---\n{yaml.safe_dump(entries, sort_keys=False)}---"


def _library(folder: Path) -> str:
    """Return the name of the library that loads an exported model."""
    config = folder / "config.json"
    fields = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return "burnish" if fields.get("architectures") == [OWN_CLASS] else "transformers"


def _is_hub_name(path: str) -> bool:
    """Return whether a path of a recipe is the name of a repository, not of a local folder."""
    if path.startswith((".", "/", "~")) or Path(path).exists():
        return False
    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return True


def _summary(recipe: Mapping[str, Any], model: str, *, step: int | None, lora: str) -> str:
    role, _, averaged = model.partition("-")
    subject = f"The moving average of the {role}" if averaged else f"The {role}"
    form = " (a peft adapter)" if lora == "adapter" else ""
    after = f" after step {step:,}" if step is not None else ""
    job = recipe.get("job")
    by = f" of a `{job}` run" if isinstance(job, str) else ""
    return f"{subject}{form}{by} with Burnish{after}."


def _data_section(recipe: Mapping[str, Any]) -> str:
    public = [without_secret_values(_without_folders(source)) for source in _sources(recipe)]
    if not public:
        return ""
    items = []
    for source in public:
        named = [f"`{source.get('path') or source.get('name') or source.get('environment')}`"]
        keys = ("kind", "subset", "split", "max_samples", "weight")
        named += [f"{key} {source[key]}" for key in keys if source.get(key) is not None]
        items.append("- " + ", ".join(named))
    return "## Training data\n\n" + "\n".join(items)


def _sources(recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    sources = _below(recipe, "data", "sources")
    return [s for s in sources if isinstance(s, dict)] if isinstance(sources, list) else []


def _metrics_section(lines: Lines, recipe: Mapping[str, Any]) -> str:
    measured = sorted({n for line in lines for n, v in line.items() if _is_number(v)})
    best_metric, best_mode = (_below(recipe, "checkpoint", f"best_{k}") for k in ("metric", "mode"))
    sets = _below(recipe, "eval", "sets")
    bare = {name: _without_set(name, sets if isinstance(sets, dict) else ()) for name in measured}
    charts = _learning_charts(measured, bare)
    first = [name for name in measured if name == best_metric]
    names = list(dict.fromkeys([*first, *chain(*charts)]))  # in the order of the report
    if not names:
        return "## Metrics\n\nThis checkpoint has no recorded learning metrics."
    # The first metric of every chart has a place before the second one of any.
    by_chart = [*first, *filter(None, chain(*zip_longest(*charts)))]
    kinds = list(dict.fromkeys(bare[name] for name in by_chart))
    shown = [name for name in names if bare[name] in kinds[:MAX_METRICS]]
    curves = list(dict.fromkeys(first + [chart[0] for chart in charts if chart] + names))
    rows = ["| metric | final | step | best | step |", "| --- | --- | --- | --- | --- |"]
    for name in shown:
        points = _points(lines, name)
        last, direction = points[-1], better(name)
        if name == best_metric and best_mode is not None:
            direction = best_mode
        row = f"| `{name}` | {last[1]:.4g} | {last[0]} |"
        if direction is None:
            rows.append(f"{row} | |")
            continue
        best = (max if direction == "max" else min)(points, key=lambda point: point[1])
        rows.append(f"{row} {best[1]:.4g} | {best[0]} |")
    omitted = [f"`{name}`" for name in names if name not in shown]
    more = f"\n\nAlso measured: {', '.join(omitted)}." if omitted else ""
    table = "\n".join(rows) + more
    return f"## Metrics\n\n{table}\n\n{_curve(lines, curves[:MAX_CURVES])}"


def _learning_charts(names: Sequence[str], bare: Mapping[str, str]) -> list[list[str]]:
    """Return the metrics of each chart of the report on learning, each metric once. ``bare``: name
    -> name without its evaluation set."""
    charts: list[list[str]] = []
    for chart in (chart for chart in CHARTS if chart.section == LEARNING):
        drawn = set(chain(*charts))
        charts.append(
            [
                name
                for pattern in chart.names
                for name in names
                if fnmatchcase(name, pattern) or fnmatchcase(bare[name], pattern)
                if name not in drawn
            ]
        )
    return charts


def _without_set(metric: str, sets: Iterable[str]) -> str:
    """Return the name of a metric of an evaluation set as that of ``eval.data``.

    >>> _without_set("eval/hard/accuracy", ["hard"])
    'eval/accuracy'
    """
    group, _, rest = metric.partition("/")
    name, _, metric_of_set = rest.partition("/")
    return f"eval/{metric_of_set}" if group == "eval" and name in sets else metric


def _points(lines: Lines, name: str) -> list[tuple[int, float]]:
    """Return (step, value) of the finite values of a metric, by step."""
    values = {int(line["step"]): line[name] for line in lines if _is_number(line.get(name))}
    return sorted(values.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _curve(lines: Lines, names: Sequence[str]) -> str:
    """Return a table of metrics at up to MAX_POINTS steps, the first and the last included."""
    columns = {name: dict(_points(lines, name)) for name in names}
    steps = sorted(set().union(*columns.values()))
    count = min(MAX_POINTS, len(steps))
    chosen = sorted({steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)})
    rows = [
        "| step | " + " | ".join(f"`{name}`" for name in names) + " |",
        "| --- |" + " --- |" * len(names),
    ]
    for step in chosen:
        cells = [f"{c[step]:.4g}" if step in c else "" for c in columns.values()]
        rows.append(f"| {step} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _recipe_section(recipe: Mapping[str, Any]) -> str:
    if not recipe:
        return "## Recipe\n\nThe checkpoint was exported without its run folder."
    public = without_secret_values(_without_folders(dict(recipe)))
    text = yaml.safe_dump(public, sort_keys=False, allow_unicode=True, width=100)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return (
        f"## Recipe\n\nSave this as `recipe.yaml` and run `burnish {recipe.get('job')} recipe.yaml"
        "`. Secrets are replaced by `***`, and folders of absolute paths by `LOCAL`.\n\n"
        f"<details><summary>All keys</summary>\n\n{fence}yaml\n{text}{fence}\n\n</details>"
    )


def _without_folders(node: Any) -> Any:
    """Return a part of a recipe with the folders of absolute paths replaced by ``LOCAL``."""
    if isinstance(node, dict):
        return {key: _without_folders(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_without_folders(value) for value in node]
    if not isinstance(node, str):
        return node
    if re.fullmatch(r"[/~]\S+", node):
        return f"LOCAL/{Path(node).name}"
    home = str(Path.home())
    return node.replace(home + "/", "LOCAL/") if home != "/" else node


def _versions_section() -> str:
    rows = ["| package | version |", "| --- | --- |"]
    for name in ("burnish", "torch", "transformers", "safetensors"):
        try:
            number = version(name)
        except PackageNotFoundError:
            number = "from source, not installed"
        rows.append(f"| {name} | {number} |")
    return "## Versions\n\nThose of the export:\n\n" + "\n".join(rows)


def _below(node: Any, *keys: str) -> Any:
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node
