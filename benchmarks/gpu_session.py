"""The first hour on a CUDA machine: check and measure Burnish there, with one command.

    python benchmarks/gpu_wheels.py --out wheels                     # on a machine with a network
    python benchmarks/gpu_session.py --wheels wheels                 # on the GPU: 45 minutes
    python benchmarks/gpu_session.py --wheels wheels --preset short  # nine minutes
    python benchmarks/gpu_session.py --tiny [--preset short]         # on a CPU: tiny shapes

Needs torch, transformers, triton, peft, pyarrow, rich and typer; the rest comes from --wheels, into
a folder of its own. Burnish runs from this checkout.

Each step is a process with a time limit. Its findings are in --out/results.json as soon as it has
them, and --out/results.md is the report. A step that fails, hangs or is killed is recorded and the
next one runs. The output of all steps is in --out/session.log. Called again, the session continues
after the steps that ended; so calls may be short (--call 10). The exit code is 0 if every step
passed, 1 if one did not, 3 if steps are left.

The steps of --preset short are in the order of their value. Its --budget ends the call, so the last
steps are left; a second call of two minutes (--budget 2) repeats or completes some. Tables for
docs/benchmarks.md: python benchmarks/gpu_tables.py OUT/results.json
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, cast

from gpu_report import ENDED, TAIL_CHARS, Report, Results, Setup, markdown, tail

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MOST_ATTEMPTS = 2
"""A step during which the session was killed runs once more, and then no more."""
WORTHWHILE = 0.4
"""A step begins if this share of its limit is left of the call."""
TINY_SCALE = 6.0
"""Factor of the limits of ``--preset short`` with tiny shapes: a test, on a busy machine."""
DONE, FAILED, LEFT = 0, 1, 3


@dataclass(frozen=True)
class Step:
    """One part of the session, in a process of its own."""

    name: str
    target: str
    """``module:function``, called with a Setup and a Report."""
    limit_s: float
    """With the default --budget."""
    what: str


@dataclass(frozen=True)
class Preset:
    """The steps of one kind of session."""

    steps: tuple[Step, ...]
    budget: float
    """Minutes of all calls together"""
    scales: bool
    """True: another --budget changes all limits in proportion. False: it ends the call."""


KERNELS = Step(
    "kernels",
    "gpu_kernels:kernels",
    80,
    "FlashAttention over row lengths, and log-probs: errors, repeatability, time",
)
COMPARE = Step(
    "compare",
    "gpu_compare:compare",
    170,
    "0.6B: tokens/s of base, + attention, + head, + compile; of deterministic kernels",
)
STEPS = (
    Step("imports", "gpu_checks:imports", 90, "versions; import of every module of Burnish"),
    Step(
        "environment",
        "gpu_checks:environment",
        120,
        "devices, memory; measured rates and data-sheet rates",
    ),
    Step("attention", "gpu_attention:attention", 90, "SDPA kernel, time and memory per case"),
    KERNELS,
    COMPARE,
    Step("tests", "gpu_checks:tests", 300, "`tests/gpu`"),
    Step("engines", "gpu_engines:engines", 210, "both engines, compared with fp64 on the CPU"),
    Step("sync", "gpu_engines:sync", 150, "weight fingerprint, checksum, transfer: GB/s"),
    Step("sft", "gpu_speed:sft", 180, "0.6B, rows of 8k tokens: tokens/s, MFU, peak memory"),
    Step("rl", "gpu_speed:rl", 330, "0.6B, ragged rows up to 16k with shared prefixes: the same"),
    Step("trace", "gpu_trace:trace", 180, "one training pass: top kernels, idle share, host gaps"),
    Step("plan", "gpu_speed:plan", 210, "predicted and measured memory peaks"),
    Step(
        "rollout",
        "gpu_speed:rollout",
        180,
        "0.6B, local engine: tokens/s with and without CUDA graphs",
    ),
    Step("grpo", "gpu_learn:grpo", 210, "`burnish rl` on a tiny task: first and last reward"),
    Step("runs", "gpu_runs:runs", 150, "tiny runs of several jobs and settings, all at once"),
)
SHORT = (
    KERNELS,
    COMPARE,
    Step("trace", "gpu_trace:trace", 40, "one training pass: top kernels, idle share, host gaps"),
    Step("larger", "gpu_short:larger", 50, "1.7B (4B on 120 GB and more): 8k rows, RL 16k rows"),
    Step("mixture", "gpu_short:mixture", 30, "4 layers of 30B-A3B: grouped_mm, tokens/s"),
    Step("copies", "gpu_short:copies", 20, "weights to the host and to a process: GB/s"),
    Step("rollout", "gpu_short:rollout", 50, "0.6B, 8 and 64 rows: tokens/s, also compiled"),
    Step("tests", "gpu_short:tests", 40, "the newest tests of `tests/gpu`"),
    Step("trl", "gpu_short:trl", 60, "GRPO and DPO steps beside TRL's, if its wheels are here"),
)  # fmt: skip
PRESETS = {"full": Preset(STEPS, 45.0, True), "short": Preset(SHORT, 9.0, False)}


@dataclass
class Session:
    """One call: its steps, its folders, and its deadline."""

    steps: Sequence[Step]
    setup: Setup
    results: Results
    env: dict[str, str]
    scale: float = 1.0
    """Factor of the limits of all steps."""
    ends: float | None = None
    """When the call is over, on the monotonic clock. None: never."""
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def run(self, wanted: Sequence[str], *, redo: bool) -> int:
        """Run the wanted steps that have not ended. Return the exit code."""
        for step in self.steps:
            known = self.results.step(step.name)
            if step.name not in wanted or (known.get("state") in ENDED and not redo):
                continue
            if known.get("state") == "running" and known["attempts"] >= MOST_ATTEMPTS:
                self.record(
                    step, **(known | {"state": "gave up", "error": "the session died during it"})
                )
                continue
            if self.left() < WORTHWHILE * self.limit(step):
                print(
                    f"{step.name}: not started, because the time of this call is over; call "
                    "again to continue"
                )
                break
            before = 0 if known.get("state") in ENDED else known.get("attempts", 0)
            self.run_step(step, attempts=before + 1)
        return self.exit_code()

    def exit_code(self) -> int:
        """Return the exit code for the states of all steps."""
        states = [self.results.step(step.name) for step in self.steps]
        if any(known.get("state") not in ENDED for known in states):
            return LEFT
        clean = all(s["state"] == "done" and not s["found"].get("problems") for s in states)
        return DONE if clean else FAILED

    def limit(self, step: Step) -> float:
        """Return the most seconds that the step may take."""
        return step.limit_s * self.scale

    def left(self) -> float:
        """Return the seconds until the call is over."""
        return float("inf") if self.ends is None else self.ends - time.monotonic()

    def run_step(self, step: Step, *, attempts: int) -> None:
        """Run one step and record how it ended."""
        path = self.setup.work / f"{step.name}.json"
        path.unlink(missing_ok=True)
        limit = min(self.limit(step), self.left())
        self.results.set(step.name, state="running", attempts=attempts, limit_s=limit)
        print(f"{step.name}: {step.what} (at most {limit:.0f} s)", flush=True)
        begun = time.monotonic()
        log = path.with_suffix(".log")
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "gpu_session.py"), *self.child_words(step, path)],
                stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT,
                cwd=ROOT, env=self.env, start_new_session=True,
            )  # fmt: skip
            try:
                code = self.process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                code = None
            except BaseException:  # a signal to the session, which is no finding about the step
                self.results.set(step.name, state="cut", attempts=attempts - 1)
                raise
            finally:
                self.kill()
        seconds = time.monotonic() - begun
        with (self.setup.out / "session.log").open("ab") as whole:
            whole.write(f"\n---- {step.name}, {seconds:.0f} s\n".encode() + log.read_bytes())
        state = _state(code)
        if code is None and limit < self.limit(step):
            state = "cut"
        found = _read(path)
        fields: dict[str, Any] = {"state": state, "attempts": attempts, "limit_s": limit}
        fields |= {"seconds": round(seconds, 2), "found": found}
        if state != "done":
            output = log.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARS:]
            fields["error"] = found.pop("error", None) or output or f"exit code {code}"
        self.record(step, **fields)

    def child_words(self, step: Step, path: Path) -> list[str]:
        """Return the command line of a step's process, after the script."""
        words = ["--child", step.target, str(path), "--out", str(self.setup.out)]
        return [*words, "--work", str(self.setup.work), *(["--tiny"] if self.setup.tiny else [])]

    def kill(self) -> None:
        """End the step's process and all that it started."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process = None

    def record(self, step: Step, **fields: Any) -> None:
        """Store how a step ended, print it, and write the report."""
        self.results.set(step.name, **fields)
        found = fields.get("found", {})
        if "about" in found.get("values", {}):
            self.results.tree["about"] = found["values"]["about"]
            self.results.write()
        self.write_report()
        detail = found.get("summary", "")
        print(f"{step.name}: {fields['state']} in {fields.get('seconds', 0):.0f} s. {detail}")
        for text in [fields.get("error"), *found.get("problems", ())]:
            if text:
                print("  " + "\n  ".join(str(text).strip().splitlines()[-8:]))
        sys.stdout.flush()

    def write_report(self) -> None:
        """Write results.md."""
        text = markdown([(s.name, s.what) for s in self.steps], self.results.tree)
        (self.setup.out / "results.md").write_text(text, encoding="utf-8")


def _state(code: int | None) -> str:
    if code is None:
        return "timeout"
    return "done" if code == 0 else "killed" if code < 0 else "failed"


def _read(path: Path) -> dict[str, Any]:
    """Return the findings of a step, empty if it wrote none."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


