"""Measure the transfer of long rollouts from the controller to the ranks of a train engine on Ray.

    python benchmarks/rank_data.py [--samples 4096] [--tokens 8192] [--ranks 2 8] [--budget N]

The workers, the controller's engine and the object store are those of a run. Only the model's pass
is replaced: it returns zeros at once, so that the measured seconds are those of the data. One
update is measured as RL computes it: reference, old and teacher log-probs of the batch, then a
forward_backward of its only minibatch. Bytes read are the arrays that a rank receives. Memory is
anonymous memory (RssAnon, sampled every 5 ms) above the level before the update; the object store
is shared memory and not part of it.

    python benchmarks/rank_data.py --heap [--samples 4096] [--tokens 2048]

measures the controller's memory of the same rollout before the update: its samples as they arrive
from rollout workers, and the batch made of them. Seconds are CPU time of one thread: to pickle the
completions (in a worker) and to unpickle them, as Ray does, and to build the batch.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import markdown_table, versions

from burnish.batches import groups_to_batch
from burnish.compact import BoolRuns
from burnish.config.cluster import ClusterConfig
from burnish.config.model import ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.placement import placement_groups_for
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.load import load_tokenizer
from burnish.observe.timeline import Timeline
from burnish.rollout.base import Completion, VersionSpan
from burnish.runtime.ray import worker_group
from burnish.runtime.ray.runtime import RayRuntime
from burnish.runtime.ray.train_engine import RemoteTrainEngine
from burnish.runtime.worker import TrainWorker
from burnish.train.base import Outputs
from burnish.train.spec import EngineSpec
from burnish.types import Batch, Group, Prompt, Sample, Stats

MODEL = ModelConfig(scratch=ScratchConfig(hidden_size=16, num_layers=1))
PROMPT_TOKENS = 1024


def num_bytes(packed: Any) -> int:
    """Bytes of all arrays within ``packed``."""
    if isinstance(packed, np.ndarray):
        return int(packed.nbytes)
    if is_dataclass(packed) and not isinstance(packed, type):
        packed = vars(packed)
    if isinstance(packed, dict):
        return sum(map(num_bytes, packed.values()))
    return sum(map(num_bytes, packed)) if isinstance(packed, (list, tuple)) else 0


def anonymous_mb() -> float:
    """Memory of this process that no other process shares, in MB (10^6 bytes)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("/proc/self/status has no RssAnon; this benchmark needs Linux")


class Peak:
    """Highest anonymous memory of this process, sampled by a thread."""

    def __init__(self) -> None:
        self.begin()
        threading.Thread(target=self._watch, daemon=True).start()

    def begin(self) -> None:
        """Start a measurement."""
        self.start = self.highest = anonymous_mb()

    def above_start(self) -> float:
        """Return MB above the level at :meth:`begin`."""
        return max(self.highest, anonymous_mb()) - self.start

    def _watch(self) -> None:
        while True:
            self.highest = max(self.highest, anonymous_mb())
            time.sleep(0.005)


class CountingWorker(TrainWorker):
    """A rank that counts the bytes it receives and computes nothing."""

    received = 0
    calls = 0
    seconds = 0.0

    def per_token(self, method: str, packed: Any) -> Any:
        with self._counted(packed):
            return super().per_token(method, packed)

    def stats(self, method: str, packed: Any, loss: Any) -> Any:
        with self._counted(packed):
            return super().stats(method, packed, loss)

    @contextmanager
    def _counted(self, packed: Any) -> Iterator[None]:
        self.received += num_bytes(packed)
        self.calls += 1
        begun = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begun

    def begin(self) -> None:
        """Replace the model's pass and start a measurement."""
        self.engine._outputs = _zeros  # type: ignore[assignment, method-assign]
        self.received = self.calls = 0
        self.seconds = 0.0
        self.peak = Peak()

    def report(self) -> tuple[int, float, float]:
        """Return (bytes received, seconds inside calls, MB of memory above the start)."""
        return self.received, self.seconds, self.peak.above_start()


def _zeros(batch: Batch, *, with_entropy: bool) -> Outputs:
    return Outputs(logprobs=torch.zeros(batch.tokens.numel(), requires_grad=True))


