"""Settings that would make a step faster: changes of one thing, each with its effect on time and
memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from burnish.config.job import JobConfig
from burnish.config.load import ConfigError, changed_config
from burnish.plan.engine_profile import profile_class
from burnish.plan.fit import micro_batches
from burnish.plan.hardware import Hardware
from burnish.plan.memory_plan import Plan
from burnish.plan.predict import make_plan
from burnish.plan.rollout_role import rollout_settings
from burnish.plan.shapes import PlanError
from burnish.plan.time import Rates, estimate

_SHOWN = 3
_LEAST = 0.02
"""Share of the step that a change must save to be worth a line."""


@dataclass(frozen=True)
class Change:
    """A change of the recipe that still fits."""

    overrides: tuple[str, ...]
    saved_s: float
    """Seconds of a step that it saves."""
    seconds: float
    peak: float
    """Peak bytes of a GPU."""
    peak_before: float

    def __str__(self) -> str:
        return (
            f"{' '.join(self.overrides)}: {self.seconds:.3g} s (saves "
            f"{self.saved_s / (self.saved_s + self.seconds):.0%}); peak of a GPU "
            f"{self.peak_before / 1e9:.1f} -> {self.peak / 1e9:.1f} GB"
        )


def faster(
    config: JobConfig,
    hardware: Hardware,
    plan: Plan,
    seconds: float,
    *,
    assume: Sequence[str] = (),
    rates: Rates | None = None,
) -> list[Change]:
    """Return the few changes of one thing that save most of a step of ``seconds`` and fit; none on
    a machine without GPUs, whose times are not meant for comparisons."""
    if hardware.gpu is None:
        return []
    timed: list[tuple[float, tuple[str, ...], JobConfig]] = []
    for overrides in _single_changes(config, hardware):
        try:
            changed = changed_config(config, overrides)
            timed.append((estimate(changed, hardware, rates).seconds, tuple(overrides), changed))
        except (ConfigError, PlanError):  # invalid for this recipe
            continue
    changes: list[Change] = []
    for now, keys, changed in sorted(timed, key=lambda entry: entry[0]):
        if len(changes) == _SHOWN or now > (1 - _LEAST) * seconds:
            break
        try:
            other = make_plan(changed, hardware, assume=assume)
        except PlanError:  # e.g. adapters that another engine cannot have
            continue
        if other.fits:
            peaks = _device_peak(other), _device_peak(plan)
            changes.append(Change(keys, seconds - now, now, *peaks))
    return changes


def _device_peak(plan: Plan) -> float:
    return max((peak.bytes for peak in plan.peaks if peak.where == "device"), default=0.0)


def _single_changes(config: JobConfig, hardware: Hardware) -> Iterator[list[str]]:
    """Yield the overrides of each change: of the micro-batch, the layout of rows, checkpointing,
    the copies of weights, offload, and the rollout engine."""
    job = config.resolve()
    if job.trained is not None and job.batch is not None:
        train = job.trained.train
        yield from micro_batches(job.trained, job.batch)[1:]
        yield from profile_class(train.engine, job.trained.ranks).alternatives(job.trained)[1:]
        if job.trained.ranks > 1:  # layers of a node's GPUs, so that shards are gathered less
            for size in (n for n in (2, 4, 8) if n <= hardware.gpus_per_node):
                yield [
                    f"train.engine={{kind: torch, sharding: full, tensor_parallel_size: {size}}}"
                ]
        if train.gradient_checkpointing is True:
            yield ["train.gradient_checkpointing=selective"]
        if train.gradient_checkpointing:
            yield ["train.gradient_checkpointing=false"]
        if train.layout != "shared_prefix":
            yield ["train.layout=shared_prefix"]
        if train.attention == "sdpa":
            yield ["train.attention=auto"]
        if train.deterministic:
            yield ["train.deterministic=false"]
    if config.cluster.offload_between_phases:
        yield ["cluster.offload_between_phases=[]"]
    if job.rollout is not None:
        yield from rollout_settings(config, job, hardware)[1:]
        if job.rollout.engine.uses_transformers:
            yield [f"{job.rollout.key}.kind=vllm"]
