"""Output and exit code of ``burnish doctor``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import AutoConfig

from burnish.config.model import ModelConfig
from burnish.doctor.calibrate import calibrate, remember
from burnish.doctor.facts import EXTRAS, Facts, gather_facts, requirements
from burnish.doctor.known import Finding, findings
from burnish.doctor.selftest import SelfTestOutcome, names, run
from burnish.messages import library_text
from burnish.models.load import ModelError, num_positions
from burnish.plan.hardware import USER_FILE, load_tables
from burnish.preflight.families import find_support

SHOWN = ("torch", "transformers", "tokenizers", "safetensors", "peft", "datasets", "numpy")
EXIT_HEALTHY, EXIT_UNHEALTHY = 0, 1


@dataclass(frozen=True)
class Diagnosis:
    """Result of ``burnish doctor``."""

    burnish: str
    """Version of Burnish."""
    facts: Facts
    findings: tuple[Finding, ...]
    outcomes: tuple[SelfTestOutcome, ...]

    @property
    def exit_code(self) -> int:
        """Return 1 if a finding is ``bad`` or a self-test failed, else 0."""
        bad = any(finding.level == "bad" for finding in self.findings)
        return (
            EXIT_UNHEALTHY
            if bad or not all(outcome.passed for outcome in self.outcomes)
            else EXIT_HEALTHY
        )

    def as_json(self) -> str:
        """Return the result as JSON, for CI and tools/versions.py."""
        tree = {"exit_code": self.exit_code, **asdict(self)}
        return json.dumps(tree, indent=1, sort_keys=True, default=dict)


def diagnose(
    version: str, *, self_test: bool, say: Callable[[str], None] = lambda line: None
) -> Diagnosis:
    """Examine this machine. ``version`` is that of Burnish. ``say`` is called with the result of
    each self-test as it ends."""
    facts = gather_facts()
    outcomes = []
    for name in names(facts) if self_test else ():
        outcome = run(name)
        outcomes.append(outcome)
        verdict = "pass" if outcome.passed else "FAIL"
        say(f"{verdict}  {name} ({outcome.seconds:.0f} s): {outcome.text}")
    return Diagnosis(version, facts, tuple(findings(facts)), tuple(outcomes))


@dataclass(frozen=True)
class DoctorOptions:
    """Options of ``burnish doctor``."""

    as_json: bool = False
    self_test: bool = True
    calibrate: bool = False


def doctor_command(version: str, options: DoctorOptions, *, say: Callable[[str], None]) -> int:
    """Run ``burnish doctor`` and return its exit code."""
    if options.calibrate:
        say(calibration(as_json=options.as_json))
        return EXIT_HEALTHY
    if options.as_json:
        diagnosis = diagnose(version, self_test=options.self_test)
        say(diagnosis.as_json())
    else:
        diagnosis = as_text(version, self_test=options.self_test, say=say)
    return diagnosis.exit_code


def model_command(path: str, *, as_json: bool, say: Callable[[str], None]) -> int:
    """Print how a model runs here, from its config alone (``burnish doctor MODEL``); return the
    exit code.

    Returns 1 if it cannot be trained. Raises ModelError if its config cannot be read.
    """
    result = find_support(ModelConfig(path=path), sampled=True, download=True)
    if result is None:
        reason = "it cannot be read without the model's weights or code"
        try:
            AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            reason = library_text(error)
        raise ModelError(
            f"the config of {path} could not be read ({reason}); give a folder with a config.json, "
            "or a hub name"
        )
    support, decoding = result
    if as_json:
        tree = {"support": asdict(support), "decoding": decoding and asdict(decoding)}
        say(json.dumps(tree, indent=1, sort_keys=True))
    else:
        say(support.sentence())
        for layout, difference in support.differences.items():
            say(f"  {layout} rows: log-probs within {difference:.1e} nats of single rows (fp32)")
        say(decoding.sentence() if decoding is not None else "")
        limit = num_positions(ModelConfig(path=path))
        limit_text = "not limited by its config" if limit is None else f"up to {limit} tokens"
        say(f"rows: {limit_text}")
    return EXIT_UNHEALTHY if support.refusal else EXIT_HEALTHY


def as_text(version: str, *, self_test: bool, say: Callable[[str], None]) -> Diagnosis:
    """Run :func:`diagnose` and print its results as they become available."""
    facts = gather_facts()
    for title, lines in (
        ("Machine", machine_lines(version, facts)),
        ("Extras", extra_lines(facts)),
    ):
        say("\n".join([title, *(f"  {line}" for line in lines), ""]))
    if self_test:
        say("Self-test")
    diagnosis = diagnose(version, self_test=self_test, say=lambda line: say(f"  {line}"))
    say("\n".join(["", "Known", *(f"  {line}" for line in finding_lines(diagnosis.findings))]))
    return diagnosis


def calibration(path: Path | None = None, *, as_json: bool = False) -> str:
    """Measure this machine, write the result to ``path`` and return the text to print.

    With ``path`` None it is written to the user's own table. ``as_json`` returns the path and the
    measurements, by section and name.
    """
    path = path or USER_FILE.expanduser()
    measurements = calibrate(load_tables())
    text = remember(measurements, path)
    if as_json:
        return json.dumps({"file": str(path), "measured": measurements}, indent=1, sort_keys=True)
    return f"measurements written to {path}, which burnish plan reads:\n\n{text}"


def machine_lines(version: str, facts: Facts) -> Iterator[str]:
    """Yield lines about the machine and installed packages."""
    yield f"burnish {version}, Python {facts.python}, {facts.system}"
    yield f"CPU: {facts.cpu}, {facts.cpus} usable; memory {_gb(facts.memory_bytes)}"
    shm = "none" if facts.shm_bytes is None else f"{_gb(facts.shm_bytes)} free"
    yield f"/dev/shm: {shm}; disk here: {_gb(facts.disk_bytes)} free"
    for i, gpu in enumerate(facts.gpus):
        yield f"GPU {i}: {gpu.name}, {_gb(gpu.memory_bytes)}, compute capability {gpu.capability}"
    if not facts.gpus:
        yield f"GPU: none (torch is built for {facts.cuda_build or 'CPUs'})"
    if facts.driver:
        yield f"NVIDIA driver {facts.driver}; CUDA {facts.cuda_build or '(none)'} in torch"
    if facts.links.between_gpus:
        yield f"links between GPUs: {facts.links.between_gpus}"
    yield f"network: {'; '.join(facts.links.network) or 'no active adapter found'}"
    if facts.nccl:
        yield f"NCCL {facts.nccl}"
    isolates = "does not work" if facts.sandbox_problem else "isolates model-written code"
    yield f"sandbox: bubblewrap {isolates}"
    yield ", ".join(f"{n} {facts.versions[n]}" for n in SHOWN if n in facts.versions)


def extra_lines(facts: Facts) -> Iterator[str]:
    """Yield a line per extra: the installed versions, or what it adds and how to install it."""
    required = requirements()
    for extra, adds in EXTRAS.items():
        needs = [r.name for r in required.get(extra, ())] or [extra]
        versions = {name: facts.version(name) for name in needs}
        if all(versions.values()):
            yield f"{extra}: {', '.join(f'{n} {v}' for n, v in versions.items())}"
        else:
            yield f"{extra}: not installed; adds {adds}: pip install 'burnish[{extra}]'"


def finding_lines(problems: Sequence[Finding]) -> Iterator[str]:
    """Yield a line per known problem of this combination of packages and hardware."""
    for finding in problems:
        source = f" [{finding.source}]" if finding.source else ""
        yield f"{finding.level}: {finding.text}{source}"
    if not problems:
        yield "no known problems with this combination"


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