# ---- a step's process ----------------------------------------------------------------------------


def child(target: str, path: Path, setup: Setup) -> int:
    """Run one step in this process and return the exit code. The process ends when the session
    does."""
    threading.Thread(target=_end_with_parent, args=(os.dup(0),), daemon=True).start()
    report = Report(path)
    module, _, function = target.partition(":")
    try:
        vars(importlib.import_module(module))[function](setup, report)
    except BaseException as error:
        report.values["error"] = tail(error)
        report.add()
        return 1
    return 0


def _end_with_parent(stdin: int) -> None:
    while os.read(stdin, 1):
        pass
    os.killpg(0, signal.SIGKILL)


# ---- the machine's packages ----------------------------------------------------------------------


def install(wheels: Path, site: Path) -> None:
    """Install every package in ``wheels`` into ``site``, once. Raises SystemExit if pip cannot."""
    files = sorted(path.name for path in wheels.glob("*.whl"))
    if not files:
        raise SystemExit(f"--wheels {wheels} has no wheels; create them with gpu_wheels.py")
    if problem := wheels_problem(files, sys.version_info[:2]):
        raise SystemExit(f"--wheels {wheels}: {problem}")
    mark = site / "installed.txt"
    if mark.is_file() and mark.read_text().split() == [sys.version.split()[0], *files]:
        return
    shutil.rmtree(site, ignore_errors=True)
    names = sorted({name.split("-")[0] for name in files})
    options = ["--isolated", "--no-index", "--no-deps", "--quiet", "--disable-pip-version-check"]
    where = ["--find-links", str(wheels), "--target", str(site)]
    command = [sys.executable, "-m", "pip", "install", *options, *where, *names]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"pip could not install {wheels} here:\n{done.stderr[-TAIL_CHARS:]}")
    mark.write_text("\n".join([sys.version.split()[0], *files]))


