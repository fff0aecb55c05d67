"""Every train engine of the registry has an implementation and runs in the contract suite."""

from __future__ import annotations

import sys
from typing import Any, get_args

import pytest

from burnish.config.model import ModelConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.config.train_engines import TrainEngineConfig
from burnish.train.engine import BaseTrainEngine
from burnish.train.engines import engine_class
from burnish.train.spec import EngineSpec

pools: Any = sys.modules["tests.contract.pools"]
REGISTERED = get_args(get_args(TrainEngineConfig)[0])


def test_every_registered_engine_is_in_the_suite() -> None:
    kinds = {kind.engine.get("kind", "torch") for kind in pools.KINDS.values()}
    assert kinds == {options().kind for options in REGISTERED}


@pytest.mark.parametrize("options", REGISTERED)
def test_every_registered_engine_is_built_from_the_template(options: Any) -> None:
    train = TrainConfig(engine=options())
    spec = EngineSpec(TrainRole.alone("policy", train, ModelConfig(scratch=ScratchConfig())))
    found = engine_class(spec)
    assert issubclass(found, BaseTrainEngine)
    assert not found.__abstractmethods__, "a hook without an implementation"
