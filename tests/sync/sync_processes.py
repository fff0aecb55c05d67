"""What test_sync_processes.py runs: ``python sync_processes.py FOLDER RANK`` is one of three
processes.

Rank 0 trains and serves the store, rank 2 samples, rank 1 samples in most cases and is the
trainer's second rank in one. Every case is run by all three in the same order; each writes what it
saw to ``rank<RANK>.json``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from burnish.config.model import Dtype, ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.sync import DiskSync, LinkSync
from burnish.config.train import TrainConfig
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.rollout.base import Request, Sampling
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import LocalRolloutEngine
from burnish.sync.base import Abort, Bucket, End, LinkError, SyncError
from burnish.sync.channel import Channel, connect_store, serve_store
from burnish.sync.collective import CollectiveSender, CollectiveSource
from burnish.sync.connect import Rendezvous, open_sender, open_source
from burnish.sync.disk import DiskSender
from burnish.sync.engine import SyncedEngine, WeightSender
from burnish.sync.ipc import SharedSender, SharedSource
from burnish.train.base import Outputs
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, Stats, rows_to_batch

MODEL = ModelConfig(scratch=ScratchConfig(hidden_size=32, tie_word_embeddings=False))
OTHER = ModelConfig(scratch=ScratchConfig(hidden_size=32, tie_word_embeddings=False, seed=9))
TOKENIZER = load_tokenizer(MODEL)
BUCKET = 4096
"""The embedding (53 x 32 fp32, 6,784 bytes) is split, and the model takes 36 buckets."""
PATIENT, HASTY = 100.0, 1.5
REQUESTS = [Request("a", (7, 8, 9)), Request("b", (10,)), Request("c", tuple(range(6, 30)))]
KINDS = ("collective", "ipc", "disk")


@dataclass
class Context:
    """One process, and what it writes down."""

    folder: Path
    rank: int
    store: Any
    found: dict[str, Any]

    def rendezvous(self, what: str) -> None:
        """Wait for the other two."""
        self.store.set(f"meet/{what}/{self.rank}", "1")
        self.store.wait([f"meet/{what}/{r}" for r in range(3)])

    def channel(self, name: str, timeout_s: float) -> Channel:
        return Channel(self.store, name, rank=self.rank, num_receivers=2, timeout_s=timeout_s)


# ---- engines -------------------------------------------------------------------------------------


def trainer() -> TorchTrainEngine:
    model = load_causal_lm(MODEL)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)  # far from uniform, so that other weights give other tokens
    spec = EngineSpec(
        TrainRole.alone("policy", TrainConfig(lr=0.05), MODEL, precision=PrecisionConfig()),
        total_steps=100,
    )
    return TorchTrainEngine(model, spec)


def train(engine: TorchTrainEngine) -> None:
    rows = [[7, 8, 9, 10, 11, 12], [10, 20, 30, 40]]
    batch = rows_to_batch(rows, [[False] + [True] * (len(r) - 1) for r in rows], prompt_lens=[1, 1])

    def nll(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        assert outputs.logprobs is not None
        return -outputs.logprobs.sum() / batch.num_tokens, Stats()

    engine.forward_backward(batch, nll)
    assert not engine.optim_step().skipped


def rollout(dtype: Dtype = "fp32") -> LocalRolloutEngine:
    """With weights of its own, so that nothing is right by chance."""
    model = load_causal_lm(OTHER, dtype=dtype)
    model.requires_grad_(False)
    return LocalRolloutEngine(model, TOKENIZER, LocalEngine())


def tokens(engine: Any) -> dict[str, list[int]]:
    done = engine.generate(REQUESTS, Sampling(12, 0.0))
    return {c.request_id: [c.version, *c.token_ids] for c in done}


def expected_tokens(engine: TorchTrainEngine, dtype: Dtype) -> dict[str, list[int]]:
    """What the trainer's own weights sample, converted by torch alone."""
    own = rollout(dtype)
    own.load_weights(engine.version, engine.weights())
    return tokens(own)


def tried(call: Callable[[], Any]) -> dict[str, Any]:
    """Return the result of a call, or its error and the seconds until it was raised. RuntimeError:
    an engine that was written in part refuses to sample."""
    started = time.monotonic()
    try:
        return {"result": call()}
    except (SyncError, RuntimeError) as error:
        seconds = time.monotonic() - started
        return {"error": str(error), "type": type(error).__name__, "seconds": seconds}


# ---- both ends of each kind ----------------------------------------------------------------------


