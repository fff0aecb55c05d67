"""Nested state round-trips, types included, and no file is ever unpickled."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import struct
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from burnish.checkpoint import CheckpointError, capture_rng, load_state, restore_rng, save_state


def round_trip(folder: Path, state):
    save_state(folder, "state", state)
    return load_state(folder, "state")


def assert_same(a, b) -> None:
    """Equal in type and in every bit: NaN equals the same NaN, -0.0 is not 0.0."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert [(type(key), key) for key in a] == [(type(key), key) for key in b]
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.numpy().tobytes() == b.numpy().tobytes()
    elif isinstance(a, np.ndarray | np.generic):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()
    elif isinstance(a, float):
        assert struct.pack(">d", a) == struct.pack(">d", b)
    else:
        assert a == b


arrays = hnp.arrays(
    dtype=hnp.boolean_dtypes()
    | hnp.integer_dtypes(endianness="?")
    | hnp.floating_dtypes(endianness="?")
    | hnp.complex_number_dtypes()
    | hnp.datetime64_dtypes()
    | hnp.unicode_string_dtypes(),
    shape=hnp.array_shapes(min_dims=0, min_side=0, max_side=3),
)
tensors = hnp.arrays(
    dtype=st.sampled_from(["bool", "uint8", "int64", "uint16", "float16", "float32", "float64"]),
    shape=hnp.array_shapes(min_dims=0, min_side=0, max_side=3),
).map(torch.from_numpy)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**63 - 2, 2**63 + 2)
    | st.integers(-(2**64), 2**64)
    | st.floats(width=64)
    | st.text()
    | st.sampled_from(["$tensor", "", "__metadata__"])
    | tensors
    | arrays
    | arrays.filter(lambda a: a.size > 0).map(lambda a: a.reshape(-1)[0])
)
keys = (
    st.integers() | st.text(max_size=3) | st.sampled_from(["$tensor", "$", "a/b", "__metadata__"])
)
states = st.dictionaries(
    keys,
    st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(keys, inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@settings(deadline=None, max_examples=80)
@given(states)
def test_any_nested_state_round_trips(tmp_path_factory, state):
    folder = tmp_path_factory.getbasetemp() / "round_trip"
    assert_same(round_trip(folder, state), state)


def test_ints_above_the_decimal_text_limit_round_trip(tmp_path):
    """Python refuses to print ints of over 4300 decimal digits; 10**5000 has 5001."""
    state = {"big": 10**5000, "negative": -(10**5000)}
    assert_same(round_trip(tmp_path, state), state)


def test_nan_keeps_its_payload_and_infinity_its_sign(tmp_path):
    odd_nan = struct.unpack(">d", bytes.fromhex("fff8000000001234"))[0]
    state = {"nan": odd_nan, "inf": math.inf, "minus": -math.inf, "zero": -0.0}
    assert_same(round_trip(tmp_path, state), state)


def test_the_json_is_strict_json(tmp_path):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    save_state(tmp_path, "state", {"a": math.nan, "b": math.inf, "c": np.float32("nan")})
    json.loads((tmp_path / "state.json").read_text(), parse_constant=refuse)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.int16,
        torch.int8, torch.int32, torch.uint32, torch.uint64,
    ],
)  # fmt: skip
def test_every_training_dtype_round_trips_bitwise(tmp_path, dtype):
    raw = torch.arange(64, dtype=torch.uint8)
    loaded = round_trip(tmp_path, {"x": raw.view(dtype)})["x"]
    assert loaded.dtype == dtype
    assert torch.equal(loaded.view(torch.uint8), raw)


def test_tensors_that_share_memory_are_loaded_separately(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        "base": base,
        "again": base,
        "transposed": base.t(),
        "column": base[:, 1],
        "tail": base[2:],
        "expanded": torch.ones(1).expand(3),
        "conjugate": torch.complex(base, base).conj(),
    }
    loaded = round_trip(tmp_path, state)
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor), name
    loaded["base"].zero_()
    assert torch.equal(loaded["again"], base)
    assert torch.equal(loaded["tail"], base[2:])
    # and the state that was saved is untouched
    assert torch.equal(base, torch.arange(12.0).reshape(3, 4))


def test_loaded_tensors_outlive_the_file(tmp_path):
    save_state(tmp_path, "state", {"x": torch.ones(10_000)})
    loaded = load_state(tmp_path, "state")
    (tmp_path / "state.safetensors").write_bytes(b"")
    assert loaded["x"].sum() == 10_000


def test_loaded_arrays_can_be_written_to(tmp_path):
    loaded = round_trip(tmp_path, {"a": np.zeros(3)})
    loaded["a"][0] = 1.0
    assert loaded["a"].tolist() == [1.0, 0.0, 0.0]


def test_a_restored_model_and_optimizer_continue_bitwise(tmp_path):
    def train(model, optimizer):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def make():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)

    model, optimizer = make()
    train(model, optimizer)
    save_state(
        tmp_path, "state", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    )
    resumed, resumed_optimizer = make()
    loaded = load_state(tmp_path, "state")
    resumed.load_state_dict(loaded["model"])
    resumed_optimizer.load_state_dict(loaded["optimizer"])
    train(model, optimizer)
    train(resumed, resumed_optimizer)
    assert torch.equal(resumed.weight, model.weight)
    assert torch.equal(resumed.bias, model.bias)


