"""What the tests of this folder run in processes of their own.

``python gpu_ranks.py sync FOLDER KIND RANK DEVICE``: rank 0 trains and hands its weights over, rank
1 samples. ``python gpu_ranks.py offload FOLDER ENGINE DEVICE``: three steps of an engine that keeps
its state in host memory, and of the plain one on the same device. DEVICE may be ``cpu``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from burnish.config.model import Dtype, ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.sync import LinkSync
from burnish.config.train import TrainConfig
from burnish.config.train_engines import DeepSpeedEngine, TorchEngine
from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.models.load import DTYPES, load_causal_lm, load_tokenizer
from burnish.optimizers.adamw.config import AdamW
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import LocalRolloutEngine
from burnish.sync.base import Bucket, SyncError
from burnish.sync.channel import connect_store, serve_store
from burnish.sync.connect import Rendezvous, open_sender, open_source
from burnish.sync.engine import SyncedEngine, WeightSender
from burnish.train.base import Outputs
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, Stats, rows_to_batch

SIZES = ScratchConfig(hidden_size=64, tie_word_embeddings=False)
MODEL = ModelConfig(scratch=SIZES)
OTHER = ModelConfig(scratch=SIZES.model_copy(update={"seed": 9}))
BUCKET = 1 << 14
"""The embedding (53 x 64 fp32, 13,568 bytes) nearly fills one; a projection of 64 x 256 takes
four."""
PATIENT_S = 100.0
DTYPES_SENT: tuple[Dtype, ...] = ("fp32", "bf16")
ENGINES: dict[str, Any] = {
    "zero-2": DeepSpeedEngine(zero_stage=2, adam_offload=True),
    "zero-3": DeepSpeedEngine(zero_stage=3, adam_offload=True, param_offload=True),
    "fsdp": TorchEngine(sharding="full", cpu_offload=True),
}


def batch() -> Batch:
    rows = [[7, 8, 9, 10, 11, 12], [10, 20, 30, 40], [5, 6, 7]]
    return rows_to_batch(rows, [[False] + [True] * (len(r) - 1) for r in rows], prompt_lens=[1] * 3)


def nll(outputs: Outputs, rows: Batch) -> tuple[Tensor, Stats]:
    assert outputs.logprobs is not None
    return -outputs.logprobs.sum() / rows.num_tokens, Stats()


def step(engine: Any) -> None:
    engine.forward_backward(batch(), nll)
    assert not engine.optim_step().skipped


def spec_of(engine: Any, lr: float) -> EngineSpec:
    """``eps`` is large, so that a gradient's last digit does not decide a sign."""
    train = TrainConfig(lr=lr, optimizer=AdamW(eps=1e-3), engine=engine)
    return EngineSpec(
        TrainRole.alone("policy", train, MODEL, precision=PrecisionConfig()), total_steps=100
    )


# ---- weight sync ---------------------------------------------------------------------------------


class Corrupts:
    """A sender's link that changes a bit of its third bucket."""

    def __init__(self, link: Any) -> None:
        self.link = link

    def buffer(self) -> Tensor:
        return self.link.buffer()  # type: ignore[no-any-return]

    def send(self, bucket: Bucket, payload: Tensor) -> None:
        if bucket.index == 2:
            payload[7] ^= 1
        self.link.send(bucket, payload)

    def finish(self, message: Any) -> None:
        self.link.finish(message)


