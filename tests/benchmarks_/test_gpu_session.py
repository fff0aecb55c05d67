"""benchmarks/gpu_session.py: its steps with tiny shapes on the CPU, and what happens to steps that
raise, hang or are killed, and to a session that is killed itself."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import fork_server
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_attention  # noqa: E402
import gpu_engines  # noqa: E402
import gpu_model  # noqa: E402
import gpu_session  # noqa: E402
import gpu_tables  # noqa: E402
import gpu_trace  # noqa: E402
import gpu_wheels  # noqa: E402
from gpu_report import Report, Results, Setup, markdown  # noqa: E402
from gpu_session import DONE, FAILED, LEFT, Session, Step  # noqa: E402
from gpu_trace import Host, Span, gaps_of, read_trace, shares  # noqa: E402

FAKES = """
import os, signal, threading

def good(setup, report):
    report.row("numbers", n=1)
    with (setup.work / "ran").open("a") as file:
        file.write("good ")
    report.summary("one number")

def raises(setup, report):
    report.add(before=1)
    raise KeyError("of the step")

def wrong(setup, report):
    with report.case("second"):
        raise ValueError("of a case")
    report.add(after=2)

def dies(setup, report):
    report.add(before=1)
    os.kill(os.getpid(), signal.SIGKILL)

def hangs(setup, report):
    report.add(before=1)
    with (setup.work / "pipe").open("w") as pipe:  # until this process ends
        pipe.write("begun\\n")
        pipe.flush()
        threading.Event().wait()
