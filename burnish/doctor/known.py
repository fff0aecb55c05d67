"""Combinations that are known not to work, with their sources: rules over
:class:`burnish.doctor.facts.Facts`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version

from burnish.doctor.facts import EXTRAS, OTHER_NAMES, Facts, requirements

Level = Literal["bad", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """A known problem that applies to this machine."""

    level: Level
    """``bad``: affected features fail or give wrong results. ``warning``: they do so under some
    settings. ``note``: they are slower or only possibly affected."""
    text: str
    """Problem, reason and fix."""
    source: str = ""
    """Where the problem is reported or was measured."""


Rule = Callable[[Facts], Iterator[Finding]]


def findings(facts: Facts) -> list[Finding]:
    """Return all known problems that apply, the most severe first."""
    problems = [finding for rule in RULES for finding in rule(facts)]
    order: tuple[Level, ...] = ("bad", "warning", "note")
    return sorted(problems, key=lambda finding: order.index(finding.level))


def own_requirements(facts: Facts) -> Iterator[Finding]:
    """Find required packages that are missing or have an unsupported version, also of installed
    extras."""
    for extra, required in requirements().items():
        for requirement in required:
            version = facts.version(requirement.name.lower().replace("_", "-").replace(".", "-"))
            if extra and (version is None or extra not in EXTRAS):
                continue
            if version is None:
                text = f"{requirement.name} is missing; pip install '{requirement}'"
                yield Finding("bad", text, "pyproject.toml")
            elif not requirement.specifier.contains(version, prereleases=True):
                name = f"burnish[{extra}]" if extra else "Burnish"
                yield Finding(
                    "bad",
                    f"{requirement.name} {version} is installed, but {name} needs "
                    f"{requirement.specifier}; pip install "
                    f"'{requirement.name}{requirement.specifier}'",
                    "pyproject.toml",
                )


def deepspeed_that_keeps_what_it_gathered(facts: Facts) -> Iterator[Finding]:
    """Find DeepSpeed versions that run out of memory with ZeRO-3 and gradient checkpointing."""
    version = facts.version("deepspeed")
    if version is not None and Version("0.16.0") <= version < Version("0.16.8"):
        yield Finding(
            "bad",
            f"DeepSpeed {version} does not release gathered weights under ZeRO-3 with gradient "
            "checkpointing, so memory grows with the depth of the model; install 0.19.8 or newer",
            "deepspeedai/DeepSpeed pull requests 6726 (the change) and 7258 (reverted in 0.16.8); "
            "OpenRLHF/OpenRLHF issue 776",
        )


def deepspeed_that_checks_no_gradients(facts: Facts) -> Iterator[Finding]:
    """Find DeepSpeed versions that apply gradients that are not finite."""
    version = facts.version("deepspeed")
    if version is not None and Version("0.16.8") <= version < Version("0.19.8"):
        yield Finding(
            "bad",
            f"DeepSpeed {version} does not check gradients in fp32 and bf16 at stage 3: one step "
            "with an infinite gradient destroys the weights; install 0.19.8 or newer",
            "its source (runtime/zero/stage3.py of 0.19.7, compared with 0.19.8)",
        )


def pins_of_vllm(facts: Facts) -> Iterator[Finding]:
    """Find a torch or transformers that vLLM does not support; it is compiled for one torch."""
    name = next((n for n in ("vllm", *OTHER_NAMES["vllm"]) if n in facts.versions), None)
    if name is None:
        return
    for line in metadata.requires(name) or []:
        requirement = Requirement(line)
        if requirement.name not in ("torch", "transformers"):
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = facts.version(requirement.name)
        if version is None or requirement.specifier.contains(version, prereleases=True):
            continue
        compiled = requirement.name == "torch" and name == "vllm"
        yield Finding(
            "bad" if compiled else "note",
            f"{name} {facts.versions[name]} requires {requirement}, but {requirement.name} "
            f"{version} is installed"
            + (
                ": its kernels are built for that torch; install vLLM in a separate environment"
                if compiled
                else " (the self-test shows whether it works anyway)"
            ),
            f"{name}'s own requirements",
        )


def expandable_segments_and_sleep(facts: Facts) -> Iterator[Finding]:
    """Find allocator settings with which a sleeping vLLM cannot release memory."""
    if facts.version("vllm") is None:
        return
    old, new = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    asked = [v for v in (old, new) if "expandable_segments:True" in facts.environment.get(v, "")]
    if asked:
        yield Finding(
            "warning",
            f"{asked[0]} enables expandable segments, which are incompatible with a sleeping "
            "vLLM (rollout.engine.sleep_between_rollouts): older versions reject them, newer "
            f"ones check only {old}, and otherwise the memory is not released; unset it, or set "
            "both variables to the same value",
            "pytorch/pytorch issue 147851; vllm-project/vllm pull requests 14189 and 40812",
        )


def cumem_of_old_nccl(facts: Facts) -> Iterator[Finding]:
    """Find NCCL versions whose cuMem allocator fails in groups with vLLM."""
    if facts.nccl is None or Version(facts.nccl) >= Version("2.22.3"):
        return
    if facts.environment.get("NCCL_CUMEM_ENABLE") != "0":
        yield Finding(
            "warning",
            f"NCCL {facts.nccl} hangs or runs out of memory with its cuMem allocator in groups "
            "with vLLM; set NCCL_CUMEM_ENABLE=0 for all processes, or use NCCL 2.22.3 or newer",
            "NVIDIA/nccl issue 1234; vllm-project/vllm pull request 24141",
        )


OLDEST_DRIVER = {"12": "525.60.13", "13": "580.65.06"}
"""CUDA major version -> oldest Linux driver that supports it."""


def torch_without_the_gpu(facts: Facts) -> Iterator[Finding]:
    """Find why torch sees no GPU although a driver is installed."""
    if facts.gpus or not facts.driver_present:
        return
    if facts.cuda_build is None:
        yield Finding(
            "warning",
            "this machine has an NVIDIA driver, but torch is a CPU build; make install-cuda "
            "VENV=.venv-cuda installs the CUDA builds",
            "docs/install.md",
        )
        return
    oldest = OLDEST_DRIVER.get(facts.cuda_build.partition(".")[0])
    if facts.driver and oldest and Version(facts.driver) < Version(oldest):
        yield Finding(
            "bad",
            f"the NVIDIA driver is {facts.driver}, but torch is built for CUDA "
            f"{facts.cuda_build}, which needs {oldest} or newer, so it sees no GPU; update the "
            "driver, or install NVIDIA's package cuda-compat if these are data center GPUs",
            "https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/",
        )
        return
    yield Finding(
        "warning",
        f"torch is built for CUDA {facts.cuda_build} but sees no GPU: none is visible to this "
        "process (CUDA_VISIBLE_DEVICES?), or the driver is too old; nvidia-smi shows its version",
    )


def gpus_without_peer_access(facts: Facts) -> Iterator[Finding]:
    """Find GPUs that can only communicate through host memory."""
    pairs, direct = facts.links.gpu_pairs, facts.links.direct_pairs
    if direct < pairs:
        yield Finding(
            "note",
            f"{pairs - direct} of {pairs} pairs of GPUs have no peer access: transfers between "
            "them go through host memory. burnish plan's times assume the direct link; measure "
            "the actual one with burnish doctor --calibrate",
            "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
        )


def small_shared_memory(facts: Facts) -> Iterator[Finding]:
    """Find a /dev/shm below 1 GiB. The default of containers is 64 MB."""
    wants = [n for n in ("ray", "vllm") if facts.version(n) is not None]
    if wants and facts.shm_bytes is not None and facts.shm_bytes < 1 << 30:
        yield Finding(
            "warning",
            f"/dev/shm has {facts.shm_bytes / 2**20:.0f} MB free: Ray's object store, weight "
            "transfers between processes and vLLM's workers use it; start the container with "
            "--shm-size=16g or more",
            "docs/engines.md",
        )


def no_sandbox(facts: Facts) -> Iterator[Finding]:
    """Find machines on which model-written code cannot be isolated."""
    if facts.sandbox_problem is not None:
        yield Finding(
            "warning",
            "the code tool (rollout.episodes.tools: [python]) and rewards of kind python_code do "
            f"not start here: {facts.sandbox_problem}",
            "a test program in the sandbox",
        )


def few_open_files(facts: Facts) -> Iterator[Finding]:
    """Find a limit on open files that is too low for Ray."""
    if facts.version("ray") is not None and facts.open_files < 4096:
        yield Finding(
            "warning",
            f"the limit on open files is {facts.open_files}, but Ray opens several per worker; run "
            "ulimit -n 65536",
        )


RULES: tuple[Rule, ...] = (
    own_requirements,
    deepspeed_that_keeps_what_it_gathered,
    deepspeed_that_checks_no_gradients,
    pins_of_vllm,
    expandable_segments_and_sleep,
    cumem_of_old_nccl,
    torch_without_the_gpu,
    gpus_without_peer_access,
    small_shared_memory,
    few_open_files,
    no_sandbox,
)