def config(context: Context, kind: str, name: str) -> LinkSync | DiskSync:
    if kind == "disk":
        folder = str(context.folder / name)
        return DiskSync(kind="disk", folder=folder, bucket_bytes=20_000, timeout_s=PATIENT)
    return LinkSync(kind=kind, bucket_bytes=BUCKET, timeout_s=PATIENT)


def sender(
    context: Context, kind: str, name: str, engine: Any, dtype: Dtype | None = None
) -> WeightSender | DiskSender:
    rendezvous = Rendezvous(context.store, name, num_receivers=2, rank=0)
    return open_sender(config(context, kind, name), engine, rendezvous, dtype=dtype)


def receiver(
    context: Context, kind: str, name: str, engine: LocalRolloutEngine, receivers: int = 2
) -> SyncedEngine:
    expected = {n: tuple(p.shape) for n, p in engine.model.named_parameters()}
    rank = context.rank if receivers == 2 else 1
    rendezvous = Rendezvous(context.store, name, num_receivers=receivers, rank=rank)
    source = open_source(config(context, kind, name), rendezvous, expected=expected)
    return SyncedEngine(engine, source)


# ---- cases ---------------------------------------------------------------------------------------


def several_pushes(context: Context, kind: str, dtype: Dtype) -> list[Any]:
    """Three transfers with training between them."""
    name, out = f"several {kind} {dtype}", []
    if context.rank == 0:
        engine = trainer()
        end = sender(context, kind, name, engine, dtype)
        for _ in range(3):
            metrics = end.push()
            out.append({"tokens": expected_tokens(engine, dtype), "metrics": metrics})
            train(engine)
            context.rendezvous(
                f"{name} {engine.version}"
            )  # a disk keeps two: nobody is left behind
    else:
        synced = receiver(context, kind, name, rollout(dtype))
        out.append(tried(lambda: tokens(synced)))
        for version in range(3):
            metrics = synced.receive(version)
            out.append({"tokens": tokens(synced), "metrics": metrics})
            context.rendezvous(f"{name} {version + 1}")
    return out


class Faulty:
    """A sender's link that does something to bucket ``at`` once."""

    def __init__(self, link: Any, fault: str, at: int = 3) -> None:
        self.link, self.fault, self.at = link, fault, at
        self.held: tuple[Bucket, Tensor] | None = None

    def buffer(self) -> Tensor:
        return self.link.buffer()

    def send(self, bucket: Bucket, payload: Tensor) -> None:
        if self.held is not None:
            self.link.send(bucket, payload)
            self.link.send(*self.held)
            self.held = None
        elif bucket.index != self.at:
            self.link.send(bucket, payload)
        else:
            self._hurt(bucket, payload)

    def _hurt(self, bucket: Bucket, payload: Tensor) -> None:
        entry = bucket.entries[-1]
        if self.fault == "corrupt":
            payload[7] ^= 1
        elif self.fault == "truncate":
            payload = payload[:-16]
        elif self.fault == "version":
            bucket = replace(bucket, version=bucket.version + 1)
        elif self.fault in ("name", "shape", "twice"):
            lie = {"name": "model.extra", "shape": entry.name, "twice": "model.embed_tokens.weight"}
            shape = (*entry.shape, 1) if self.fault == "shape" else entry.shape
            last = replace(entry, name=lie[self.fault], shape=shape)
            bucket = replace(bucket, entries=(*bucket.entries[:-1], last))
        if self.fault == "swap":
            self.held = (bucket, payload)
        elif self.fault != "drop":
            self.link.send(bucket, payload)
        if self.fault == "duplicate":
            self.link.send(bucket, payload)

    def finish(self, message: End | Abort) -> None:
        if self.fault == "lost tensors" and isinstance(message, End):
            message = replace(message, num_tensors=message.num_tensors + 1)
        self.link.finish(message)


FAULTS = (
    *("corrupt", "drop", "duplicate", "swap", "truncate"),
    *("name", "shape", "twice", "version", "lost tensors", "corrupt the first"),
)


