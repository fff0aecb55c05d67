"""Store nested state as JSON and safetensors, without pickle. Capture and restore random states.

``<name>.json`` contains the structure; every tensor and array in it is a reference into
``<name>.safetensors``. Types that JSON lacks are objects with one key that begins with ``$``:

    {"$tensor": key}                   a torch tensor under that key of the safetensors file
    {"$ndarray": [key, dtype, shape]}  a numpy array, its bytes under that key
    {"$numpy": [dtype, hex]}           a numpy scalar
    {"$tuple": [item, ...]}            a tuple
    {"$dict": [[key, value], ...]}     a dict with keys that are ints or begin with $
    {"$int": hex}                      an int that does not fit into 64 bits
    {"$float": hex}                    NaN or infinity, as the 8 bytes of the double
"""

from __future__ import annotations

import json
import logging
import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from burnish.checkpoint.errors import CheckpointError, UnstorableError
from burnish.host_copies import to_host
from burnish.small_files import read_small

FORMAT_VERSION = 1
EXPORT_METADATA = "facts"
"""Name of the state in a checkpoint that exports copy into the model's config."""
_NUMPY_KINDS = "biufcmMSU"
_LARGEST_STATE = 16 << 30
"""Bytes of the JSON of a state: recorded rollouts contain their texts."""
logger = logging.getLogger("burnish")

WeightsRecord = dict[str, dict[str, str]]
"""Role, or ``tokenizer`` -> ``model`` (folder or hub name) and ``digest`` (``models/digest.py``) of
files that a resumed run reads again."""

UNFITTING = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Errors of readers of a loaded state that has other keys, types or sizes than they wrote."""


def save_state(folder: Path, name: str, state: Mapping[str, Any]) -> None:
    """Write ``state`` as ``<name>.json`` and ``<name>.safetensors`` into ``folder``.

    Supported values: None, bool, int, float, str, list, tuple, mapping (str or int keys), numpy
    array or scalar, torch tensor. Mappings load as dict, named tuples as tuple, and parameters and
    tensors of any device as plain CPU tensors. Tensors that share memory are stored separately.
    Raises UnstorableError with the entry that cannot be stored, or CheckpointError with the file
    that cannot be written.
    """
    writer = _Writer()
    try:
        text = json.dumps(
            {"format": FORMAT_VERSION, "state": writer.encode(dict(state), "")}, allow_nan=False
        )
    except RecursionError as error:
        raise UnstorableError(
            f"state {name!r} cannot be stored: it is nested too deeply or contains itself; "
            "store its values without cycles and with fewer levels"
        ) from error
    path = folder / f"{name}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(writer.tensors, path)
        path = folder / f"{name}.json"
        path.write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} could not be written ({error}); check the free space and the permissions of "
            "its folder, or use another run_dir"
        ) from error


def load_state(folder: Path, name: str) -> dict[str, Any]:
    """Load a state written by :func:`save_state`, with its types. Tensors are on the CPU, each with
    its own memory.

    Only JSON and safetensors are read; a pickle in their place raises and is never run. Raises
    CheckpointError with the file that is missing or corrupted.
    """
    path = folder / f"{name}.safetensors"
    try:
        for part in (path, folder / f"{name}.json"):
            if part.exists() and not part.is_file():  # reading a pipe or a device may block forever
                raise ValueError(f"{part.name} is not a regular file")
        # copied from the memory-mapped file, which retention may delete while tensors are in use
        tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
        path = folder / f"{name}.json"
        document = json.loads(read_small(path, limit=_LARGEST_STATE))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: use another checkpoint") from error
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): use another checkpoint") from error
    version = document.get("format") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version!r}, but this burnish reads {FORMAT_VERSION}: "
            "read it with the burnish version that wrote it"
        )
    try:
        state = _decode(document["state"], tensors)
    except (*UNFITTING, struct.error, SyntaxError) as error:
        raise CheckpointError(f"{path} is corrupted ({error!r}): use another checkpoint") from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} contains a {type(state).__name__} instead of a dict: use another checkpoint"
        )
    return state


def saved_weights(checkpoint: Path) -> WeightsRecord:
    """Return the entry ``weights`` of a checkpoint's session. Empty if an earlier version wrote it.
    Raises CheckpointError if the session is missing or corrupted."""
    record = load_state(checkpoint, "session").get("weights", {})
    entries = record.values() if isinstance(record, dict) else [None]
    if not all(isinstance(entry, dict) for entry in entries):
        raise CheckpointError(
            f"{checkpoint / 'session.json'} is corrupted (its weights are no mapping of mappings): "
            "use another checkpoint"
        )
    return dict(record)


def capture_rng() -> dict[str, Any]:
    """Return the state of every global random generator: Python's, numpy's legacy one, torch's on
    the CPU and, if this process uses a GPU, torch's on its current GPU.

    :func:`save_state` can store the result. Generators that a caller created are not included.
    """
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        # Reading a GPU's state would initialize CUDA in a process that does not use it.
        "torch_cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore the state of :func:`capture_rng`, so that the next random numbers are the same.

    Logs a warning if only one of the two processes uses a GPU. (Checkpoints of older versions
    contain a state for each GPU of the machine.)
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    saved, on_gpu = state["torch_cuda"], torch.cuda.is_initialized()
    if saved and on_gpu:
        place = torch.cuda.current_device() if len(saved) > 1 else 0
        torch.cuda.set_rng_state(saved[min(place, len(saved) - 1)])
    if bool(saved) != on_gpu:
        logger.warning(
            "the random state was saved %s a GPU and is restored %s one: random numbers will "
            "differ from the uninterrupted run's",
            "with" if saved else "without",
            "with" if on_gpu else "without",
        )


class _Writer:
    """Encodes a state as JSON values and collects its tensors and arrays in ``tensors``."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._storages: set[int] = set()

    def encode(self, value: Any, path: str) -> Any:
        """Encode ``value`` as JSON. ``path`` is its location in the state, like
        ``/optimizer/lr``."""
        if isinstance(value, Mapping):
            return self._encode_mapping(value, path)
        if isinstance(value, list | tuple):
            items = [self.encode(item, f"{path}/{i}") for i, item in enumerate(value)]
            return {"$tuple": items} if isinstance(value, tuple) else items
        if isinstance(value, Tensor):
            return {"$tensor": self._store(_plain(value, path), path)}
        if isinstance(value, np.ndarray | np.generic):
            return self._encode_numpy(value, path)
        return _encode_scalar(value, path)

    def _encode_mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        for key in value:
            if type(key) not in (str, int):
                raise UnstorableError(
                    f"state entry {path or '/'} has the key {key!r}, a {type(key).__name__}: "
                    "keys must be str or int"
                )
        items = [(key, self.encode(item, f"{path}/{key}")) for key, item in value.items()]
        if all(type(key) is str and not key.startswith("$") for key in value):
            return dict(items)
        return {"$dict": [[_encode_scalar(key, path), item] for key, item in items]}

    def _encode_numpy(self, value: np.ndarray | np.generic, path: str) -> Any:
        if value.dtype.kind not in _NUMPY_KINDS or isinstance(value, np.ma.MaskedArray):
            raise UnstorableError(
                f"state entry {path} is a numpy {type(value).__name__} of {value.dtype}: only "
                "plain arrays of numbers, bools, times and text can be stored"
            )
        if isinstance(value, np.generic):
            return {"$numpy": [value.dtype.str, value.tobytes().hex()]}
        data = torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())
        return {"$ndarray": [self._store(data, path), value.dtype.str, list(value.shape)]}

    def _store(self, tensor: Tensor, path: str) -> str:
        """Store ``tensor`` under a key derived from ``path`` and return the key.

        Safetensors requires that tensors do not share memory, so shared ones are cloned.
        """
        storage = tensor.untyped_storage()
        shared = storage.data_ptr() in self._storages or storage.nbytes() != tensor.nbytes
        if shared and tensor.numel():
            tensor = tensor.clone()
        self._storages.add(tensor.untyped_storage().data_ptr())
        base = path.removeprefix("/").encode("ascii", "backslashreplace").decode()
        key, n = base, 1
        while key in self.tensors or key == "__metadata__":
            n += 1
            key = f"{base}#{n}"
        self.tensors[key] = tensor
        return key