def loss(outputs: Outputs, batch: Batch) -> tuple[torch.Tensor, Stats]:
    """Return a sum over the tokens."""
    assert outputs.logprobs is not None
    return outputs.logprobs.sum(), Stats(sums={"tokens": int(batch.action_mask.sum())})


def make_batch(samples: int, tokens: int) -> Batch:
    """A rollout of ``samples`` rows of half to all of ``tokens`` tokens, with a sampler's
    log-probs and advantages."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(tokens // 2, tokens + 1, (samples,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(offsets[-1])
    mask = torch.ones(total, dtype=torch.bool)
    prompt = min(PROMPT_TOKENS, tokens // 4)
    for begin in offsets[:-1].tolist():
        mask[begin : begin + prompt] = False
    batch = Batch(
        tokens=torch.randint(0, 17, (total,), generator=generator),
        offsets=offsets,
        prompt_lens=torch.full((samples,), prompt),
        action_mask=mask,
        group_ids=torch.arange(samples) // 8,
        num_tokens=0,
        num_sequences=0,
        sampler_logprobs=torch.zeros(total),
        rewards=torch.zeros(samples),
    )
    return batch.with_global_counts()


def update(engine: RemoteTrainEngine, batch: Batch, clock: Callable[[str], None]) -> None:
    """The calls of one RL step on one engine."""
    batch = replace(batch, ref_logprobs=engine.logprobs(batch))
    clock("reference log-probs")
    batch = replace(batch, old_logprobs=engine.logprobs(batch))
    clock("old log-probs")
    batch = replace(batch, teacher_logprobs=engine.logprobs(batch))
    clock("teacher log-probs")
    batch = replace(batch, advantages=torch.ones(batch.tokens.numel()))
    clock("advantages (not counted)")
    engine.forward_backward(minibatch(batch), loss)
    clock("forward_backward")


def minibatch(batch: Batch) -> Batch:
    """The only minibatch of a step, as ``jobs.rl.minibatches`` makes it."""
    return batch.select(range(batch.num_rows), copy=False).with_global_counts()


def measure(ranks: int, batch: Batch, budget: int | None) -> dict[str, str]:
    """Return the figures of one update with ``ranks`` data-parallel ranks."""
    config = ClusterConfig(runtime="ray", policy_ranks=ranks, call_timeout_s=600.0)
    spec = EngineSpec(
        TrainRole.alone("policy", TrainConfig(lr=1e-3, max_tokens_per_micro_batch=budget), MODEL),
        micro_batch_size=8,
        total_steps=10,
    )
    runtime = RayRuntime(
        load_tokenizer(MODEL),
        MODEL,
        config,
        placements=placement_groups_for(config, ["policy"]),
        precision=PrecisionConfig(),
        timeline=Timeline(),
    )
    try:
        engine = runtime.language_model(spec)
        ray = runtime.cluster.ray
        workers = engine.group.workers
        ray.get([worker.begin.remote() for worker in workers])
        put, put_bytes = ray.put, 0

        def counted_put(value: Any) -> Any:
            nonlocal put_bytes
            put_bytes += num_bytes(value)
            return put(value)

        ray.put = counted_put
        seconds: dict[str, float] = {}
        last = time.perf_counter()

        def clock(stage: str) -> None:
            nonlocal last
            seconds[stage] = time.perf_counter() - last
            last = time.perf_counter()

        peak = Peak()
        last = time.perf_counter()
        update(engine, batch, clock)
        controller_mb = peak.above_start()
        ray.put = put
        reports = ray.get([worker.report.remote() for worker in workers])
    finally:
        runtime.close()
    seconds.pop("advantages (not counted)")
    return {
        "ranks": str(ranks),
        "put, MB": f"{put_bytes / 1e6:,.0f}",
        "read by a rank, MB": f"{max(r[0] for r in reports) / 1e6:,.0f}",
        "controller peak, MB": f"{controller_mb:,.0f}",
        "rank peak, MB": f"{max(r[2] for r in reports):,.0f}",
        **{f"{name}, s": f"{value:.2f}" for name, value in seconds.items()},
        "all, s": f"{sum(seconds.values()):.2f}",
        "inside ranks, s": f"{max(r[1] for r in reports):.2f}",
    }


def heap(samples: int, tokens: int) -> dict[str, str]:
    """Return memory and CPU time of a rollout on the controller: samples with 150,000 different
    tokens and fp32 log-probs, in groups of 8, and their batch."""
    rng = np.random.default_rng(0)
    before = anonymous_mb()
    clock = {"pickle": 0.0, "unpickle": 0.0, "batch": 0.0}
    groups, count, sent = [], 0, 0
    for number in range(samples // 8):
        ids = tuple(rng.integers(150_000, size=min(PROMPT_TOKENS, tokens // 4)).tolist())
        prompt = Prompt(f"p{number}", ids, "")
        found = []
        for index in range(8):
            length = int(rng.integers(tokens // 2, tokens + 1)) - len(ids)
            made = _completion(rng, prompt.id, index, length)
            with _cpu_time(clock, "pickle"):
                data = pickle.dumps(made, protocol=5)
            del made
            with _cpu_time(clock, "unpickle"):
                completion = pickle.loads(data)
            sent += len(data)
            found.append(_sample(prompt, number, completion))
            count += length + len(ids)
        groups.append(Group(number, prompt, tuple(found)))
    of_samples = anonymous_mb() - before
    with _cpu_time(clock, "batch"):
        batch = groups_to_batch(groups)
    of_batch = anonymous_mb() - before - of_samples
    return {
        "tokens": f"{count:,}",
        "samples, MB": f"{of_samples:,.0f}",
        "bytes per token": f"{1e6 * of_samples / count:.1f}",
        "batch, MB": f"{of_batch:,.0f}",
        "per token": f"{1e6 * of_batch / batch.tokens.numel():.1f}",
        "pickles, bytes per token": f"{sent / count:.1f}",
        **{f"{name}, s": f"{value:.2f}" for name, value in clock.items()},
    }


def _completion(rng: np.random.Generator, prompt_id: str, index: int, length: int) -> Completion:
    return Completion(
        request_id=prompt_id,
        index=index,
        token_ids=tuple(rng.integers(150_000, size=length).tolist()),
        logprobs=tuple(rng.standard_normal(length, dtype=np.float32).tolist()),
        finish_reason="stop",
        text="",
        spans=(VersionSpan(7, 0, length),),
    )


def _sample(prompt: Prompt, group_id: int, completion: Completion) -> Sample:
    """A sample as ``rollout.runner`` makes it."""
    return Sample(
        sample_id=f"{prompt.id}/{completion.index}",
        prompt_id=prompt.id,
        group_id=group_id,
        prompt_ids=prompt.token_ids,
        response_ids=completion.token_ids,
        sampler_logprobs=completion.logprobs,
        action_mask=BoolRuns.repeat(True, len(completion.token_ids)),
        versions=completion.versions,
        text="",
        finish_reason="stop",
    )


@contextmanager
def _cpu_time(clock: dict[str, float], name: str) -> Iterator[None]:
    begun = time.thread_time()
    yield
    clock[name] += time.thread_time() - begun


def main(arguments: list[str]) -> None:
    """Measure every number of ranks and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192, help="longest row")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--budget", type=int, help="tokens per micro-batch; default: 8 rows")
    parser.add_argument("--heap", action="store_true", help="measure samples and batch only")
    args = parser.parse_args(arguments)
    if args.heap:
        found = heap(args.samples, args.tokens)
        print("\n".join(markdown_table(list(found), [list(found.values())])))
        return
    worker_group.TrainWorker = CountingWorker  # type: ignore[attr-defined, misc]
    batch = make_batch(args.samples, args.tokens)
    print(versions("torch", "ray"))
    print(f"{batch.num_rows:,} rows, {batch.tokens.numel():,} tokens", flush=True)
    rows = [measure(ranks, batch, args.budget) for ranks in args.ranks]
    print("\n".join(markdown_table(list(rows[0]), [list(row.values()) for row in rows])))


if __name__ == "__main__":
    main(sys.argv[1:])
