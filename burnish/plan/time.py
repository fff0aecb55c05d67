"""How long a step takes, roughly: FLOPs, bytes and link speeds over shares of their peaks.

Good for comparing layouts, not for promises: the shares are assumed (``efficiency`` in
``hardware.yaml``) until they are measured. Every phase waits for the one before it, as in
``jobs/rl.py``, so a step is the sum of its phases, and a GPU whose roles do not work in a phase is
idle in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from burnish.config.jobs import EvaluateConfig, GenerateConfig, JobConfig, RLConfig
from burnish.config.placement import placement_groups
from burnish.config.roles import roles_of
from burnish.config.rollout import VllmEngine
from burnish.config.train import DeepSpeedEngine, ranks_per_row
from burnish.plan.hardware import Hardware
from burnish.plan.kv_cache import bytes_per_token, vllm_on_gpu
from burnish.plan.model_state import SIZES, EngineSetup
from burnish.plan.role_base import lengths_of, positions
from burnish.plan.rollout_role import demand_of
from burnish.plan.shapes import ModelShape, matrix_flops, shape_of
from burnish.plan.train_role import setup_of


@dataclass(frozen=True)
class Part:
    """One phase of one role."""

    role: str
    phase: str
    seconds: float
    how: str
    """What takes the time."""


@dataclass(frozen=True)
class TimePlan:
    """A step of an RL job (a rollout and its updates), or an optimizer step."""

    parts: tuple[Part, ...]
    samples: int
    idle: dict[str, float] = field(default_factory=dict)
    """Share of a step in which a place's GPUs wait, by place."""

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(p.seconds for p in self.parts)

    @property
    def samples_per_s(self) -> float:
        """Rows trained on."""
        return self.samples / self.seconds if self.seconds else 0.0

    def to_text(self) -> str:
        """For people."""
        lines = [
            f"time (an estimate from peaks and assumed shares of them): {self.seconds:.1f} s for a "
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
    """The time of a step of ``config``."""
    clock = _Clock(config, hardware)
    parts: list[Part] = []
    for role in roles_of(config):
        parts += clock.rollout() if role == "rollout" else clock.engine(role)
    return TimePlan(tuple(parts), clock.samples, _idle(config, parts))


def _idle(config: JobConfig, parts: Sequence[Part]) -> dict[str, float]:
    whole = sum(p.seconds for p in parts)
    if config.cluster.runtime == "inline" or not whole:
        return {}
    return {
        "+".join(placement.roles): 1.0
        - sum(p.seconds for p in parts if p.role in placement.roles or p.phase == "sync") / whole
        for placement in placement_groups(config)
    }


class _Clock:
    def __init__(self, config: Any, hardware: Hardware) -> None:
        self.config, self.hardware = config, hardware
        self.share = hardware.tables.efficiency
        self.samples, self.updates = _work_of(config)

    def ranks(self, role: str) -> int:
        cluster = self.config.cluster
        return 1 if cluster.runtime == "inline" else int(cluster.ranks(role))

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

    def engine(self, role: str) -> list[Part]:
        ranks = self.ranks(role)
        setup, rows = setup_of(self.config, role, ranks)
        length, prompt = self._mean_lengths(setup.model)
        group = self.config.rollout.n_samples_per_prompt if self._is_rl else 1
        shares = setup.train.layout == "shared_prefix"
        tokens = length - (prompt * (1 - 1 / group) if shares else 0.0)
        per_token = flops(setup.model, length)
        model_parallel = ranks_per_row(setup.train)
        passes = max(1.0, model_parallel * self.samples / ranks / max(1, len(rows)))
        work = self.samples / ranks * tokens * per_token
        parts = []
        old = self._is_rl and (role in ("critic", "reference") or self.updates > 1)
        if old or not setup.trainable:
            seconds, how = self._pass(setup, work, passes, gathers=1.0, reduces=0.0)
            parts.append(Part(role, "log-probs", seconds, how))
        if setup.trainable:
            factor = (2.0 if setup.shape.adapters else 3.0) + setup.train.gradient_checkpointing
            seconds, how = self._pass(setup, work * factor, passes, gathers=2.0, reduces=1.0)
            parts.append(Part(role, "forward/backward", seconds, how))
            parts.append(self._step(setup, role))
        if role == "policy" and self._is_rl:
            parts.append(self._sync(setup))
        return parts

    @property
    def _is_rl(self) -> bool:
        return isinstance(self.config, RLConfig)

    def _mean_lengths(self, shape: ModelShape) -> tuple[float, float]:
        length, prompt = lengths_of(self.config, positions(shape))
        return length * self.share["mean_length"], prompt * self.share["mean_length"]

    def _pass(
        self, setup: EngineSetup, work: float, passes: float, *, gathers: float, reduces: float
    ) -> tuple[float, str]:
        """Computing, or waiting for the links that feed it, whichever is longer."""
        compute = work / self.flops_per_s(setup.half)
        sent = 0.0
        if setup.sharded and setup.ranks > 1:
            weights = setup.shape.parameters * setup.weight_size * gathers
            sums = setup.trained * SIZES[setup.precision.grad_accum_dtype] * reduces
            sent = passes * (weights + sums) * (setup.ranks - 1) / setup.ranks
        elif setup.ranks > 1:
            sums = setup.trained * SIZES[setup.precision.grad_accum_dtype] * reduces
            once = isinstance(setup.train.engine, DeepSpeedEngine)
            sent = 2 * sums * (passes if once else self.updates)
        wait = sent / self.link_bytes_per_s(setup.ranks)
        if wait > compute:
            return wait, f"waits for links: {sent / 1e9:.0f} GB a rank (computing: {compute:.1f} s)"
        return compute, f"computes {work:.2e} FLOPs a rank" + (
            f" (links: {wait:.1f} s)" if wait else ""
        )

    def _step(self, setup: EngineSetup, role: str) -> Part:
        engine = setup.train.engine
        cut = setup.sharded or (isinstance(engine, DeepSpeedEngine) and engine.zero_stage > 0)
        own = setup.trained / (setup.ranks if cut else 1)
        offload = vars(engine).get("adam_offload") or vars(engine).get("cpu_offload")
        if offload and self.hardware.gpu is not None:
            node = min(setup.ranks, self.hardware.gpus_per_node)
            host = own * 28 * node / (self.share["host_adam_gbs"] * 1e9)
            seconds = host + own * (4 + setup.weight_size) / self.pcie_bytes_per_s()
            how = f"on the host: {own * node / 1e9:.1f}e9 parameters of a node"
        else:
            seconds = own * 28 / self.memory_bytes_per_s()
            how = f"Adam over {own / 1e9:.2f}e9 parameters a rank"
        return Part(role, "step", self.updates * seconds, f"{self.updates} x {how}")

    def _sync(self, setup: EngineSetup) -> Part:
        size = setup.model.parameters * setup.weight_size
        if self.config.cluster.runtime == "inline":
            copies = isinstance(self.config.rollout.engine, VllmEngine)
            seconds = size / self.memory_bytes_per_s() * (2 if copies else 0)
            return Part(
                "policy", "sync", seconds, "copied inside of the GPU" if copies else "shared"
            )
        steps = 2 * size / self.pcie_bytes_per_s()
        if self.hardware.nodes > 1:
            steps += size / (self.hardware.network_gbs * 1e9 * self.share["link"])
        return Part("policy", "sync", steps, f"{size / 1e9:.1f} GB through host memory")

    # ---- rollout -------------------------------------------------------------------------

    def rollout(self) -> list[Part]:
        config, hardware = self.config, self.hardware
        shape = shape_of(config.model.model_copy(update={"lora": None}))
        dtype = config.precision.sampler_dtype
        plain: Any = config
        engine = plain.rollout.engine if not isinstance(config, EvaluateConfig) else plain.engine
        workers = self.ranks("rollout")
        demand = demand_of(config, workers, shape)
        is_vllm = isinstance(engine, VllmEngine)
        parts = engine.tensor_parallel_size if is_vllm else 1
        most = engine.max_num_seqs if is_vllm else engine.max_batch_size
        length, prompt = self._mean_lengths(shape)
        new = length - prompt
        sequences = max(1, self.samples // workers)
        if is_vllm and hardware.gpu is not None:
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
        one = isinstance(config, EvaluateConfig)
        group = 1 if one else config.rollout.n_samples_per_prompt
        prefill = sequences / group * prompt * flops(shape, prompt) / parts
        seconds = prefill / self.flops_per_s(dtype != "fp32")
        return [
            Part("rollout", "prefill", seconds, f"{prefill:.2e} FLOPs a GPU"),
            Part(
                "rollout",
                "decode",
                steps * token,
                f"{steps:.0f} steps of {batch} rows, {token * 1e3:.1f} ms each",
            ),
        ]


def flops(shape: ModelShape, length: float) -> float:
    """Of one token's forward pass in a row of ``length``: matrices, and attention to half the row
    on average."""
    text = shape.text.to_dict()
    width = int(text.get("num_attention_heads") or 1) * shape.head_dim
    seen = [min(length / 2, w) if w else length / 2 for w in shape.windows]
    return matrix_flops(shape) + sum(4.0 * s * width for s in seen)


def _work_of(config: Any) -> tuple[int, int]:
    """(rows, optimizer steps) of one step of the job."""
    if isinstance(config, EvaluateConfig):
        count = config.eval.num_prompts or 1000
        return count * config.eval.n_samples_per_prompt, 0
    if isinstance(config, GenerateConfig):
        return config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt, 0
    plan = config.batch_plan()
    if isinstance(config, RLConfig):
        samples = (plan.samples_per_rollout or 1) * plan.epochs_per_rollout
        return samples, plan.optimizer_steps_per_rollout or 1
    return plan.train_batch_size * config.rows_per_unit, 1
