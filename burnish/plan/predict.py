"""Make the memory plan of a recipe on a cluster: the roles on each GPU, phase by phase.

Roles take turns. Memory that every role holds permanently adds up; of temporary memory, only the
largest role counts. Processes that share a GPU release unused memory after every call, and a
sleeping vLLM releases its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from burnish.config.arithmetic import batch_table
from burnish.config.job import JobConfig
from burnish.config.placement import PlacementGroupSpec, placement_groups, total_text
from burnish.config.roles import JobSpec, RolloutRole
from burnish.models.flash_versions import TITLES, is_installed, newer_for
from burnish.plan.hardware import Hardware
from burnish.plan.memory_plan import PHASES, Peak, Plan, PlanRow
from burnish.plan.model_state import Item, total
from burnish.plan.role_base import (
    HOW,
    Context,
    Items,
    RoleMemory,
    resolve_model,
    together,
    without_offload,
)
from burnish.plan.rollout_role import rollout_role
from burnish.plan.shapes import PlanError
from burnish.plan.train_role import train_role

ASSUMPTIONS = {
    "unreleased-gathers": "weights that DeepSpeed's stage 3 gathers are never released, as in "
    "0.16.0 to 0.16.7 (which Burnish rejects)",
    "kept-cache": "processes that share a GPU keep their peak reserved memory, loading included "
    "(Burnish's processes release it after every call)",
}
"""Name -> description of each assumption that ``--assume`` accepts."""


def make_plan(config: JobConfig, hardware: Hardware, *, assume: Iterable[str] = ()) -> Plan:
    """Return the plan of a recipe on ``hardware``. Raises PlanError if the recipe needs other
    hardware, if the job loads no model, or if a model's sizes or an assumption are unknown."""
    assumptions = frozenset(assume)
    if unknown := assumptions - set(ASSUMPTIONS):
        raise PlanError(
            f"--assume {sorted(unknown)[0]} is not a known assumption; use "
            f"{' or '.join(ASSUMPTIONS)}"
        )
    job, placements = config.resolve(), _placements(config, hardware)
    if not job.roles:
        raise PlanError(f"this {job.job} job loads no model: it needs no memory plan")
    check_room(config, hardware, placements)
    roles = {r.role: r for r in roles_memory(job, hardware, assumptions)}
    host = hardware.host_bytes
    if config.cluster.runtime == "ray":
        host *= hardware.tables.overhead["ray_limit"]
    peaks = [
        *_device_peaks(placements, roles, hardware, assumptions),
        *_host_peaks(placements, roles, replace(hardware, host_bytes=host)),
    ]
    disk = sum(r.disk for r in roles.values())
    return Plan(
        job=f"{job.job} ({config.cluster.runtime})",
        hardware=str(hardware),
        models=tuple(dict.fromkeys(_model_lines(roles.values()))),
        batch=() if job.batch is None else tuple(batch_table(job.batch)),
        rows=tuple(_rows(roles.values(), _nodes(placements, hardware))),
        peaks=tuple(peaks),
        disk_per_checkpoint=disk,
        assumptions=tuple(_assumptions(job, hardware, roles.values(), assumptions, disk)),
        savings=_savings(peaks, placements, roles, hardware, assumptions),
        problems=tuple(r.problem for r in roles.values() if r.problem),
        guessed=max((r.guessed for r in roles.values()), default=0.0),
    )


def _savings(
    peaks: Sequence[Peak],
    placements: Sequence[PlacementGroupSpec],
    roles: dict[str, RoleMemory],
    hardware: Hardware,
    assume: frozenset[str],
) -> tuple[str, ...]:
    """Return the GPUs that engines on the ranks' GPUs save, and the device memory that offloading
    between phases saves, by place, with its cost in host memory."""
    savings = [
        f"{_name(p)}: {p.count * p.gpus:g} GPUs instead of {p.count * p.gpus * len(p.roles):g} "
        f"with cluster.layout=separate and the same ranks; {p.workers('rollout')} rollout engines "
        f"span {p.span} GPUs each"
        for p in placements
        if p.span > 1 and hardware.gpu is not None
    ]
    moved = {name: role for name, role in roles.items() if role.offloaded is not None}
    if not moved:
        return tuple(savings)
    before = _device_peaks(placements, without_offload(roles), hardware, assume)
    for placement in placements:
        place, moved_roles = _name(placement), [name for name in placement.roles if name in moved]
        most = max((p.bytes for p in peaks if (p.place, p.where) == (place, "device")), default=0.0)
        was = max((p.bytes for p in before if p.place == place), default=0.0)
        if moved_roles and was:
            savings.append(
                f"{place}: at most {most / 1e9:.1f} GB of a GPU instead of {was / 1e9:.1f} GB"
            )
    savings += [
        f"{name}: {item.bytes / 1e9:.1f} GB of host memory per rank ({item.how})"
        for name, role in moved.items()
        for item in (role.offloaded or {})["rollout"]
        if item.how.startswith(HOW)
    ]
    return tuple(savings)


