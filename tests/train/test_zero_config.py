"""Burnish's settings in DeepSpeed's words. (No DeepSpeed is needed.)"""

from __future__ import annotations

from typing import Any

import pytest

from burnish.config.model import ModelConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.config.train_engines import DeepSpeedEngine
from burnish.train.deepspeed.zero import ds_config, zero_section
from burnish.train.spec import EngineSpec


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize(
    ("engine", "sections"),
    [
        ({"zero_stage": 3}, set()),
        ({"zero_stage": 1, "adam_offload": True}, {"offload_optimizer"}),
        ({"zero_stage": 3, "param_offload": True}, {"offload_param"}),
        (
            {"zero_stage": 3, "adam_offload": True, "param_offload": True},
            {"offload_optimizer", "offload_param"},
        ),
    ],
)
def test_offloaded_memory_is_pinned_only_with_a_gpu(
    engine: dict[str, Any], sections: set[str], on_gpu: bool
) -> None:
    chosen = DeepSpeedEngine(**engine)
    section = zero_section(chosen, on_gpu=on_gpu)
    found = {name: value for name, value in section.items() if name.startswith("offload_")}
    assert found == {name: {"device": "cpu", "pin_memory": on_gpu} for name in sections}
    spec = EngineSpec(
        TrainRole.alone("policy", TrainConfig(engine=chosen), ModelConfig(scratch=ScratchConfig()))
    )
    assert ds_config(spec, on_gpu=on_gpu)["zero_optimization"] == section
