"""Imports go one way: the mathematics never learns of engines, and engines never of loops."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import burnish
from burnish.config.registry import REGISTRY

PACKAGE = Path(burnish.__file__).parent

MATHS = {"types", "tensors", "transcript", "compact"}
BASE = MATHS | {
    *(
        "chat_message",
        "config",
        "data_files",
        "errors",
        "file_lock",
        "json_text",
        "small_files",
        "loop_thread",
        "messages",
        "oom",
        "secret",
        "shm",
    ),
    *("host_copies", "model_text", "reasoning_tags", "special_tokens", "template_charges"),
    "templates",
    *("byte_tokens", "schema_keywords", "tool_arguments", "user_calls", "vocabulary"),
}
LOOPS = BASE | {
    *(
        "batches",
        "plan",
        "algorithms",
        "distributed",
        "optimizers",
        "train",
        "rollout",
        "sync",
        "data",
        "rewards",
        "models",
        "checkpoint",
        "observe",
        "runs",
        "report",
    ),
    "environments",
    "episodes",
    "agents",
    "sandbox",
    "serve",
}

JOBS = {"runtime", "driver", "steps", "preflight", "publish"}

ALLOWED: dict[str, set[str]] = {
    "types": {"tensors", "transcript", "compact"},
    "compact": set(),
    "transcript": set(),
    "batches": {"types", "compact"},
    "chat_message": {"errors", "json_text"},
    "errors": set(),
    "file_lock": set(),
    "json_text": set(),
    "small_files": {"errors"},
    "loop_thread": set(),
    "messages": set(),
    "model_text": {"errors"},
    "reasoning_tags": {"model_text"},
    "oom": set(),
    "secret": set(),
    "template_charges": {"errors"},
    "templates": {"errors", "template_charges"},
    "special_tokens": {"templates"},
    "shm": {"file_lock"},
    "schema_keywords": {"errors"},
    "tool_arguments": {"errors", "schema_keywords"},
    "user_calls": {"errors"},
    "call_guard": set(),
    "vocabulary": set(),
    "byte_tokens": set(),
    "tensors": set(),
    "host_copies": set(),
    "algorithms": MATHS,
    "config": {"errors", "json_text", "data_files"},
    "data_files": {"errors", "json_text", "small_files"},
    "distributed": BASE | {"models"},
    "optimizers": BASE | {"models", "distributed"},
    # engines and what feeds them; neighbours only where one is made of the other
    "models": BASE,
    "sandbox": BASE,
    "environments": BASE | {"sandbox"},
    "observe": BASE,
    "runs": BASE | {"observe"},
    "report": BASE | {"observe", "runs"},
    "watch": BASE | {"observe", "runs", "report", "serve"},
    "train": BASE | {"models", "checkpoint", "distributed", "optimizers"},
    "data": BASE | {"environments"},
    "checkpoint": BASE | {"models"},
    "rewards": BASE | {"environments", "models", "train", "algorithms", "data", "sandbox"},
    "rollout": BASE | {"data", "models", "rewards", "environments"},
    "episodes": BASE | {"data", "environments", "rewards", "rollout"},
    "sync": BASE | {"models", "checkpoint", "train", "rollout"},
    "agents": BASE | {"data", "environments", "episodes", "rewards", "rollout", "sandbox", "serve"},
    "serve": BASE | {"models", "train", "rewards"},
    "plan": BASE
    | {"algorithms", "distributed", "models", "observe", "optimizers", "rollout", "train"},
    # runtime builds engines; loops ask it for them
    "runtime": LOOPS,
    "driver": LOOPS | {"runtime"},
    "steps": LOOPS | {"runtime", "driver"},
    "preflight": LOOPS | {"runtime", "driver"},
    "publish": LOOPS | {"driver"},
    "jobs": LOOPS | JOBS,
    "demo": LOOPS | JOBS | {"jobs"},
    "starter": BASE | {"data", "preflight"},
    "doctor": LOOPS | JOBS | {"jobs"},
}
"""What each part may import besides itself. ``cli``, ``__main__`` and the root import anything."""

TOP = {
    *("cli", "cli_arguments", "cli_completion", "cli_errors", "cli_init", "cli_runs", "cli_serve"),
    *("__main__", "__init__"),
}

ONLY_IN = {
    "ray": "runtime/ray/cluster.py",
    "deepspeed": "train/deepspeed/engine.py",
    "vllm": "rollout/vllm/engine.py",
    "wandb": "observe/wandb.py",
}


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            module = node.module or ""
            if module == "burnish":
                yield from ((node.lineno, f"burnish.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


KINDS = {"data", "optimizers", "rewards", "rollout"}
"""Folders whose subfolders are kinds that recipes select."""
LAYERS = {"config": "config", "kinds": "config", "memory": "plan"}
"""Files of a kind that belong to another layer than its code: its config, the registry and the
contract of the kinds, and its part of the plan."""


def part_of(path: Path) -> str:
    folder, *rest = path.relative_to(PACKAGE).with_suffix("").parts
    return LAYERS.get(rest[-1], folder) if folder in KINDS else folder


def part_of_module(module: str) -> str:
    """The part of an imported module."""
    path = PACKAGE.parent / module.replace(".", "/")
    return part_of(path / "__init__" if path.is_dir() else path)


FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def imports() -> list[tuple[Path, int, str]]:
    return [(path, line, module) for path in FILES for line, module in imports_of(path)]


def test_every_part_of_the_package_has_its_place_in_the_order():
    assert {part_of(path) for path in FILES} <= set(ALLOWED) | TOP


def test_a_file_imports_only_from_the_layers_below():
    wrong = [
        f"{path}:{line}: {part_of(path)} may not import {module}"
        for path, line, module in imports()
        if part_of(path) not in TOP
        and module.split(".")[0] == "burnish"
        and part_of_module(module) not in ALLOWED[part_of(path)] | {part_of(path)}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_order_has_no_circle():
    done: set[str] = set()
    while left := set(ALLOWED) - done:
        ready = {part for part in left if ALLOWED[part] <= done}
        assert ready, f"a circle among {sorted(left)}"
        done |= ready


def test_ray_deepspeed_and_vllm_are_imported_in_one_file_each():
    homes = {
        (module.split(".")[0], path.relative_to(PACKAGE).as_posix())
        for path, _, module in imports()
        if module.split(".")[0] in ONLY_IN
    }
    assert homes == set(ONLY_IN.items())


def test_reading_a_recipe_loads_no_torch():
    """What makes --help and --dry-run quick."""
    code = "import sys, burnish.cli; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_a_run_starts_without_what_only_its_report_or_other_engines_need():
    """A machine without these trains with the torch engine and the local rollout."""
    others = {"pandas", "matplotlib", "datasets", "math_verify", "gguf", "starlette"}
    others |= {"tensorboard", "ray", "deepspeed", "vllm", "wandb", "peft", "bitsandbytes"}
    jobs = "".join(f", {entry.module}" for entry in REGISTRY.values())
    code = f"import sys, burnish.jobs.run{jobs}; print(*sorted({others} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert done.stdout.strip() == ""


def test_the_python_api_has_what_it_names():
    for name in burnish.__all__:
        assert vars(burnish).get(name) or burnish.__getattr__(name)
    with pytest.raises(AttributeError, match="has no attribute 'runn'"):
        burnish.runn  # noqa: B018
