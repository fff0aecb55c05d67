"""Estimate of a step's time: the counted work of each phase (``work.py``), divided by the rates
that kernels reach (``speeds.py``).

The rates were measured for one small model on two cards. Use the estimate to compare settings, and
``--rates`` for times of a known run. In a synchronous run every phase waits for the previous one,
as in ``steps/rl.py``. A step is therefore the sum of its phases, and a GPU is idle in phases in
which its roles do not work. ``overlap.py`` combines the two sides of an asynchronous run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from burnish.config.job import JobConfig
from burnish.config.placement import placement_groups
from burnish.config.roles import JobSpec, RolloutRole, RowLengths, TrainRole
from burnish.config.sync import SyncConfig
from burnish.plan.activations import Pass
from burnish.plan.engine_profile import TrainEngineProfile, profile_of
from burnish.plan.hardware import Hardware
from burnish.plan.model_state import SIZES, EngineSetup, step_work, total
from burnish.plan.overlap import Overlap, Sides, overlap, seconds_text
from burnish.plan.role_base import Context, positions, work_of
from burnish.plan.rollout_role import (
    bytes_per_token,
    decode_step,
    responses_at_once,
    rows_at_once,
)
from burnish.plan.shapes import ModelShape, matrix_flops, shape_of
from burnish.plan.speeds import Speeds
from burnish.plan.train_role import passes_of, setup_of
from burnish.plan.work import attention_work
from burnish.train.row_layout import RowSize


@dataclass(frozen=True)
class Part:
    """Time of one phase of one role."""

    role: str
    phase: str
    seconds: float
    how: str
    """Description of the limiting work."""


@dataclass(frozen=True)
class ResponseLengths:
    """Lengths of the responses of a measured run, in tokens."""

    mean: float
    longest: float
    """Longest response of a step."""


@dataclass(frozen=True)
class Rates:
    """Speed of the phases of a measured run, and the lengths of its responses."""

    factors: Mapping[tuple[str, str], float]
    """:func:`rate_key` -> measured divided by estimated seconds."""
    source: str
    """Description of the run."""
    lengths: ResponseLengths | None = None
    """None: unknown. A recipe with a lower limit has shorter responses."""

    def apply(self, part: Part) -> Part:
        """Return a part with its time multiplied by the factor of its phase, if it is known."""
        return replace(part, seconds=part.seconds * self.factors.get(rate_key(part), 1.0))


def rate_key(part: Part) -> tuple[str, str]:
    """Return the (role, phase) under which the time of a part is measured. All reward models, all
    parts of sampling, and all parts of the transfer of weights are measured together."""
    if part.phase in TRANSFER:
        return "policy", "sync"
    role = part.role.partition(" ")[0]
    return role, "rollout" if part.phase in SAMPLING else part.phase


SAMPLING = ("prefill", "decode", "drain", "recompute")
"""Phases in which an engine samples."""
TRANSFER = ("sync", "stage weights", "load weights")
"""Phases of the transfer of weights. ``sync``: both sides wait for it."""


@dataclass(frozen=True)
class TimePlan:
    """Time of one step of an RL job (a rollout and its updates), or of one optimizer step."""

    parts: tuple[Part, ...]
    samples: int
    idle: dict[str, float] = field(default_factory=dict)
    """Placement -> share of a step in which its GPUs are idle."""
    overlap: Overlap | None = None
    """The two sides of an asynchronous run. None: one phase after the other."""
    rates: str = "counted work and the rates of hardware.yaml"
    """Source of the speeds."""

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.work_s if self.overlap is None else self.overlap.seconds

    @property
    def work_s(self) -> float:
        """Sum of all phases, of both sides of an asynchronous run."""
        return sum(p.seconds for p in self.parts)

    @property
    def samples_per_s(self) -> float:
        """Rows per second, each counted once (``JobSpec.rows_per_step``)."""
        return self.samples / self.seconds if self.seconds else 0.0

    def to_text(self) -> str:
        """Return the estimate as text, slowest phase first."""
        lines = [
            f"time (estimated from {self.rates}): {seconds_text(self.seconds)} s per "
            f"step, {self.samples_per_s:.2f} samples/s"
        ]
        for part in sorted(self.parts, key=lambda p: -p.seconds):
            share = part.seconds / self.seconds if self.seconds else 0.0
            time = f"{share:>4.0%} {seconds_text(part.seconds):>9} s"
            lines.append(f"  {time}  {part.role}, {part.phase}: {part.how}")
        lines += [
            f"  {placement}: idle {share:.0%} of the step" for placement, share in self.idle.items()
        ]
        if self.overlap is not None:
            lines += [f"  {line}" for line in self.overlap.lines()]
        return "\n".join(lines)


def estimate(config: JobConfig, hardware: Hardware, rates: Rates | None = None) -> TimePlan:
    """Estimate the time of a step of ``config``, with the speeds of ``rates`` where it has some."""
    job = config.resolve()
    clock = _Clock(job, hardware, None if rates is None else rates.lengths)
    parts: list[Part] = []
    for role in job.roles:
        parts += clock.rollout(role) if isinstance(role, RolloutRole) else clock.engine(role)
    if rates is not None:
        parts = [rates.apply(part) for part in parts]
    overlap = _overlap(config, clock, parts)
    duration = sum(p.seconds for p in parts) if overlap is None else overlap.seconds
    places = [] if config.cluster.runtime == "inline" or not duration else _places(config)
    return TimePlan(
        tuple(parts),
        job.rows_per_step,
        {"+".join(roles): 1.0 - _busy(roles, parts) / duration for roles in places},
        overlap=overlap,
        rates=TimePlan.rates if rates is None else rates.source,
    )


def _overlap(config: JobConfig, clock: _Clock, parts: Sequence[Part]) -> Overlap | None:
    """Return the two sides of an asynchronous run. None: each phase waits for the previous one."""
    role = clock.job.rollout
    if role is None or role.asynchronous is None or not role.continues:
        return None
    places = _places(config)
    trainers = next(place for place in places if "policy" in place)
    busy = [_busy(place, parts) for place in places]
    scores = [p for p in parts if p.role.startswith("reward") and p.role not in trainers]
    trains = [p for p in parts if p.role != "rollout" and p not in scores]
    waits = ("sync",) if role.overlaps else ()  # with partial, sampling is paused anyway
    samples = [p for p in parts if p.role == "rollout" or p.phase in waits]
    decode = next(p for p in parts if p.role == "rollout" and p.phase == "decode")
    batch = clock.sampling_batch(role)
    per_step = decode.seconds / batch.steps
    sides = Sides(
        trainer_s=sum(p.seconds for p in trains),
        rollout_s=sum(p.seconds for p in samples),
        longest_s=per_step * batch.longest,
        response_s=per_step * batch.mean,
        running_groups=batch.rows * batch.engines / role.samples_per_prompt / role.prompts,
        scoring_s=sum(p.seconds for p in scores),
        busiest_s=max(busy),
    )
    return overlap(sides, role.asynchronous)


def _places(config: JobConfig) -> list[tuple[str, ...]]:
    """Return the roles in each kind of place. Servers have places of their own."""
    roles = config.roles()
    servers = [(r.name,) for r in roles if isinstance(r, RolloutRole) and r.on_servers]
    if config.cluster.runtime == "inline":
        return [tuple(r.name for r in roles if (r.name,) not in servers), *servers]
    return [*(placement.roles for placement in placement_groups(config)), *servers]


def _busy(roles: Sequence[str], parts: Sequence[Part]) -> float:
    """Return the seconds in which the places of ``roles`` compute."""
    return sum(p.seconds for p in parts if p.role in roles or p.phase == "sync")


@dataclass(frozen=True)
class _Batch:
    """Decoding of one step's responses on one rollout worker or server."""

    rows: int
    """Responses decoded at once."""
    steps: float
    """Decode steps."""
    longest: float
    """Tokens of the longest response."""
    mean: float
    """Tokens of a response of mean length."""
    length: float
    """Tokens of a row of mean length."""
    sequences: int
    """Responses of one step."""
    engines: int
    """Rollout workers or servers, which share the responses of all."""

    @property
    def running(self) -> float:
        """Responses in progress at a mean step: fewer than ``rows`` while the longest end."""
        return min(self.rows, self.sequences * self.mean / self.steps)