def sync(folder: Path, kind: str, rank: int, device: str) -> None:
    """Two pushes with a step between them, a damaged one and a good one, in both formats. What was
    sent and what came is written down after every good push."""
    found = {}
    store = open_rendezvous(folder, rank)
    for dtype in DTYPES_SENT:
        rendezvous = Rendezvous(store, f"{kind} {dtype}", num_receivers=1, rank=rank, device=device)
        config = LinkSync(kind=kind, bucket_bytes=BUCKET, timeout_s=PATIENT_S)  # type: ignore[arg-type]
        run = sends if rank == 0 else receives
        found[dtype] = run(folder, config, rendezvous, dtype)
    (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    if rank == 0:  # the store is in this process
        store.wait(["end"])
    else:
        store.set("end", "1")


def sends(folder: Path, config: LinkSync, rendezvous: Rendezvous, dtype: Dtype) -> dict[str, Any]:
    engine = TorchTrainEngine(
        load_causal_lm(MODEL, device=rendezvous.device), spec_of(TorchEngine(), 0.05)
    )
    sender = open_sender(config, engine, rendezvous, dtype=dtype)
    assert isinstance(sender, WeightSender)
    versions = []
    for push in range(3):
        if push == 2:
            good, sender.link = sender.link, Corrupts(sender.link)
            error = told(sender.push)
            sender.link = good
        versions.append(sender.push()["sync/version"])
        write(folder / f"{dtype}-{push}-sent.safetensors", engine.weights(), dtype)
        step(engine)
    sender.close()
    return {"versions": versions, "error": error}


def receives(
    folder: Path, config: LinkSync, rendezvous: Rendezvous, dtype: Dtype
) -> dict[str, Any]:
    model = load_causal_lm(OTHER, dtype=dtype, device=rendezvous.device).requires_grad_(False)
    engine = LocalRolloutEngine(model, load_tokenizer(OTHER), LocalEngine())
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    synced = SyncedEngine(engine, open_source(config, rendezvous, expected=expected))
    versions = []
    for push in range(3):
        error = told(synced.receive) if push == 2 else ""
        versions.append(synced.receive()["sync/version"])
        write(folder / f"{dtype}-{push}-came.safetensors", model.named_parameters(), dtype)
    synced.source.close()
    return {"versions": versions, "error": error}


def told(call: Any) -> str:
    """What a call that is refused says."""
    try:
        call()
    except SyncError as error:
        return str(error)
    return "no error"


def write(path: Path, weights: Any, dtype: Dtype) -> None:
    save_file({n: t.detach().to("cpu", DTYPES[dtype]).contiguous() for n, t in weights}, path)


def open_rendezvous(folder: Path, rank: int) -> Any:
    port = folder / "port"
    if rank == 0:
        store = serve_store("127.0.0.1", timeout_s=PATIENT_S)
        scratch = folder / "port.tmp"
        scratch.write_text(str(store.port))
        os.replace(scratch, port)
        return store
    while not port.is_file():
        time.sleep(0.05)
    return connect_store("127.0.0.1", int(port.read_text()), timeout_s=PATIENT_S)


# ---- offload -------------------------------------------------------------------------------------


def offload(folder: Path, name: str, device: str) -> None:
    """Three steps; how many bytes are pinned meanwhile."""
    on_gpu = device != "cpu"
    plain = TorchTrainEngine(load_causal_lm(MODEL, device=device), spec_of(TorchEngine(), 1e-3))
    before = pinned_bytes() if on_gpu else 0
    engine = offloaded(name, device)
    for _ in range(3):
        step(plain)
        step(engine)
    pinned = pinned_bytes() - before if on_gpu else 0
    write(folder / "offloaded.safetensors", engine.weights(), "fp32")
    write(folder / "plain.safetensors", plain.weights(), "fp32")
    (folder / "found.json").write_text(json.dumps({"pinned": pinned}), encoding="utf-8")
    torch.distributed.destroy_process_group()


def offloaded(name: str, device: str) -> Any:
    model, spec = load_causal_lm(MODEL, device=device), spec_of(ENGINES[name], 1e-3)
    if name == "fsdp":
        from burnish.train.engines import make_engine as engine_of

        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        backend = "gloo" if device == "cpu" else "nccl"
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        ranks = RankGroup(torch.distributed.group.WORLD)
        return engine_of(model, spec, ranks=ranks, device=torch.device(device))
    from burnish.train.deepspeed.engine import DeepSpeedTrainEngine

    return DeepSpeedTrainEngine(model, spec, ranks=SINGLE)


def pinned_bytes() -> int:
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


if __name__ == "__main__":
    if sys.argv[-1] != "cpu":
        torch.cuda.set_device(sys.argv[-1])
    if sys.argv[1] == "sync":
        sync(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
    else:
        offload(Path(sys.argv[2]), sys.argv[3], sys.argv[4])
