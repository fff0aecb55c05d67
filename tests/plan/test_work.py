"""Operations of a pass as they are counted for its time (``plan/work.py``)."""

from __future__ import annotations

import pytest
import torch

from burnish.config.model import ModelConfig
from burnish.models.sdpa import Kernels
from burnish.plan.activations import Pass, key_of, measure
from burnish.plan.shapes import shape_of
from burnish.plan.work import KERNELS_OF_RUN, WorkCounter
from burnish.train.row_layout import RowSize


def test_a_compiled_run_reads_its_inputs_and_writes_its_results_once() -> None:
    """x of 4000 B. As they are, x + x, its sine and the sum of that and x move 8000, 8000 and 12000
    B; compiled, x is read and the sum is written. A product ends the run: 2 x 4000 B of factors and
    400 B of results (10 x 10 numbers)."""
    x = torch.randn(10, 100)
    with WorkCounter() as counter:
        y = (x + x).sin() + x
        z = y @ x.T
        z.mul_(2)
    counted = counter.counted
    product = 4000 + 4000 + 400
    assert counted.body.bytes == 28000 + product + 400
    assert counted.compiled.bytes == 8000 + product + 400 + 400, "the last run reads and writes z"
    assert counted.body.kernels == 5 and counted.compiled.kernels == 1 + 2 * KERNELS_OF_RUN
    assert counted.compiled.matmul_flops == counted.body.matmul_flops == 2 * 10 * 100 * 10


def test_compiled_layers_are_planned_with_the_kernels_that_the_compiler_makes() -> None:
    """Per layer of Qwen3, forward and backward: 21 matrix products, 2 calls of attention, 24
    kernels of the compiler; without compiling 170. The rest is outside of the layers."""
    rows = (RowSize(600, 1, 0), RowSize(599, 1, 1))
    work = Pass(rows, dtype="bf16", kernels=Kernels((2, 13), (9, 0)), flash=True)
    counted = measure(key_of(shape_of(ModelConfig(path="Qwen/Qwen3-0.6B"))), work).work
    assert counted is not None
    assert counted.compiled.kernels / 28 == pytest.approx(21 + 2 + 24, abs=1)
    assert counted.body.kernels / 28 == pytest.approx(170, abs=3)
    assert 0.3 < counted.compiled.bytes / counted.body.bytes < 0.5