def _placements(config: JobConfig, hardware: Hardware) -> list[PlacementGroupSpec]:
    if config.cluster.runtime == "inline":
        return [PlacementGroupSpec(tuple(role.name for role in config.roles()), 1, 0.0, 0.0)]
    placements = placement_groups(config)
    if config.cluster.runtime == "spmd":  # a rank takes the GPU of its number, if there are any
        return [replace(p, gpus=0.0 if hardware.gpu is None else 1.0) for p in placements]
    return placements


def check_room(
    config: JobConfig, hardware: Hardware, placements: Sequence[PlacementGroupSpec]
) -> None:
    """Raise PlanError if the recipe and the cluster contradict each other."""
    if config.cluster.runtime == "inline":
        return
    need = sum(p.count * p.gpus for p in placements)
    if hardware.gpu is None:
        if need:
            raise PlanError(
                f"the recipe's workers need {need:g} GPUs ({total_text(placements)}), but torch "
                "detects no GPU on this machine: give the cluster to plan for, e.g. --cluster "
                f"{max(1, round(need / 8))}x8xA100-80GB, or set cluster.hardware in the recipe"
            )
        return
    if not need:
        raise PlanError(
            "the recipe's workers compute on CPUs (cluster.gpus_per_worker=0), but the plan is for "
            f"the GPUs of {hardware}; set cluster.gpus_per_worker=1, or remove --cluster and "
            "cluster.hardware"
        )
    if need > hardware.num_gpus:
        raise PlanError(
            f"the recipe needs {need:g} GPUs ({'; '.join(map(str, placements))}), but {hardware} "
            f"has {hardware.num_gpus}; use fewer ranks or workers, a layout that shares more GPUs, "
            "or a larger cluster"
        )
    for placement in placements:
        if placement.gpus > hardware.gpus_per_node:
            raise PlanError(
                f"{placement}: one worker's GPUs have to be in one node, but a node of {hardware} "
                f"has {hardware.gpus_per_node}; use nodes with more GPUs, or a smaller "
                "tensor_parallel_size"
            )
        engines = placement.count // placement.span
        room = hardware.nodes * int(hardware.gpus_per_node / (placement.span * placement.gpus))
        if placement.span > 1 and room < engines:
            raise PlanError(
                f"{placement}: the {placement.span} GPUs of a rollout engine have to be in one "
                f"node, so {hardware} has room for {room} of {engines} engines; use a "
                "tensor_parallel_size that divides the GPUs of a node, or more nodes"
            )


# ---- peaks -----------------------------------------------------------------------------------


def _name(placement: PlacementGroupSpec) -> str:
    count = f"{placement.count} x " if placement.count > 1 else ""
    return f"{count}{'+'.join(placement.roles)}"


def _device_peaks(
    placements: Sequence[PlacementGroupSpec],
    roles: dict[str, RoleMemory],
    hardware: Hardware,
    assume: frozenset[str],
) -> list[Peak]:
    """Return the peaks of every kind of GPU placement in every phase."""
    if hardware.gpu is None:
        return []
    peaks = []
    for placement in placements:
        placed_roles = [roles[r] for r in placement.roles]
        share = min(1.0, placement.gpus) if placement.gpus else 1.0
        limit = hardware.gpu.bytes * share
        for phase in _phases(placed_roles):
            size, formula = max(
                _in_place(list(now.values()), phase, keeps="kept-cache" in assume)
                for now in together({role.role: role for role in placed_roles}, phase)
            )
            peaks.append(Peak(_name(placement), "device", phase, size, limit, formula))
    return peaks


def _phases(roles: Sequence[RoleMemory]) -> list[str]:
    """Return the phases in which one of the roles computes."""
    working = {phase for r in roles for phase in r.passing}
    if not all(r.keeps_peak for r in roles):
        working |= {"load", "rollout", "sync"}
    return [phase for phase in PHASES if phase in working]


