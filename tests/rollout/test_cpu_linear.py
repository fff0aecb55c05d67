"""Linear layers through oneDNN while sampling: the same numbers, and the layers are restored."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from burnish.models.half_linear import use_fp32_products
from burnish.rollout.base import Request, Sampling
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import LocalRolloutEngine
from burnish.rollout.local.model import Fp32Layer, fp32_layers, onednn_layers, onednn_linear


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_equal_those_of_the_plain_layer(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer, inputs = nn.Linear(96, 40, bias=bias), torch.randn(rows, 1, 96)
    expected = layer(inputs)
    with torch.no_grad(), onednn_linear(fp32_layers(onednn_layers(layer))):
        # sums of 96 products of size 1 in another order
        torch.testing.assert_close(layer(inputs), expected, atol=2e-6, rtol=0)


def test_after_the_context_the_layer_is_restored_and_has_gradients() -> None:
    layer = nn.Linear(8, 4)
    with pytest.raises(RuntimeError, match="in the middle"):
        with onednn_linear(fp32_layers(onednn_layers(layer))):
            assert "forward" in vars(layer)
            raise RuntimeError("in the middle")
    assert "forward" not in vars(layer)
    layer(torch.randn(2, 8)).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("bias", [True, False])
def test_fp16_layers_compute_the_fp32_product_rounded_once(bias: bool) -> None:
    """Sums of 96 products in fp32 differ in their last bits by the order of summation (a few 1e-6),
    so a sum halfway between two fp16 numbers may round the other way: one fp16 spacing, 2^-10 of
    the number, and 1e-6 where terms cancel."""
    torch.manual_seed(0)
    layer, inputs = nn.Linear(96, 40, bias=bias).half(), torch.randn(64, 1, 96).half()
    use_fp32_products(layer)
    expected = layer(inputs).detach()
    with torch.no_grad(), onednn_linear(fp32_layers(onednn_layers(layer))):
        assert "forward" in vars(layer)
        out = layer(inputs)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, expected, atol=4e-6, rtol=2**-10)
    assert "forward" not in vars(layer), "its own forward again"


def test_fp32_layers_are_not_copied() -> None:
    layer = nn.Linear(8, 4)
    layers = fp32_layers(onednn_layers(layer))
    assert layers[0].weight.data_ptr() == layer.weight.data_ptr()


def test_only_plain_fp32_and_fp16_layers_are_replaced() -> None:
    class Other(nn.Linear):
        pass

    model = nn.Sequential(
        nn.Linear(8, 8), Other(8, 8), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8).half()
    )
    assert onednn_layers(model) == [model[0], model[3]]


def test_an_fp16_engine_uses_new_weights_and_frees_copies_when_closed_early(
    lively_model: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for parameter in lively_model.parameters():
        parameter.data = parameter.data.half()
    num_switched = use_fp32_products(lively_model)
    used: list[int] = []

    def counted(layers: Any) -> Any:
        used.append(len(layers))
        return onednn_linear(layers)

    monkeypatch.setattr("burnish.rollout.local.model.onednn_linear", counted)
    engine = LocalRolloutEngine(lively_model, tiny_tokenizer, LocalEngine())
    request, sampling = Request("a", (7, 9, 12), n=2), Sampling(max_tokens=16, temperature=0.0)
    first = next(engine.generate([request], sampling)).token_ids  # the generator is dropped
    assert set(used) == {num_switched}, "every layer, at every step"
    with torch.no_grad():
        lively_model.lm_head.weight.copy_(lively_model.lm_head.weight.flip(0))
    changed = next(engine.generate([request], sampling)).token_ids
    vocabulary = lively_model.config.vocab_size
    assert changed[0] == vocabulary - 1 - first[0], "the head's rows are in the opposite order"
    held = [x for x in gc.get_objects() if type(x) is Fp32Layer]
    assert not held