class _Clock:
    def __init__(
        self, job: JobSpec, hardware: Hardware, measured: ResponseLengths | None = None
    ) -> None:
        """``measured``: lengths of single responses; None: assumed."""
        self.job, self.hardware, self.measured = job, hardware, measured
        self.context = Context(job, hardware, frozenset())
        self.share, self.speeds = hardware.tables.efficiency, Speeds(hardware)
        self.samples, self.updates = job.rows_per_step, job.updates_per_step

    # ---- train engines -------------------------------------------------------------------

    def engine(self, role: TrainRole) -> list[Part]:
        setup, rows = setup_of(self.job, role)
        profile = profile_of(setup)
        parts = []
        for work in passes_of(self.context, setup, role, rows).values():
            times = self.job.epochs_per_rollout if work.train else len(role.passes)
            if times:
                parts.append(self._pass(role, profile, work, times))
        if setup.trainable:
            parts += self._step(profile, role.name)
        if role.sync is not None:
            parts += self._transfer(setup, role.sync)
        if role.offload:  # moved to the device and, if its tensors have changed, back
            size = total([item for item in profile.state() if item.where == "device"])
            times = 2 if role.trainable else 1
            formula = f"{times} x {size / 1e9:.1f} GB between GPU and host memory"
            seconds = times * size / self.speeds.pcie_bytes_per_s()
            parts.append(Part(role.name, "offload", seconds, formula))
        return parts

    def _pass(self, role: TrainRole, profile: TrainEngineProfile, work: Pass, times: int) -> Part:
        """Return one phase of passes over all rows of a step, ``times`` times: the largest of the
        device's time, the host's time to launch its kernels, and link time."""
        setup, rows = profile.setup, work.rows
        phase = "forward/backward" if work.train else "log-probs"
        length, prompt = self._mean_lengths(role.lengths, setup.model)
        samples = self.samples * times / setup.ranks  # rows that a rank computes
        shares = work.layout == "shared_prefix" and any(row.prompt > 1 for row in rows)
        computed = length - (prompt * (1 - 1 / self.job.samples_per_prompt) if shares else 0.0)
        budget = setup.train.max_tokens_per_micro_batch
        computed_rows = samples * setup.train.engine.ranks_per_row / role.tensor_parallel
        passes = computed_rows * computed / budget if budget else computed_rows / max(1, len(rows))
        passes = max(1.0, passes)
        counted = work_of(setup, work)
        # Without a config of its share, a tensor-parallel rank is traced as the entire model.
        parallel = role.tensor_parallel if setup.unsharded is None else 1
        body = counted.body * (samples * computed / work.tokens / parallel)
        head = counted.head * (samples * (length - prompt) / max(1, work.actions) / parallel)
        spread = self._spread(role, setup.model, rows)
        attention = attention_work(setup.shape, spread, work.layout, flash=work.flash)
        # Selective checkpointing keeps what attention computes.
        runs = 3.5 + (work.checkpointing is True) if work.train else 1.0
        factor = runs * samples / len(rows) / parallel
        kernels = self.speeds.kernel_seconds(
            body + head, attention * factor, half=setup.half, rate=work.attention_rate
        )
        if role.tensor_parallel > 1:  # two sums over the ranks per layer and pass, not overlapped
            sums = (4 + 2 * bool(work.checkpointing) if work.train else 2) * len(setup.shape.layers)
            summed = sums * samples * computed * setup.shape.hidden_size * setup.weight_size
            rate = self.speeds.link_bytes_per_s(role.tensor_parallel)
            kernels["sums over ranks"] = 2 * summed / rate
        launch = self.speeds.launch_s((counted.body + counted.head).kernels * passes)
        compute = max(sum(kernels.values()), launch)
        sent = profile.traffic(passes=passes, updates=self.updates, trains=work.train)
        wait = sent / self.speeds.link_bytes_per_s(setup.ranks)
        if wait > compute:
            how = f"communication: {sent / 1e9:.0f} GB per rank (compute: {compute:.1f} s)"
            return Part(role.name, phase, wait, how)
        parts = (f"{name} {part / sum(kernels.values()):.0%}" for name, part in kernels.items())
        how = f"compute: {', '.join(parts)}"
        if launch >= compute:
            how = f"the host launches {(counted.body + counted.head).kernels:.0f} kernels per pass"
        flops = (body + head).matmul_flops + factor * attention.total
        how += f"; {flops:.2e} FLOPs per rank"
        return Part(
            role.name, phase, compute, how + (f" (communication: {wait:.1f} s)" if wait else "")
        )

    def _spread(
        self, role: TrainRole, shape: ModelShape, rows: Sequence[RowSize]
    ) -> tuple[RowSize, ...]:
        """Return rows of a micro-batch whose responses have evenly spread lengths, with the assumed
        or measured mean."""
        length, prompt = self._mean_lengths(role.lengths, shape)
        most = self._most(role.lengths, shape)
        least = max(1.0, 2 * (length - prompt) - most)
        prompt = prompt if rows[0].prompt > 1 else 0.0
        return tuple(
            RowSize(
                round(prompt + least + (most - least) * (i + 0.5) / len(rows)),
                max(1, round(prompt)),
                row.group,
            )
            for i, row in enumerate(rows)
        )

    def _moves(self, role: TrainRole, profile: TrainEngineProfile) -> list[Part]:
        """Return the moves of an offloaded role in a step: to the device and, if its tensors have
        changed, back."""
        if not role.offload:
            return []
        size = total([item for item in profile.state() if item.where == "device"])
        times = 2 if role.trainable else 1
        formula = f"{times} x {size / 1e9:.1f} GB between GPU and host memory"
        return [Part(role.name, "offload", times * size / self.speeds.pcie_bytes_per_s(), formula)]

    def _mean_lengths(self, lengths: RowLengths, shape: ModelShape) -> tuple[float, float]:
        length, prompt = lengths.within(positions(shape))
        share = self.share["mean_length"]
        if self.measured is None or not lengths.prompt or lengths.episodes is not None:
            return length * share, prompt * share
        return prompt * share + min(self.measured.mean, length - prompt), prompt * share

    def _most(self, lengths: RowLengths, shape: ModelShape) -> float:
        """Return the tokens of the longest response of a step."""
        length, prompt = lengths.within(positions(shape))
        if self.measured is None or lengths.episodes is not None:
            return float(length - prompt)
        return min(self.measured.longest, length - prompt)

    def _step(self, profile: TrainEngineProfile, role: str) -> list[Part]:
        """Return the update of all parameters, and the optimizer's other work."""
        setup, entries = profile.setup, profile.stepped_entries
        if setup.train.engine.offloads_optimizer and self.hardware.gpu is not None:
            node = min(setup.ranks, self.hardware.gpus_per_node)
            host = entries * 28 * node / (self.share["host_adam_gbs"] * 1e9)
            seconds = host + entries * (4 + setup.weight_size) / self.speeds.pcie_bytes_per_s()
            formula = f"Adam on the host: {entries * node / 1e9:.1f}e9 parameters per node"
        else:
            seconds = entries * 28 / self.speeds.memory_bytes_per_s()
            formula = f"Adam: {entries / 1e9:.2f}e9 parameters per rank"
        parts = [Part(role, "step", self.updates * seconds, f"{self.updates} x {formula}")]
        work = step_work(setup)
        flops = 0.0 if work is None else work.flops * entries / max(1, setup.trained)
        if work is not None and flops:
            seconds = flops / self.speeds.flops_per_s(work.half)
            formula = f"{work.purpose}: {flops:.2e} FLOPs per rank"
            if entries < setup.trained:  # gathered on one rank, and its result is scattered
                sent = 8.0 * entries / self.speeds.link_bytes_per_s(setup.ranks)
                seconds, formula = seconds + sent, f"{formula}, communication {sent:.2g} s"
            parts.append(Part(role, "step", self.updates * seconds, f"{self.updates} x {formula}"))
        return parts

    def _transfer(self, setup: EngineSetup, sync: SyncConfig) -> list[Part]:
        """Return the transfer of weights: both sides wait for it, or the trainer stages a copy and
        goes on, and the workers load it between two decode steps."""
        rollout = self.job.rollout
        if rollout is None or not rollout.overlaps:
            return [self._sync(setup)]
        size = setup.model.parameters * setup.weight_size
        if self.job.inline:
            seconds, formula = 2 * size / self.speeds.memory_bytes_per_s(), "a copy in this process"
        elif sync.ray_store is None:
            return [self._sync(setup)]  # a connection, which needs both sides
        else:
            seconds, formula = (
                size / self.speeds.to_host_bytes_per_s(),
                f"{size / 1e9:.1f} GB of host memory",
            )
        load = seconds if self.job.inline else size / self.speeds.pcie_bytes_per_s()
        way = "between two decode steps"
        if rollout.on_servers:
            load, way = self._files(size)
        return [
            Part("policy", "stage weights", seconds, formula),
            Part("rollout", "load weights", load, way),
        ]

    def _files(self, size: float) -> tuple[float, str]:
        """Return the time in which weights of ``size`` bytes are copied into files in memory and
        out of them, with a description. Each copy reads and writes."""
        seconds = 4 * size / self.speeds.host_bytes_per_s
        return seconds, "written to files in memory, and read by the servers"

    def _sync(self, setup: EngineSetup) -> Part:
        size = setup.model.parameters * setup.weight_size
        rollout = self.job.rollout
        on_servers = rollout is not None and rollout.on_servers
        seconds, formula = 0.0, "shared weights"
        if not self.job.inline:
            formula = f"{size / 1e9:.1f} GB through host memory"
            seconds = (
                size / self.speeds.to_host_bytes_per_s() + size / self.speeds.pcie_bytes_per_s()
            )
            if self.hardware.nodes > 1:
                seconds += size / (self.hardware.network_gbs * 1e9 * self.share["link"])
        elif rollout is not None and not rollout.shares_weights and not on_servers:
            copies = 1 if rollout.asynchronous is None else 2  # a staged copy, and its load
            seconds = copies * 2 * size / self.speeds.memory_bytes_per_s()
            formula = "copy within the GPU"
        if on_servers:
            files, way = self._files(size)
            seconds, formula = seconds + files, way if self.job.inline else f"{formula}, {way}"
        return Part("policy", "sync", seconds, formula)

    # ---- rollout -------------------------------------------------------------------------

    def rollout(self, role: RolloutRole) -> list[Part]:
        shape = shape_of(role.model.model_copy(update={"lora": None}))
        batch = self.sampling_batch(role)
        prompt = batch.length - batch.mean
        parts, speed = role.tensor_parallel, self.speeds.flops_per_s(role.dtype != "fp32")
        step = decode_step(role, shape, prompt + batch.mean / 2)
        cache = batch.running * step.cached * bytes_per_token(shape, role.dtype)
        read = (shape.parameters * SIZES[role.dtype] + cache) / parts
        token = max(
            self.speeds.decode_seconds(read, step.recorded, step.launched),
            batch.running * flops(shape, batch.length) / parts / speed,
        )
        tokens = batch.sequences / role.samples_per_prompt * prompt
        prefill = tokens * flops(shape, prompt) / parts
        phases = [
            Part("rollout", "prefill", prefill / speed, f"compute: {prefill:.2e} FLOPs per GPU"),
            Part(
                "rollout",
                "decode",
                batch.steps * token,
                f"{batch.steps:.0f} steps of {batch.rows} rows, {token * 1e3:.1f} ms each "
                f"(weights and cache: {1e3 * read / self.speeds.memory_bytes_per_s():.1f} ms)",
            ),
        ]
        if role.continues:
            phases += self._at_update(role, shape, batch, token)
        return phases

    def sampling_batch(self, role: RolloutRole) -> _Batch:
        """Return the decoding of one step on one worker. If sampling never ends, other responses
        use the slots of those that have ended, and no step waits for its longest response."""
        shape = shape_of(role.model.model_copy(update={"lora": None}))
        workers = role.engine.num_workers(role.ranks)  # servers: as if on this hardware
        length, prompt = self._mean_lengths(role.lengths, shape)
        most = rows_at_once(role, self.hardware, shape, length)
        sequences = max(1, self.samples // workers)
        at_once = -(-responses_at_once(role) * role.ranks // workers)
        rows = min(most, at_once if role.continues else sequences)
        steps = sequences * (length - prompt) / rows
        most_tokens, most_prompt = role.lengths.within(positions(shape))
        longest = float(most_tokens - most_prompt)
        if self.measured is not None and role.lengths.episodes is None:
            longest = min(self.measured.longest, longest)
        return _Batch(
            rows=rows,
            steps=steps if role.continues else max(steps, longest),
            longest=longest,
            mean=length - prompt,
            length=length,
            sequences=sequences,
            engines=workers,
        )

    def _at_update(
        self, role: RolloutRole, shape: ModelShape, batch: _Batch, token: float
    ) -> list[Part]:
        """Return the cost of new weights for the responses in progress."""
        assert role.asynchronous is not None
        if role.asynchronous.in_flight == "finish":
            formula = "half of the slots are empty while the longest response in progress ends"
            return [Part("rollout", "drain", batch.longest * token / 2, formula)]
        if role.asynchronous.in_flight == "continue":
            return []
        length = batch.length - batch.mean / 2  # half of a response on average
        work = batch.rows * length * flops(shape, length) / role.tensor_parallel
        seconds = work / self.speeds.flops_per_s(role.dtype != "fp32")
        formula = f"new keys and values of {batch.rows} rows of {length:.0f} tokens"
        return [Part("rollout", "recompute", seconds, formula)]


def flops(shape: ModelShape, length: float) -> float:
    """Return the FLOPs of one token's forward pass in a row of ``length``: the matrices, and
    attention to half of the row on average."""
    width = shape.heads * shape.head_dim
    seen = [min(length / 2, w) if w else length / 2 for w in shape.windows]
    return matrix_flops(shape) + sum(4.0 * s * width for s in seen)