def wheels_problem(files: Sequence[str], version: tuple[int, int]) -> str | None:
    """Return why wheels cannot be installed in a version of Python, or None.

    >>> wheels_problem(["a-1-cp311-cp311-linux_x86_64.whl", "b-1-py3-none-any.whl"], (3, 11))
    >>> wheels_problem(["a-1-cp311-cp311-linux_x86_64.whl"], (3, 12))
    'it has no wheel of a for Python 3.12; collect it with gpu_wheels.py --python 3.12'
    """
    fits = dict[str, bool]()
    for file in files:
        name, *_, python, abi, _ = file.removesuffix(".whl").split("-")
        tags = python.split(".")
        own = f"cp{version[0]}{version[1]}" in tags
        stable = ("py3", "cp3") if abi == "abi3" else ("py3",)  # also those of older versions
        older = [int(t[3:] or 0) <= version[1] for t in tags if t.startswith(stable)]
        fits[name] = fits.get(name, False) or own or any(older)
    missing = ", ".join(name for name, fit in fits.items() if not fit)
    text = f"{version[0]}.{version[1]}"
    if not missing:
        return None
    how = f"collect it with gpu_wheels.py --python {text}"
    return f"it has no wheel of {missing} for Python {text}; {how}"


def require_cuda(env: dict[str, str]) -> None:
    """Raise SystemExit if torch cannot be imported or sees no CUDA device."""
    code = "import torch; assert torch.cuda.is_available(), 'torch sees no CUDA device'"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1]
        raise SystemExit(f"no CUDA device ({why}); --tiny runs the steps on a CPU")


