"""The cases of test_fsdp_engine.py: models, losses, splits and options, and how to run them with
the sharded engine and with the plain one."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from burnish.config.model import LoraConfig, ModelConfig, Nf4Config, PrecisionConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.config.train_engines import TorchEngine
from burnish.distributed.process_group import RankGroup
from burnish.models.compiled_layers import CompiledLayers
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.models.value_head import load_scalar_model
from burnish.optimizers.adafactor.config import Adafactor
from burnish.optimizers.adafactor.rule import AdafactorOptimizer, FactoredWeight
from burnish.train.engines import make_engine as engine_of
from burnish.train.fsdp.engine import ShardedTrainEngine
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine

_SPEC = importlib.util.spec_from_file_location(
    "two_ranks", Path(__file__).with_name("two_ranks.py")
)
assert _SPEC is not None and _SPEC.loader is not None
two_ranks: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["two_ranks"] = two_ranks  # its dataclasses look their module up
_SPEC.loader.exec_module(two_ranks)
LOSSES = two_ranks.accumulation.LOSSES

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
MODELS = {
    "tied": ModelConfig(scratch=ScratchConfig(**SIZES)),
    "untied": ModelConfig(scratch=ScratchConfig(**SIZES, tie_word_embeddings=False)),
    "lora": ModelConfig(scratch=ScratchConfig(**SIZES), lora=LoraConfig(lora_rank=3)),
    "nf4": ModelConfig(
        scratch=ScratchConfig(**SIZES), lora=LoraConfig(lora_rank=3, quantization=Nf4Config())
    ),
    "dora": ModelConfig(
        scratch=ScratchConfig(**SIZES, tie_word_embeddings=False),
        lora=LoraConfig(lora_rank=3, use_dora=True, modules_to_save=("lm_head", "embed_tokens")),
    ),
    "ends": ModelConfig(
        scratch=ScratchConfig(**SIZES, tie_word_embeddings=False),
        lora=LoraConfig(
            lora_rank=3,
            quantization=Nf4Config(double=False),
            target_modules=("embed_tokens", "lm_head", "q_proj"),
        ),
    ),
    "one kv head": ModelConfig(scratch=ScratchConfig(**{**SIZES, "num_kv_heads": 1})),
    "wide": ModelConfig(scratch=ScratchConfig(hidden_size=64, num_layers=1)),
    "odd": ModelConfig(scratch=ScratchConfig(hidden_size=72, num_layers=1)),
}
"""53 rows of embeddings and adapters of 3: not divisible by 2."""
CompiledLayers.backend = "aot_eager"  # the graphs of a run, without a compiler of C++
SELECTIVE = {"gradient_checkpointing": "selective"}
TEAMS = ("sequence_parallel_size", "tensor_parallel_size")


@dataclass(frozen=True)
class Case:
    """Three optimizer steps."""

    loss: str = "sft"
    split: str = "micro 3"
    model: str = "tied"
    train: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    rows: int = 10

    @property
    def key(self) -> str:
        return f"{self.loss}, {self.split}, {self.model}, {self.train}, {self.engine}, {self.rows}"


SPLITS = ("micro 1", "micro 3", "budget 24")
MUON = {"kind": "muon", "ns_dtype": "fp32", "eps": 1e-6}
CASES = [
    *(
        Case(loss, SPLITS[(i + j) % len(SPLITS)], train={"layout": layout})
        for i, loss in enumerate(two_ranks.NAMES)
        for j, layout in enumerate(two_ranks.accumulation.LAYOUTS)
    ),
    *(Case(loss, "micro 1", rows=2 if "reward" in loss else 1) for loss in two_ranks.NAMES),
]
"""Every loss with every layout, the splits in turn; and rows for one rank only."""

OPTIONS = [
    *(Case(model=name) for name in ("untied", "lora")),
    *(Case(model=name, train={"gradient_checkpointing": True}) for name in ("tied", "lora")),
    Case(engine={"reshard_after_forward": False}),
    Case(engine={"cpu_offload": True}),
    Case(model="untied", engine={"reduce_gradients": "once"}),
    Case(model="lora", engine={"cpu_offload": True}),
    Case(model="lora", engine={"reduce_gradients": "once"}),
    Case(model="untied", engine={"reduce_gradients": "once"}, split="micro 1", rows=3),
    Case(model="untied", train={"ema_decay": 0.9, "weight_decay": 0.1, "max_grad_norm": 0.05}),
    Case(model="untied", train={"gradient_checkpointing": True}, split="budget 24"),
    *(Case(model=name) for name in ("nf4", "dora", "ends")),
    Case(model="untied", train={"optimizer": MUON, "weight_decay": 0.1, "ema_decay": 0.9}),
    Case(model="lora", train={"optimizer": MUON}, engine={"cpu_offload": True}),
    Case(model="untied", train={"optimizer": "adafactor", "weight_decay": 0.1}),
    *(Case(model=name, train=SELECTIVE) for name in ("tied", "lora", "nf4")),
    Case(train={"compile": "layers", "gradient_checkpointing": True}),
]
"""What the engine can be told."""


def make_engine(
    ranks: RankGroup, case: Case, *, precision: PrecisionConfig = PrecisionConfig(), **spec: Any
) -> TorchTrainEngine:
    """The engine of the case (sharded by default) if there are ranks, else the plain one."""
    engine_config = {"sharding": "full", **case.engine}
    if ranks.group is None:
        engine_config = {k: v for k, v in engine_config.items() if k not in TEAMS}
    config, split = MODELS[case.model], two_ranks.SPLITS[case.split]
    role = spec.pop("role", LOSSES[case.loss][0])
    torch.manual_seed(0)  # adapters start from the global generator
    scalar = role in ("critic", "reward")
    model: nn.Module = (
        load_scalar_model(config, new_head="random") if scalar else load_causal_lm(config)
    )
    train = TrainConfig(
        **{
            "lr": 1e-3,
            "optimizer": {
                "eps": 1e-6
            },  # gradients differ by 1e-9, which is then no step of its own
            "max_tokens_per_micro_batch": split.get("budget"),
            "engine": TorchEngine(**engine_config),
            **case.train,
        }
    )
    own = EngineSpec(
        TrainRole.alone(role, train, config, precision=precision, **spec),
        micro_batch_size=split.get("micro"),
        total_steps=10,
    )
    engine = engine_of(model, own, tokenizer=load_tokenizer(config), ranks=ranks)
    sharded = ranks.group is not None and engine_config["sharding"] == "full"
    assert isinstance(engine, ShardedTrainEngine) == sharded
    return engine


def weights(engine: TorchTrainEngine) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.weights()}


def run_case(case: Case, ranks: RankGroup) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Log-probs or values before, weights after two steps, and the step statistics. The
    second step depends on the weights and the moments of the first."""
    loss = LOSSES[case.loss][1]
    batch = two_ranks.batch_for(case.loss).select(list(range(case.rows)))
    engine = make_engine(ranks, case)
    outputs = engine.values(batch) if engine.scalar else engine.logprobs(batch)
    said: dict[str, float] = {}
    for step in range(2):
        stats = engine.forward_backward(batch, loss)
        norm = engine.optim_step().grad_norm
        said |= {f"{step} {k}": v for k, v in stats.floats().items()} | {f"{step} norm": norm}
    return {**weights(engine), "outputs": outputs}, said


