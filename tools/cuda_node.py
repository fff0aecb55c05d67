"""Check whether ``constraints/cuda.lock.txt`` fits this machine, for ``make install-cuda``.

Standard library only: it runs before anything is installed, with Pythons that are too old as well.
It does not check the driver, because container images are built without one; ``burnish doctor``
does.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig

PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
"""Python versions that the lock has wheels for."""
GLIBC = (2, 31)
"""Oldest C library for which every compiled package of the lock except pycosat has a wheel."""


def problems(
    python: tuple[int, int],
    system: str,
    machine: str,
    libc: tuple[str, str],
    *,
    compiler: str | None,
    headers: str,
) -> list[str]:
    """Return every reason why the lock cannot be installed, as sentences.

    ``libc``: the result of ``platform.libc_ver``. ``headers``: the folder of ``Python.h``."""
    found = []
    if (system, machine) != ("Linux", "x86_64"):
        found.append(
            f"this is {system} on {machine}, but the lock file has packages only for Linux on "
            "x86_64. Elsewhere: pip install -e '.[vllm,deepspeed,ray]', untested"
        )
    if python not in PYTHONS:
        first, last = PYTHONS[0], PYTHONS[-1]
        found.append(
            f"this is Python {_dotted(python)} ({sys.executable}), but the lock file has "
            f"packages for {_dotted(first)} to {_dotted(last)}. Choose another: make "
            f"install-cuda PYTHON=/path/to/python{_dotted(PYTHONS[1])}"
        )
    name, version = libc
    if system == "Linux" and (name != "glibc" or _numbers(version) < GLIBC):
        found.append(
            f"the C library is {name or 'not glibc'} {version}, but the lock file has packages "
            f"for glibc {_dotted(GLIBC)} or newer (Debian 11, Ubuntu 20.04, RHEL 9). Use the "
            "container: docs/install.md"
        )
    if compiler is None:
        found.append(
            "there is no C compiler (cc or gcc), which pycosat needs at installation and Triton "
            "for its first kernel: apt-get install build-essential"
        )
    if not os.path.isfile(os.path.join(headers, "Python.h")):
        found.append(
            f"{headers}/Python.h is missing, which pycosat needs at installation and Triton for "
            f"its first kernel: apt-get install python{_dotted(python)}-dev"
        )
    return found


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def main() -> int:
    """Print the reasons; return 2 if there are any."""
    found = problems(
        (sys.version_info[0], sys.version_info[1]),
        platform.system(),
        platform.machine(),
        platform.libc_ver(),
        compiler=shutil.which("cc") or shutil.which("gcc"),
        headers=sysconfig.get_path("include"),
    )
    for problem in found:
        sys.stderr.write(f"error: {problem}\n")
    return 2 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
