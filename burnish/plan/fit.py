"""Find settings of a recipe that fit a cluster, fastest first, or the smallest cluster that fits.

The search varies micro-batches and token budgets, checkpointing, sharding or the ZeRO stage,
offload, and vLLM's memory share and tensor parallelism. For runs whose sampling and training
overlap on separate GPUs it also varies the split into policy ranks and rollout workers. Settings
that affect learning do not change: batch sizes of optimizer steps, data and losses. Every candidate
is a complete recipe that was loaded and planned.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from burnish.config.arithmetic import BatchPlan
from burnish.config.cluster import ClusterConfig
from burnish.config.job import JobConfig
from burnish.config.load import ConfigError, changed_config, changed_if_valid
from burnish.config.off_policy import shares_with_policy
from burnish.config.placement import placement_groups
from burnish.config.roles import TrainRole
from burnish.plan.engine_profile import profile_class
from burnish.plan.hardware import Hardware
from burnish.plan.memory_plan import TIGHT
from burnish.plan.overlap import seconds_text
from burnish.plan.predict import make_plan
from burnish.plan.rollout_role import rollout_settings
from burnish.plan.shapes import PlanError
from burnish.plan.time import Rates, estimate

SHOWN = 3
"""Maximum number of proposals."""
_SPLITS = 3
"""Number of splits of the GPUs, the fastest ones, whose memory is planned."""
UNCHANGED = "the unchanged recipe"
_MOST_GPUS = 4096


@dataclass(frozen=True)
class Proposal:
    """A recipe that fits, with its changes."""

    overrides: tuple[str, ...]
    config: JobConfig
    free_frac: float
    """Smallest free share of any GPU or node. GPUs used only by vLLM are ignored, because vLLM
    takes its configured share."""
    seconds: float
    """Estimated time of a step."""
    reason: str


@dataclass(frozen=True)
class Fitting:
    """Result of ``burnish plan --fit``."""

    tried: int
    proposals: tuple[Proposal, ...]
    smallest: str | None = None
    """Description of the smallest cluster that fits, if this one does not."""

    def with_overrides(self, overrides: Sequence[str]) -> Fitting:
        """Return the result for a recipe without ``overrides``, which every proposal then has."""
        proposals = (replace(p, overrides=(*overrides, *p.overrides)) for p in self.proposals)
        return replace(self, proposals=tuple(proposals))

    def to_text(self) -> str:
        """Return the result as text."""
        if not self.proposals:
            head = f"none of the {self.tried} settings tried fits."
            larger = self.smallest or "No larger cluster of these GPUs was found on which it fits."
            return f"{head} {larger}"
        lines = [f"{self.tried} settings tried; those that fit, fastest first:"]
        for i, proposal in enumerate(self.proposals, 1):
            changes = " ".join(proposal.overrides) or UNCHANGED
            lines += [f"  {i}. {changes}", f"     {proposal.reason}"]
        return "\n".join(lines)


def fit(
    config: JobConfig,
    hardware: Hardware,
    *,
    assume: Iterable[str] = (),
    rates: Rates | None = None,
) -> Fitting:
    """Return the fastest few settings that fit. If possible, only settings that leave a share of
    ``TIGHT`` free are returned."""
    assumptions = tuple(assume)
    proposals, tried = _search(config, hardware, assumptions, rates=rates)
    now = (config.cluster.ranks("policy"), config.cluster.ranks("rollout"))
    others = [s for s in splits(config, hardware, rates) if s.workers != now]
    for split in others[:_SPLITS]:
        changed = changed_config(config, split.overrides)
        more, count = _search(changed, hardware, assumptions, rates=rates)
        proposals += [replace(p, overrides=(*split.overrides, *p.overrides)) for p in more]
        tried += count
    if proposals:
        best: list[Proposal] = []  # whose times differ by more than one percent
        roomy = [p for p in proposals if p.free_frac >= TIGHT] or proposals
        for proposal in sorted(roomy, key=lambda p: (p.seconds, len(p.overrides))):
            if not best or proposal.seconds >= 1.01 * best[-1].seconds:
                best.append(proposal)
        return Fitting(tried, tuple(best[:SHOWN]))
    return Fitting(tried, (), _smallest(config, hardware, assumptions))


def _search(
    config: JobConfig,
    hardware: Hardware,
    assume: Sequence[str],
    *,
    rates: Rates | None = None,
) -> tuple[list[Proposal], int]:
    proposals, tried = [], 0
    for overrides in candidates(config, hardware):
        try:
            changed = changed_config(config, overrides)
            plan = make_plan(changed, hardware, assume=assume)
        except (ConfigError, PlanError):  # invalid combination of settings
            continue
        tried += 1
        if plan.fits:
            time = estimate(changed, hardware, rates)
            peaks = [p for p in plan.peaks if p.place.split(" x ")[-1] != "rollout"]
            worst = min(peaks, key=lambda p: p.margin / p.limit, default=plan.worst)
            free = worst.margin / worst.limit if peaks else 1.0
            reason = (
                f"about {time.seconds:.0f} s per step ({time.samples_per_s:.2f} samples/s); "
                f"{worst.margin / 1e9:.1f} GB ({worst.margin / worst.limit:.0%}) of {worst.where} "
                f"memory free on {worst.place} in {worst.phase}"
            )
            proposals.append(Proposal(tuple(overrides), changed, free, time.seconds, reason))
    return proposals, tried


# ---- search space ----------------------------------------------------------------------------


def candidates(config: JobConfig, hardware: Hardware) -> list[list[str]]:
    """Return the overrides of every candidate, starting with the unchanged recipe."""
    job = config.resolve()
    options = [rollout_settings(config, job, hardware)]
    if job.trained is not None and job.batch is not None:
        profile = profile_class(job.trained.train.engine, job.trained.ranks)
        present = str(job.trained.train.gradient_checkpointing).lower()
        other = [mode for mode in ("false", "selective", "true") if mode != present]
        options += [
            profile.alternatives(job.trained),
            [[], *([f"train.gradient_checkpointing={mode}"] for mode in other)],
        ]
        options.append(micro_batches(job.trained, job.batch))
    return [[*itertools.chain(*chosen)] for chosen in itertools.product(*options)]


def micro_batches(role: TrainRole, plan: BatchPlan) -> list[list[str]]:
    """Return the overrides of some sizes of micro-batches. The first is empty: the present one."""
    budget = role.train.max_tokens_per_micro_batch
    if budget is not None:
        sizes = [budget // 4, budget // 2, 2 * budget]
        return [[], *([f"train.max_tokens_per_micro_batch={n}"] for n in sizes if n)]
    each, now = plan.train_batch_size // plan.data_parallel_size, plan.micro_train_batch_size
    divisors = [n for n in range(1, each + 1) if each % n == 0 and n != now]
    near = sorted(divisors, key=lambda n: abs(n.bit_length() - (now or 1).bit_length()))[:4]
    out: list[list[str]] = [[]]
    for n in near:
        out.append([f"train.micro_train_batch_size={n}", "train.gradient_accumulation_steps=null"])
    return out


# ---- a larger cluster ------------------------------------------------------------------------


def _smallest(config: JobConfig, hardware: Hardware, assume: Sequence[str]) -> str | None:
    """Return the first multiple of the recipe's ranks for which some settings fit, as text."""
    if hardware.gpu is None:
        return None
    if config.cluster.runtime == "inline":
        return _larger_gpu(config, hardware, assume)
    cluster = config.cluster
    factor = 2
    while factor * cluster.policy_ranks <= _MOST_GPUS:
        more = [f"cluster.{name}={factor * ranks}" for name, ranks in _ranks_of(config).items()]
        try:
            wider = changed_config(config, more)
        except ConfigError:  # the batch does not divide among so many ranks
            return None
        need = sum(p.count * p.gpus for p in placement_groups(wider))
        nodes = max(1, -(-int(need) // hardware.gpus_per_node))
        proposals, _ = _search(wider, replace(hardware, nodes=nodes), assume)
        if proposals:
            best = min(proposals, key=lambda p: p.seconds)
            words = " ".join([*more, *best.overrides])
            name = f"{nodes}x{hardware.gpus_per_node}x{hardware.gpu.name}"
            return f"The smallest cluster of these nodes on which it fits: {name}, with {words}"
        factor *= 2
    return None


def _ranks_of(config: JobConfig) -> dict[str, int]:
    """Return the numbers of ranks and workers that the recipe sets, by their keys."""
    names = (name for name in ClusterConfig.model_fields if name.endswith("_ranks"))
    values = {name: config.cluster.value_of(name) for name in (*names, "rollout_workers")}
    return {name: ranks for name, ranks in values.items() if ranks is not None}


def fewer_ranks(config: JobConfig, hardware: Hardware) -> list[str]:
    """Return the overrides that halve the ranks and workers of a recipe until the cluster has
    enough GPUs. Empty if it has, or if no such recipe is valid."""
    if hardware.gpu is None or config.cluster.runtime == "inline":
        return []
    overrides: list[str] = []
    smaller, divisor = config, 1
    while sum(p.count * p.gpus for p in placement_groups(smaller)) > hardware.num_gpus:
        divisor *= 2
        if divisor > max(_ranks_of(config).values()):
            return []
        overrides = [
            f"cluster.{name}={max(1, ranks // divisor)}"
            for name, ranks in _ranks_of(config).items()
        ]
        try:
            smaller = changed_config(config, overrides)
        except ConfigError:  # the batch does not divide among so many ranks
            return []
    return overrides


def _larger_gpu(config: JobConfig, hardware: Hardware, assume: Sequence[str]) -> str | None:
    """Return the smallest GPU of the table for which some settings fit, as text. A recipe in one
    process uses one GPU."""
    assert hardware.gpu is not None
    larger = [g for g in hardware.tables.gpus.values() if g.bytes > 1.02 * hardware.gpu.bytes]
    for gpu in sorted(larger, key=lambda g: g.bytes):
        proposals, _ = _search(config, replace(hardware, gpu=gpu), assume)
        if proposals:
            best = min(proposals, key=lambda p: p.seconds)
            changes = " ".join(best.overrides) or UNCHANGED
            return (
                f"The smallest known GPU on which it fits: {gpu.name}, with {changes}; or use "
                "several GPUs (cluster.runtime=ray, cluster.policy_ranks)"
            )
    return (
        "A recipe with cluster.runtime=inline uses one GPU; use several (cluster.runtime=ray, "
        "cluster.policy_ranks)"
    )


# ---- split of the GPUs -----------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Numbers of workers, and the estimated time of a step with them."""

    policy_ranks: int
    rollout_workers: int
    seconds: float

    @property
    def workers(self) -> tuple[int, int]:
        """Return (policy ranks, rollout workers)."""
        return self.policy_ranks, self.rollout_workers

    @property
    def overrides(self) -> list[str]:
        """Return the settings of the recipe."""
        return [
            f"cluster.policy_ranks={self.policy_ranks}",
            f"cluster.rollout_workers={self.rollout_workers}",
        ]


def splits(config: JobConfig, hardware: Hardware, rates: Rates | None = None) -> list[Split]:
    """Return every split of the cluster's GPUs that the recipe's batch sizes allow, fastest first;
    empty unless trainer and rollout workers are on different GPUs and work at the same time.

    Ranks of other roles that the recipe does not set follow ``policy_ranks``. Rollout workers take
    all GPUs that remain, at most one for each group that may be in progress.
    """
    job = config.resolve()
    role, trained = job.rollout, job.trained
    if role is None or trained is None or job.batch is None or hardware.gpu is None:
        return []
    if role.on_servers or not role.overlaps or job.inline:
        return []
    if shares_with_policy(config.cluster, job.roles):
        return []
    each = config.cluster.gpus_per_worker * role.tensor_parallel
    unit, size = trained.train.engine.ranks_per_row, job.batch.train_batch_size
    candidates = []
    for parts in (n for n in range(1, hardware.num_gpus // unit + 1) if size % n == 0):
        ranks = parts * unit
        least = changed_if_valid(config, Split(ranks, 1, 0.0).overrides)
        if least is None:
            continue
        free = hardware.num_gpus - sum(p.count * p.gpus for p in placement_groups(least))
        if free < 0:
            continue
        workers = min(1 + int(free / each + 1e-9), role.groups_at_once)
        changed = changed_if_valid(config, Split(ranks, workers, 0.0).overrides)
        if changed is not None:
            seconds = estimate(changed, hardware, rates).seconds
            candidates.append(Split(ranks, workers, seconds))
    return sorted(candidates, key=lambda split: split.seconds)


def split_text(config: JobConfig, hardware: Hardware, rates: Rates | None, now: float) -> str:
    """Return one line about the best split, or an empty string if the recipe has none. ``now``:
    seconds per step of the recipe."""
    candidates = splits(config, hardware, rates)
    if not candidates:
        return ""
    best = candidates[0]
    count = f"best split of {hardware.num_gpus} GPUs by this estimate:"
    if best.seconds > 0.99 * now:
        return f"{count} the recipe's own"
    text = f"{count} {' '.join(best.overrides)}, {seconds_text(best.seconds)} s per step"
    return f"{text} (--fit also checks its memory)"
