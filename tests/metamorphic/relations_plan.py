"""Relations of memory plans: what is planned, and what an engine has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from metamorphic.base import Draw, Refused, equal, relation
from metamorphic.draw_models import USUAL, families
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from burnish.config import load_config
from burnish.config.model import LoraConfig, ModelConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.load import load_causal_lm
from burnish.models.nf4 import Nf4Layer
from burnish.models.shrink import build, shrink
from burnish.models.value_head import load_scalar_model
from burnish.optimizers.rule import OptimizerError
from burnish.plan.hardware import parse_cluster, this_machine
from burnish.plan.model_state import EngineSetup, checkpoint_bytes
from burnish.plan.predict import make_plan
from burnish.plan.shapes import shape_of
from burnish.train.base import Outputs
from burnish.train.engines import make_engine
from burnish.train.spec import EngineSpec
from burnish.types import Batch, Stats, rows_to_batch

ROWS = {"data": {"sources": ["pairs.jsonl"], "max_len": 24}}
PROMPTS = {
    "data": {"sources": ["prompts.jsonl"], "prompt_max_len": 8},
    "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "generate_max_len": 8},
}
JOBS: dict[str, dict[str, Any]] = {"sft": ROWS, "rm": ROWS, "rl": PROMPTS}


@relation
def planned_parameters(draw: Draw) -> None:
    """A plan has the parameters, the trained parameters and the bytes of a checkpoint of the engine
    that trains: every family, heads of reward models, and all forms of LoRA.

    Exact, without the steps that a checkpoint counts."""
    config, vocabulary = _model(draw)
    outputs = draw.one(outputs=[None, None, 1, 3])
    train = TrainConfig(
        lr=1e-3,
        optimizer=draw.one(optimizer=["adamw", "adamw", "adafactor", "muon", "adamw_8bit"]),
        ema_decay=draw.one(ema_decay=[None, None, 0.9]),
    )
    engine = _engine(config, train, outputs)
    shape = shape_of(config, scalar=outputs is not None, outputs=outputs or 1)
    trained = [p.shape for p in engine.model.parameters() if p.requires_grad]
    planned = [weight.shape for unit in shape.units for weight in unit.trained]
    equal(sorted(planned), sorted(map(tuple, trained)), "shapes of trained parameters")
    equal(shape.parameters + shape.adapters, _entries(engine.model), "entries of all parameters")
    rows = [draw.rng.choices(range(5, vocabulary), k=4) for _ in range(2)]
    masks = [[False, True, True, True]] * 2
    engine.forward_backward(rows_to_batch(rows, masks, prompt_lens=[1, 1]), _sum)
    if any(p.grad is None for p in engine.model.parameters() if p.requires_grad):
        raise Refused("parameters that no pass uses have no state")
    engine.optim_step()
    engine.save(draw.folder / "checkpoint")
    setup = EngineSetup(shape, train, engine.spec.role.precision)
    equal(checkpoint_bytes(setup), _written(draw.folder / "checkpoint"), "bytes of a checkpoint")


@relation
def plan_of_a_family(draw: Draw) -> None:
    """Every model that loads has a plan, on a CPU and on a GPU, with the moments of its trained
    parameters.

    Exact: two moments of 4 bytes."""
    config, _ = _model(draw)
    job = draw.one(job=list(JOBS))
    scalar = job == "rm"
    if scalar:
        load_scalar_model(config, new_head="zero")
    else:
        load_causal_lm(config)
    model = config.model_dump(exclude_unset=True, exclude_defaults=True)
    tree = {"job": job, "max_steps": 1, "model": model, "train": {"train_batch_size": 2}}
    plan = make_plan(
        load_config({**tree, **JOBS[job]}),
        draw.rng.choice([this_machine(), parse_cluster("1x1xA800-80GB")]),
    )
    shape = shape_of(config, scalar=scalar)
    step = [row for row in plan.rows if row.phase == "step" and row.how.startswith("moments")]
    equal([row.bytes for row in step], [8 * shape.trained], "bytes of moments")


def _model(draw: Draw) -> tuple[ModelConfig, int]:
    """Draw a small model in a folder, with or without LoRA; also the end of its usual tokens."""
    name = draw.one(family=USUAL if draw.rng.random() < 0.5 else families.names())
    try:
        small = shrink(families.config_of(name))
        if draw.rng.random() < 0.5:
            small.get_text_config().tie_word_embeddings = False
            small.tie_word_embeddings = False
        network: Any = build(small, seed=1)
    except Exception as error:
        raise Refused(f"transformers cannot build a small {name}: {error}") from error
    network.save_pretrained(draw.folder / "model")
    lora = _lora(draw, network) if draw.rng.random() < 0.75 else None
    rows = network.get_input_embeddings().weight.shape[0]
    return ModelConfig(path=str(draw.folder / "model"), lora=lora), min(90, int(rows))


def _lora(draw: Draw, network: Any) -> LoraConfig:
    rng = draw.rng
    names = sorted({n.rpartition(".")[2] for n, m in network.named_modules() if _is_layer(m)})
    modules = sorted({n.rpartition(".")[2] for n, m in network.named_modules() if n} - {""})
    some = tuple(rng.sample(names, min(len(names), rng.randint(1, 3))))
    experts = (*some[:1], "gate_proj", "down_proj")
    pattern = rf".*[.]0[.].*{re.escape(rng.choice(names))}"
    targets = rng.choice(["all-linear", "all-linear", some, experts, pattern])
    saved: tuple[str, ...] = ()
    if rng.random() < 0.5:
        ends = [n for n in modules if n in ("lm_head", "embed_tokens", "wte", "norm", "ln_f")]
        saved = (rng.choice([*ends, *ends, *modules]),)
    lora = LoraConfig(
        lora_rank=rng.randint(1, 6),
        target_modules=targets,
        modules_to_save=tuple(set(saved) - set(targets if isinstance(targets, tuple) else ())),
        use_dora=rng.random() < 0.2,
        quantization=rng.choice([None, None, None, "nf4"]),
    )
    draw.note(lora=lora)
    return lora


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D | nn.Embedding)


def _engine(config: ModelConfig, train: TrainConfig, outputs: int | None) -> Any:
    role: Any = "policy"
    if outputs is None:
        network: Any = load_causal_lm(config)
    else:
        role = "reward"
        network = load_scalar_model(config, new_head="random", num_outputs=outputs)
    spec = EngineSpec(
        TrainRole.alone(role, train, config, outputs=outputs or 1), micro_batch_size=2
    )
    try:
        return make_engine(network, spec)
    except OptimizerError as error:
        raise Refused(str(error)) from error


def _entries(model: nn.Module) -> int:
    """Number of entries of all parameters, of 4-bit ones without their packing."""
    packed = [m for m in model.modules() if isinstance(m, Nf4Layer)]
    codes = {id(layer.packed) for layer in packed}
    plain = sum(p.numel() for p in model.parameters() if id(p) not in codes)
    return plain + sum(torch.Size(layer.full_shape).numel() for layer in packed)


def _written(folder: Path) -> float:
    """Bytes of the tensors in a checkpoint, without buffers and counts of steps."""
    total = 0.0
    for file in folder.glob("*.safetensors"):
        if file.stem in ("buffer", "step"):
            continue
        total += sum(tensor.nbytes for tensor in load_file(file).values())
    return total


def _sum(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
    found = outputs.values if outputs.logprobs is None else outputs.logprobs
    assert found is not None
    return found.sum() / batch.num_tokens, Stats()
