"""The cases of test_parallel_engines.py: run as a script on each of several ranks, and in the test
on a single rank with the plain engine.

``python parallel_ranks.py FOLDER RANK SIZE`` meets the other ranks through FOLDER, runs every case
and writes ``rank<RANK>.safetensors`` and ``.json`` there.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

import burnish.train.fsdp.sharded_state
import burnish.train.torch.engine
from burnish.config.model import Fp16Config, ModelConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.config.train_engines import TorchEngine
from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.models import tensor_parallel, ulysses
from burnish.models.attention import packed_attention, plan_segments
from burnish.models.cache_attention import Options
from burnish.models.flash import FlashSwitch
from burnish.models.flash_reference import on_cpu
from burnish.models.load import load_causal_lm
from burnish.models.segments import Segment
from burnish.models.ulysses import sequence_parallel_attention
from burnish.optimizers.adamw.config import AdamW
from burnish.train.base import NonFiniteError
from burnish.train.engines import make_engine as engine_of
from burnish.train.spec import EngineSpec

_SPEC = importlib.util.spec_from_file_location(
    "fsdp_cases", Path(__file__).with_name("fsdp_cases.py")
)
assert _SPEC is not None and _SPEC.loader is not None
cases: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["fsdp_cases"] = cases  # its dataclasses look their module up
_SPEC.loader.exec_module(cases)
two_ranks, Case = cases.two_ranks, cases.Case
LAYOUTS = two_ranks.accumulation.LAYOUTS

ENGINES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "sp2": {"sharding": "none", "sequence_parallel_size": 2},
        "sp2 sharded": {"sequence_parallel_size": 2},
        "tp2": {"sharding": "none", "tensor_parallel_size": 2},
        "tp2 sharded": {"tensor_parallel_size": 2},
    },
    4: {
        "sp4": {"sharding": "none", "sequence_parallel_size": 4},
        "sp2 x 2": {"sharding": "none", "sequence_parallel_size": 2},
        "sp2 x 2 sharded": {"sequence_parallel_size": 2},
        "tp2 x 2": {"sharding": "none", "tensor_parallel_size": 2},
        "tp2 x 2 sharded": {"tensor_parallel_size": 2},
    },
}
"""By number of ranks."""


def cases_of(size: int, name: str) -> list[Any]:
    """Return the cases of an engine: losses, layouts and options. Each engine runs every second
    loss on rows for one micro-batch only."""
    engine = ENGINES[size][name]
    losses = itertools.product(two_ranks.NAMES, LAYOUTS)
    place = list(ENGINES[size]).index(name)
    few = two_ranks.NAMES[place % 2 :: 2]
    some = [
        *(Case(loss, "micro 1", rows=2 if "reward" in loss else 1) for loss in few),
        Case("policy, sequence_mean", "budget 24", "untied"),
        Case(split="micro 1", rows=3, train={"gradient_checkpointing": True}),
        Case(split="micro 1", rows=3, train=cases.SELECTIVE),
        Case(model="lora"),
    ]
    if "tensor_parallel_size" in engine:
        some.append(Case(model="untied", train={"optimizer": cases.MUON, "weight_decay": 0.1}))
    if "sequence_parallel_size" in engine:
        some.append(Case(model="one kv head", train={"layout": "packed"}))
    every = [Case(loss, train={"layout": layout}) for loss, layout in losses]
    chosen = [*some, *every] if name == "sp2" else [*some, *every[:: 4 if size == 2 else 7]]
    if name in ("sp2 sharded", "tp2 sharded"):
        chosen += [
            Case(model="untied", split="micro 1", engine={"reduce_gradients": "once"}),
            Case(model="lora", train={"gradient_checkpointing": True}),
            Case(model="lora", train=cases.SELECTIVE),
        ]
    return [replace(case, engine={**engine, **case.engine}) for case in chosen]


def local_shard(tensor: Tensor, *, ranks: RankGroup, each: int) -> Tensor:
    """This rank's ``each`` rows, of zeros at the end."""
    more = ranks.size * each - len(tensor)
    padded = torch.cat([tensor, tensor.new_zeros(more, *tensor.shape[1:])])
    return padded[ranks.rank * each :][:each].detach()


def _attend(plan: Any, options: Any, qkv: Any) -> Tensor:
    return packed_attention(plan, qkv, options)


