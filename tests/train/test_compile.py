"""A train engine with compiled layers (``train.compile``). Several ranks: test_fsdp_engine.py and
test_parallel_engines.py."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import compiles  # noqa: F401

from burnish.distributed.process_group import SINGLE
from burnish.train.base import NonFiniteError

_SPEC = importlib.util.spec_from_file_location(
    "fsdp_cases", Path(__file__).with_name("fsdp_cases.py")
)
assert _SPEC is not None and _SPEC.loader is not None
cases: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["fsdp_cases"] = cases  # its dataclasses look their module up
_SPEC.loader.exec_module(cases)

COMPILED = {"compile": "layers"}


@pytest.mark.parametrize("model", ["tied", "lora"])
def test_steps_with_compiled_layers_are_those_of_eager_layers(model: str) -> None:
    """fp32 in another order: 1e-5 in log-probs, and in weights after two steps at lr 1e-3."""
    plain, said = cases.run_case(cases.Case(model=model), SINGLE)
    compiled, found = cases.run_case(cases.Case(model=model, train=COMPILED), SINGLE)
    for name, tensor in plain.items():
        assert float((tensor - compiled[name]).abs().max()) <= 1e-5, name
    assert found == pytest.approx(said, rel=1e-5, abs=1e-5)


def test_graphs_and_the_time_of_compiling_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    engine = cases.make_engine(SINGLE, cases.Case(train=COMPILED))
    with caplog.at_level(logging.INFO, "burnish"):
        cases.train(engine, 2)
    lines = [record.getMessage() for record in caplog.records if "graphs" in record.getMessage()]
    assert len(lines) == 1 and lines[0].startswith("policy: compiled 4 graphs of its layers in ")


def test_the_first_bad_tensor_is_found_inside_a_compiled_layer() -> None:
    train = {**COMPILED, "max_consecutive_skips": 1}
    engine = cases.make_engine(SINGLE, cases.Case(train=train))
    cases.train(engine, 1)
    name = "model.layers.1.mlp.up_proj"
    assert engine.optimizer is not None
    master = engine.optimizer.masters[engine.optimizer.names.index(f"{name}.weight")]
    master.detach().fill_(3e38)  # finite, and its products are not
    engine.forward_backward(cases.two_ranks.ragged(), cases.two_ranks.nll)
    with pytest.raises(NonFiniteError, match=rf"{name}\b(?!\.weight)"):
        engine.optim_step()