def faults(context: Context, kind: str) -> dict[str, Any]:
    """For each fault: a push that goes wrong, what everybody says, and a good push after it."""
    name, out = f"faults {kind}", {}
    if context.rank == 0:
        engine = trainer()
        end = sender(context, kind, name, engine)
        out["first"] = end.push()
        assert isinstance(end, WeightSender)
        good = end.link
        for fault in FAULTS:
            train(engine)
            first = fault == "corrupt the first"
            end.link = Faulty(good, "corrupt" if first else fault, 0 if first else 3)
            report = {"push": tried(end.push)}
            context.rendezvous(f"{name} {fault}")
            end.link = good
            report["again"] = tried(end.push)
            out[fault] = report | {"tokens": expected_tokens(engine, "fp32")}
    else:
        synced = receiver(context, kind, name, rollout())
        out["first"] = synced.receive(0)
        for version, fault in enumerate(FAULTS, 1):
            report = {"receive": tried(lambda v=version: synced.receive(v))}
            report["generate"] = tried(lambda: tokens(synced))
            report["old"] = tried(lambda: tokens(synced.engine))
            context.rendezvous(f"{name} {fault}")
            report["again"] = tried(lambda v=version: synced.receive(v))
            out[fault] = report | {"tokens": tokens(synced)}
    context.rendezvous(name)
    return out


def one_receiver(context: Context, kind: str) -> dict[str, Any]:
    """A byte changes on the way to receiver 1 (rank 2) alone."""
    name = f"one receiver {kind}"
    out: dict[str, Any] = {}
    if context.rank == 0:
        engine = trainer()
        end = sender(context, kind, name, engine)
        out = {"push": tried(end.push), "again": tried(end.push)}
        out["tokens"] = expected_tokens(engine, "fp32")
    else:
        synced = receiver(context, kind, name, rollout())
        link: Any = synced.source
        take, count = link._receive, 0

        def damaged() -> tuple[bytes, Tensor]:
            nonlocal count
            header, payload = take()
            count += 1
            if count == 3 and context.rank == 2:
                payload = payload.clone()  # shared memory belongs to both
                payload[5] ^= 128
            if count == 5 and context.rank == 2:
                header = header.replace(b"bucket", b"bucxet")
            return header, payload

        link._receive = damaged
        out = {"receive": tried(synced.receive), "generate": tried(lambda: tokens(synced))}
        out |= {"again": tried(synced.receive), "tokens": tokens(synced)}
    context.rendezvous(name)
    return out


class GivesUp:
    """A train engine whose weights() fails in the middle."""

    version = 4

    def __init__(self, engine: TorchTrainEngine) -> None:
        self.engine = engine

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for i, item in enumerate(self.engine.weights()):
            if i == 6:
                raise RuntimeError("gathering failed on purpose")
            yield item


def giving_up(context: Context, kind: str) -> dict[str, Any]:
    """The trainer fails in the middle: receivers hear of it at once."""
    name, out = f"giving up {kind}", {}
    if context.rank == 0:
        engine = trainer()
        end = sender(context, kind, name, GivesUp(engine))
        try:
            end.push()
        except RuntimeError as error:
            out["error"] = str(error)
        end.policy = engine
        out["again"] = tried(end.push)
    else:
        synced = receiver(context, kind, name, rollout())
        out["receive"] = tried(synced.receive)
        out["again"] = tried(synced.receive)
    context.rendezvous(name)
    return out


class Silent:
    """A sender's link that sends a few buckets and then says nothing any more."""

    def __init__(self, link: Any, sends: int) -> None:
        self.link, self.sends = link, sends

    def buffer(self) -> Tensor:
        return self.link.buffer()

    def send(self, bucket: Bucket, payload: Tensor) -> None:
        if bucket.index >= self.sends:
            raise LinkError("silent on purpose")
        self.link.send(bucket, payload)

    def finish(self, message: End | Abort) -> None:
        raise LinkError("silent on purpose")


