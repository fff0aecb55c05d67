"""FlashAttention over packed rows (models/flash.py), on operators of plain matmuls, against dense
attention in fp64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import burnish.models.flash as flash
from burnish.models.flash import FlashPlan, FlashSwitch, flash_attention, flash_plan, prefix_lengths
from burnish.models.flash_merge import fused_merge, merge_by_torch, triton_merge
from burnish.models.flash_reference import on_cpu
from burnish.models.segments import Segment
from burnish.train.row_layout import RowSize, place_rows, segments_of

EXACT = 1e-12
NEEDS_TRITON = "needs triton: pip install -c constraints/cpu.txt triton (Linux)"


@pytest.fixture(autouse=True, scope="module")
def operators() -> Iterator[None]:
    with on_cpu():
        yield


def segments_for(groups: Sequence[tuple[int, Sequence[int]]]) -> list[Segment]:
    """Segments of (prompt, responses) per group, as training lays them out."""
    rows = [
        RowSize(prompt + response, prompt, number)
        for number, (prompt, responses) in enumerate(groups)
        for response in responses
    ]
    return segments_of(place_rows(rows, "shared_prefix"))


def plan_of(segments: Sequence[Segment]) -> FlashPlan:
    return flash_plan(segments, torch.device("cpu"), FlashSwitch(may_fall_back=False))


def dense(segments: Sequence[Segment], qkv: Sequence[Tensor], window: int | None) -> Tensor:
    """Attention of each segment by itself, with copies of its prefix."""
    query, key, value = qkv
    outputs = []
    for s in segments:
        at = torch.cat(
            [torch.arange(s.prefix_start, s.prefix_end), torch.arange(s.q_start, s.q_end)]
        )
        k, v = (x[at].repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[s.q_start : s.q_end], k) * 0.3
        own, keys = torch.arange(s.q_len)[:, None] + s.prefix_len, torch.arange(s.k_len)
        hidden = keys > own
        if window is not None:
            hidden |= keys <= own - window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


def tensors(segments: Sequence[Segment], heads: tuple[int, int], seed: int = 0) -> list[Tensor]:
    """Query, key, value, and the gradient of the output."""
    draw, total = torch.Generator().manual_seed(seed), segments[-1].q_end
    shapes = [heads[0], heads[1], heads[1], heads[0]]
    return [torch.randn(total, h, 8, generator=draw, dtype=torch.float64) for h in shapes]


def results(attention: Any, qkv: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Output, and gradients of query, key and value."""
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = attention(leaves)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def both(
    segments: Sequence[Segment], heads: tuple[int, int], window: int | None, seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    *qkv, grad = tensors(segments, heads, seed)
    plan = plan_of(segments)
    return (
        results(lambda x: flash_attention(plan, tuple(x), scale=0.3, window=window), qkv, grad),
        results(lambda x: dense(segments, x, window), qkv, grad),
    )


def assert_exact(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y, atol=EXACT, rtol=0)


GROUPS = [(4, [3, 1, 5]), (1, [2, 2]), (7, [6]), (5, [1, 9, 2, 4])]


@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (6, 1)])
@pytest.mark.parametrize("window", [None, 1, 2, 4, 6, 13, 14, 40])
def test_output_and_gradients_equal_dense_attention(
    heads: tuple[int, int], window: int | None
) -> None:
    assert_exact(*both(segments_for(GROUPS), heads, window))


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(0, 8), min_size=1, max_size=4)),
        min_size=1,
        max_size=4,
    ),
    heads=st.sampled_from([(4, 2), (2, 2), (3, 1)]),
    window=st.one_of(st.none(), st.integers(1, 18)),
)
def test_random_groups_equal_dense_attention(
    groups: list[tuple[int, list[int]]], heads: tuple[int, int], window: int | None
) -> None:
    """Groups of one, empty responses, prompts of one token, windows shorter and longer than
    prompts."""
    assert_exact(*both(segments_for(groups), heads, window))


@given(
    groups=st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(0, 8), min_size=1, max_size=4)),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=100, deadline=None)
def test_the_prefix_part_covers_all_tokens_once(groups: list[tuple[int, list[int]]]) -> None:
    """As queries and as keys, and each query reads the prefix of its segment."""
    segments = segments_for(groups)
    queries, keys = prefix_lengths(segments)
    assert sum(queries) == sum(keys) == segments[-1].q_end
    ends = [[0, *itertools.accumulate(n)] for n in (queries, keys)]
    reads = {
        q: (k, k + keys[i])
        for i, (begin, k) in enumerate(itertools.islice(zip(*ends, strict=True), len(keys)))
        for q in range(begin, begin + queries[i])
        if keys[i]
    }
    assert reads == {
        q: (s.prefix_start, s.prefix_end)
        for s in segments
        if s.prefix_len
        for q in range(s.q_start, s.q_end)
    }


def test_prefixes_that_one_call_cannot_express_are_refused() -> None:
    behind = [Segment(0, 2, 6, 2), Segment(2, 2), Segment(4, 2, 2, 2), Segment(6, 2)]
    with pytest.raises(ValueError, match="order"):
        prefix_lengths(behind)


