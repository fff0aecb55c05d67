"""From a recipe's ``train.engine`` to the engine, and to the way its model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from torch import nn
from transformers import PreTrainedTokenizerBase

from burnish.config.model import Dtype
from burnish.config.train import DeepSpeedEngine
from burnish.train.fsdp import torch_engine
from burnish.train.ranks import ALONE, Ranks
from burnish.train.torch import EngineSpec, TorchTrainEngine


def make_engine(
    model: nn.Module,
    spec: EngineSpec,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    ranks: Ranks = ALONE,
) -> TorchTrainEngine:
    """The engine that ``spec.train.engine`` names, over ``model``."""
    if isinstance(spec.train.engine, DeepSpeedEngine):
        from burnish.train.deepspeed import DeepSpeedTrainEngine

        engine = DeepSpeedTrainEngine(model, spec, tokenizer=tokenizer, ranks=ranks)
        return cast(TorchTrainEngine, engine)  # of which runtimes use what both have
    return torch_engine(model, spec, tokenizer=tokenizer, ranks=ranks)


@contextmanager
def loading(spec: EngineSpec, dtype: Dtype, ranks: Ranks = ALONE) -> Iterator[None]:
    """Inside, a model that is loaded in ``dtype`` is cut into shards at once if the engine wants
    it so."""
    if not isinstance(spec.train.engine, DeepSpeedEngine):
        yield
        return
    from burnish.train.deepspeed import loading as in_shards

    with in_shards(spec.train.engine, dtype, ranks):
        yield


def shares_weights(spec: EngineSpec) -> bool:
    """Whether the engine's model can be run by others as it is: not where its weights are in
    shards, or its layers cut."""
    engine = spec.train.engine
    if isinstance(engine, DeepSpeedEngine):
        return engine.zero_stage < 3
    return engine.tensor_parallel_size == 1
