"""Linear layers through oneDNN while sampling: the same numbers, and nothing left behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from burnish.rollout.cpu_linear import onednn_layers, onednn_linear


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_the_numbers_are_those_of_the_plain_layer(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer, inputs = nn.Linear(96, 40, bias=bias), torch.randn(rows, 1, 96)
    expected = layer(inputs)
    with torch.no_grad(), onednn_linear(onednn_layers(layer)):
        # sums of 96 products of size 1 in another order
        torch.testing.assert_close(layer(inputs), expected, atol=2e-6, rtol=0)


def test_outside_the_layer_is_as_before_and_has_gradients() -> None:
    layer = nn.Linear(8, 4)
    with pytest.raises(RuntimeError, match="in the middle"), onednn_linear(onednn_layers(layer)):
        assert "forward" in vars(layer)
        raise RuntimeError("in the middle")
    assert "forward" not in vars(layer)
    layer(torch.randn(2, 8)).sum().backward()
    assert layer.weight.grad is not None


def test_only_plain_fp32_layers_are_taken() -> None:
    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8), Other(8, 8), nn.Linear(8, 8).bfloat16())
    assert onednn_layers(model) == [model[0]]