"""


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    made = Setup(tmp_path / "out", tmp_path / "work", tiny=True)
    made.work.mkdir()
    made.out.mkdir()
    (tmp_path / "fakes.py").write_text(FAKES)
    return made


@pytest.fixture
def session(setup: Setup) -> Callable[..., Session]:
    """A session over steps of the module above. ``hangs=2.0``: with that limit in seconds."""

    def make(**limits: float) -> Session:
        steps = [Step(name, f"fakes:{name}", limit, name) for name, limit in limits.items()]
        env = gpu_session.environment_of(None, tiny=True)
        env["PYTHONPATH"] += os.pathsep + str(setup.work.parent)
        results = Results(setup.out / "results.json", tiny=True)
        return Session(steps, setup, results, env)

    return make


def run(session: Session, *, redo: bool = False) -> int:
    return session.run([step.name for step in session.steps], redo=redo)


def kept(setup: Setup) -> Any:
    return json.loads((setup.out / "results.json").read_text())["steps"]


# ---- the session ---------------------------------------------------------------------------------


def test_a_step_that_raises_is_recorded_with_its_traceback_and_the_next_runs(
    session: Callable[..., Session], setup: Setup
) -> None:
    assert run(session(raises=60, good=60)) == FAILED
    steps = kept(setup)
    assert steps["raises"]["state"] == "failed"
    assert steps["raises"]["error"].endswith(
        "raise KeyError(\"of the step\")\nKeyError: 'of the step'\n"
    )
    assert steps["raises"]["found"]["values"] == {"before": 1}
    assert steps["good"]["state"] == "done"
    report = (setup.out / "results.md").read_text()
    assert "| `raises` | raises | **failed** (KeyError: 'of the step') |" in report
    assert "| `good` | good | one number |" in report
    log = (setup.out / "session.log").read_text()
    assert "---- raises, " in log and "---- good, " in log


def test_a_case_that_raises_is_a_problem_and_its_step_continues(
    session: Callable[..., Session], setup: Setup
) -> None:
    assert run(session(wrong=60)) == FAILED
    found = kept(setup)["wrong"]["found"]
    assert found["values"] == {"after": 2}
    [problem] = found["problems"]
    assert problem.startswith("second: Traceback") and "ValueError: of a case" in problem


def test_a_killed_step_keeps_its_results_and_the_next_runs(
    session: Callable[..., Session], setup: Setup
) -> None:
    assert run(session(dies=60, good=60)) == FAILED
    steps = kept(setup)
    assert (steps["dies"]["state"], steps["good"]["state"]) == ("killed", "done")
    assert steps["dies"]["found"]["values"] == {"before": 1}
    assert steps["dies"]["error"] == "exit code -9"


def test_a_step_that_hangs_ends_at_its_limit_and_the_next_runs(
    session: Callable[..., Session], setup: Setup
) -> None:
    """The pipe has no writer any more when the session is over: the process has ended. (It is open
    for reading and writing here, so that neither side waits to open it.)"""
    os.mkfifo(setup.work / "pipe")
    pipe = os.open(setup.work / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert run(session(hangs=8.0, good=60)) == FAILED
    assert os.read(pipe, 100) == b"begun\n"
    assert os.read(pipe, 100) == b"", "the end of the file: its writer is gone"
    os.close(pipe)
    steps = kept(setup)
    assert (steps["hangs"]["state"], steps["good"]["state"]) == ("timeout", "done")
    assert steps["hangs"]["found"]["values"] == {"before": 1}


def test_a_second_call_runs_the_incomplete_steps(
    session: Callable[..., Session], setup: Setup
) -> None:
    assert run(session(good=60)) == DONE
    assert run(session(good=60, raises=60)) == FAILED
    assert (setup.work / "ran").read_text() == "good "
    assert run(session(good=60), redo=True) == DONE
    assert (setup.work / "ran").read_text() == "good good "


def test_a_killed_session_ends_its_step_which_runs_again_once(
    session: Callable[..., Session], setup: Setup
) -> None:
    """The step's process ends when the session's does: the pipe that it holds ends."""
    os.mkfifo(setup.work / "pipe")
    script = setup.work / "main.py"
    script.write_text(
        "import sys; from pathlib import Path; from gpu_session import *\n"
        f"setup = Setup(Path({str(setup.out)!r}), Path({str(setup.work)!r}), True)\n"
        "results = Results(setup.out / 'results.json', tiny=True)\n"
        "steps = [Step(n, f'fakes:{n}', 600, n) for n in ('good', 'hangs')]\n"
        "Session(steps, setup, results, dict(os.environ)).run(['good', 'hangs'], redo=False)\n"
    )
    paths = os.pathsep.join(map(str, (ROOT, BENCHMARKS, setup.work.parent)))
    for attempt in (1, 2):
        process = subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.DEVNULL,
        )
        with (setup.work / "pipe").open() as pipe:
            assert pipe.readline() == "begun\n"
            assert kept(setup)["hangs"] == {
                "state": "running", "attempts": attempt, "limit_s": 600.0,
            }  # fmt: skip
            process.kill()
            assert pipe.read() == "", "the end of the file: its writer is gone"
        process.wait()
    assert (setup.work / "ran").read_text() == "good ", "once, in the first session"
    assert run(session(good=60, hangs=600)) == FAILED
    assert kept(setup)["hangs"]["state"] == "gave up"


def test_a_call_without_time_leaves_steps_to_the_next(
    session: Callable[..., Session], setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """23 of 60 s are less than two fifths of the limit, 25 s are more."""
    called = session(good=60)
    monkeypatch.setattr(Session, "left", lambda _: 23.0)
    assert run(called) == LEFT
    assert kept_or_none(setup) is None
    monkeypatch.setattr(Session, "left", lambda _: 25.0)
    assert run(called) == DONE
    assert kept(setup)["good"]["limit_s"] == 25.0


def kept_or_none(setup: Setup) -> Any:
    return kept(setup) if (setup.out / "results.json").is_file() else None


def test_a_step_interrupted_by_the_end_of_the_call_runs_again(
    session: Callable[..., Session], setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(setup.work / "pipe")
    reader = os.open(setup.work / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr(Session, "left", lambda _: 1.0)
    assert run(session(hangs=2.0)) == LEFT
    os.close(reader)
    assert kept(setup)["hangs"]["state"] == "cut"


def test_results_of_another_kind_are_rejected(setup: Setup) -> None:
    Results(setup.out / "results.json", tiny=False).write()
    with pytest.raises(SystemExit, match="session"):
        Results(setup.out / "results.json", tiny=True)
    (setup.out / "results.json").write_text('{"format": 1, "ste')
    with pytest.raises(SystemExit, match=r"results\.json"):
        Results(setup.out / "results.json", tiny=True)


@pytest.mark.parametrize("name", list(gpu_session.PRESETS))
def test_the_limits_of_all_steps_fit_into_the_budget(name: str) -> None:
    preset = gpu_session.PRESETS[name]
    assert sum(step.limit_s for step in preset.steps) <= 60 * preset.budget
    halved = Session(preset.steps, None, None, {}, scale=0.5)  # type: ignore[arg-type]
    assert halved.limit(preset.steps[0]) == preset.steps[0].limit_s / 2


def test_a_budget_below_the_first_step_is_rejected() -> None:
    """`kernels` takes up to 80 s and begins with two fifths of that: 32 s."""
    [kernels, compare, *_] = gpu_session.SHORT
    assert gpu_session.budget_problem(32 / 60, [kernels, compare]) is None
    problem = gpu_session.budget_problem(0.5, [kernels, compare])
    assert problem is not None and "kernels" in problem and "--only" in problem
    assert gpu_session.budget_problem(0.1, []) is None
    with pytest.raises(SystemExit, match="kernels"):
        gpu_session.main(["--preset", "short", "--budget", "0.2", "--out", "absent"])


def test_a_step_of_another_preset_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_session.parse(["--preset", "short", "--only", "grpo"])
    assert "grpo" in capsys.readouterr().err


def test_without_cuda_the_way_out_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--tiny"):
        gpu_session.require_cuda({**os.environ, "CUDA_VISIBLE_DEVICES": ""})


def test_a_repeated_step_has_both_attempts_again(
    session: Callable[..., Session], setup: Setup
) -> None:
    run(session(good=60))
    run(session(good=60), redo=True)
    assert kept(setup)["good"]["attempts"] == 1


# ---- wheels --------------------------------------------------------------------------------------


def test_every_wheel_has_a_locked_version_and_too_many_are_rejected() -> None:
    wanted = gpu_wheels.requirements(gpu_wheels.locked_versions(gpu_wheels.LOCK.read_text()))
    assert any(name.startswith("pydantic-core==") for name in wanted)
    with pytest.raises(SystemExit, match=r"has no version of .*xxhash"):
        gpu_wheels.requirements({"pydantic": "2"})
    mib = 1 << 20
    assert gpu_wheels.size_problem({"a": 40 * mib, "b": 24 * mib}, 64.0) is None
    with_trl = gpu_wheels.requirements(
        gpu_wheels.locked_versions(gpu_wheels.LOCK.read_text()), with_trl=True
    )
    assert set(wanted) < set(with_trl) and any(name.startswith("trl==") for name in with_trl)
    problem = gpu_wheels.size_problem({"a": 40 * mib, "b": 24 * mib + 1}, 64.0)
    assert problem is not None and "64.0 MiB, above --limit-mib 64" in problem
    assert doctest.testmod(gpu_wheels).failed == 0


def test_wheels_of_another_python_are_reported(tmp_path: Path) -> None:
    """Wheels for every Python, and with the stable ABI of an older one, fit."""
    files = ["a-1-cp310-abi3-linux_x86_64.whl", "b-1-py3-none-any.whl", "c-1-py2.py3-none-any.whl"]
    files += ["f-1-py312-none-any.whl"]
    assert gpu_session.wheels_problem(files, (3, 12)) is None
    both = ["d_e-1.0-cp311-cp311-linux_x86_64.whl", "d_e-1.0-cp312-cp312-linux_x86_64.whl"]
    assert gpu_session.wheels_problem([*files, *both], (3, 12)) is None
    problem = gpu_session.wheels_problem([*files, *both], (3, 13))
    assert problem is not None and "d_e" in problem and "--python 3.13" in problem
    assert "wheel of f for" in str(gpu_session.wheels_problem(files, (3, 11)))
    (tmp_path / "d_e-1.0-cp27-cp27mu-linux_x86_64.whl").write_bytes(b"")
    with pytest.raises(SystemExit, match="gpu_wheels"):
        gpu_session.install(tmp_path, tmp_path / "site")
    assert doctest.testmod(gpu_session).failed == 0


def test_wheels_that_pip_cannot_install_are_reported(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no wheels"):
        gpu_session.install(tmp_path, tmp_path / "site")
    (tmp_path / "burnish_absent-1.0-py3-none-win32.whl").write_bytes(b"")
    with pytest.raises(SystemExit, match=r"pip could not install .*\n.*burnish_absent"):
        gpu_session.install(tmp_path, tmp_path / "site")


# ---- what is computed of measurements ------------------------------------------------------------


def test_gaps_kernels_and_their_cause_in_a_trace_made_by_hand(tmp_path: Path) -> None:
    """Kernels at 0 to 10, 5 to 12 (another stream), 40 to 50 and 60 to 70 us: idle 28 + 10 of 70.
    The third was launched at 39: the host took 27 of the 28 us, 20 of them in ``_packed`` (14 to
    34). The fourth was launched at 15, before its gap began: the host is not the cause."""

    def event(cat: str, name: str, start: float, end: float, link: int | None = None) -> Any:
        args = {} if link is None else {"correlation": link}
        return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "args": args}

    events = [
        event("kernel", "gemm", 0, 10, 1),
        event("kernel", "norm", 5, 12, 2),
        event("kernel", "gemm", 40, 50, 3),
        event("gpu_memcpy", "Memcpy DtoH", 60, 70, 4),
        event("cuda_runtime", "cudaLaunchKernel", 39, 39.5, 3),
        event("cuda_runtime", "cudaMemcpyAsync", 15, 15.5, 4),
        event("python_function", "/here/burnish/train/torch/engine.py(1): step", 0, 80),
        event("python_function", "/here/burnish/models/attention.py(2): _packed", 14, 34),
        event("python_function", "json/decoder.py(3): decode", 14, 39),
        event("cpu_op", "aten::nonzero", 14, 30),
        {"ph": "M", "name": "process_name"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    spans = read_trace(path)
    found = shares(spans)
    assert found["ms"] == pytest.approx(0.070)
    assert found["idle_share"] == pytest.approx(38 / 70)
    assert found["top"][0] == {
        "kernel": "gemm", "calls": 2, "ms": pytest.approx(0.020), "share": pytest.approx(20 / 37),
    }  # fmt: skip
    assert found["syncs"]["Memcpy DtoH"] == found["syncs"]["aten::nonzero"] == 1
    gaps, host = gaps_of(spans), Host(spans, Path("/here"))
    assert [gap.length for gap in gaps] == [28, 10]
    assert host.cause(gaps[0]) == (27, "burnish/models/attention.py(2): _packed", "aten::nonzero")
    assert host.cause(gaps[1]) == (0.0, "", "")
    assert shares([Span("aten::mm", "cpu_op", 0, 1)]) == {}
    assert doctest.testmod(gpu_trace).failed == 0


def test_flops_of_a_training_pass_are_those_counted_by_hand(setup: Setup) -> None:
    """Hidden 32, 4 heads of 8, 2 kv heads, MLP 64, 2 layers, 128 tokens in the vocabulary.

    A layer has 32 x 32 (q) + 2 x 32 x 16 (k, v) + 32 x 32 (o) + 3 x 32 x 64 = 9,216 in matrices,
    and norms of 2 x 32 + 2 x 8 = 80; with the last norm N = 2 x 9,296 + 32 = 18,624.
    A prompt of 2 with responses of 1 and 2: T = 5, A = 3, P = 13.
    2 x N x T = 186,240; 2 x 128 x 32 x 3 = 24,576; 4 x 32 x 2 x 13 = 3,328; together 214,144."""
    groups = [gpu_model.Group(2, (1, 2))]
    assert gpu_model.train_flops(setup, groups) == 3 * 214_144
    assert doctest.testmod(gpu_model).failed == 0


def test_a_kernel_that_contradicts_burnishs_rules_is_a_problem(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 24 calls 6 are decode steps, for which there is no rule."""
    report = Report(setup.work / "step.json")
    monkeypatch.setattr(gpu_attention, "way_of", lambda case, device: "scores")
    gpu_attention.attention(setup, report)
    assert len(report.values["problems"]) == 18
    assert "against burnish/models/sdpa.py" in report.values["problems"][0]