def test_gradients_are_wrong_without_the_merged_log_sum_exp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If each part's backward reads its own output and log-sum-exp, gradients are those of two
    softmaxes; so the tests above can tell."""
    backward, forward = flash._Part.backward, flash._Part.forward
    own: dict[int, Any] = {}

    def remembering(part: Any, qkv: Any, scale: float) -> Any:
        own[id(part)] = forward(part, qkv, scale)
        return own[id(part)]

    def unmerged(part: Any, grad: Tensor, qkv: Any, merged: Any, scale: float) -> Any:
        return backward(part, grad, qkv, own[id(part)], scale)

    monkeypatch.setattr(flash._Part, "forward", remembering)
    monkeypatch.setattr(flash._Part, "backward", unmerged)
    ours, expected = both(segments_for(GROUPS), (4, 2), None)
    torch.testing.assert_close(ours[0], expected[0], atol=EXACT, rtol=0)
    for x, y in zip(ours[1:], expected[1:], strict=True):
        assert (x - y).abs().max() > 0.05 * y.abs().max()


@pytest.mark.parametrize("sign", [1, -1])
def test_rows_without_keys_are_never_read(sign: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their output may be anything; their log-sum-exp is +inf or -inf."""
    forward = flash._Part.forward

    def dirty(part: Any, qkv: Any, scale: float) -> Any:
        out, lse = forward(part, qkv, scale)
        empty = lse[0].isinf()
        out[empty], lse[:, empty] = torch.nan, sign * torch.inf
        return out, lse

    monkeypatch.setattr(flash._Part, "forward", dirty)
    assert_exact(*both(segments_for(GROUPS), (4, 2), None))


def test_a_layer_gathers_nothing_and_masks_nothing() -> None:
    """Neither forward nor backward indexes a tensor by another one, and each layer after the first
    makes no tensor of segments."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.append(func._schema.name.removeprefix("aten::"))
            return func(*args, **(kwargs or {}))

    segments = segments_for(GROUPS)
    *qkv, grad = tensors(segments, (4, 2))
    plan = plan_of(segments)

    def run() -> list[str]:
        query, key, value = (x.requires_grad_() for x in qkv)
        with Names() as names:
            flash_attention(plan, (query, key, value), scale=0.3, window=None).backward(grad)
        return names.seen

    run()
    seen = run()
    assert not {n for n in seen if n.startswith(("index", "gather", "scatter", "masked", "repeat"))}
    assert seen.count("_flash_attention_forward") == seen.count("_flash_attention_backward") == 2
    assert len(seen) <= 32, seen


def test_another_schema_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash.schema_problem() is None
    changed = dict(flash._SCHEMAS)
    changed["_flash_attention_backward"] = (("grad", "query"), 3)
    monkeypatch.setattr(flash, "_SCHEMAS", changed)
    assert "aten::_flash_attention_backward" in str(flash.schema_problem())
    monkeypatch.setattr(flash, "_SCHEMAS", {"_flash_attention_sideways": ((), 1)})
    assert "has no operator" in str(flash.schema_problem())


def test_another_shape_of_the_log_sum_exp_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = segments_for(GROUPS)
    *qkv, _ = tensors(segments, (4, 2))
    part = plan_of(segments).calls(None).own
    called = torch.ops.aten._flash_attention_forward

    class Padded:
        def __call__(self, *args: Any, **keywords: Any) -> Any:
            out, lse, *rest = called(*args, **keywords)
            return out, lse[None], *rest

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", Padded())
    with pytest.raises(flash.FlashError, match="log-sum-exp"):
        part.forward((qkv[0], qkv[1], qkv[2]), 0.3)


def test_half_precision_stays_within_its_rounding() -> None:
    draw = random.Random(0)
    segments = segments_for([(draw.randint(1, 20), [draw.randint(1, 20)] * 3) for _ in range(3)])
    *qkv, grad = tensors(segments, (4, 2))
    plan = plan_of(segments)
    half = [x.bfloat16() for x in qkv]
    ours = results(
        lambda x: flash_attention(plan, tuple(x), scale=0.3, window=None), half, grad.bfloat16()
    )
    expected = results(lambda x: dense(segments, x, None), [x.double() for x in half], grad)
    for x, y in zip(ours, expected, strict=True):
        assert x.dtype == torch.bfloat16
        assert (x.double() - y).abs().max() <= 0.03 * y.abs().max()


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(3, 8), (4, 20), (2, 128)])
def test_the_triton_kernel_merges_like_torch(
    heads: int, dim: int, dtype: torch.dtype, strided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter. Rows that read no prefix have anything in the prefix part."""
    pytest.importorskip("triton", reason=NEEDS_TRITON)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    draw, tokens = torch.Generator().manual_seed(0), 17
    reads = torch.rand(tokens, generator=draw) > 0.4
    parts = []
    for _ in range(2):
        out = torch.randn(heads, tokens, dim, generator=draw).to(dtype).transpose(0, 1)
        lse = 3 * torch.randn(heads, tokens, generator=draw)
        parts.append((out if strided else out.contiguous(), lse))
    parts[0][0][~reads], parts[0][1][:, ~reads] = torch.nan, torch.inf
    expected = merge_by_torch(parts[0], parts[1], reads)
    ours = triton_merge()(parts[0], parts[1], reads)
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2**-7 if dtype == torch.bfloat16 else 2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "dim"), [(16, 128), (14, 64), (32, 256), (3, 8)])
def test_the_trial_of_the_triton_kernel_passes(
    heads: int, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter, in the sizes and the format of a layer."""
    pytest.importorskip("triton", reason=NEEDS_TRITON)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert fused_merge.__wrapped__(torch.device("cpu"), dtype, heads, dim) is not None


def test_a_kernel_that_cannot_be_built_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Any:
        raise ValueError("no compiler")

    monkeypatch.setattr("burnish.models.flash_merge.triton_merge", broken)
    assert fused_merge.__wrapped__(torch.device("cpu"), torch.bfloat16, 16, 128) is None
    assert "no compiler" in caplog.text