def steps_of(case: Case, engine: TorchTrainEngine, count: int) -> list[float]:
    """Gradient norms of some steps with the case's loss."""
    loss = two_ranks.nll if case.loss == "sft" else LOSSES[case.loss][1]
    batch = two_ranks.batch_for(case.loss)
    norms = []
    for _ in range(count):
        engine.forward_backward(batch, loss)
        norms.append(engine.optim_step().grad_norm)
    return norms


def train(engine: TorchTrainEngine, steps: int) -> list[float]:
    """Gradient norms of some steps."""
    return steps_of(Case(), engine, steps)


def state_hash(engine: TorchTrainEngine) -> str:
    """Of everything a step moves on this rank."""
    assert engine.optimizer is not None
    digest = hashlib.sha256(str(engine.version).encode())
    for kind, tensors in engine.optimizer.tensors().items():
        for name, tensor in tensors.items():
            digest.update(f"{kind}/{name}".encode() + tensor.numpy().tobytes())
    for name, tensor in engine.weights():
        digest.update(name.encode() + tensor.detach().float().numpy().tobytes())
    return digest.hexdigest()


ADAFACTOR_WEIGHTS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "rows split twice": ((12, 6), 0),
    "rows and columns": ((5, 8), 1),
    "more ranks than rows": ((1, 8), None),
    "stack": ((3, 4, 5), None),
    "vector": ((7,), None),
    "vector split twice": ((8,), 0),
}
"""Name -> shape and the dimension that tensor parallelism splits."""


def adafactor_inputs() -> dict[str, Tensor]:
    """Each weight and its three gradients. The second of the vector and rows of the third of the
    stack are 0, which stands for no gradient."""
    generator = torch.Generator().manual_seed(0)
    found = {n: torch.randn(4, *s, generator=generator) for n, (s, _) in ADAFACTOR_WEIGHTS.items()}
    found["vector"][2] = found["stack"][3, 2:] = 0.0
    return found


def adafactor_steps(ranks: RankGroup, *, tensor_parallel: int, scale: bool) -> dict[str, Any]:
    """This rank's parts of weights and state after three steps, as FSDP2 and tensor parallelism
    split them."""
    groups, shards = ranks.subgroups(tensor_parallel)
    parts = {}
    for name, whole in adafactor_inputs().items():
        shape, dim = ADAFACTOR_WEIGHTS[name]
        dim = dim if groups.size > 1 else None
        if dim is not None:
            whole = whole.chunk(groups.size, dim + 1)[groups.rank]
        each = -(-whole.shape[1] // shards.size)
        part = whole[:, shards.rank * each : (shards.rank + 1) * each]
        parts[name] = part, FactoredWeight(part[0].clone(), shape, 0.1 * (len(shape) > 1), dim)
    settings = Adafactor(clip_threshold=0.5, scale_parameter=scale)
    optimizer = AdafactorOptimizer([w for _, w in parts.values()], settings, tensor_parallel=groups)
    optimizer.shards, optimizer.param_groups[0]["lr"] = shards, 1e-2
    for step in range(1, 4):
        for part, weight in parts.values():
            weight.master.grad = part[step].clone() if part[step].any() else None
        optimizer.step()
    return {
        name: {"weight": w.master.tolist(), "columns": _columns(optimizer.state[w.master])}
        for name, (_, w) in parts.items()
    }


def _columns(state: dict[str, Any]) -> Any:
    return state["exp_avg_sq_col"].tolist() if "exp_avg_sq_col" in state else None


PRECISIONS = {name: two_ranks.PRECISIONS[name] for name in ("fp32", "bf16", "fp16")}