def _in_place(roles: Sequence[RoleMemory], phase: str, *, keeps: bool) -> tuple[float, str]:
    """Return the bytes on one GPU in a phase, with a breakdown by process."""
    pools: dict[str, list[RoleMemory]] = {}
    for role in roles:
        pools.setdefault(role.pool, []).append(role)
    alone = len(pools) == 1 or not keeps
    parts = {}
    for name, members in pools.items():
        if alone or not all(m.keeps_peak for m in members):
            parts[name] = _held(members, phase)
        elif phase == "load":
            parts[name] = _held(members, "load")
        else:
            parts[name] = max(_held(members, p) for p in PHASES)
    if not keeps:  # roles compute one after the other
        idle = {n: sum(total(m.resident[phase]) for m in ms) for n, ms in pools.items()}
        most = max(parts, key=lambda n: parts[n] - idle[n])
        parts = {n: parts[n] if n == most else idle[n] for n in parts}
    formula = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items())
    return sum(parts.values()), formula


def _held(members: Sequence[RoleMemory], phase: str) -> float:
    """Return the bytes of one process: resident memory of all its roles, and the temporary memory
    of the role that computes."""
    there = sum(total(m.resident[phase]) for m in members)
    return there + max(total(m.passing.get(phase, ())) for m in members)


def _host_peaks(
    placements: Sequence[PlacementGroupSpec], roles: dict[str, RoleMemory], hardware: Hardware
) -> list[Peak]:
    """Return the peaks of the fullest node in every phase. On a machine without GPUs, host memory
    contains all tensors."""
    placed = {role for placement in placements for role in placement.roles}
    controller = {role: 1 for role in roles if role not in placed}  # its node is unknown
    nodes = [node | controller for node in _nodes(placements, hardware)]
    both = hardware.gpu is None
    phases = _phases(list(roles.values()))
    peaks = []
    for phase in phases:
        sizes = [
            max(_on_node(node, now, phase, both=both) for now in together(roles, phase))
            for node in nodes
        ]
        worst = max(range(len(nodes)), key=lambda i: sizes[i])
        workers = (f"{count} {role}" for role, count in nodes[worst].items())
        name = "this machine" if both else "a node with " + "+".join(workers)
        peaks.append(Peak(name, "host", phase, sizes[worst], hardware.host_bytes))
    if not peaks:
        return []
    most = max(peaks, key=lambda p: p.bytes)
    return [Peak(most.place, "host", p.phase, p.bytes, p.limit) for p in peaks]


def _nodes(placements: Sequence[PlacementGroupSpec], hardware: Hardware) -> list[dict[str, int]]:
    """Return the number of workers of each role on each node. The packing follows Ray: one
    placement after another, each on as few nodes as possible."""
    if hardware.gpu is None or all(p.gpus == 0 for p in placements):
        return [{role: p.workers(role) for p in placements for role in p.roles}]
    nodes: list[dict[str, int]] = [{} for _ in range(hardware.nodes)]
    free = [float(hardware.gpus_per_node)] * hardware.nodes
    for placement in placements:
        left = placement.count
        while left:
            room = [int(f / placement.gpus + 1e-9) for f in free]
            enough = [i for i, n in enumerate(room) if n >= left]
            best = min(enough or range(len(room)), key=lambda i: (-min(room[i], left), room[i]))
            count = min(left, room[best]) or left
            free[best] -= count * placement.gpus
            left -= count
            for role in placement.roles:
                nodes[best][role] = nodes[best].get(role, 0) + placement.workers(role, count)
    return [node for node in nodes if node]


def _on_node(
    node: dict[str, int], roles: dict[str, RoleMemory], phase: str, *, both: bool
) -> float:
    kinds = ("host", "device") if both else ("host",)

    def size(items: Iterable[Item]) -> float:
        return sum(i.bytes for i in items if i.where in kinds)

    there = sum(n * size(roles[r].resident[phase]) for r, n in node.items())
    once = sum(size(roles[r].first.get(phase, ())) for r in node)
    working = max(n * size(roles[r].passing.get(phase, ())) for r, n in node.items())
    return there + once + working


# ---- text ------------------------------------------------------------------------------------


def _rows(roles: Iterable[RoleMemory], nodes: Sequence[dict[str, int]]) -> Iterable[PlanRow]:
    for role in roles:
        on_node = max((node.get(role.role, 0) for node in nodes), default=0) or 1
        name = f"{role.role} x{role.ranks}" if role.ranks > 1 else role.role
        for phase in _phases([role]):
            for item in (*role.resident[phase], *role.passing.get(phase, ())):
                yield PlanRow(
                    name, phase, item.name, item.bytes, item.how, item.where, on_node=on_node
                )
            for item in role.first.get(phase, ()):
                yield PlanRow(name, phase, item.name, item.bytes, item.how, item.where, "first")


