"""Shared by the benchmarks: the model, the prompts, process CPU time, and workers that take turns.

Two systems are compared by letting one process of each do one step, in turn, while the other
sleeps on a pipe: what else the machine does falls on both. The figure reported is the ratio of
medians of user-CPU seconds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

QUESTION = "Question: {prompt}\nAnswer:"


def model_folder() -> Path:
    """SmolLM2-135M-Instruct as an ordinary HuggingFace folder, converted once from the package's
    GGUF."""
    folder = (
        Path(os.environ.get("BURNISH_BENCH_CACHE", Path.home() / ".cache" / "burnish-bench"))
        / "smollm2-135m"
    )
    if not (folder / "tokenizer.json").is_file():
        from burnish.config.model import ModelConfig
        from burnish.demo import find_bundled_model
        from burnish.models.load import load_causal_lm, load_tokenizer

        source, file = find_bundled_model()
        config = ModelConfig(path=str(source), gguf_file=file)
        load_causal_lm(config).save_pretrained(folder)
        load_tokenizer(config).save_pretrained(folder)
    return folder


def chain_sums(count: int, seed: int) -> list[dict[str, str]]:
    """``count`` two-term sums as rows with ``prompt`` (ready for the model) and ``label``."""
    if importlib.util.find_spec("reasoning_gym") is None:  # other sums of the same form
        draw = random.Random(seed)
        terms = [(draw.randint(1, 99), draw.randint(1, 99)) for _ in range(count)]
        questions = [(f"State the final answer to the sum: {a} + {b} =", a + b) for a, b in terms]
        return [{"prompt": QUESTION.format(prompt=q), "label": str(s)} for q, s in questions]
    from reasoning_gym import create_dataset

    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    items = create_dataset("chain_sum", size=count, seed=seed, **options)
    return [{"prompt": QUESTION.format(prompt=x["question"]), "label": x["answer"]} for x in items]


def cpu_seconds() -> float:
    """User-CPU seconds of this process, all threads."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def peak_rss_mb() -> float:
    """Peak resident memory of this process in MB (10^6 bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


class Turns:
    """In a worker: ``wait()`` until it is this worker's turn; ``done(...)`` reports and hands
    back."""

    def __init__(self) -> None:
        # Results travel on the original stdout; whatever libraries print goes to stderr.
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def wait(self) -> bool:
        return sys.stdin.readline().strip() == "go"

    def done(self, **values: Any) -> None:
        print(json.dumps(values), file=self._out, flush=True)


class Worker:
    """In the parent: a process that does one step per ``go()``."""

    def __init__(self, script: str, *args: str, threads: int) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [sys.executable, script, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def go(self) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"worker {self.process.args!r} exited without a result")
        return dict(json.loads(line))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def interleave(
    workers: dict[str, Worker], *, warmup: int, steps: int
) -> dict[str, list[dict[str, Any]]]:
    """``steps`` measured steps of each worker, in turn, after ``warmup`` unmeasured ones."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    for i in range(warmup + steps):
        for name, worker in workers.items():
            result = worker.go()
            if i >= warmup:
                results[name].append(result)
    return results


def median(results: list[dict[str, Any]], key: str) -> float:
    """The median of one measured value."""
    return float(statistics.median(r[key] for r in results))


TRL_QUIET: dict[str, Any] = {
    "use_cpu": True,
    "fp16": False,
    "gradient_checkpointing": False,
    "lr_scheduler_type": "constant",
    "report_to": [],
    "logging_strategy": "no",
    "save_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
"""Of a config of TRL's: train on the CPU and say nothing."""


def held(turns: Turns, report: Callable[[], dict[str, float]]) -> Any:
    """A callback that holds a trainer of transformers at each step's begin until it is its turn,
    and then tells what the step took and ``report`` says."""
    from transformers import TrainerCallback

    class MemoryPeak(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not turns.wait():
                raise SystemExit
            self.cpu, self.wall = cpu_seconds(), time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.done(
                cpu_s=cpu_seconds() - self.cpu,
                wall_s=time.perf_counter() - self.wall,
                rss_mb=peak_rss_mb(),
                **report(),
            )

    return MemoryPeak()


def inline_runtime(config: Any, device: str = "cpu") -> Any:
    """A runtime in this process for a recipe's model."""
    from burnish.models.load import load_tokenizer
    from burnish.observe.timeline import Timeline
    from burnish.runtime.inline import InlineRuntime

    tokenizer = load_tokenizer(config.model)
    return InlineRuntime(tokenizer, precision=config.precision, device=device, timeline=Timeline())


def use_svg_style() -> None:
    """Figures on white that are the same bytes for the same numbers."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {
            "svg.hashsalt": "burnish",
            "svg.fonttype": "path",
            "figure.dpi": 100,
            "figure.facecolor": "white",
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#e4e4e4",
            "grid.linewidth": 0.6,
            "legend.frameon": False,
        }
    )


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a markdown table."""
    yield "| " + " | ".join(heads) + " |"
    yield "| " + " | ".join("---" for _ in heads) + " |"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def versions(*names: str) -> str:
    """One line: machine, Python, and the versions of the named packages."""
    from importlib.metadata import version

    cpu = next(_cpu_names(), platform.processor())
    have = [f"{n} {version(n)}" for n in names if importlib.util.find_spec(n.replace("-", "_"))]
    return f"{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, {', '.join(have)}"


def _cpu_names() -> Iterator[str]:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else []:
        if line.startswith("model name"):
            yield line.split(":", 1)[1].strip()
