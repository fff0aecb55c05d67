"""One rank of test_sharded_experts.py: the load-balancing loss on a sharded mixture.

``python expert_ranks.py FOLDER RANK SIZE`` meets the other ranks through FOLDER, trains the mixture
in FOLDER for one step with FSDP2, sequence and tensor parallelism, and ZeRO 2 and 3. It writes the
statistics, on rank 0 the weights after the step, and a checkpoint of Adafactor with tensor
parallelism.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from burnish.config.model import ModelConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.distributed.process_group import RankGroup
from burnish.models.load import load_causal_lm
from burnish.steps.objectives import sft_objective, with_expert_balance
from burnish.train.engines import make_engine
from burnish.train.spec import EngineSpec
from burnish.types import Batch, rows_to_batch

ENGINES: dict[str, dict[str, Any]] = {
    "fsdp": {"sharding": "full"},
    "fsdp, recomputed": {"sharding": "full"},
    "sequence": {"sequence_parallel_size": 2},
    "sequence, fsdp": {"sharding": "full", "sequence_parallel_size": 2},
    "tensor": {"tensor_parallel_size": 2},
    "tensor, fsdp": {"sharding": "full", "tensor_parallel_size": 2},
    "tensor, recomputed": {"tensor_parallel_size": 2},
    "zero-2": {"kind": "deepspeed", "zero_stage": 2},
    "zero-3": {"kind": "deepspeed", "zero_stage": 3},
}


def rows() -> Batch:
    """Five rows of 4 to 9 tokens: with two ranks and one row per pass, one rank has fewer."""
    ids = torch.Generator().manual_seed(2)
    tokens = [torch.randint(3, 15, (n,), generator=ids).tolist() for n in (5, 9, 4, 7, 6)]
    masks = [[t >= 2 for t in range(len(row))] for row in tokens]
    return rows_to_batch(tokens, masks, prompt_lens=[2] * 5).with_global_counts()


def make(folder: Path, engine: dict[str, Any], ranks: RankGroup, **train: Any) -> Any:
    """Return an engine of the mixture. With a process group it reads its own rows."""
    config = ModelConfig(path=str(folder))
    settings = TrainConfig(engine=engine, max_grad_norm=None, **train)
    spec = EngineSpec(TrainRole.alone("policy", settings, config), micro_batch_size=1)
    empty = engine.get("sharding") == "full"
    return make_engine(load_causal_lm(config, empty=empty), spec, ranks=ranks)


def step(folder: Path, engine: dict[str, Any], ranks: RankGroup, *, recompute: bool) -> Any:
    """Return the engine after one step, and its statistics."""
    made = make(
        folder / "mixture",
        engine,
        ranks,
        lr=1.0,
        optimizer={"eps": 1.0},  # the step is then close to lr x gradient
        moe_aux_loss_coef=1.0,
        gradient_checkpointing=recompute,
    )
    stats = made.forward_backward(rows(), with_expert_balance(sft_objective(), 1.0)).floats()
    made.optim_step()
    return made, stats


def shared_expert_step(folder: Path, engine: dict[str, Any], ranks: RankGroup) -> Any:
    """Return an engine of a mixture with a shared expert and a first dense layer, after a step."""
    made = make(folder / "shared", engine, ranks, lr=1.0, optimizer={"eps": 1.0})
    made.forward_backward(rows(), sft_objective())
    made.optim_step()
    return made


def adafactor(folder: Path, engine: dict[str, Any], ranks: RankGroup) -> Any:
    """Return an engine after a step with given gradients, as in every engine."""
    made = make(folder / "mixture", engine, ranks, lr=1e-2, optimizer="adafactor")
    made.forward_backward(rows(), sft_objective())
    optimizer = made.optimizer
    for name, parameter in zip(optimizer.names, optimizer.params, strict=True):
        numel = torch.Size(optimizer.shapes[name]).numel()
        full = torch.linspace(-1, 1, numel).sin().reshape(optimizer.shapes[name])
        target, own = made._own_part(name, parameter, full)
        grad = parameter.grad if target is parameter else parameter.grad.to_local()
        grad.copy_(own)
    if optimizer.tp_plan is not None:  # partial gradients, which are summed over ranks
        optimizer.tp_plan.sum_partial = lambda grads: None
    made.optim_step()
    return made


def main(folder: Path, rank: int, size: int) -> None:
    store = torch.distributed.FileStore(str(folder / "store"), size)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    ranks = RankGroup(torch.distributed.group.WORLD)
    found = {}
    for name, engine in ENGINES.items():
        made, found[name] = step(folder, engine, ranks, recompute="recomputed" in name)
        weights = {n: t.detach().clone().contiguous() for n, t in made.weights()}
        if rank == 0:
            save_file(weights, folder / f"{name}.safetensors")
        if name.startswith("tensor") and "recomputed" not in name:
            weights = dict(shared_expert_step(folder, engine, ranks).weights())
            if rank == 0:
                kept = {n: t.detach().clone().contiguous() for n, t in weights.items()}
                save_file(kept, folder / f"shared {name}.safetensors")
            adafactor(folder, engine, ranks).save(folder / f"saved {name}")
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