def _model_lines(roles: Iterable[RoleMemory]) -> Iterable[str]:
    for role in roles:
        if role.setup is None:
            continue
        shape = role.setup.model
        adapters = f" + {shape.adapters:,} of adapters" if shape.adapters else ""
        count = f"{shape.parameters:,} parameters{adapters}"
        yield f"{role.role}: {shape.name}, {count} ({shape.source})"


def _assumptions(
    job: JobSpec,
    hardware: Hardware,
    roles: Iterable[RoleMemory],
    assume: frozenset[str],
    disk: float,
) -> Iterable[str]:
    over = hardware.tables.overhead
    yield from hardware.notes
    for role in roles:
        yield from role.notes
        for work in role.passes[-1:]:
            longest = max(r.length for r in work.rows)
            yield (
                f"{role.role}: the largest micro-batch is {len(work.rows)} rows of {longest} "
                f"tokens, {work.tokens} computed ({work.layout})"
            )
    keep_last = next(
        (r.checkpoint.keep_last for r in job.train_roles if r.checkpoint is not None), 0
    )
    if disk:
        disk *= keep_last + 1
        yield f"keep_last checkpoints and one being written take {disk / 1e9:.1f} GB of disk"
    if hardware.gpu is None:
        yield f"a process takes {over['process_gb']:g} GB in addition to tensors"
        yield "temporary memory inside a single operation is not counted"
    else:
        yield (
            f"a process takes {over['context_gb']:g} GB of a GPU for CUDA and, with several ranks, "
            f"{over['nccl_gb']:g} GB for NCCL; fragmentation adds {over['fragmentation']:.0%} of "
            "temporary memory"
        )
        assert hardware.kernels is not None
        major, minor = hardware.kernels.torch_version
        yield (
            f"attention uses the kernels of torch {major}.{minor} (installed here) for this GPU; "
            "if no fused kernel supports a format or head size, the attention scores are counted"
        )
        newer = newer_for(hardware.kernels)
        if newer is not None and is_installed(newer):
            yield (
                f"the time assumes that {TITLES[newer]} (installed here) computes FlashAttention's "
                "calls; a run tries it on the GPU first"
            )
    if any(role.train.compile == "layers" for role in job.train_roles):
        yield (
            "compiled layers (train.compile): the memory is planned as if they were not, an upper "
            "bound; the time assumes that operations between two matrix products read and write "
            "memory once, in 1.6 kernels (not measured on a GPU)"
        )
    if not job.inline:
        yield f"Ray kills workers above {over['ray_limit']:.0%} of a node's memory"
        if hardware.gpu is not None and "kept-cache" not in assume:
            yield (
                "processes that share a GPU release unused memory after every call; a sleeping "
                "vLLM releases its own"
            )
    yield from _unknown_models(job)
    yield from (ASSUMPTIONS[name] for name in sorted(assume))


def _unknown_models(job: JobSpec) -> Iterable[str]:
    kinds = {"critic": "critic", "reference": "reference", "teacher": "teacher"}
    kinds["reward"] = "reward model"
    for kind, name in kinds.items():
        for role in job.train_roles:
            model = role.model
            if role.kind == kind and resolve_model(model, job.model) is not model:
                yield (
                    f"the config of the {name} {model.path} is not on this machine: its size is "
                    "assumed to be the policy's"
                )


def roles_memory(
    job: JobSpec, hardware: Hardware, assume: frozenset[str] = frozenset()
) -> list[RoleMemory]:
    """Return the memory of every role of the job."""
    context = Context(job, hardware, assume)
    memories: list[RoleMemory] = []
    for role in job.roles:
        if isinstance(role, RolloutRole):
            memory = rollout_role(context, role)
        else:
            memory = train_role(context, role)
        if job.inline and memories:  # one process, whose overhead is already counted
            memory = replace(
                memory, resident={p: _no_process(i) for p, i in memory.resident.items()}
            )
            if memory.offloaded is not None:
                offloaded = {p: _no_process(i) for p, i in memory.offloaded.items()}
                memory = replace(memory, offloaded=offloaded)
        memories.append(memory)
    return memories


_PROCESS = ("CUDA context", "a Python process", "NCCL")


def _no_process(items: Items) -> Items:
    return tuple(i for i in items if i.name != "overhead" or not i.how.startswith(_PROCESS))