def attention(ranks: RankGroup) -> dict[str, float]:
    """Sums of differences of outputs and gradients from attention in one place, for every way in
    which heads can be shared, with and without a window, by rectangles and by FlashAttention; 11
    tokens, which no number of ranks divides."""
    found = {}
    segments = [Segment(0, 6), Segment(6, 3, 0, 4), Segment(9, 2)]
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 4, 5, 6, 0, 1])
    plan, count = plan_segments(segments, positions), 11
    flash_plan = plan_segments(segments, positions, flash=FlashSwitch(may_fall_back=False))
    group = ranks.group
    assert group is not None
    each = -(-count // ranks.size)
    shared = ((4, 4), (8, 2), (4, 1), (12, 3))
    for (heads, kv), window, flash in itertools.product(shared, (None, 3), (False, True)):
        generator, value_dim = torch.Generator().manual_seed(heads), 8 if flash else 4
        shapes = ((count, heads, 8), (count, kv, 8), (count, kv, value_dim))
        whole = [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]
        upstream = torch.randn(count, heads, value_dim, generator=generator)
        options = Options(0, 0.3, window, 0.0, None)
        expected = packed_attention(plan, (whole[0], whole[1], whole[2]), options)
        grads = torch.autograd.grad((expected * upstream).sum(), whole)

        shard = partial(local_shard, ranks=ranks, each=each)
        own = [shard(x).requires_grad_() for x in whole]
        attend = partial(_attend, flash_plan if flash else plan, options)
        with on_cpu() if flash else nullcontext():
            out = sequence_parallel_attention(
                (own[0], own[1], own[2]), attend, num_tokens=count, group=group
            )
            ours = torch.autograd.grad((out * shard(upstream)).sum(), own)
        pairs = zip((out.detach(), *ours), (expected.detach(), *grads), strict=True)
        real = max(0, count - ranks.rank * each)  # what is behind is padding
        errors = [float((a - shard(b))[:real].abs().sum()) for a, b in pairs]
        found[f"{heads} heads, {kv} kv, window {window}, flash {flash}"] = max(errors)
    return found


def entropies(ranks: RankGroup, engine: dict[str, Any]) -> dict[str, Any]:
    """A loss over log-probs and entropies: gradient norms of three steps, and the entropies."""
    made = cases.make_engine(ranks, Case(engine=engine))
    seen: list[float] = []

    def loss(outputs: Any, batch: Any) -> Any:
        entropy = outputs.entropy
        seen.extend(entropy.tolist())
        total = (entropy * torch.arange(len(entropy)) - outputs.logprobs).sum()
        return total / batch.num_tokens, cases.two_ranks.Stats(sums={"h": entropy.sum().detach()})

    norms, sums = [], []
    for _ in range(3):
        stats = made.forward_backward(two_ranks.ragged(), loss)
        sums.append(stats.floats()["h"])
        norms.append(made.optim_step().grad_norm)
    return {"norms": norms, "sums": sums}


def stop(ranks: RankGroup, engine: dict[str, Any]) -> dict[str, Any]:
    """A loss that is not finite on the last rank, and a weight that is not on any: a step is
    skipped on all ranks, with the same message."""
    found: dict[str, Any] = {}
    last = ranks.size - 1
    for what in ("loss", "weight"):
        case = Case(train={"max_consecutive_skips": 1}, engine=engine)
        made = cases.make_engine(ranks, case)
        assert made.optimizer is not None
        if what == "weight":
            at = made.optimizer.names.index("model.layers.1.mlp.up_proj.weight")
            made.optimizer.masters[at].data.fill_(torch.nan)
        loss = two_ranks.not_finite_on(ranks, last) if what == "loss" else two_ranks.nll
        made.forward_backward(two_ranks.ragged(), loss)
        try:
            made.optim_step()
            found[what] = "went on"
        except NonFiniteError as error:
            found[what] = str(error)
    return found


def overflow(ranks: RankGroup, engine: dict[str, Any]) -> dict[str, Any]:
    """fp16 with a scale that is too high at first: the trace of scales and skips; and the ranks'
    final weights."""
    precision = two_ranks.PrecisionConfig(
        dtype="fp16",
        fp16=Fp16Config(initial_scale_power=21, hysteresis=2, loss_scale_window=3),
    )
    made = cases.make_engine(ranks, Case(engine=engine), precision=precision)
    steps = []
    for _ in range(9):
        made.forward_backward(two_ranks.ragged(), two_ranks.nll)
        steps.append(made.optim_step())
    weights = {n: float(t.double().sum()) for n, t in made.weights()}
    return {"trace": [[s.loss_scale, s.skipped] for s in steps], "weights": weights}


def bf16(ranks: RankGroup, engine: dict[str, Any]) -> list[float]:
    """Log-probs after 4 steps."""
    precision = two_ranks.PRECISIONS["bf16"]
    made = cases.make_engine(ranks, Case(engine=engine), precision=precision)
    cases.train(made, 4)
    after: list[float] = made.logprobs(two_ranks.ragged()).tolist()
    return after


SAVED: dict[str, Any] = {
    "tied": Case(train={"ema_decay": 0.9, "lr": 1e-2}),
    "lora": Case(model="lora"),
    "critic": Case("critic"),
    "adafactor": Case(model="untied", train={"optimizer": "adafactor"}),
}


SAVED_BY = {
    "sp2": ("tied", "critic"),
    "sp2 sharded": ("lora", "adafactor"),
    "tp2": ("lora", "critic"),
    "tp2 sharded": ("tied", "adafactor"),
    "sp4": ("tied",),
    "sp2 x 2": ("lora",),
    "sp2 x 2 sharded": ("adafactor",),
    "tp2 x 2": ("tied",),
    "tp2 x 2 sharded": ("lora", "adafactor"),
}
"""States that each engine saves. Both kinds of parallelism have every state."""


KINDS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}
"""With biases of queries, keys and values; with norms of single heads."""


