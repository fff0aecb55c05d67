"""The list that new weights are crossed off, and the number they are compared by."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish import shm
from burnish.rollout.vllm.weights import _not_live, shared_folder
from burnish.rollout.weights import WeightNameCheck, fingerprint, read_fingerprints

MASK = (1 << 64) - 1


def number(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    return read_fingerprints({"x": fingerprint(tensor, dtype)})["x"].values


def placed(tensor: torch.Tensor, **place: int) -> int:
    return read_fingerprints({"x": fingerprint(tensor, torch.float32, **place)})["x"].placed


def mixed(bits: int) -> int:
    """SplitMix64's finaliser in Python integers, on sign-extended bits."""
    z = bits & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def test_a_fingerprint_is_the_sum_of_mixed_bits() -> None:
    values = [1.0, -1.5, 3e-40, 65504.0]
    for code, dtype in (("<f", torch.float32), ("<e", torch.float16)):
        bits = "<i" if code == "<f" else "<h"
        expected = sum(mixed(struct.unpack(bits, struct.pack(code, x))[0]) for x in values) & MASK
        assert number(torch.tensor(values), dtype) == expected


def test_a_fingerprint_adds_up_over_parts_in_any_order_and_zeros_add_nothing() -> None:
    x = torch.randn(70_000)  # more than one chunk of the CPU's
    whole = number(x, torch.float32)
    parts = [number(p, torch.float32) for p in x.split([1, 999, 69_000])]
    assert sum(parts) & MASK == whole
    assert number(x.view(700, 100).t(), torch.float32) == whole
    assert number(torch.cat([torch.zeros(5), x]), torch.float32) == whole


def test_a_fingerprint_of_places_adds_up_over_parts_at_their_places_and_zeros_add_nothing() -> None:
    x = torch.randn(700, 100)  # more than one chunk of the CPU's
    parts = [
        placed(x[:3, :9]),
        placed(x[:3, 9:], column=9),
        placed(x[3:, :50], row=3),
        placed(x[3:, 50:], row=3, column=50),
    ]
    assert sum(parts) & MASK == placed(x)
    assert placed(torch.nn.functional.pad(x, (0, 0, 0, 8))) == placed(x)
    assert placed(x[:0]) == placed(x[:, :0]) == placed(torch.zeros(())) == 0
    assert placed(x[0]) == sum(placed(part, row=i) for i, part in enumerate(x[0])) & MASK


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.flip(0),
        lambda x: x.flip(1),
        lambda x: x.flip(0, 1),
        lambda x: x.T,
        lambda x: x.roll(1, 0),
        lambda x: torch.cat([x[8:], x[:8]]),
        lambda x: x.view(4, 4, 16).transpose(0, 1).reshape(16, 16),  # heads and their halves
        lambda x: x.view(-1)[torch.arange(256).view(128, 2).flip(1).flatten()].view(16, 16),
    ],
)
def test_values_at_other_places_change_the_fingerprint_of_places_alone(change: Any) -> None:
    x = torch.randn(16, 16)
    y = change(x).contiguous()
    assert not torch.equal(x, y)
    assert number(x, torch.float32) == number(y, torch.float32) and placed(x) != placed(y)


def test_two_exchanged_values_change_the_fingerprint_of_places() -> None:
    x = torch.randn(40, 30)
    first = placed(x)
    for i, j in torch.randint(0, 1200, (200, 2)).tolist():
        y = x.clone().view(-1)
        y[i], y[j] = y[j].clone(), y[i].clone()
        assert (placed(y.view(40, 30)) == first) == (i == j)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_bit_anywhere_changes_a_fingerprint(dtype: torch.dtype) -> None:
    x = torch.randn(200).to(dtype)
    whole = number(x, dtype)
    for i in range(200):
        y = x.clone()
        y.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])[i] ^= 1
        assert number(y, dtype) != whole


def test_one_up_and_one_down_do_not_cancel() -> None:
    """The sum of the plain bits would be the same."""
    x = torch.ones(2)
    y = x.clone()
    y.view(torch.int32)[0] += 1
    y.view(torch.int32)[1] -= 1
    assert number(x, torch.float32) != number(y, torch.float32)


