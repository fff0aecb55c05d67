"""``train.on_oom=retry_smaller``: a pass that does not fit is halved, and the step stays the
same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from burnish.config.train import TrainConfig
from burnish.config.train_engines import DeepSpeedEngine, TorchEngine
from burnish.oom import is_out_of_memory
from burnish.train.batching import MicroBatchBackoff
from burnish.types import Batch

FULL = "[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes."


def limit_rows(engine: Any, most: int, *, in_backward: bool = False) -> list[int]:
    """Passes over more rows than ``most`` run out of memory; returns the list of passes tried."""
    plain, tried = engine._micro_loss, list[int]()

    def micro_loss(batch: Batch, rows: list[int], loss: Any) -> Any:
        tried.append(len(rows))
        scalar, stats = plain(batch, rows, loss)
        if len(rows) <= most:
            return scalar, stats
        if not in_backward:
            raise RuntimeError(FULL)
        first = next(p for n, p in engine.model.named_parameters() if "layers.0" in n)
        first.register_hook(_fail_once(tried))
        return scalar, stats

    engine._micro_loss = micro_loss
    return tried


def _fail_once(tried: list[int]) -> Callable[[torch.Tensor], None]:
    at = len(tried)

    def hook(_: torch.Tensor) -> None:
        if len(tried) == at:  # in the pass that registered it
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    return hook


def gradients(engine: Any) -> list[torch.Tensor]:
    assert engine.optimizer is not None
    return [g.clone() for g in engine.optimizer.gradients()]


def last_passes(tried: list[int], rows: int) -> list[int]:
    """The passes at the end that together have ``rows`` rows."""
    last: list[int] = []
    while sum(last) < rows:
        last.insert(0, tried[-1 - len(last)])
    assert sum(last) == rows
    return last


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("layout", ["shared_prefix", "packed", "padded"])
def test_a_step_in_smaller_passes_has_the_same_gradient(
    make_engine: Any, ragged_batch: Batch, nll: Any, layout: str, in_backward: bool, dtype: str
) -> None:
    """In backward the head's and the last layers' gradients are already added when layer 0 fails.
    fp32: sums in another order; bf16: 8 bits of mantissa round each pass's gradient."""
    batch = ragged_batch.with_global_counts()
    plain = make_engine(layout=layout, dtype=dtype)
    retried = make_engine(layout=layout, dtype=dtype, on_oom="retry_smaller")
    tried = limit_rows(retried, 3, in_backward=in_backward)
    for engine in (plain, retried):
        engine.forward_backward(batch, nll)
    assert tried[0] == 8 and max(last_passes(tried, 8)) <= 3
    tolerance = 1e-6 if dtype == "fp32" else 2e-2
    for a, b in zip(gradients(plain), gradients(retried), strict=True):
        assert (a - b).norm() <= tolerance * max(1.0, float(a.norm()))


def test_batches_before_in_the_same_step_are_counted_once(
    make_engine: Any, ragged_batch: Batch, nll: Any
) -> None:
    batch = ragged_batch.with_global_counts()
    halves = [batch.select([0, 1, 2]), batch.select([3, 4, 5, 6, 7])]
    plain, retried = make_engine(), make_engine(on_oom="retry_smaller")
    limit_rows(retried, 4, in_backward=True)
    for engine in (plain, retried):
        sums = [engine.forward_backward(half, nll).sums["tokens"] for half in halves]
        assert sums == [3 + 7 + 1, 11 + 2 + 2 + 8 + 5]
    for a, b in zip(gradients(plain), gradients(retried), strict=True):
        assert torch.allclose(a, b, atol=1e-6)  # sums in another order
    assert len(retried._losses) == 3  # of 3, 3 and 2 rows


def test_the_reduced_size_is_kept_and_retries_are_counted(
    make_engine: Any, ragged_batch: Batch, nll: Any
) -> None:
    engine = make_engine(on_oom="retry_smaller", layout="padded")
    tried = limit_rows(engine, 2)
    batch = ragged_batch.with_global_counts()
    engine.forward_backward(batch, nll)
    first = engine.optim_step()
    assert first.oom_retries and first.oom_retries >= 2  # 8 -> 4 -> 2
    tried.clear()
    engine.forward_backward(batch, nll)
    assert max(tried) <= 2 and sum(tried) == 8
    assert engine.optim_step().oom_retries == 0
    assert make_engine().smaller is None


def test_a_single_row_that_does_not_fit_is_an_error_with_its_size(
    make_engine: Any, ragged_batch: Batch, nll: Any
) -> None:
    engine = make_engine(on_oom="retry_smaller")
    limit_rows(engine, 0)
    with pytest.raises(RuntimeError, match="not enough memory") as raised:
        engine.forward_backward(ragged_batch.with_global_counts(), nll)
    assert "must stay in one micro-batch" in "".join(raised.value.__notes__)


def test_by_default_the_error_propagates(make_engine: Any, ragged_batch: Batch, nll: Any) -> None:
    engine = make_engine()
    tried = limit_rows(engine, 4)
    with pytest.raises(RuntimeError, match="not enough memory"):
        engine.forward_backward(ragged_batch.with_global_counts(), nll)
    assert tried == [8]


def test_row_groups_are_never_split(ragged_batch: Batch) -> None:
    pairs = replace(ragged_batch, rows_per_unit=2)
    smaller = MicroBatchBackoff("shared_prefix", forget=lambda: None)
    smaller.most_tokens = 1
    assert list(smaller.parts(pairs, list(range(8)))) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    "engine",
    [
        DeepSpeedEngine(),
        TorchEngine(sharding="full"),
        TorchEngine(tensor_parallel_size=2),
        TorchEngine(sequence_parallel_size=2),
    ],
    ids=["deepspeed", "full", "tensor", "sequence"],
)
def test_on_oom_retry_is_refused_if_ranks_synchronize_in_a_pass(engine: Any) -> None:
    config = TrainConfig(train_batch_size=4, engine=engine, on_oom="retry_smaller")
    assert any("leave the others waiting" in rule for rule in config.rules())
    assert not list(config.model_copy(update={"on_oom": "fail"}).rules())


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError(FULL), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_errors_about_memory_are_recognised(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) is is_memory


def test_a_failed_real_allocation_is_recognised() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value), raised.value


def test_rows_of_one_sample_are_never_cut(ragged_batch: Batch) -> None:
    """Samples of rows 0 3 5, 1 2 and 4: halved into the first and the others, then no more."""
    ids = torch.tensor([0, 1, 1, 0, 2, 0, 9, 9])
    episodes = replace(ragged_batch, sample_ids=ids, samples_together=True)
    smaller = MicroBatchBackoff("packed", forget=lambda: None)
    smaller.most_tokens = 1
    parts = list(smaller.parts(episodes, [0, 1, 2, 3, 4, 5]))
    assert parts == [[0, 3, 5], [1, 2], [4]]
    full = RuntimeError(FULL)
    assert not smaller.try_reduce(full, episodes, [0, 3, 5])
    assert "3 row(s)" in full.__notes__[0]
    assert smaller.try_reduce(RuntimeError(FULL), episodes, [0, 3, 5, 4])
