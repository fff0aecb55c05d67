"""The ranks of test_rank_shares.py: every engine computes batches twice, once from the entire batch
on each rank and once from the rank's own share, as it arrives from the object store.

``python share_ranks.py FOLDER RANK SIZE`` writes ``rank<RANK>.json`` to FOLDER.
"""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish.config.model import ModelConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.distributed.process_group import RankGroup
from burnish.models.load import load_causal_lm
from burnish.runtime.worker import pack_share, unpack_share
from burnish.train.base import Outputs
from burnish.train.batching import Share
from burnish.train.engine import BaseTrainEngine
from burnish.train.engines import make_engine
from burnish.train.spec import EngineSpec
from burnish.types import Batch, Stats, rows_to_batch

MODEL = ModelConfig(
    scratch=ScratchConfig(hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2)
)
BUDGET = 40
ENGINES: dict[str, dict[str, Any]] = {
    "replicas": {},
    "FSDP2": {"sharding": "full"},
    **{
        f"ZeRO-{n}": {"kind": "deepspeed", "zero_stage": n, "reduce_bucket_size": 50_000}
        for n in range(4)
    },
    "sequence parallel": {"sequence_parallel_size": 2},
    "tensor parallel": {"tensor_parallel_size": 2},
    "tensor parallel, FSDP2": {"sharding": "full", "tensor_parallel_size": 2},
}


def batches() -> dict[str, Batch]:
    """Ten rows of 5 to 30 tokens in groups of two, of each kind of unit; and a row alone."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 31, (10,), generator=generator).tolist()
    rows = [torch.randint(5, 30, (n,), generator=generator).tolist() for n in lengths]
    for row in range(1, 10, 2):
        rows[row][:3] = rows[row - 1][:3]  # the prompt of its group
    plain = rows_to_batch(
        rows,
        [[t > 2 for t in range(n)] for n in lengths],
        prompt_lens=[3] * 10,
        group_ids=[row // 2 for row in range(10)],
    )
    plain = replace(plain, advantages=torch.randn(plain.tokens.numel(), generator=generator))
    samples = torch.tensor([0, 1, 0, 2, 1, 3, 0, 4, 5, 3])
    episodes = replace(plain, sample_ids=samples, sample_tokens=torch.ones(10, dtype=torch.int64))
    return {
        "rows": plain,
        "pairs": replace(plain, rows_per_unit=2),
        "episodes": replace(episodes, samples_together=True).with_global_counts(),
        "one row": plain.select([3]).with_global_counts(),
    }


def loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
    """A sum of log-probs weighted by advantages. It overwrites a column of its batch, which must
    not reach the share."""
    assert outputs.logprobs is not None and batch.advantages is not None
    weighted = (outputs.logprobs * batch.advantages.clone()).sum() / batch.num_tokens
    batch.advantages.zero_()
    return weighted, Stats(sums={"rows": batch.num_rows, "loss": weighted.detach()})


def from_object_store(share: Share) -> tuple[Share, int]:
    """The share after its transfer, over read-only memory, and the bytes of its arrays."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(pack_share(share), protocol=5, buffer_callback=buffers.append)
    sent = [bytes(buffer.raw()) for buffer in buffers]
    return unpack_share(pickle.loads(data, buffers=sent)), sum(map(len, sent))


def start(engine: dict[str, Any], ranks: RankGroup) -> BaseTrainEngine:
    config = TrainConfig(lr=1e-2, max_tokens_per_micro_batch=BUDGET, engine=engine)
    spec = EngineSpec(TrainRole.alone("policy", config, MODEL, with_entropy=False), total_steps=10)
    torch.manual_seed(0)
    return make_engine(load_causal_lm(MODEL), spec, ranks=ranks)


def compare(options: dict[str, Any], ranks: RankGroup) -> dict[str, Any]:
    """One optimizer step per batch with either engine."""
    whole, own = start(options, ranks), start(options, ranks)
    found: dict[str, Any] = {"share": own.data_parallel.rank}
    for name, batch in batches().items():
        sent = list(own.row_split.shares(batch))[own.data_parallel.rank]
        share, num_bytes = from_object_store(sent)
        expected, logprobs = whole.logprobs(batch), own.logprobs(share)
        index = [
            t for row in share.row_numbers for t in range(*batch.offsets[row : row + 2].tolist())
        ]
        stats = [whole.forward_backward(batch, loss), own.forward_backward(share, loss)]
        assert whole.optim_step() == own.optim_step()
        assert share.batch.advantages is not None
        found[name] = {
            "rows": list(share.row_numbers),
            "bytes": num_bytes,
            "unwritten": torch.equal(share.batch.advantages, sent.batch.advantages),
            "same logprobs": torch.equal(expected[index], logprobs),
            "nonzero": bool(expected.any()),
            "same stats": repr(stats[0].plain()) == repr(stats[1].plain()),
        }
    start_weights = dict(load_causal_lm(MODEL).named_parameters())
    pairs = [
        (name, a.clone(), b)
        for (name, a), (_, b) in zip(whole.weights(), own.weights(), strict=True)
    ]
    found["same weights"] = all(torch.equal(a, b) for _, a, b in pairs)
    found["moved"] = any(not torch.equal(a, start_weights[n]) for n, a, _ in pairs)
    return found


def main(folder: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), size)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    ranks = RankGroup(torch.distributed.group.WORLD)
    found = {name: compare(engine, ranks) for name, engine in ENGINES.items()}
    (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