def _plain(value: Tensor, path: str) -> Tensor:
    """Return ``value`` as a dense contiguous CPU tensor. Raises UnstorableError if impossible."""
    if type(value) not in (Tensor, torch.nn.Parameter) or value.is_meta or value.is_quantized:
        kind = "a meta tensor" if value.is_meta else f"a {type(value).__name__}"
        raise UnstorableError(
            f"state entry {path} is {kind}: gather or convert it to a plain torch.Tensor first"
        )
    if value.layout != torch.strided or value.dtype not in _DTYPES:
        raise UnstorableError(
            f"state entry {path} is a {value.layout} tensor of {value.dtype}, which safetensors "
            "cannot store: convert it first"
        )
    return to_host(value.detach().resolve_conj().resolve_neg())


_DTYPES = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32,
        torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
    }
)  # fmt: skip


def _encode_scalar(value: Any, path: str) -> Any:
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        return value if value.bit_length() < 64 else {"$int": hex(value)}
    if type(value) is float:
        finite = value - value == 0.0
        return value if finite else {"$float": struct.pack(">d", value).hex()}
    raise UnstorableError(
        f"state entry {path} is a {type(value).__module__}.{type(value).__qualname__}, which "
        "cannot be stored: convert it to numbers, text, lists, tuples, dicts, arrays or tensors"
    )


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Decode the output of ``_Writer.encode``.

    Raises KeyError, TypeError, ValueError or struct.error.
    """
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _decode(item, tensors) for key, item in value.items()}
    content = value[tag]
    match tag:
        case "$tensor":
            return tensors[content]
        case "$ndarray":
            key, dtype, shape = content
            return _array(tensors[key].numpy().tobytes(), dtype, shape).copy()
        case "$numpy":
            dtype, data = content
            return _array(bytes.fromhex(data), dtype, ())[()]
        case "$tuple":
            return tuple(_decode(item, tensors) for item in content)
        case "$dict":
            return {_decode(key, tensors): _decode(item, tensors) for key, item in content}
        case "$int":
            return int(content, 16)
        case "$float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
    raise ValueError(f"unknown tag {tag!r}")


def _array(data: bytes, dtype: str, shape: Any) -> np.ndarray:
    kind = np.dtype(dtype)
    if kind.kind not in _NUMPY_KINDS:
        raise ValueError(f"numpy dtype {dtype!r} is not allowed")
    if any(size < 0 for size in shape):
        raise ValueError(f"the shape {shape!r} is negative")
    return np.ndarray(tuple(shape), kind, data)
