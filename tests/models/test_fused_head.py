"""Log-probs by Triton kernels (models/fused_head.py), in Triton's interpreter, against fp64."""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import burnish.models.fused_head as fused_head
from burnish.config.model import ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.fused_head import (
    BY_TORCH,
    CHUNK_BYTES,
    FusedHead,
    HeadChoice,
    HeadKernels,
    Softmax,
    Transform,
    Upstream,
    accumulates,
    choose_head,
    device_problem,
    fused_chunk_tokens,
    trial_problem,
    triton_kernels,
)
from burnish.models.load import load_causal_lm
from burnish.models.logit_scaling import UNSCALED, LogitScaling
from burnish.models.logprobs import Head, token_logprobs
from burnish.models.sdpa import Kernels
from burnish.plan.tracking import LiveBytes
from burnish.train import forward
from burnish.train.base import Outputs
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, Stats, rows_to_batch

CPU, BLOCK = torch.device("cpu"), 128
NEEDS_TRITON = "needs triton: pip install -c constraints/cpu.txt triton (Linux)"
HALF = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}
"""Largest rounding of a stored number. The interpreter cuts bf16; GPUs round to the nearest."""


@pytest.fixture(scope="module")
def kernels() -> HeadKernels:
    """The kernels in Triton's interpreter, with blocks of 128 entries."""
    triton = pytest.importorskip("triton", reason=NEEDS_TRITON)
    if not triton.knobs.runtime.interpret:
        pytest.skip("this machine has a GPU, on which tests/gpu runs the kernels")
    return triton_kernels.__wrapped__(BLOCK, 1)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(
    outputs: Tensor, targets: Tensor, transform: Transform, upstream: Upstream
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and the gradient of the outputs, in fp64 by autograd."""
    leaf = outputs.double().requires_grad_()
    logits = transform.scaling.scale * leaf
    if transform.scaling.softcap is not None:
        logits = transform.scaling.softcap * (logits / transform.scaling.softcap).tanh()
    log_p = (logits / transform.temperature).log_softmax(-1)
    logprobs = log_p.gather(-1, targets[:, None])[:, 0]
    finite = log_p.clamp(min=torch.finfo(torch.float64).min)
    entropy = -(log_p.exp() * finite).sum(-1)
    loss = (logprobs * upstream.logprobs).sum()
    if upstream.entropy is not None:
        loss = loss + (entropy * upstream.entropy).sum()
    loss.backward()
    assert leaf.grad is not None
    return logprobs.detach(), entropy.detach(), leaf.grad


def assert_exact(
    kernels: HeadKernels,
    outputs: Tensor,
    targets: Tensor,
    transform: Transform,
    *,
    with_entropy: bool = True,
) -> None:
    """Log-probs and entropies to 1e-5; gradients to 1e-5 of the largest one, and in half precision
    to one rounding of each."""
    rows = outputs.shape[0]
    upstream = Upstream(draw(1, rows), draw(2, rows) if with_entropy else None)
    logprobs, entropy, gradient = exact(outputs, targets, transform, upstream)
    softmax, grad = Softmax.empty(outputs, with_entropy=with_entropy), outputs.clone()
    kernels.reduce(grad, targets, transform, softmax)
    assert torch.equal(grad, outputs), "forward changes nothing"
    kernels.backward_(grad, targets, transform, softmax, upstream)
    torch.testing.assert_close(softmax.logprobs.double(), logprobs, atol=1e-5, rtol=0)
    if with_entropy:
        assert softmax.entropy is not None
        torch.testing.assert_close(softmax.entropy.double(), entropy, atol=1e-5, rtol=0)
    assert grad.dtype == outputs.dtype
    rounding = HALF.get(outputs.dtype, 0.0)
    smallest = 2.0**-25 if outputs.dtype == torch.float16 else 0.0  # half of its subnormal step
    room = float(gradient.abs().max()) * 1e-5 + smallest
    torch.testing.assert_close(grad.double(), gradient, atol=room, rtol=rounding)


@pytest.mark.parametrize("softcap", [None, 6.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [7, 128, 300, 520])
def test_results_equal_fp64(
    kernels: HeadKernels,
    vocabulary: int,
    dtype: torch.dtype,
    temperature: float,
    softcap: float | None,
) -> None:
    """Vocabularies below a block, of one block, and of several and a part."""
    outputs = (2 * draw(0, 4, vocabulary)).to(dtype)
    targets = torch.arange(4) * (vocabulary - 1) // 3
    transform = Transform(LogitScaling(1.25, softcap), temperature)
    assert_exact(kernels, outputs, targets, transform)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_each_part_of_the_transform_may_be_absent(kernels: HeadKernels, with_entropy: bool) -> None:
    outputs, targets = draw(3, 4, 130), torch.tensor([0, 64, 129, 5])
    for transform in (Transform(), Transform(LogitScaling(0.25)), Transform(temperature=0.7)):
        assert_exact(kernels, outputs, targets, transform, with_entropy=with_entropy)


def test_the_cap_is_exact_from_the_smallest_to_the_largest_logits(kernels: HeadKernels) -> None:
    """tanh by a series below 0.6, and by an exponential above: x / softcap from 1e-7 to 300."""
    outputs = 30 * torch.logspace(-7, 2.5, 200).repeat(2, 1)
    outputs[1].neg_()
    assert_exact(kernels, outputs, torch.tensor([150, 3]), Transform(LogitScaling(1.0, 30.0), 0.3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_excluded_entries_have_no_probability_and_no_gradient(
    kernels: HeadKernels, dtype: torch.dtype
) -> None:
    """Logits of -inf: a first block, a last block, all but one entry."""
    outputs = draw(4, 3, 400).to(dtype)
    outputs[0, :128] = outputs[1, 256:] = -torch.inf
    outputs[2] = -torch.inf
    outputs[2, 77] = 1.0
    targets = torch.tensor([128, 255, 77])
    assert_exact(kernels, outputs, targets, Transform(temperature=0.7))
    softmax = Softmax.empty(outputs, with_entropy=True)
    kernels.reduce(outputs, torch.tensor([0, 399, 0]), Transform(), softmax)
    assert softmax.logprobs.tolist() == [-math.inf] * 3
    assert softmax.entropy is not None and softmax.entropy[2] == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_other_numbers_that_are_not_finite_reach_the_log_prob(
    kernels: HeadKernels, value: float
) -> None:
    """So that a step with them is found. (And a row that has -inf alone.)"""
    outputs = draw(5, 3, 150)
    outputs[0, 100], outputs[2] = value, -torch.inf
    softmax = Softmax.empty(outputs, with_entropy=True)
    kernels.reduce(outputs, torch.tensor([3, 3, 3]), Transform(), softmax)
    assert softmax.logprobs.isnan().tolist() == [True, False, True]


def random_case(seed: int, dtype: torch.dtype, *, bias: bool) -> tuple[list[Tensor], Tensor]:
    """Hidden states, weight, bias; targets."""
    tensors = [draw(seed, 11, 16), 0.3 * draw(seed + 1, 150, 16), draw(seed + 2, 150)]
    targets = torch.arange(11) * 13
    return [x.to(dtype) for x in tensors[: 3 if bias else 2]], targets


def run(
    head: Head, hidden: Tensor, targets: Tensor, leaves: list[Tensor], *, in_loss: bool = True
) -> list[Tensor]:
    """Log-probs, entropies, and the gradients of the leaves."""
    logprobs, entropy = token_logprobs(hidden, targets, head, with_entropy=True)
    assert entropy is not None
    loss = (logprobs * draw(8, 11)).sum()
    if in_loss:
        loss = loss + (entropy * draw(9, 11)).sum()
    return [logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("in_loss", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
def test_a_head_gives_the_results_of_pytorch(
    kernels: HeadKernels, chunk: int, bias: bool, in_loss: bool
) -> None:
    """With its gradients of hidden states, weight and bias; the loss has sums of other lengths, so
    1e-5 of the largest value."""
    leaves, targets = random_case(0, torch.float32, bias=bias)
    leaves = [x.requires_grad_() for x in leaves]
    scaling = LogitScaling(0.9, 8.0)
    head = Head(leaves[1], leaves[2] if bias else None, 0.7, chunk_tokens=4, scaling=scaling)
    ours = replace(head, fused=FusedHead(kernels, chunk))
    results = [run(h, leaves[0], targets, leaves, in_loss=in_loss) for h in (ours, head)]
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5 * float(y.abs().max()), rtol=0)


def test_half_precision_differs_by_the_rounding_of_gradients(kernels: HeadKernels) -> None:
    leaves, targets = random_case(3, torch.bfloat16, bias=False)
    leaves = [x.requires_grad_() for x in leaves]
    head = Head(leaves[1], chunk_tokens=4)
    ours = replace(head, fused=FusedHead(kernels, 4))
    results = [run(h, leaves[0], targets, leaves) for h in (ours, head)]
    for index, (x, y) in enumerate(zip(*results, strict=True)):
        most = 1e-5 if index < 2 else 2**-6  # operands and results, each cut or rounded
        torch.testing.assert_close(x, y, atol=most * float(y.abs().max()), rtol=0)


def test_only_entropies_in_the_loss_and_a_frozen_head(kernels: HeadKernels) -> None:
    (hidden, weight), targets = random_case(6, torch.float32, bias=False)
    grads = []
    for fused in (None, FusedHead(kernels, 4)):
        leaf = hidden.clone().requires_grad_()
        head = Head(weight, fused=fused)
        entropy = token_logprobs(leaf, targets, head, with_entropy=True)[1]
        assert entropy is not None
        entropy.sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[0], grads[1], atol=1e-5, rtol=0)
    assert weight.grad is None


def test_sampling_masks_and_collision_entropies_stay_on_the_other_path() -> None:
    """Kernels that must not be called."""

    def forbidden(*_: object) -> None:
        raise AssertionError("called")

    (hidden, weight), targets = random_case(6, torch.float32, bias=False)
    head = Head(weight, fused=FusedHead(HeadKernels(forbidden, forbidden), 4))
    token_logprobs(hidden, targets, head, kept_ids=targets[:, None].int())
    with torch.no_grad():
        token_logprobs(hidden, targets, head, with_entropy=True, entropy_order=2)
    assert head.fused is not None and head.fused.on


# ---- memory and traffic --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_loss", [False, True])
@pytest.mark.usefixtures("kernels")
def test_one_chunk_of_logits_exists(in_loss: bool, dtype: torch.dtype) -> None:
    """Most live bytes, in [chunk, vocab] buffers of the compute dtype. The weight's gradient and a
    chunk's part of it (and here its copy in fp32) are small, because a row has 8 numbers."""
    hidden, weight = draw(0, 48, 8).to(dtype).requires_grad_(), draw(1, 4096, 8).to(dtype)
    weight.requires_grad_()
    large = unseen(triton_kernels.__wrapped__(4096, 1))
    by_size = replace(large, accumulate=lambda *_: None)
    head = Head(weight, fused=FusedHead(by_size, 16))
    with LiveBytes() as live:
        live.hold([hidden, weight])
        before = live.now
        logprobs, entropy = token_logprobs(
            hidden, torch.zeros(48, dtype=torch.int64), head, with_entropy=True
        )
        assert entropy is not None
        loss = logprobs.sum() + entropy.sum() if in_loss else logprobs.sum()
        live.stage("backward")
        loss.backward()
    unit = 16 * 4096 * dtype.itemsize
    few = 48 * 8 * 4 + 48 * 4 * 10  # the gradient of the hidden states, numbers per token
    gradient = 4096 * 8 * (4 + dtype.itemsize)
    assert unit <= live.peaks["start"][0] - before <= unit + few
    assert live.peaks["backward"][0] - before <= unit + gradient + few


def test_sweeps_over_the_vocabulary(kernels: HeadKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernels: forward loads each logit once, backward loads and stores it once. Of PyTorch:
    one product writes the logits, in backward a second one for all chunks but the last, and two
    read their gradient."""
    from triton.runtime import interpreter

    counts = {"load": 0, "store": 0}

    def counted(name: str, mask_at: int) -> None:
        builder = interpreter.InterpreterBuilder
        original = vars(builder)[f"create_masked_{name}"]

        def wrapper(self: Any, *args: Any, **keywords: Any) -> Any:
            counts[name] += int(args[mask_at].data.sum())
            return original(self, *args, **keywords)

        monkeypatch.setattr(builder, f"create_masked_{name}", wrapper)

    counted("load", 1)
    counted("store", 2)
    tokens, vocabulary, chunk = 6, 300, 2
    size, per_token = tokens * vocabulary, 10 * tokens * (vocabulary // BLOCK + 1)
    hidden, weight = draw(0, tokens, 8).requires_grad_(), draw(1, vocabulary, 8).requires_grad_()
    head = Head(weight, temperature=0.7, fused=FusedHead(unseen(kernels), chunk))
    with LargeOperations(chunk * vocabulary) as operations:
        logprobs, entropy = token_logprobs(hidden, torch.arange(tokens), head, with_entropy=True)
    assert entropy is not None
    assert size <= counts["load"] <= size + per_token and counts["store"] <= per_token
    assert operations.names == ["mm"] * 3
    counts["load"] = counts["store"] = 0
    with LargeOperations(chunk * vocabulary) as operations:
        (logprobs.sum() + entropy.sum()).backward()
    assert size <= counts["load"] <= size + per_token
    assert counts["store"] == size
    assert operations.names == ["mm", "addmm_", *["mm"] * 2, "addmm_", *["mm"] * 2, "addmm_"]


def unseen(kernels: HeadKernels) -> HeadKernels:
    """Hide the copies of the interpreter from counters of operations, and free what it keeps."""

    def hidden(call: Any) -> Any:
        def wrapper(*args: Any) -> None:
            with _disable_current_modes():
                call(*args)
                gc.collect()

        return wrapper

    return HeadKernels(hidden(kernels.reduce), hidden(kernels.backward_))


class LargeOperations(TorchDispatchMode):
    """Names of operations that read or write a tensor of a size. (Views and allocations do not.)"""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.names = size, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        tensors = [x for x in (*args, *(kwargs or {}).values(), out) if isinstance(x, Tensor)]
        if any(x.numel() == self.size for x in tensors) and name not in ("t", "permute", "detach"):
            self.names.append(name)
        return out


def test_chunks_take_at_most_700_megabytes() -> None:
    """151,936 x 2 B: 2,303 rows, or 2,176 = 17 x 128. 32,000 x 4 B: 5,468, or 5,376 = 42 x 128.
    10^9 x 2 B: no row fits, and one is computed."""
    assert fused_chunk_tokens(None, 151_936, 2) == 2176
    assert fused_chunk_tokens(None, 32_000, 4) == 5376
    assert fused_chunk_tokens(None, 10**9, 2) == 1
    assert fused_chunk_tokens(7, 151_936, 2) == 7
    assert CHUNK_BYTES >= 2176 * 151_936 * 2


def test_the_sum_of_gradients_is_not_rounded_where_torch_can(
    kernels: HeadKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel for CPUs is added here, with CUDA's arguments; without, it is found to be absent.
    The gradient is then closer to fp64 than with one rounding per chunk."""
    assert not accumulates(CPU, torch.bfloat16)
    library = torch.library.Library("aten", "IMPL")

    def addmm(
        total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *,
        beta: float = 1, alpha: float = 1, out: Tensor,
    ) -> Tensor:  # fmt: skip
        assert total.dtype == out.dtype == out_dtype == torch.float32 and a.dtype == b.dtype
        return out.copy_(total + a.float() @ b.float())

    library.impl("addmm.dtype_out", addmm, "CPU")
    try:
        assert accumulates(CPU, torch.bfloat16) and accumulates(CPU, torch.float16)
        (hidden, weight), targets = random_case(3, torch.bfloat16, bias=False)
        weight.requires_grad_()
        wide = HeadKernels(kernels.reduce, kernels.backward_, fused_head.accumulate_wide)
        exactly = weight.detach().double().requires_grad_()
        log_p = (hidden.double() @ exactly.T).log_softmax(-1)
        (expected,) = torch.autograd.grad(log_p[torch.arange(11), targets].sum(), exactly)
        errors = []
        for each in (wide, kernels):
            head = Head(weight.float(), fused=FusedHead(each, 1))
            head = replace(head, weight=weight)
            loss = token_logprobs(hidden, targets, head)[0].sum()
            (grad,) = torch.autograd.grad(loss, weight)
            errors.append(float((grad.double() - expected).norm()))
    finally:
        library._destroy()
    assert errors[0] < errors[1]


# ---- choice and fallback -------------------------------------------------------------------------


def test_devices_that_cannot_run_the_kernels() -> None:
    assert device_problem(Kernels((2, 11), (8, 0))) is None
    assert "CPU" in str(device_problem(None))
    assert "AMD" in str(device_problem(Kernels((2, 11), (9, 4), hip=True)))
    assert "7.5" in str(device_problem(Kernels((2, 11), (7, 5))))
    choice = choose_head(CPU, torch.float32, 100, UNSCALED)
    assert choice.kernels is None and "CPU" in choice.sentence


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the choice on the CPU as on a GPU."""
    monkeypatch.setattr(fused_head, "kernels_of", lambda _: Kernels((2, 11), (9, 0)))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_kernels_are_chosen_if_they_agree_with_pytorch(
    kernels: HeadKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = choose_head.__wrapped__

    def wrong(outputs: Tensor, targets: Tensor, transform: Transform, softmax: Softmax) -> None:
        kernels.reduce(outputs, targets, transform, softmax)
        softmax.logprobs.add_(0.01)

    for dtype, scaling in ((torch.bfloat16, LogitScaling(1.0, 30.0)), (torch.float32, UNSCALED)):
        monkeypatch.setattr(fused_head, "triton_kernels", lambda: kernels)
        assert choose(CPU, dtype, 193, scaling).kernels is not None
        monkeypatch.setattr(fused_head, "triton_kernels", lambda: replace(kernels, reduce=wrong))
        choice = choose(CPU, dtype, 193, scaling)
        assert choice.kernels is None and "log-probs" in choice.problem


@pytest.mark.usefixtures("as_on_a_gpu")
def test_without_triton_pytorch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Any:
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(fused_head, "triton_kernels", absent)
    choice = choose_head.__wrapped__(CPU, torch.bfloat16, 193, UNSCALED)
    assert choice.kernels is None and "triton" in choice.sentence


@pytest.mark.parametrize("direction", ["reduce", "backward_"])
def test_a_kernel_that_raises_is_replaced_once(
    direction: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In the chunk at which it raised and later ones, with one warning that has the first failing
    call; the results are those of PyTorch."""
    calls = 0

    def broken(*_: object) -> None:
        nonlocal calls
        calls += 1
        raise ValueError("no such instruction")

    (hidden, weight), targets = random_case(0, torch.float32, bias=False)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    fused = FusedHead(replace(BY_TORCH, **{direction: broken}), 4)
    expected = run(Head(weight), hidden, targets, leaves)
    for _ in range(2):
        ours = run(Head(weight, fused=fused), hidden, targets, leaves)
        for x, y in zip(ours, expected, strict=True):
            torch.testing.assert_close(x, y)
    assert calls == 1 and not fused.on
    assert len(caplog.records) == 1
    assert all(part in caplog.text for part in ("no such instruction", "150]", "float32"))


def test_memory_that_runs_out_is_no_reason_to_replace_a_kernel() -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    (hidden, weight), targets = random_case(0, torch.float32, bias=False)
    fused = FusedHead(HeadKernels(full, full), 4)
    with pytest.raises(torch.OutOfMemoryError):
        token_logprobs(hidden, targets, Head(weight, fused=fused))
    assert fused.on


def test_the_trial_finds_a_gradient_that_is_wrong(kernels: HeadKernels) -> None:
    def wrong(outputs: Tensor, *rest: Any) -> None:
        kernels.backward_(outputs, *rest)
        outputs[1, 0] += 0.1

    broken = replace(kernels, backward_=wrong)
    assert trial_problem(kernels, CPU, torch.float32, 130, scaling=UNSCALED) is None
    assert "gradients" in str(trial_problem(broken, CPU, torch.float32, 130, scaling=UNSCALED))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the wheel with NVIDIA's assembler")
def test_the_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """Without one, by Triton's own assembler, for a vocabulary of 151,936. A thread has 4096 / 256
    = 16 entries of a block, which loads of 16 bytes read."""
    pytest.importorskip("triton", reason=NEEDS_TRITON)
    script = Path(__file__).parents[1] / "support" / "compile_head.py"
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["capability"] for row in rows} == {80, 90} and len(rows) == 8
    for row in rows:
        assert row["wide_loads"] == {"bf16": 2, "fp32": 4}[row["dtype"]], row
        assert row["binary"], row


# ---- engines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["padded", "shared_prefix"])
def test_an_engine_trains_with_the_kernels(
    kernels: HeadKernels, layout: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs, loss and gradient norm are those of an engine without, at a temperature, with
    entropies in the loss; bf16 within its rounding."""
    model = ModelConfig(scratch=ScratchConfig(hidden_size=32))
    train = TrainConfig(layout=layout, train_batch_size=4)  # type: ignore[arg-type]
    role = TrainRole.alone(
        "policy", train, model, precision=PrecisionConfig(dtype=dtype), with_entropy=True
    )  # type: ignore[arg-type]
    batch = rows_to_batch(
        [[3, 4, 5, *range(6, 6 + n)] for n in (4, 9, 1, 6)],
        [[False] * 3 + [True] * n for n in (4, 9, 1, 6)],
        prompt_lens=[3] * 4,
        group_ids=[0, 0, 0, 1],
    )

    def loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        assert outputs.logprobs is not None and outputs.entropy is not None
        value = outputs.logprobs.sum() - 0.3 * outputs.entropy.sum()
        return value / batch.num_tokens, Stats(sums={"loss": value.detach()})

    results = []
    for choice in (HeadChoice(None, "of the test"), HeadChoice(kernels)):
        monkeypatch.setattr(forward, "choose_head", lambda *_, c=choice: c)
        torch.manual_seed(0)
        spec = replace(EngineSpec(role, micro_batch_size=2), temperature=0.7)
        engine = TorchTrainEngine(load_causal_lm(model, dtype="fp32"), spec)
        logprobs = engine.logprobs(batch)
        stats = engine.forward_backward(batch, loss)
        results.append((logprobs, stats.floats()["loss"], engine.optim_step().grad_norm))
        fused = engine.forward.fused_head
        assert fused is None if choice.kernels is None else fused is not None and fused.on
    rounding = 1e-5 if dtype == "fp32" else 0.02
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=0)
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-5)
    assert results[1][2] == pytest.approx(results[0][2], rel=rounding)


def test_on_a_cpu_pytorch_computes() -> None:
    model = ModelConfig(scratch=ScratchConfig(hidden_size=32))
    role = TrainRole.alone("policy", TrainConfig(train_batch_size=4), model)
    spec = EngineSpec(role, micro_batch_size=2)
    assert TorchTrainEngine(load_causal_lm(model, dtype="fp32"), spec).forward.fused_head is None