def silence(context: Context, kind: str) -> dict[str, Any]:
    """Nobody comes; a sender falls silent; a receiver falls silent; then a new connection."""
    out: dict[str, Any] = {}
    name = f"silence {kind}"
    engine: Any = trainer() if context.rank == 0 else rollout()
    ends = {
        "collective": (CollectiveSender, CollectiveSource),
        "ipc": (SharedSender, SharedSource),
    }
    make_sender, make_receiver = ends[kind]

    hasty = context.channel(f"{name} missing", timeout_s=HASTY)
    if context.rank == 0:
        out["nobody"] = tried(lambda: make_sender(hasty, bucket_bytes=BUCKET) and None)
    elif context.rank == 1:
        out["nobody"] = tried(lambda: make_receiver(hasty) and None)
    context.rendezvous(f"{name} missing")

    # gloo continues to wait in the background for the timeout of its group, also at exit
    channel = context.channel(name, timeout_s=10.0)
    if context.rank == 0:
        link = make_sender(channel, bucket_bytes=BUCKET)
        channel.timeout_s = HASTY
        out["silent sender"] = tried(WeightSender(engine, Silent(link, 2)).push)
        context.rendezvous(f"{name} 1")
        out["silent receiver"] = tried(WeightSender(engine, link).push)
    else:
        link = make_receiver(channel)
        channel.timeout_s = HASTY
        synced = SyncedEngine(engine, link)
        out["silent sender"] = tried(synced.receive)
        out["generate"] = tried(lambda: tokens(synced))
        context.rendezvous(f"{name} 1")
        if context.rank == 1:
            out["silent receiver"] = tried(synced.receive)
    context.rendezvous(f"{name} 2")
    link.close()
    link.close()  # as before a second attempt to join a new connection
    out["closed"] = tried(link.buffer if context.rank == 0 else link.next_message)
    if context.rank == 0:
        out["again"] = sender(context, kind, f"{name} again", engine).push()
        out["tokens"] = expected_tokens(engine, "fp32")
    else:
        synced = receiver(context, kind, f"{name} again", engine)
        out["again"] = synced.receive()
        out["tokens"] = tokens(synced)
    context.rendezvous(name)
    return out


class Sharded:
    """Two trainer ranks with FSDP2: a weight is unsharded only while all gather it."""

    def __init__(self, engine: TorchTrainEngine) -> None:
        from torch.distributed.fsdp import fully_shard

        self.version, self.model = 7, engine.model
        fully_shard(self.model)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.full_tensor()


def two_trainer_ranks(context: Context, kind: str) -> dict[str, Any]:
    """Ranks 0 and 1 train in a default group of their own, rank 2 samples: a good push, one whose
    link breaks in the middle, and a good one."""
    name, out = f"two trainer ranks {kind}", {}
    if context.rank < 2:
        if not dist.is_initialized():
            store = dist.PrefixStore("trainer", context.store)
            dist.init_process_group("gloo", store=store, rank=context.rank, world_size=2)
        plain = trainer()
        out["tokens"] = expected_tokens(plain, "fp32")
        rendezvous = Rendezvous(context.store, name, num_receivers=1, rank=0)
        sends = rendezvous if context.rank == 0 else None
        end = open_sender(config(context, kind, name), Sharded(plain), sends)
        link = end.link
        out["push"] = tried(end.push)
        end.link = Silent(link, 2) if link is not None else None
        out["broken"] = tried(end.push)
        end.link = link
        if link is not None:  # what a silent link could not say any more
            link.finish(Abort(1, 7, "it was silent"))
        out["again"] = tried(end.push)
    else:
        synced = receiver(context, kind, name, rollout(), receivers=1)
        out["push"] = tried(synced.receive)
        out["broken"] = tried(synced.receive)
        out["again"] = tried(synced.receive)
        out["tokens"] = tokens(synced)
    context.rendezvous(name)
    return out


def cases() -> Iterator[tuple[str, Callable[[Context], Any]]]:
    """(name, what every process does)."""
    for kind in KINDS:
        for dtype in ("fp32", "bf16"):
            yield f"several {kind} {dtype}", lambda c, k=kind, d=dtype: several_pushes(c, k, d)
    for kind in KINDS[:2]:
        yield f"faults {kind}", lambda c, k=kind: faults(c, k)
        yield f"one receiver {kind}", lambda c, k=kind: one_receiver(c, k)
        yield f"giving up {kind}", lambda c, k=kind: giving_up(c, k)
        yield f"silence {kind}", lambda c, k=kind: silence(c, k)
        yield f"two trainer ranks {kind}", lambda c, k=kind: two_trainer_ranks(c, k)


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    port = folder / "port"
    if rank == 0:
        store = serve_store("127.0.0.1", timeout_s=PATIENT)
        scratch = folder / "port.tmp"
        scratch.write_text(str(store.port))
        os.replace(scratch, port)
    else:
        while not port.is_file():
            time.sleep(0.05)
        store = connect_store("127.0.0.1", int(port.read_text()), timeout_s=PATIENT)
    context = Context(folder, rank, store, {})
    try:
        for name, run in cases():
            started = time.monotonic()
            context.found[name] = run(context)
            print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        (folder / f"rank{rank}.json").write_text(json.dumps(context.found), encoding="utf-8")
    if rank == 0:  # the store is in this process
        store.wait([f"end/{other}" for other in (1, 2)])
    else:
        store.set(f"end/{rank}", "1")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
