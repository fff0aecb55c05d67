"""One rank of one probe stage, in a separate process: run each phase and measure it.

``python -m burnish.plan.probe_worker`` reads its task as one line of JSON and prints its result as
one line. It exits when its input is closed, so that no process outlives a killed probe.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from burnish.algorithms.distill import DIVERGENCES, SLOPES, forward_kl
from burnish.config.distill import DistillConfig
from burnish.config.job import JobConfig
from burnish.config.registry import JOBS
from burnish.config.roles import JobSpec, RolloutRole, TrainRole
from burnish.distributed.process_group import RankGroup
from burnish.errors import BurnishError
from burnish.messages import library_text
from burnish.models.distill import DistillTarget
from burnish.models.gpu import set_up_gpu
from burnish.models.load import DTYPES, describe, load_causal_lm
from burnish.models.logprobs import Head, chunk_tokens
from burnish.models.lora_layers import merged_weights
from burnish.models.scratch import scratch_tokenizer
from burnish.observe.memory import PhasePeaks
from burnish.oom import is_out_of_memory
from burnish.plan.probe_stages import RolePhase, probed_roles, probed_rollout, separate_rollout
from burnish.plan.role_base import positions, resolve_model
from burnish.plan.rollout_role import demand_of
from burnish.plan.shapes import find_config, shape_of
from burnish.plan.tracking import LiveBytes
from burnish.plan.train_role import largest_rows, planned_model
from burnish.rollout.base import Request, RolloutEngine, Sampling, make_rollout_engine
from burnish.train.base import Outputs
from burnish.train.engine import BaseTrainEngine
from burnish.train.engines import load_engine
from burnish.train.optim import Optimizer
from burnish.train.spec import EngineSpec
from burnish.types import Batch, Stats, rows_to_batch

Work = dict[str, Callable[[], Any]]


def main() -> None:
    """Read the task, run it, and print the result."""
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        measure = probe_engine if task["engine_alone"] else probe
        result = measure(JOBS[task["job"]].model_validate(task["config"]), task)
    except BurnishError as error:  # such as a missing library: shown by the command
        result = {"refused": str(error)}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        result = {"out_of_memory": library_text(error)}
    print(json.dumps(result), flush=True)
    os._exit(0)  # other ranks may wait in a collective for a rank that ran out of memory


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def probe(config: JobConfig, task: dict[str, Any]) -> dict[str, Any]:
    """Return bytes and seconds by role and phase."""
    ranks, device = _join(task)
    torch.manual_seed(0)
    job, roles = config.resolve(), probed_roles(config)
    engines = {role.name: _engine(job, role, ranks, device) for role in roles}
    student = next((role for role in roles if role.distillation is not None), None)
    if student is not None:
        _add_target(engines[student.name], student, cast(DistillConfig, config))
    phases = _work(job, engines, ranks, Path(task["folder"]))
    work = {str(phase): run for phase, run in phases.items() if str(phase) in task["phases"]}
    for run in work.values():  # the first step creates moments and workspaces
        run()
    engine = roles[0].train.engine
    counted = device.type == "cpu" and engine.kind == "torch" and engine.sharding == "none"
    # Files are serialized without tensors, so saving is measured by the process.
    seen = {name: run for name, run in work.items() if not name.startswith("checkpoint")}
    live = _count(engines.values(), seen) if counted else {}
    return _measured(work, live, device)


def probe_engine(config: JobConfig, task: dict[str, Any]) -> dict[str, Any]:
    """Return bytes and seconds of vLLM, with random weights and no trainer."""
    device = torch.device("cuda:0" if task["gpu"] else "cpu")
    set_up_gpu(device)
    role = separate_rollout(config.resolve())
    assert role is not None
    described = role.model.model_copy(update={"lora": None})
    model = load_causal_lm(described, dtype=role.dtype, random=find_config(described)[0])
    engine = _sampler(model, role, max_len=demand_of(role, shape_of(described)).longest)
    try:
        engine.load_weights(0, merged_weights(model))
        del model
        work = {"rollout": _sampling(role, engine)}
        work["rollout"]()  # allocates workspaces
        return _measured(work, {}, device)
    finally:
        engine.close()


def _measured(work: Work, live: dict[str, float], device: torch.device) -> dict[str, Any]:
    peaks = PhasePeaks()
    seconds: dict[str, float] = {}
    for phase, run in work.items():
        # Memory that earlier phases have freed would count as resident in this one.
        gc.collect()
        with suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        peaks.begin(phase)
        begun = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds[phase] = time.perf_counter() - begun
    held = peaks.collect()
    return {
        phase: {
            "tensors": live.get(phase, held[phase].allocated),
            "reserved": held[phase].reserved,
            "host": held[phase].host,
            "seconds": seconds[phase],
        }
        for phase in work
    }


def _join(task: dict[str, Any]) -> tuple[RankGroup, torch.device]:
    device = torch.device(f"cuda:{task['rank']}" if task["gpu"] else "cpu")
    set_up_gpu(device)
    if task["size"] == 1:
        return RankGroup(), device
    from torch import distributed
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    store = FileStore(str(Path(task["folder"]) / "store"), task["size"])
    backend = "nccl" if task["gpu"] else "gloo"
    distributed.init_process_group(backend, store=store, rank=task["rank"], world_size=task["size"])
    return RankGroup(distributed.group.WORLD), device


def _engine(
    job: JobSpec, role: TrainRole, ranks: RankGroup, device: torch.device
) -> BaseTrainEngine:
    """Return the train engine of a role, with a model with random weights."""
    assert role.kind != "rollout" and job.batch is not None
    described = planned_model(job, role)
    spec = EngineSpec(
        replace(role, model=described, offload=False),
        micro_batch_size=role.rows_per_pass or job.batch.micro_train_batch_size,
    )
    return load_engine(
        spec,
        scalar=role.head == "scalar",
        ranks=ranks,
        device=device,
        random=find_config(described)[0],
    )


def _work(
    job: JobSpec, engines: dict[str, BaseTrainEngine], ranks: RankGroup, folder: Path
) -> dict[RolePhase, Callable[[], Any]]:
    """Return a function for every role and phase, in order. Checkpoints are written to
    ``folder``."""
    work: dict[RolePhase, Callable[[], Any]] = {}
    rollout = probed_rollout(job)
    if rollout is not None:
        work[RolePhase("rollout", "rollout")] = _sampling(
            rollout, _sampler(engines["policy"].model, rollout, max_len=None)
        )
    for name, engine in engines.items():
        role = job.role(name)
        batch = _batch(job, role, ranks.size)
        read = engine.values if role.head == "scalar" else engine.logprobs
        read = engine.states if "states" in role.passes else read
        work[RolePhase(name, "log-probs")] = partial(read, batch)
        if role.distillation is not None:
            batch = replace(batch, teacher_states=engines["teacher"].states(batch))
        if role.trainable:
            work[RolePhase(name, "forward/backward")] = partial(
                engine.forward_backward, batch, _loss
            )
            work[RolePhase(name, "step")] = engine.optim_step
            work[RolePhase(name, "checkpoint")] = partial(engine.save, folder / name)
    return work


def _add_target(engine: BaseTrainEngine, role: TrainRole, config: DistillConfig) -> None:
    """Add a teacher's output projection with random weights to a student's engine."""
    teacher = shape_of(resolve_model(config.teacher.model, config.model))
    assert role.distillation is not None
    rows, width = _shared_tokens(config.resolve()), teacher.hidden_size
    weight = torch.randn(rows, width, dtype=DTYPES[role.distillation.dtype], device=engine.device)
    chunk = chunk_tokens(role.train.logprob_chunk_tokens, engine.device.type)
    options = config.loss.model_dump(exclude={"kind"})
    engine.forward.distill_target = DistillTarget(
        Head(weight / width**0.5, temperature=config.temperature, chunk_tokens=chunk),
        partial(DIVERGENCES[config.loss.kind], **options),
        partial(SLOPES[config.loss.kind], **options),
        forward_kl,
        config.temperature,
    )


def _shared_tokens(job: JobSpec) -> int:
    """Return the number of token ids that all language models of a job have."""
    models = [resolve_model(role.model, job.model) for role in job.train_roles]
    return min(shape_of(model).vocab_size for model in models)


def _loss(outputs: Outputs, batch: Batch) -> tuple[torch.Tensor, Stats]:
    per_token = outputs.logprobs if outputs.divergence is None else outputs.divergence
    output = per_token if per_token is not None else outputs.values
    assert output is not None
    return -output.sum() / batch.num_tokens, Stats()


def _batch(job: JobSpec, role: TrainRole, ranks: int) -> Batch:
    """Return a batch with two of the largest micro-batches per rank (one, if the recipe has no
    more)."""
    assert job.batch is not None and job.trained is not None
    limit = positions(shape_of(job.model))
    micro = largest_rows(job, role, limit)
    unit, group = job.trained.rows_per_unit, job.samples_per_prompt
    share = job.batch.train_batch_size * job.trained.rows_per_sample // ranks
    rows = [row for _ in range(ranks * min(2, max(1, share // len(micro)))) for row in micro]
    vocabulary = _shared_tokens(job)
    longest = max(row.length for row in rows)
    groups = torch.randint(0, vocabulary, (-(-len(rows) // group), longest)).tolist()
    tokens = [groups[i // group][: row.length] for i, row in enumerate(rows)]  # prompts are shared
    batch = rows_to_batch(
        tokens,
        [[False] * r.prompt + [True] * (r.length - r.prompt) for r in rows],
        prompt_lens=[r.prompt for r in rows],
        group_ids=[i // group for i in range(len(rows))],
    )
    return replace(batch, rows_per_unit=unit).with_global_counts()


def _sampler(model: Any, role: RolloutRole, *, max_len: int | None) -> RolloutEngine:
    """Return a rollout engine that stops at no token, so that all responses have full length."""
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    tokenizer = scratch_tokenizer("0123456789")
    tokenizer.eos_token = tokenizer.chat_template = None
    return make_rollout_engine(
        model, tokenizer, role.engine, name=describe(role.model), dtype=role.dtype, max_len=max_len
    )


def _sampling(role: RolloutRole, engine: RolloutEngine) -> Callable[[], Any]:
    """Return a function that samples full-length responses, as many as the engine decodes at
    once."""
    n = role.samples_per_prompt
    most = min(role.engine.slots, role.prompts * n)
    length, prefix = role.lengths.within(positions(shape_of(role.model)))
    new, prompt = length - prefix, tuple([7] * prefix)
    requests = [Request(str(i), prompt, n=n, seed=i) for i in range(max(1, most // n))]
    sampling = Sampling(max_tokens=new)
    return lambda: [None for _ in engine.generate(requests, sampling)]


def _count(engines: Iterable[BaseTrainEngine], work: Work) -> dict[str, float]:
    """Return the peak bytes of live tensors by phase, counted operation by operation (on a CPU)."""
    held: list[torch.Tensor] = []
    for engine in engines:
        held += [*engine.model.parameters(), *engine.model.buffers()]
        optimizer = engine.optimizer
        if optimizer is None:
            continue
        assert isinstance(optimizer, Optimizer), "tensors are counted for the torch engine only"
        states = [rule.state(m).values() for rule in optimizer.rules for m in rule.masters]
        held += [*optimizer.masters, *(t for state in states for t in state)]
        held += optimizer.ema or ()
    with LiveBytes() as live:
        live.hold(held)
        for phase, run in work.items():
            live.stage(phase)
            run()
    return {phase: float(live.peaks[phase][0]) for phase in work}


if __name__ == "__main__":
    main()