def test_a_fingerprint_is_of_the_rounded_values() -> None:
    x = torch.randn(100)
    assert number(x, torch.bfloat16) == number(x.bfloat16(), torch.bfloat16)
    assert number(x, torch.bfloat16) == number(x.bfloat16().float(), torch.bfloat16)


class Multiplies:
    """As vLLM's linear layers compute."""

    def apply(self, layer: Any, x: torch.Tensor, bias: None) -> torch.Tensor:
        return x @ layer.weight.T


def test_a_load_is_verified_with_one_read_from_the_device(host_reads: Any) -> None:
    model = torch.nn.ModuleList(torch.nn.Linear(5, 7, bias=False) for _ in range(20))
    for layer in model:
        layer.quant_method = Multiplies()
    named = dict(model.named_parameters())
    with host_reads() as reads:
        assert _not_live(model) == []
        sums = {name: fingerprint(tensor, torch.bfloat16) for name, tensor in named.items()}
        found = read_fingerprints(sums)
    assert reads.values == 0 and reads.lists == [(20,), (20, 2)]
    values = {name: both.values for name, both in found.items()}
    assert values == {name: number(tensor, torch.bfloat16) for name, tensor in named.items()}


def test_layers_that_compute_with_a_copy_or_with_noise_are_distinguished() -> None:
    """Products of a GPU may differ between two calls in their last bits."""

    class Noisy(Multiplies):
        def apply(self, layer: Any, x: torch.Tensor, bias: None) -> torch.Tensor:
            out = super().apply(layer, x, bias)
            return out * (1 + 1e-3 * torch.rand_like(out))

    class Packed(Noisy):
        def apply(self, layer: Any, x: torch.Tensor, bias: None) -> torch.Tensor:
            return super().apply(copy, x, bias)

    layer = torch.nn.Linear(5, 7, bias=False)
    copy = deepcopy(layer)
    layer.quant_method = Noisy()
    assert _not_live(torch.nn.ModuleDict({"a": layer})) == []
    layer.quant_method = Packed()
    assert _not_live(torch.nn.ModuleDict({"a": layer})) == [
        "the layer a computes with a copy of its weight"
    ]


def test_every_weight_is_received_once_in_its_shape() -> None:
    names = WeightNameCheck({"a": (2,), "b": (3,)})
    names.add("a", (2,))
    with pytest.raises(ValueError, match="weight a was received twice"):
        names.add("a", (2,))
    with pytest.raises(ValueError, match="weight c"):
        names.add("c", (2,))
    with pytest.raises(ValueError, match="weights were"):
        names.complete()
    with pytest.raises(ValueError, match=r"shape \[1\]"):
        names.add("b", (1,))
    names.add("b", (3,))
    names.complete()


KILLED = """
import os, signal, tempfile
from pathlib import Path
from burnish.rollout.vllm.weights import _not_live, shared_folder
(shared_folder({size}) / "00000.safetensors").write_bytes(bytes(4096))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("size", [1, 1 << 60], ids=["in shared memory", "on disk"])
def test_weights_that_a_killed_process_left_are_removed_by_the_next(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2^60 bytes are more than any /dev/shm has."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    places = [tmp_path] + [p for p in [Path("/dev/shm")] if size == 1 and p.is_dir()]

    def left(pid: int) -> list[Path]:
        return [path for place in places for path in place.glob(f"burnish-weights-{pid}-*")]

    environment = os.environ | {"TMPDIR": str(tmp_path)}
    killed = subprocess.Popen([sys.executable, "-c", KILLED.format(size=size)], env=environment)
    killed.wait(120)
    assert len(left(killed.pid)) == 1
    folder = shared_folder(size)
    assert left(killed.pid) == [] and left(os.getpid()) == [folder]
    again = shared_folder(size)
    assert folder.is_dir(), "its owner lives"
    folder.rmdir()
    again.rmdir()
    assert not shm.owner_has_ended(folder.name)
