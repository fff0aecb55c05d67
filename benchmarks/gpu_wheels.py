"""Collect the wheels that benchmarks/gpu_session.py installs on a CUDA machine without a network.

    python benchmarks/gpu_wheels.py [--out wheels] [--python 3.11 3.12 3.13] [--machine x86_64]
    python benchmarks/gpu_wheels.py --with-trl [--python 3.12]   # for the session's step trl

Assumed on that machine: torch, transformers, triton, peft, pyarrow, rich and typer, with what these
need. The wheels are what Burnish and its tests import besides, in the versions of
constraints/cpu.lock.txt; packages with compiled code come once for each Python. With trl it is one
Python by default: 21 MiB, and 53 for three. Printed are the files and their sum, which may not
exceed --limit-mib.

Not collected: packages of extras (ray, deepspeed, vllm, ...) and of jobs that the session does not
run (math-verify, gguf).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "constraints" / "cpu.lock.txt"
NEEDED_BY = {
    "burnish.config": ("pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    "pydantic": ("typing-extensions",),
    "peft and transformers": ("accelerate", "psutil"),
    "burnish.rewards": ("httpx", "httpcore", "h11", "anyio", "idna", "certifi", "tenacity"),
    "burnish.sync": ("xxhash",),
    "burnish.doctor": ("packaging",),
    "burnish.episodes.parsing": ("jsonschema", "jsonschema-specifications"),
    "jsonschema": ("attrs", "referencing", "rpds-py"),
    "tests": ("pytest", "pytest-timeout", "pluggy", "iniconfig", "pygments"),
    "tests/conftest.py": ("hypothesis", "sortedcontainers"),
}
"""Importing module -> packages."""
NEEDED_BY_TRL = {
    "trl": ("trl", "datasets"),
    "datasets": ("dill", "multiprocess", "pandas", "python-dateutil", "six", "tzdata"),
}
"""The same for the comparison with TRL. pandas takes 11 MiB for each version of Python."""
LIMIT_MIB = 40.0
PYTHONS = ("3.11", "3.12", "3.13")
PYTHONS_WITH_TRL = ("3.12",)
"""That of the GPU machines so far."""
GLIBC = (5, 12, 17, 24, 26, 27, 28)
"""Minor versions of glibc 2 whose platform tags pip accepts. It compares tags exactly."""
OLD_TAGS = {
    "x86_64": ("manylinux1", "manylinux2010", "manylinux2014"),
    "aarch64": ("manylinux2014",),
}


def locked_versions(text: str) -> dict[str, str]:
    """Return the version of every package in a lock file, by normalized name.

    >>> locked_versions("Typing_Extensions==4.1 \\\\\\n    --hash=sha256:00\\n# a comment\\n")
    {'typing-extensions': '4.1'}
    """
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s\\;]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def requirements(versions: dict[str, str], *, with_trl: bool = False) -> list[str]:
    """Return ``NAME==VERSION`` of all packages. Raises SystemExit if the lock file lacks one."""
    tables = [NEEDED_BY, NEEDED_BY_TRL] if with_trl else [NEEDED_BY]
    names = [name for table in tables for packages in table.values() for name in packages]
    if missing := sorted(set(names) - set(versions)):
        raise SystemExit(f"{LOCK.name} has no version of {', '.join(missing)}; lock them first")
    return [f"{name}=={versions[name]}" for name in names]


def platform_tags(machine: str) -> list[str]:
    """Return the wheel platforms of ``machine`` for pip's --platform, newest glibc last."""
    return [
        *(f"{old}_{machine}" for old in OLD_TAGS[machine]),
        *(f"manylinux_2_{minor}_{machine}" for minor in GLIBC),
    ]


def pip_command(python: str, machine: str, out: Path, wanted: Iterable[str]) -> list[str]:
    """Return the command that downloads for one version of Python."""
    tags = [word for tag in platform_tags(machine) for word in ("--platform", tag)]
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet"]
    target = ["--implementation", "cp", "--python-version", python, *tags]
    return [sys.executable, "-m", "pip", "download", *options, *target, "-d", str(out), *wanted]


def size_problem(sizes: dict[str, int], limit_mib: float) -> str | None:
    """Return why the wheels are too large together, None if they are not."""
    total = sum(sizes.values()) / 2**20
    if total <= limit_mib:
        return None
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    return (
        f"the wheels take {total:.1f} MiB, above --limit-mib {limit_mib:g}; give fewer versions "
        f"of Python (--python 3.12). Largest: {', '.join(largest)}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Download and list the wheels, and check their sum."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("wheels"), help="folder of the wheels")
    pythons = f"default: {' '.join(PYTHONS)}; with --with-trl {' '.join(PYTHONS_WITH_TRL)}"
    parser.add_argument("--python", nargs="+", metavar="X.Y", help=pythons)
    parser.add_argument("--machine", choices=sorted(OLD_TAGS), default="x86_64")
    parser.add_argument("--with-trl", action="store_true", help="also trl and datasets")
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB)
    args = parser.parse_args(arguments)
    versions = locked_versions(LOCK.read_text(encoding="utf-8"))
    wanted = requirements(versions, with_trl=args.with_trl)
    args.out.mkdir(parents=True, exist_ok=True)
    for old in args.out.glob("*.whl"):  # two versions of one package would both be installed
        old.unlink()
    for python in args.python or (PYTHONS_WITH_TRL if args.with_trl else PYTHONS):
        subprocess.run(pip_command(python, args.machine, args.out, wanted), check=True)
    sizes = {path.name: path.stat().st_size for path in sorted(args.out.glob("*.whl"))}
    for name, size in sizes.items():
        print(f"{size / 2**20:8.2f} MiB  {name}")
    print(f"{sum(sizes.values()) / 2**20:8.2f} MiB  {len(sizes)} wheels in {args.out}")
    if problem := size_problem(sizes, args.limit_mib):
        raise SystemExit(problem)


if __name__ == "__main__":
    main()
