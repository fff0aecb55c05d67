"""Muon as the update rule of the matrices in decoder layers, AdamW as that of the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from burnish.models.load import DTYPES
from burnish.models.units import layers_of
from burnish.optimizers.adamw.rule import adamw_rules
from burnish.optimizers.config import WeightShape
from burnish.optimizers.muon.config import Muon
from burnish.optimizers.muon.update import Matrix, MuonOptimizer, MuonSettings
from burnish.optimizers.rule import OptimizerError, RuleInputs, UpdateRule, embedding_names

_FUSED = re.compile(r"qkv|c_attn|query_key_value|W_pack|in_proj", re.IGNORECASE)
"""Names of projections that hold several matrices, in an order that differs between families."""


def make_rules(config: Muon, inputs: RuleInputs) -> list[UpdateRule]:
    """Return the rule of the matrices and AdamW's rule of the rest. Raises OptimizerError if the
    model has no matrices, or if one cannot be split over tensor-parallel ranks."""
    trained, tp_plan = inputs.trained, inputs.tp_plan
    halves_of = hidden_matrices(inputs.model, {t.name: t.shape for t in trained}, config)
    matrices = [t for t in trained if t.name in halves_of]
    if tp_plan is not None and (
        several := [t.name for t in matrices if halves_of[t.name] or len(t.shape) > 2]
    ):
        raise OptimizerError(
            f"train.optimizer.kind=muon with train.engine.tensor_parallel_size="
            f"{tp_plan.model_parallel.size}: {several[0]} holds several matrices, whose split over "
            "ranks is not supported; use sharding=full without tensor parallelism, or add it to "
            "train.optimizer.adamw_params"
        )
    tp_dims = {t.name: None if tp_plan is None else tp_plan.dim(t.name) for t in matrices}
    group = {} if tp_plan is None else {"tensor_parallel": tp_plan.model_parallel}
    muon = MuonOptimizer(
        [Matrix(t.master, t.shape, halves_of[t.name], tp_dims[t.name]) for t in matrices],
        muon_settings(config, weight_decay=inputs.train.weight_decay),
        device=inputs.device,
        **group,
    )
    lr_ratio = (config.matrix_lr or inputs.lr) / inputs.lr
    rule = UpdateRule(muon, {"momentum": "momentum"}, lr_ratio=lr_ratio)
    rest = [t for t in trained if t.name not in halves_of]
    return [rule, *adamw_rules(config, rest, inputs)]


def muon_settings(config: Muon, *, weight_decay: float) -> MuonSettings:
    """Return the settings of the update."""
    return MuonSettings(
        momentum=config.momentum,
        nesterov=config.nesterov,
        steps=config.ns_steps,
        dtype=DTYPES[config.ns_dtype],
        scale=config.lr_scale,
        weight_decay=weight_decay,
    )


def hidden_matrices(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], config: Muon
) -> dict[str, bool]:
    """Return the parameters that Muon trains -> whether their rows are two matrices.

    These are the weight matrices and stacks of expert matrices in the decoder layers (of adapters:
    A and B, each a matrix). Raises OptimizerError if there are none, and for a parameter with
    several matrices in an unknown order.
    """
    body = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    inside = {id(p) for _, layer in layers_of(body) for p in layer.parameters()} if body else set()
    parameters = dict(model.named_parameters())
    tables = embedding_names(model)
    hidden_size = None if body is None else body.config.get_text_config().hidden_size
    halves_of: dict[str, bool] = {}
    for name, shape in shapes.items():
        if config.trains(WeightShape(name, shape, name in tables, id(parameters[name]) in inside)):
            halves_of[name] = _is_two_matrices(name, shape, hidden_size)
    if not halves_of:
        raise OptimizerError(
            f"train.optimizer.kind=muon: {type(model).__name__} has no matrix in decoder layers "
            "that is trained with Muon; use train.optimizer.kind=adamw"
        )
    return halves_of


def _is_two_matrices(name: str, shape: tuple[int, ...], hidden_size: int | None) -> bool:
    """Return whether a parameter is the gate and up projection in one. Raises OptimizerError for
    other parameters that hold several matrices."""
    if "lora_" in name:
        return False
    if "gate_up_proj" in name:
        if shape[-1] == hidden_size and shape[-2] != hidden_size:
            return True
    elif not _FUSED.search(name):
        return False
    part = name.removesuffix(".weight").rpartition(".")[2]
    raise OptimizerError(
        f"train.optimizer.kind=muon: {name} {list(shape)} holds several matrices in one tensor, "
        "in an order that differs between model families, and Muon must orthogonalize each of "
        f"them alone; train it with AdamW (train.optimizer.adamw_params=[{part}]), or use "
        "train.optimizer.kind=adamw"
    )
