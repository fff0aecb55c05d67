"""Rough estimate of a step's time: FLOPs, bytes and traffic, divided by assumed shares of peak
speeds.

Use it to compare layouts, not as a guarantee: the shares (``efficiency`` in ``hardware.yaml``) are
assumed until they are measured. Every phase waits for the previous one, as in ``jobs/rl.py``. A
step is therefore the sum of its phases, and a GPU is idle in phases in which its roles do not work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from burnish.config.job import JobConfig
from burnish.config.placement import placement_groups
from burnish.config.roles import JobSpec, RolloutRole, RowLengths, TrainRole
from burnish.config.rollout import VllmEngine
from burnish.plan.engine_profile import TrainEngineProfile, profile_of
from burnish.plan.hardware import Hardware
from burnish.plan.kv_cache import bytes_per_token, vllm_on_gpu
from burnish.plan.model_state import SIZES, EngineSetup
from burnish.plan.role_base import positions
from burnish.plan.rollout_role import demand_of
from burnish.plan.shapes import ModelShape, matrix_flops, shape_of
from burnish.plan.train_role import setup_of


@dataclass(frozen=True)
class Part:
    """Time of one phase of one role."""

    role: str
    phase: str
    seconds: float
    how: str
    """Description of the limiting work."""


@dataclass(frozen=True)
class TimePlan:
    """Time of one step of an RL job (a rollout and its updates), or of one optimizer step."""

    parts: tuple[Part, ...]
    samples: int
    idle: dict[str, float] = field(default_factory=dict)
    """Placement -> share of a step in which its GPUs are idle."""

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return sum(p.seconds for p in self.parts)

    @property
    def samples_per_s(self) -> float:
        """Rows per second, each counted once (``JobSpec.rows_per_step``)."""
        return self.samples / self.seconds if self.seconds else 0.0

    def to_text(self) -> str:
        """Return the estimate as text, slowest phase first."""
        lines = [
            f"time (estimated from peak speeds and assumed efficiencies): {self.seconds:.1f} s per "
            f"step, {self.samples_per_s:.2f} samples/s"
        ]
        for part in sorted(self.parts, key=lambda p: -p.seconds):
            share = part.seconds / self.seconds if self.seconds else 0.0
            lines.append(
                f"  {share:>4.0%} {part.seconds:>9.1f} s  {part.role}, {part.phase}: {part.how}"
            )
        lines += [
            f"  {placement}: idle {share:.0%} of the step" for placement, share in self.idle.items()
        ]
        return "\n".join(lines)


def estimate(config: JobConfig, hardware: Hardware) -> TimePlan:
    """Estimate the time of a step of ``config``."""
    job = config.resolve()
    clock = _Clock(job, hardware)
    parts: list[Part] = []
    for role in job.roles:
        parts += clock.rollout(role) if isinstance(role, RolloutRole) else clock.engine(role)
    return TimePlan(tuple(parts), job.rows_per_step, _idle(config, parts))


def _idle(config: JobConfig, parts: Sequence[Part]) -> dict[str, float]:
    duration = sum(p.seconds for p in parts)
    if config.cluster.runtime == "inline" or not duration:
        return {}
    return {
        "+".join(placement.roles): 1.0
        - sum(p.seconds for p in parts if p.role in placement.roles or p.phase == "sync") / duration
        for placement in placement_groups(config)
    }


class _Clock:
    def __init__(self, job: JobSpec, hardware: Hardware) -> None:
        self.job, self.hardware = job, hardware
        self.share = hardware.tables.efficiency
        self.samples, self.updates = job.rows_per_step, job.updates_per_step

    # ---- speeds --------------------------------------------------------------------------

    def flops_per_s(self, half: bool) -> float:
        gpu = self.hardware.gpu
        machines = self.hardware.tables.machines
        peak = (
            machines["cpu_tflops"] if gpu is None else gpu.bf16_tflops if half else gpu.fp32_tflops
        )
        return peak * 1e12 * self.share["matmul"]

    @property
    def _cpu_gbs(self) -> float:
        return self.hardware.tables.machines["cpu_gbs"]

    def memory_bytes_per_s(self) -> float:
        gpu = self.hardware.gpu
        return (self._cpu_gbs if gpu is None else gpu.memory_gbs) * 1e9 * self.share["decode"]

    def link_bytes_per_s(self, ranks: int) -> float:
        gpu = self.hardware.gpu
        if gpu is None:
            return self._cpu_gbs * 1e9
        inside = ranks <= self.hardware.gpus_per_node
        speed = gpu.link_gbs if inside else min(gpu.link_gbs, self.hardware.network_gbs)
        return speed * 1e9 * self.share["link"]

    def pcie_bytes_per_s(self) -> float:
        gpu = self.hardware.gpu
        return (self._cpu_gbs if gpu is None else gpu.pcie_gbs) * 1e9 * self.share["pcie"]

    # ---- train engines -------------------------------------------------------------------

    def engine(self, role: TrainRole) -> list[Part]:
        ranks = role.ranks
        setup, rows = setup_of(self.job, role)
        profile = profile_of(setup)
        length, prompt = self._mean_lengths(role.lengths, setup.model)
        group = self.job.samples_per_prompt
        shares = setup.train.layout == "shared_prefix"
        tokens = length - (prompt * (1 - 1 / group) if shares else 0.0)
        per_token = flops(setup.model, length)
        model_parallel = setup.train.engine.ranks_per_row
        passes = max(1.0, model_parallel * self.samples / ranks / max(1, len(rows)))
        work = self.samples / ranks * tokens * per_token
        parts = []
        times = role.num_forward_passes
        if times:
            seconds, how = self._pass(profile, times * work, times * passes, trains=False)
            parts.append(Part(role.name, "log-probs", seconds, how))
        if setup.trainable:
            factor = (2.0 if setup.shape.adapters else 3.0) + setup.train.gradient_checkpointing
            epochs = self.job.epochs_per_rollout
            seconds, how = self._pass(profile, epochs * work * factor, epochs * passes, trains=True)
            parts.append(Part(role.name, "forward/backward", seconds, how))
            parts.append(self._step(profile, role.name))
        if role.sync is not None:
            parts.append(self._sync(setup))
        return parts

    def _mean_lengths(self, lengths: RowLengths, shape: ModelShape) -> tuple[float, float]:
        length, prompt = lengths.within(positions(shape))
        return length * self.share["mean_length"], prompt * self.share["mean_length"]

    def _pass(
        self, profile: TrainEngineProfile, work: float, passes: float, *, trains: bool
    ) -> tuple[float, str]:
        """Return the larger of computing time and link time of a pass, with a description."""
        compute = work / self.flops_per_s(profile.setup.half)
        sent = profile.traffic(passes=passes, updates=self.updates, trains=trains)
        wait = sent / self.link_bytes_per_s(profile.setup.ranks)
        if wait > compute:
            return wait, (f"communication: {sent / 1e9:.0f} GB per rank (compute: {compute:.1f} s)")
        return compute, f"compute: {work:.2e} FLOPs per rank" + (
            f" (communication: {wait:.1f} s)" if wait else ""
        )

    def _step(self, profile: TrainEngineProfile, role: str) -> Part:
        setup, own = profile.setup, profile.stepped_entries
        if setup.train.engine.offloads_optimizer and self.hardware.gpu is not None:
            node = min(setup.ranks, self.hardware.gpus_per_node)
            host = own * 28 * node / (self.share["host_adam_gbs"] * 1e9)
            seconds = host + own * (4 + setup.weight_size) / self.pcie_bytes_per_s()
            how = f"Adam on the host: {own * node / 1e9:.1f}e9 parameters per node"
        else:
            seconds = own * 28 / self.memory_bytes_per_s()
            how = f"Adam: {own / 1e9:.2f}e9 parameters per rank"
        return Part(role, "step", self.updates * seconds, f"{self.updates} x {how}")

    def _sync(self, setup: EngineSetup) -> Part:
        size = setup.model.parameters * setup.weight_size
        if self.job.inline:
            rollout = self.job.rollout
            copies = rollout is not None and isinstance(rollout.engine, VllmEngine)
            seconds = size / self.memory_bytes_per_s() * (2 if copies else 0)
            return Part(
                "policy", "sync", seconds, "copy within the GPU" if copies else "shared weights"
            )
        steps = 2 * size / self.pcie_bytes_per_s()
        if self.hardware.nodes > 1:
            steps += size / (self.hardware.network_gbs * 1e9 * self.share["link"])
        return Part("policy", "sync", steps, f"{size / 1e9:.1f} GB through host memory")

    # ---- rollout -------------------------------------------------------------------------

    def rollout(self, role: RolloutRole) -> list[Part]:
        hardware, dtype, engine = self.hardware, role.dtype, role.engine
        shape = shape_of(role.model.model_copy(update={"lora": None}))
        demand = demand_of(role, shape)
        parts = role.tensor_parallel
        most = engine.max_num_seqs if isinstance(engine, VllmEngine) else engine.max_batch_size
        length, prompt = self._mean_lengths(role.lengths, shape)
        new = length - prompt
        sequences = max(1, self.samples // role.ranks)
        if isinstance(engine, VllmEngine) and hardware.gpu is not None:
            over = dict(hardware.tables.overhead)
            found = vllm_on_gpu(
                shape, engine, demand, dtype=dtype, gpu_bytes=hardware.gpu.bytes, overhead=over
            )
            most = max(1, min(most, int(found.cache_tokens / max(length, 1))))
        batch = min(most, sequences)
        size = shape.parameters * SIZES[dtype] / parts
        read = size + batch * (prompt + new / 2) * bytes_per_token(shape, dtype) / parts
        token = max(
            read / self.memory_bytes_per_s(),
            batch * flops(shape, length) / parts / self.flops_per_s(dtype != "fp32"),
        )
        steps = max(sequences * new / batch, float(demand.new_tokens))
        prefill = sequences / role.samples_per_prompt * prompt * flops(shape, prompt) / parts
        seconds = prefill / self.flops_per_s(dtype != "fp32")
        return [
            Part("rollout", "prefill", seconds, f"compute: {prefill:.2e} FLOPs per GPU"),
            Part(
                "rollout",
                "decode",
                steps * token,
                f"{steps:.0f} steps of {batch} rows, {token * 1e3:.1f} ms each",
            ),
        ]


def flops(shape: ModelShape, length: float) -> float:
    """Return the FLOPs of one token's forward pass in a row of ``length``: the matrices, and
    attention to half of the row on average."""
    text = shape.text.to_dict()
    width = int(text.get("num_attention_heads") or 1) * shape.head_dim
    seen = [min(length / 2, w) if w else length / 2 for w in shape.windows]
    return matrix_flops(shape) + sum(4.0 * s * width for s in seen)
