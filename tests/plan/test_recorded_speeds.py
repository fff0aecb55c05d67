"""The time of a plan, compared with every speed that was measured on a GPU."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from burnish.models.sdpa import Kernels
from burnish.plan.activations import Pass, key_of, measure
from burnish.plan.hardware import load_tables, parse_cluster
from burnish.plan.rollout_role import bytes_per_token
from burnish.plan.speeds import Speeds
from burnish.plan.work import attention_work, pairs, work_by_formula
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.memory import LAYER_KERNELS, decode_step
from burnish.train.row_layout import RowSize

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from planned_speeds import (
    PAGE,
    RECORDED,
    SHAPE,
    kernel_seconds,
    recorded_pass,
    written,
)

WITHIN = 0.2
"""Share by which an estimate may differ: cards of one type differ by some percent."""


@pytest.mark.parametrize("case", RECORDED["training"], ids=lambda c: "-".join(map(str, c.values())))
def test_training_takes_the_planned_time(case: dict[str, Any]) -> None:
    work = recorded_pass(case["rows"], flash=case["attention"] == "flash")
    kernels = kernel_seconds(case["card"], work)
    assert sum(kernels.values()) == pytest.approx(case["seconds"], rel=WITHIN)
    counted, speeds = measure(key_of(SHAPE), work).work, Speeds(parse_cluster(case["card"]))
    assert counted is not None
    assert speeds.launch_s((counted.body + counted.head).kernels) < case["seconds"]


def test_the_page_has_the_planned_times() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert written(text) == text, "run: python benchmarks/planned_speeds.py --write"


@pytest.mark.parametrize("case", RECORDED["decoding"], ids=lambda c: "-".join(map(str, c.values())))
def test_decoding_takes_the_planned_time(case: dict[str, Any]) -> None:
    """As measured: with 39 kernels in a layer instead of 37, and graphs that read powers of two."""
    graphs, layers = case["graphs"], len(SHAPE.layers)
    step = decode_step(LocalEngine(cuda_graphs=graphs), layers=layers, length=768)
    more = layers * (39 - LAYER_KERNELS)
    recorded = step.recorded + more if graphs else step.recorded
    launched = step.launched if graphs else step.launched + more
    cached = 1024 if graphs else 768
    read = 2 * SHAPE.parameters + case["samples"] * cached * bytes_per_token(SHAPE, "bf16")
    seconds = Speeds(parse_cluster(case["card"])).decode_seconds(read, recorded, launched)
    assert 1e3 * seconds == pytest.approx(case["ms"], rel=WITHIN)


def test_rates_that_were_measured_alone_are_not_fitted() -> None:
    """Memory and masked attention: means over both cards, rounded."""
    shares: dict[str, list[float]] = {"memory": [], "masked_attention": []}
    for case in RECORDED["alone"]:
        gpu = parse_cluster(case["card"]).gpu
        assert gpu is not None
        if "rows" in case:
            work = recorded_pass(case["rows"], flash=False)
            rows, layout = work.rows, work.layout
            flops = attention_work(SHAPE, rows, layout, flash=False).masked / len(SHAPE.layers)
        else:
            count, length = case["equal_rows"]
            flops = 4.0 * count * length**2 * SHAPE.heads * SHAPE.head_dim
        seconds = case["attention_ms"] / 1e3
        shares["masked_attention"].append(3.5 * flops / seconds / (gpu.bf16_tflops * 1e12))
        shares["memory"].append(case["read_gbs"] / gpu.memory_gbs)
    used = load_tables().efficiency
    assert used["memory"] == round(sum(shares["memory"]) / 2, 2)
    assert used["masked_attention"] == round(sum(shares["masked_attention"]) / 2, 3)


@pytest.mark.parametrize("train", [False, True])
def test_the_formula_is_near_the_trace(train: bool) -> None:
    """The formula is used for models that cannot be traced."""
    rows = tuple(RowSize(1024, 128, i) for i in range(8))
    work = Pass(
        rows=rows,
        dtype="bf16",
        train=train,
        chunk_tokens=2048,
        kernels=Kernels((2, 11), (9, 0)),
        flash=True,
    )
    traced = measure(key_of(SHAPE), work).work
    formula = work_by_formula(
        SHAPE, tokens=work.tokens, actions=work.actions, train=train, checkpointing=False
    )
    assert traced is not None
    assert formula.body.matmul_flops == pytest.approx(traced.body.matmul_flops, rel=0.05)
    # (the logits of the last chunk are not computed again)
    assert formula.head.matmul_flops == pytest.approx(traced.head.matmul_flops, rel=0.1)
    assert formula.body.bytes == pytest.approx(traced.body.bytes, rel=1 / 3)
    assert formula.head.bytes == pytest.approx(traced.head.bytes, rel=1 / 3)
    assert formula.body.kernels == pytest.approx(traced.body.kernels, rel=1 / 3)


@pytest.mark.parametrize("window", [None, 1, 3, 7, 20])
@pytest.mark.parametrize(("queries", "prefix"), [(1, 0), (6, 0), (4, 5), (9, 2)])
def test_pairs_are_those_of_a_mask(queries: int, prefix: int, window: int | None) -> None:
    seen = sum(
        1
        for q in range(prefix, prefix + queries)
        for k in range(prefix + queries)
        if k <= q and (window is None or k > q - window)
    )
    assert pairs(queries, prefix, window) == seen


def test_the_kernels_of_log_probs_read_and_write_less() -> None:
    """Per token of a head with 151,936 entries: PyTorch's operations take 18 sweeps over fp32
    logits in forward and 14 in backward, without entropies in the loss; the kernels one read of
    bf16 logits and two in place, and the products write and read them four times (one of the
    chunks is not recomputed). The products are the same."""
    plain = replace(recorded_pass("rl_short", flash=True), with_entropy=True)
    fused = replace(plain, fused_chunk_tokens=2176)
    with_kernels, without = (measure(key_of(SHAPE), work).work for work in (fused, plain))
    assert with_kernels is not None and without is not None
    assert with_kernels.head.bytes < without.head.bytes / 4
    # fewer chunks of the same tokens are traced and recomputed
    assert with_kernels.head.matmul_flops == pytest.approx(without.head.matmul_flops, rel=0.05)
    assert with_kernels.body == without.body