def test_an_inaccurate_engine_is_a_problem(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN is not within tolerance either: 3 formats x 3 layouts, 3 formats x 2."""
    report = Report(setup.work / "step.json")
    monkeypatch.setattr(gpu_engines, "train_errors", lambda *_: (float("nan"), 0.0))
    monkeypatch.setattr(gpu_engines, "sample_errors", lambda *_: (0.0, float("nan")))
    monkeypatch.setattr(gpu_engines, "greedy", lambda *_, **__: [])
    gpu_engines.engines(setup, report)
    assert report.values["summary"] == "0 of 15 comparisons within tolerance"
    assert len(report.values["problems"]) == 15


def test_every_step_is_in_the_document() -> None:
    document = (ROOT / "docs" / "benchmarks.md").read_text()
    for step in gpu_session.STEPS:
        assert f"| `{step.name}` | {step.what} |" in document
    empty: dict[str, Any] = {"steps": {}}
    rows = markdown([(s.name, s.what) for s in gpu_session.STEPS], empty).splitlines()
    assert all(row.endswith("| not run | not run |") for row in rows[2:])


def test_cells_cannot_break_a_table(tmp_path: Path) -> None:
    report = Report(tmp_path / "step.json")
    report.row("T", name="a|b\nc", good=True, ratio=0.123456, none=None)
    tree = {"steps": {"one": {"state": "done", "seconds": 1.0, "found": report.values}}}
    assert markdown([("one", "it")], tree).splitlines()[-1] == "| a\\|b c | yes | 0.1235 |  |"


BARE = ("torch", "transformers", "triton", "peft", "pyarrow", "rich", "typer")
WITHOUT = """
import importlib.metadata as metadata, pkgutil, sys

absent = set(sys.argv[1:])

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import burnish
from gpu_checks import NOT_IMPORTED, import_module
for found in pkgutil.walk_packages(burnish.__path__, "burnish."):
    if found.name not in NOT_IMPORTED:
        import_module(found.name)
"""


def test_a_bare_machine_with_the_wheels_can_import_every_module() -> None:
    """All packages are hidden but those of a bare machine, with what they require, and the wheels.
    Modules that need an optional package may be missing."""
    have, seen = (
        [*BARE, *(name for names in gpu_wheels.NEEDED_BY.values() for name in names)],
        set(),
    )
    while have:
        name = canonicalize_name(have.pop())
        if name not in seen:
            seen.add(name)
            have += [
                r.name
                for r in _requirements(name)
                if r.marker is None or r.marker.evaluate({"extra": ""})
            ]
    absent = [
        module
        for module, owners in packages_distributions().items()
        if module != "burnish" and not seen & {canonicalize_name(owner) for owner in owners}
    ]
    done = subprocess.run(
        [fork_server.interpreter(), "-c", WITHOUT, *absent],
        capture_output=True, text=True, cwd=BENCHMARKS,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{BENCHMARKS}"},
    )  # fmt: skip
    assert "jsonschema" not in absent and "ray" in absent
    assert done.returncode == 0, done.stderr


def _requirements(name: str) -> list[Requirement]:
    """Requirements of an installed package; none if it is not installed."""
    try:
        return [Requirement(text) for text in requires(name) or ()]
    except PackageNotFoundError:
        return []


# ---- tables of the page --------------------------------------------------------------------------


def test_tables_have_the_card_in_each_row_and_say_what_was_not_run() -> None:
    """Two cards; the second ran `compare` alone. Rows keep the step's order."""
    rows = [{"rows": "r", "setting": s, "tokens_per_s": n} for s, n in (("base", 1), ("+ head", 2))]
    found = {"tables": {"Settings of 0.6B": rows}, "problems": [], "summary": "twice"}
    step = {"state": "done", "found": found, "seconds": 3.0}
    copies = {"tables": {"Copies": [{"copy": "c", "GB_per_s": 1.5}]}, "problems": []}
    trees = [
        {
            "about": {"Device": "H100"},
            "steps": {"compare": step, "copies": step | {"found": copies}},
        },
        {"about": {"Device": "H200"}, "steps": {"compare": step}},
    ]
    lines = gpu_tables.page(trees).splitlines()
    assert lines[0].endswith("| H100 | H200 |")
    [kernels] = [line for line in lines if line.startswith("| `kernels`")]
    assert kernels.endswith("| not run | not run |")
    assert [line for line in lines if "| + head |" in line] == [
        "| H100 | r | + head | 2 |",
        "| H200 | r | + head | 2 |",
    ]
    assert "| H100 | c | 1.5 |" in lines
    assert lines[lines.index("Larger models (`larger`):") + 2] == "not run"


def test_the_page_has_the_tables_of_the_recorded_sessions() -> None:
    assert gpu_tables.main(["--check"]) == 0
    with pytest.raises(SystemExit, match="marks"):
        gpu_tables.written("no marks", "")


def test_files_without_results_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(SystemExit, match=r"other\.json"):
        gpu_tables.read(tmp_path / "other.json")


# ---- all of it -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_short_session_runs_on_a_cpu_with_tiny_shapes(tmp_path: Path) -> None:
    """The comparison with TRL is left out: it takes as long as all other steps together."""
    names = [step.name for step in gpu_session.SHORT if step.name != "trl"]
    command = [fork_server.interpreter(), str(BENCHMARKS / "gpu_session.py"), "--tiny"]
    out = tmp_path / "out"
    done = subprocess.run(
        [*command, "--preset", "short", "--out", str(out), "--only", *names],
        capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == LEFT, done.stdout + done.stderr
    steps = json.loads((out / "results.json").read_text())["steps"]
    assert list(steps) == names
    assert {step["state"] for step in steps.values()} == {"done"}
    assert not [step["found"]["problems"] for step in steps.values() if step["found"]["problems"]]
    assert (out / "trace.json.gz").is_file() and (out / "session.log").is_file()
    tables = gpu_tables.page([gpu_tables.read(out / "results.json")])
    assert "CPU, tiny shapes" in tables and "not run" in tables


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_session_runs_on_a_cpu_with_tiny_shapes(tmp_path: Path) -> None:
    command = [fork_server.interpreter(), str(BENCHMARKS / "gpu_session.py"), "--tiny"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")],
        capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == DONE, done.stdout + done.stderr
    tree = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(tree["steps"]) == [step.name for step in gpu_session.STEPS]
    assert {step["state"] for step in tree["steps"].values()} == {"done"}
    assert not [
        step["found"]["problems"] for step in tree["steps"].values() if step["found"]["problems"]
    ]
    assert "not run" not in (tmp_path / "out" / "results.md").read_text()
    rewards = tree["steps"]["grpo"]["found"]["values"]["rewards"]
    assert rewards[-1] > rewards[0] + 0.3
    assert (tmp_path / "out" / "trace.json.gz").is_file()