def test_mappings_are_loaded_as_dict_and_parameters_as_tensors(tmp_path):
    loaded = round_trip(tmp_path, OrderedDict(w=torch.nn.Parameter(torch.ones(2))))
    assert type(loaded) is dict
    assert type(loaded["w"]) is torch.Tensor
    assert not loaded["w"].requires_grad


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({1, 2}, "builtins.set"),
        (object(), "builtins.object"),
        (torch.float32, "dtype"),
        (Path("x"), "pathlib"),
        (np.array([object()]), "ndarray of object"),
        (np.ma.masked_array([1.0], [True]), "MaskedArray"),
        (torch.empty(2, device="meta"), "meta tensor"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
    ],
)
def test_an_unsupported_value_is_named_with_its_path(tmp_path, value, said):
    with pytest.raises(CheckpointError, match=f"/optimizer/groups/0/extra.*{said}"):
        save_state(tmp_path, "state", {"optimizer": {"groups": [{"extra": value}]}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", [1.5, None, True, (1, 2)])
def test_keys_other_than_text_and_ints_are_refused(tmp_path, key):
    with pytest.raises(CheckpointError, match="keys must be str or int"):
        save_state(tmp_path, "state", {"a": {key: 1}})


def test_a_recursive_state_is_refused(tmp_path):
    state = {}
    state["self"] = state
    with pytest.raises(CheckpointError, match="contains itself"):
        save_state(tmp_path, "state", state)


class Bomb:
    """Unpickling one creates the file ``marker``."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("name", ["state.json", "state.safetensors"])
@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_a_malicious_pickle_in_place_of_a_file_is_refused_and_never_run(tmp_path, name, how):
    save_state(tmp_path, "state", {"x": torch.ones(2)})
    marker = tmp_path / "ran"
    path = tmp_path / name
    if how == "pickle":
        path.write_bytes(pickle.dumps(Bomb(marker)))
    else:
        torch.save(Bomb(marker), path)
    with pytest.raises(CheckpointError, match=name):
        load_state(tmp_path, "state")
    assert not marker.exists()
    # the bomb is live, so the test fails if loading ever unpickles
    live = path.rename(tmp_path / "live.pt")
    torch.load(live, weights_only=False) if how == "torch" else pickle.loads(live.read_bytes())
    assert marker.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1, 2]",
        '{"format": 2, "state": {}}',
        '{"format": 1}',
        '{"format": 1, "state": [1]}',
        '{"format": 1, "state": {"a": {"$tensor": "missing"}}}',
        '{"format": 1, "state": {"a": {"$tensor": [1]}}}',
        '{"format": 1, "state": {"a": {"$unknown": 1}}}',
        '{"format": 1, "state": {"a": {"$numpy": ["|O", "0000000000000000"]}}}',
        '{"format": 1, "state": {"a": {"$ndarray": ["x", "<f8", [100]]}}}',
        '{"format": 1, "state": {"a": {"$float": "00"}}}',
        '{"format": 1, "state": {"a": {"$int": 5}}}',
        '{"format": 1, "state": {"a": {"$dict": [1]}}}',
        '{"format": 1, "state": {"a": {"$dict": [[[1], 1]]}}}',
        '{"format": 1, "state": {"a": {"$ndarray": ["x", "<f8", [-1]]}}}',
        '{"format": 1, "state": {"a": {"$ndarray": ["x", "<f8", [9999999999999999999, 0]]}}}',
        '{"format": 1, "state": {"a": {"$ndarray": ["x", "(2,", [1]]}}}',
        '{"format": 1, "state": {"a": {"$ndarray": ["x", {"names": 5}, [1]]}}}',
        '{"format": 1, "state": ' + "[" * 900 + "]" * 900 + "}",
        "[" * 100_000,
    ],
)
def test_corrupt_json_is_an_error_that_names_the_file(tmp_path, text):
    save_state(tmp_path, "state", {"x": torch.ones(2)})
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        load_state(tmp_path, "state")


@pytest.mark.parametrize("name", ["state.json", "state.safetensors"])
def test_a_pipe_in_place_of_a_file_is_not_opened(tmp_path, name):
    save_state(tmp_path, "state", {"x": torch.ones(2)})
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        load_state(tmp_path, "state")


@pytest.mark.parametrize("name", ["state.json", "state.safetensors"])
def test_a_missing_file_is_an_error_that_names_it(tmp_path, name):
    save_state(tmp_path, "state", {"x": torch.ones(2)})
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load_state(tmp_path, "state")


def test_truncated_tensors_are_an_error_that_names_the_file(tmp_path):
    save_state(tmp_path, "state", {"x": torch.ones(100)})
    path = tmp_path / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"state\.safetensors"):
        load_state(tmp_path, "state")


def draw() -> list:
    """Numbers from every generator; normal draws use the spare value that generators keep back."""
    return [
        [random.random() for _ in range(3)],
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        np.random.randn(),
        torch.rand(3).tolist(),
        torch.randn(5).tolist(),
    ]


def test_restored_generators_give_the_same_next_numbers(tmp_path):
    draw()  # leaves a spare normal value in each generator, which must be part of the state
    save_state(tmp_path, "rng", {"rng": capture_rng()})
    expected = draw()
    assert draw() != expected
    restore_rng(load_state(tmp_path, "rng")["rng"])
    assert draw() == expected


def test_only_the_generator_of_this_processs_gpu_is_saved_and_restored(monkeypatch, caplog):
    """And a process that uses none does not start CUDA by asking."""
    states = [torch.full((16,), i, dtype=torch.uint8) for i in range(3)]
    given = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: states[1])
    monkeypatch.setattr(torch.cuda, "set_rng_state", given.append)
    cpu_only = capture_rng()
    assert cpu_only["torch_cuda"] == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    state = capture_rng()
    assert state["torch_cuda"] == [states[1]]
    restore_rng(state)
    restore_rng(state | {"torch_cuda": states})  # as older versions wrote it
    assert given == [states[1], states[1]] and not caplog.text
    restore_rng(cpu_only)
    assert "saved without a GPU and is restored with one" in caplog.text