def prepare(folder: Path) -> None:
    """Checkpoints of the plain engine, and models in folders."""
    for name, case in SAVED.items():
        engine = cases.make_engine(SINGLE, case)
        cases.steps_of(case, engine, 3)
        engine.save(folder / f"alone {name}")
    for kind, config in KINDS.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(
            config(
                vocab_size=53,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                tie_word_embeddings=kind == "qwen2",
            )
        )
        for parameter in model.parameters():  # norms of 1 and biases of 0 would hide a mistake
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(folder / kind)


def from_folder(ranks: RankGroup, engine: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Other architectures, of which sharded ranks read their own parts: gradient norms of three
    steps, sums of the weights after them, and how much of the model is here."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        torch.manual_seed(0)
        config = ModelConfig(path=str(folder / kind))
        alone = ranks.group is None
        sharding = engine.get("sharding", "full")
        model: Any = load_causal_lm(config, empty=not alone and sharding == "full")
        options = {} if alone else {"sharding": sharding, **engine}
        train = TrainConfig(lr=1e-3, optimizer=AdamW(eps=1e-6), engine=TorchEngine(**options))
        made = engine_of(
            model, EngineSpec(TrainRole.alone("policy", train, config), total_steps=10), ranks=ranks
        )
        first = made.logprobs(two_ranks.ragged())
        norms = cases.train(made, 3)
        weights = {n: t.double() for n, t in made.weights()}
        here, whole = (sum(map(_numel_here, x)) for x in (model.parameters(), weights.values()))
        found[kind] = {
            "norms": norms,
            "logprobs": first.tolist(),
            "sums": {n: [float(t.sum()), float(t.square().sum())] for n, t in weights.items()},
            "own": here / whole,
        }
    return found


def _numel_here(parameter: Any) -> int:
    here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return int(here.numel())


def failing_save(ranks: RankGroup, engine: dict[str, Any], folder: Path) -> list[str]:
    """The last rank cannot write: all ranks raise, and no checkpoint exists."""
    made = cases.make_engine(ranks, Case(engine=engine))

    def refuse(*arguments: Any) -> None:
        raise OSError("no space left")

    modules = (burnish.train.torch.engine, burnish.train.fsdp.sharded_state)
    kept = [module.write_shards for module in modules]
    for module in modules:
        if ranks.rank == ranks.size - 1:
            module.write_shards = refuse  # type: ignore[assignment]
    told = []
    try:
        made.save(folder / "failed")
    except OSError as error:
        told.append(str(error))
    for module, write in zip(modules, kept, strict=True):
        module.write_shards = write
    ranks.any(False)
    return [*told, str((folder / "failed" / "engine.json").exists())]


def save_and_resume(
    ranks: RankGroup, engine: dict[str, Any], names: tuple[str, ...], folder: Path
) -> dict[str, Any]:
    """Three steps, saved; then two more here, in a new engine from the checkpoint, and from the
    checkpoint of a rank alone."""
    found: dict[str, Any] = {}
    for name in names:
        case = replace(SAVED[name], engine=engine)
        first = cases.make_engine(ranks, case)
        cases.steps_of(case, first, 3)
        first.save(folder / f"saved {name}")
        norms = cases.steps_of(case, first, 2)
        second = cases.make_engine(ranks, case)
        second.load(folder / f"saved {name}")
        again = cases.steps_of(case, second, 2)
        third = cases.make_engine(ranks, case)
        third.load(folder.parent / f"alone {name}")
        found[name] = {
            "norms": norms,
            "again": again,
            "from_alone": cases.steps_of(case, third, 2),
            "version": third.version,
            "announced": first.state_bytes,
        }
    return found


def traffic(ranks: RankGroup, engine: dict[str, Any]) -> dict[str, int]:
    """Number of elements that a rank passes to all-to-all and all-reduce calls of the layers,
    forward and backward of one micro-batch of 70 tokens."""
    made = cases.make_engine(
        ranks, Case(split="all at once", train={"layout": "packed"}, engine=engine)
    )
    sent = {"exchanged": 0, "summed": 0}
    exchange, reduce = ulysses.all_to_all_single, tensor_parallel.all_reduce

    def counted_exchange(got: Tensor, own: Tensor, **options: Any) -> None:
        sent["exchanged"] += own.numel()
        exchange(got, own, **options)

    def counted_reduce(own: Tensor, **options: Any) -> None:
        sent["summed"] += own.numel()
        reduce(own, **options)

    ulysses.all_to_all_single, tensor_parallel.all_reduce = counted_exchange, counted_reduce
    batch = two_ranks.accumulation.random_groups([(30, [20]), (5, [15])], torch.Generator())
    made.forward_backward(batch, two_ranks.nll)
    ulysses.all_to_all_single, tensor_parallel.all_reduce = exchange, reduce
    return sent


def mixed(ranks: RankGroup, engine: dict[str, Any]) -> float:
    """Largest difference of a frozen model that was mixed with a trained one from the mean of both,
    over all weights. Both are sharded alike."""
    policy = cases.make_engine(ranks, Case(engine=engine, model="untied"))
    frozen = cases.make_engine(
        ranks, Case(engine=engine, model="untied"), role="reference", trainable=False
    )
    before = cases.weights(frozen)
    cases.train(policy, 1)
    after = cases.weights(policy)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    frozen.mix(policy.weights(), 0.5)
    found = cases.weights(frozen)
    return max(float((found[n] - (before[n] + after[n]) / 2).abs().max()) for n in before)


OTHERS: dict[str, Callable[[RankGroup, dict[str, Any]], Any]] = {
    "entropies": entropies,
    "mixed": mixed,
    "stop": stop,
    "overflow": overflow,
    "bf16": bf16,
    "traffic": traffic,
}


def main(folder: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), size)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    ranks = RankGroup(torch.distributed.group.WORLD)
    tensors: dict[str, Tensor] = {}
    found: dict[str, Any] = {"attention": attention(ranks), "cases": {}, "adafactor": {}}
    for parts, scale in itertools.product(sorted({1, 2, size}), (False, True)):
        steps = cases.adafactor_steps(ranks, tensor_parallel=parts, scale=scale)
        found["adafactor"][f"{parts} {scale}"] = steps
    for name, engine in ENGINES[size].items():
        for case in cases_of(size, name):
            own, found["cases"][case.key] = cases.run_case(case, ranks)
            tensors |= {f"{case.key}|{key}": tensor.clone() for key, tensor in own.items()}
        found[name] = {"resumed": save_and_resume(ranks, engine, SAVED_BY[name], folder / name)}
        if size == 2:
            found[name] |= {key: run(ranks, engine) for key, run in OTHERS.items()}
            found[name]["folders"] = from_folder(ranks, engine, folder)
        if "tensor_parallel_size" in engine:
            found[name]["failed"] = failing_save(ranks, engine, folder / name)
    save_file(tensors, folder / f"rank{rank}.safetensors")
    (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