def environment_of(site: Path | None, *, tiny: bool) -> dict[str, str]:
    """Return the environment variables of the steps."""
    before = os.environ.get("PYTHONPATH")
    paths = [*([str(site)] if site else []), str(ROOT), str(HERE), *([before] if before else [])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    own |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if tiny:
        own |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **own}


# ---- the command line ----------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    plus = cast(Any, {"metavar": "M", "type": minutes})
    names = list(dict.fromkeys(step.name for preset in PRESETS.values() for step in preset.steps))
    parser.add_argument("--preset", choices=list(PRESETS), default="full", help="steps (full)")
    parser.add_argument("--out", type=Path, default=Path("gpu-session"), help="folder of results")
    parser.add_argument("--work", type=Path, help="folder of models and run folders (OUT-work)")
    parser.add_argument("--wheels", type=Path, help="folder of gpu_wheels.py")
    parser.add_argument("--budget", help="minutes of all calls together (45; short: 9)", **plus)
    parser.add_argument("--call", help="end this call after this many minutes (never)", **plus)
    parser.add_argument("--only", nargs="+", choices=names, metavar="STEP", help=", ".join(names))
    parser.add_argument("--redo", action="store_true", help="also repeat completed steps")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.steps = PRESETS[args.preset].steps
    if absent := set(args.only or ()) - {step.name for step in args.steps}:
        parser.error(f"--preset {args.preset} has no step {', '.join(sorted(absent))}")
    args.out = args.out.resolve()
    args.work = (args.work or args.out.with_name(args.out.name + "-work")).resolve()
    return args


def minutes(text: str) -> float:
    """Parse a positive number of minutes."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of minutes")
    return value


def budget_problem(budget: float, left: Sequence[Step]) -> str | None:
    """Return why a call of ``budget`` minutes begins none of the steps that are left, or None."""
    if not left or 60 * budget >= WORTHWHILE * left[0].limit_s:
        return None
    return (
        f"--budget {budget:g}: {60 * budget:.0f} s are too few for the first step that is left, "
        f"{left[0].name} (at most {left[0].limit_s:.0f} s); give at least "
        f"{WORTHWHILE * left[0].limit_s / 60:.1f}, or another step with --only"
    )


def _stop(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the session or, with --child, one step."""
    started = time.monotonic()
    args = parse(arguments)
    setup = Setup(args.out, args.work, args.tiny)
    if args.child is not None:
        return child(args.child[0], Path(args.child[1]), setup)
    preset = PRESETS[args.preset]
    results = Results(setup.out / "results.json", tiny=args.tiny, preset=args.preset)
    budget = preset.budget if args.budget is None else args.budget
    wanted = args.only or [step.name for step in args.steps]
    if not preset.scales:
        left = [s for s in args.steps if s.name in wanted and not results.ended(s.name, args.redo)]
        if problem := budget_problem(budget, left):
            raise SystemExit(problem)
    setup.work.mkdir(parents=True, exist_ok=True)
    setup.out.mkdir(parents=True, exist_ok=True)
    site = None
    if args.wheels is not None:
        site = setup.work / "site"
        install(args.wheels, site)
    env = environment_of(site, tiny=args.tiny)
    if not args.tiny:
        require_cuda(env)
    call, scale = args.call, budget / preset.budget
    if not preset.scales:
        call, scale = min(budget, args.call or budget), 1.0
        if args.tiny and args.budget is None:
            call, scale = args.call, TINY_SCALE
    session = Session(
        *(args.steps, setup, results, env),
        scale=scale,
        ends=None if call is None else started + 60 * call,
    )
    signal.signal(signal.SIGTERM, _stop)
    code = session.run(wanted, redo=args.redo)
    results.tree["calls"].append({"seconds": round(time.monotonic() - started, 1), "code": code})
    results.write()
    session.write_report()
    print((setup.out / "results.md").read_text(encoding="utf-8"))
    print(f"{setup.out / 'results.json'}; exit code {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
