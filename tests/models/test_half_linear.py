"""fp16 products through fp32: as exact as PyTorch's own, in every way a layer is used."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import burnish.models.half_linear as half_linear
from burnish.config.model import LoraConfig, ModelConfig, ScratchConfig
from burnish.models.half_linear import WideLinear, linear, use_fp32_products
from burnish.models.load import load_causal_lm
from burnish.models.logprobs import Head, token_logprobs


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


def half_layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(24, 10, bias=bias).half()
    assert use_fp32_products(layer) == 1
    return layer


def outcome(function: Callable[..., Tensor], operands: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The product and the gradients of its operands."""
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def ulps(result: Tensor, exact: Tensor) -> Tensor:
    """Distance from the exact result in spacings of fp16 numbers there (2^-24 is the smallest)."""
    exponent = torch.frexp(exact).exponent.clamp(min=-13)
    return (result.double() - exact).abs() / torch.ldexp(torch.ones_like(exact), exponent - 11)


@pytest.mark.parametrize("rows", [(1,), (37,), (2, 3, 5)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("block_entries", [1, 8 * 96, 1 << 22])
def test_forward_and_gradients_are_the_exact_results_rounded_once(
    monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...], bias: bool, block_entries: int
) -> None:
    """Rounding once costs half a spacing. Before it the fp32 sum of 96 products of size 1 is off by
    up to about 96 x 6e-8 x 20 = 1e-4 in the worst case and 2e-6 in fact, which is 2 hundredths of
    a spacing (1e-3) for results above 1: the bound adds 2e-6 in absolute terms."""
    monkeypatch.setattr(half_linear, "BLOCK_ENTRIES", block_entries)
    operands = [draw(*rows, 96), draw(40, 96, seed=1)] + ([draw(40, seed=2)] if bias else [])
    grad = draw(*rows, 40, seed=3)
    exact = outcome(F.linear, [x.double() for x in operands], grad.double())
    for ours, native, truth in zip(
        outcome(linear, operands, grad), outcome(F.linear, operands, grad), exact, strict=True
    ):
        assert ours.dtype == torch.float16 and ours.shape == native.shape
        noise = 2e-6 / torch.ldexp(
            torch.ones_like(truth), torch.frexp(truth).exponent.clamp(min=-13) - 11
        )
        assert bool((ulps(ours, truth) <= 0.5 + noise).all())
        # never worse than PyTorch's own, beyond that noise
        assert ulps(ours, truth).mean() <= ulps(native, truth).mean() + 0.01


def test_results_from_65520_are_inf_as_in_plain_fp16() -> None:
    """256 x 255.75 = 65472 rounds to 65472, 256 x 255.875 = 65504 is the largest number, and
    65504 + 16 = 65520 lies half way to 65536 and rounds up to inf."""
    inputs = torch.tensor([[256.0, 0.0], [256.0, 1.0], [256.0, 15.0], [256.0, 16.0]]).half()
    weight = torch.tensor([[255.875, 1.0]]).half()
    expected = torch.tensor([[65504.0], [65504.0], [65504.0], [torch.inf]]).half()
    assert torch.equal(linear(inputs, weight), expected)
    assert torch.equal(F.linear(inputs, weight), expected)
    # a sum that leaves fp16's range and comes back is finite: partial sums are fp32
    there_and_back = torch.tensor([[60000.0, 60000.0, -60000.0]]).half()
    assert linear(there_and_back, torch.ones(1, 3).half()).item() == 60000


def test_gradients_that_overflow_are_inf_as_in_plain_fp16() -> None:
    """grad 512: input gradient 512 x 128 = 65536, weight gradient 512 x 128 = 65536."""
    operands = [torch.tensor([[128.0, 2.0]]).half(), torch.tensor([[128.0, 3.0]]).half()]
    grad = torch.tensor([[512.0]]).half()
    _, grad_input, grad_weight = outcome(linear, operands, grad)
    assert grad_input.tolist() == [[torch.inf, 1536.0]]
    assert grad_weight.tolist() == [[torch.inf, 1024.0]]
    _, *native = outcome(F.linear, operands, grad)
    assert torch.equal(native[0], grad_input) and torch.equal(native[1], grad_weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_are_computed_as_before(dtype: torch.dtype) -> None:
    operands = [x.to(dtype) for x in (draw(7, 24), draw(10, 24, seed=1), draw(10, seed=2))]
    grad = draw(7, 10, seed=3).to(dtype)
    for ours, native in zip(
        outcome(linear, operands, grad), outcome(F.linear, operands, grad), strict=True
    ):
        assert torch.equal(ours, native)


def test_only_plain_fp16_layers_are_switched_and_only_once() -> None:
    class Other(nn.Linear):
        pass

    model = nn.Sequential(
        nn.Linear(4, 4).half(), Other(4, 4).half(), nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()
    )
    assert use_fp32_products(model) == 1
    assert [type(m) is WideLinear for m in model] == [True, False, False, False]
    assert use_fp32_products(model) == 0
    model.append(nn.Linear(4, 4).half())
    assert use_fp32_products(model) == 1


def test_only_needed_fp16_tensors_are_saved_for_backward() -> None:
    layer, inputs = half_layer(), draw(6, 24).requires_grad_()

    def saved() -> list[tuple[torch.dtype, tuple[int, ...]]]:
        kept: list[tuple[torch.dtype, tuple[int, ...]]] = []

        def pack(tensor: Tensor) -> Tensor:
            kept.append((tensor.dtype, tuple(tensor.shape)))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            layer(inputs)
        return kept

    assert saved() == [(torch.float16, (6, 24)), (torch.float16, (10, 24))]
    layer.requires_grad_(False)  # frozen: the input gradient alone
    assert saved() == [(torch.float16, (10, 24))]
    layer(inputs).sum().backward()
    assert inputs.grad is not None and layer.weight.grad is None
    layer.requires_grad_(True)
    inputs.requires_grad_(False)
    assert saved() == [(torch.float16, (6, 24))]


def test_a_copy_of_a_layer_has_its_own_weights_and_no_entries_are_added_to_its_state() -> None:
    layer, inputs = half_layer(), draw(6, 24)
    before = layer(inputs)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.zero_()
    assert torch.equal(layer(inputs), before)
    assert torch.equal(twin(inputs), twin.bias.expand(6, 10))
    assert set(layer.state_dict()) == {"weight", "bias"}
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(inputs), before)


def test_new_weights_take_effect_for_every_way_to_set_them() -> None:
    layer, inputs, new = half_layer(bias=False), draw(6, 24), draw(10, 24, seed=4)
    expected = linear(inputs, new)
    old = layer.weight.detach().clone()
    layer.weight.data = new.clone()
    assert torch.equal(layer(inputs), expected)
    layer.weight.data.copy_(old)
    assert torch.equal(layer(inputs), linear(inputs, old))
    layer.weight = nn.Parameter(new.clone())
    assert torch.equal(layer(inputs), expected)
    layer.float()
    assert torch.equal(layer(inputs.float()), F.linear(inputs.float(), new.float()))


def test_under_gradient_checkpointing_the_gradients_are_the_same() -> None:
    layer = half_layer()

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        inputs = draw(6, 24).requires_grad_()
        return list(torch.autograd.grad(run(inputs).sum(), [inputs, *layer.parameters()]))

    plain = gradients(layer)
    again = gradients(lambda x: checkpoint(layer, x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("lora", [None, LoraConfig(lora_rank=4)])
def test_a_language_model_is_as_close_to_fp32_as_in_plain_fp16(
    lora: LoraConfig | None,
) -> None:
    """Most of the error is rounding between layers, which is the same in both; the rest is a draw
    of rounding errors: within a quarter of each other over thousands of gradient entries."""
    config = ModelConfig(scratch=ScratchConfig(hidden_size=32, num_layers=2), lora=lora)
    torch.manual_seed(0)
    exact = load_causal_lm(config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in exact.named_parameters():
        if ".lora_B" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
        parameter.data = parameter.data.half().float()
    native = copy.deepcopy(exact)
    for module in native.modules():
        if type(module) is WideLinear:
            module.__class__ = nn.Linear
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.half()
    ours = copy.deepcopy(native)
    assert use_fp32_products(ours) == 2 * 7 * (1 if lora is None else 3) + 1, "and the head"
    truth = passed(exact)
    error, native_error = ((passed(m) - truth).norm() / truth.norm() for m in (ours, native))
    assert 0 < error < 1.25 * native_error


def passed(model: nn.Module) -> Tensor:
    """All logits and gradients of one pass in one vector."""
    ids = torch.arange(6, 26)[None]
    logits = model(ids).logits.float()
    trained = [p for p in model.parameters() if p.requires_grad]
    loss = 1024 * F.cross_entropy(logits[0, :-1], ids[0, 1:])
    parts = [logits.detach(), *torch.autograd.grad(loss, trained)]
    return torch.cat([part.float().flatten() for part in parts])


def test_logprobs_and_gradients_of_an_fp16_head_agree_with_float64() -> None:
    """The logits (up to 20, so spaced by 2^-6) are rounded to fp16, as the sampler rounds them:
    half a spacing each for the target's logit and, on average, for the normaliser. Gradients are
    rounded once at the end, from logit gradients that are rounded to fp16: 2^-10 of the
    largest."""
    hidden, weight, bias = draw(12, 32), draw(90, 32, seed=1), draw(90, seed=2)
    targets = torch.arange(12)
    results: list[list[Tensor]] = []
    for exact in (True, False):
        operands = [x.double() if exact else x.clone() for x in (hidden, weight, bias)]
        leaves = [x.requires_grad_() for x in operands]
        if exact:
            log_p = F.linear(*leaves).log_softmax(-1)[torch.arange(12), targets]
        else:
            head = Head(leaves[1], leaves[2], chunk_tokens=5)
            log_p, _ = token_logprobs(leaves[0], targets, head)
        upstream = torch.linspace(0.5, 2, 12, dtype=log_p.dtype)
        results.append([log_p.detach(), *torch.autograd.grad((upstream * log_p).sum(), leaves)])
    (true_log_p, *true_grads), (log_p, *grads) = results
    assert log_p.dtype == torch.float32
    torch.testing.assert_close(log_p.double(), true_log_p, atol=2**-6, rtol=0)
    for ours, truth in zip(grads, true_grads, strict=True):
        # ... and the softmax of rounded logits: 2^-7 relative at most
        bound = 2**-7 * float(truth.abs().max())
        torch.testing.assert_close(ours.double(), truth, atol=bound, rtol=0)


def test_logits_of_head_and_layer_are_the_same_numbers() -> None:
    """Trainer (Head) and sampler (the layer) must round logits at the same points."""
    layer, hidden = half_layer(), draw(6, 24)
    assert torch.equal(Head(layer.weight, layer.bias).logits(hidden), layer(hidden).float())


def test_the_weight_gradient_of_the_head_is_summed_in_fp32_over_chunks() -> None:
    """2050 rows that each add 1: upstream 2 on two equal logits is 2 x (1 - 1/2) = 1 for hidden 1.
    A row-by-row sum in fp16 would stop at 2048; 2050 is an fp16 number."""
    hidden = torch.ones(2050, 1).half()
    weight = torch.zeros(2, 1).half().requires_grad_()
    head = Head(weight, chunk_tokens=1)
    log_p, _ = token_logprobs(hidden, torch.zeros(2050, dtype=torch.int64), head)
    (2 * log_p.sum()).backward()
    assert weight.grad.tolist() == [[2050.0], [-2050.0]]


def test_the_output_may_be_changed_in_place() -> None:
    """Gemma 3n adds to projections in place; autograd forbids that for views."""
    layer = torch.nn.Linear(4, 3).half()
    use_fp32_products(layer)
    inputs = torch.ones(2, 2, 4, dtype=torch.float16, requires_grad=True)
    out = layer(inputs)
    out[..., 0] += 1
    out.sum().backward()
    assert torch.equal(inputs.grad, layer.weight.sum(0).expand(2, 2, 4))
