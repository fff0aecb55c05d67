"""Models without weights, for ranks that read only their own rows of each weight.

This requires all weights in safetensors files, under the model's own names and shapes, as in most
HuggingFace folders. It does not work for GGUF files, models built from scratch, quantized weights,
or if transformers renames or merges weights on load (some mixtures of experts). Every rank loads
those models in full and then keeps its shard.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from burnish.config.model import ModelConfig
from burnish.models.buffers import persistent_buffers, plain_name, replace_buffers
from burnish.models.islands import cast_parameters
from burnish.models.tensor_files import Rows, TensorFiles
from burnish.models.tied_ends import untie_as_stored
from burnish.models.untrusted import UNREADABLE, unloadable

log = logging.getLogger("burnish")


def empty_model(
    auto_class: Any, config: ModelConfig, pretrained_config: PretrainedConfig, *, dtype: torch.dtype
) -> Any | None:
    """Build the model of a folder, of which this is the config, without reading its parameters.

    Parameters are on the meta device; buffers are loaded or computed. Returns None if the weights
    cannot be read in parts.
    """
    files = weight_files(config)
    if files is None or "quantization_config" in pretrained_config.to_dict():
        return None
    pretrained_config = copy.deepcopy(pretrained_config)
    untie_as_stored(pretrained_config, auto_class, files, files.read, name=str(config.path))
    with init_empty_weights(include_buffers=False):
        model = auto_class.from_config(
            pretrained_config, dtype=dtype, trust_remote_code=config.trust_remote_code
        )
    cast_parameters(model, dtype)
    model.tie_weights()  # moving parameters to the meta device untied them
    buffers = dict(persistent_buffers(model))
    state = {**dict(model.named_parameters()), **buffers}
    odd = [
        name
        for name, tensor in state.items()
        if name not in files or files.shape(name) != tuple(tensor.shape)
    ]
    if odd:
        log.warning(
            "the safetensors files of %s have no %s of the model's shape, so every rank reads the "
            "full model before it keeps its shard",
            config.path,
            odd[0],
        )
        return None
    _read_buffers(model, buffers, files, dtype)
    try:
        model.generation_config = GenerationConfig.from_pretrained(
            str(config.path), revision=config.revision or "main"
        )
    except OSError:  # the folder has none: transformers made one from the config
        log.debug("%s has no generation config", config.path)
    return model


def _read_buffers(
    model: Any, buffers: Mapping[str, Tensor], files: TensorFiles, dtype: torch.dtype
) -> None:
    """Read the persistent buffers in the dtypes in which transformers loads them.

    Buffers are small and every rank needs all of them. transformers keeps some in fp32
    (``_keep_in_fp32_modules``); the others have the dtype of a model built in ``dtype``.
    """
    in_fp32 = model._get_dtype_plan(dtype)
    read = {}
    for name, buffer in buffers.items():
        keep = any(pattern in name for pattern in in_fp32)
        read[name] = files.read(name).to(torch.float32 if keep else buffer.dtype)
    replace_buffers(model, read)


@torch.no_grad()
def fill_rows(
    parameters: Mapping[str, tuple[Tensor, Rows]],
    config: ModelConfig,
    *,
    keep: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Read rows [begin, end) of each named parameter into its tensor; no other rows are read.

    ``parameters`` maps a name to (tensor, rows). ``keep`` maps a name and the rows read to the part
    of them that the tensor holds; None: all of them.
    """
    files = weight_files(config)
    assert files is not None, "an empty model comes from safetensors files"
    for name, (tensor, rows) in parameters.items():
        read = files.read(plain_name(name), rows)
        tensor.copy_(read if keep is None else keep(name, read))


def read_tensor(config: ModelConfig, name: str) -> Tensor:
    """Return one weight of an empty model from its files."""
    files = weight_files(config)
    assert files is not None, "an empty model comes from safetensors files"
    return files.read(name)


def weight_files(config: ModelConfig) -> TensorFiles | None:
    """Return the safetensors files of a HuggingFace folder or hub model that transformers reads;
    None if it has none or some are missing. Raises ModelError if one is damaged."""
    single = find_file(config, SAFE_WEIGHTS_NAME)
    index = find_file(config, SAFE_WEIGHTS_INDEX_NAME) if single is None else None
    names = (
        [SAFE_WEIGHTS_NAME]
        if index is None
        else sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    )
    paths = [find_file(config, name) for name in names] if single is None else [single]
    existing = [path for path in paths if path is not None]
    if not existing or len(existing) != len(paths):
        return None
    try:
        return TensorFiles(existing)
    except UNREADABLE as error:
        raise unloadable("model", str(config.path), error) from error


def find_file(config: ModelConfig, name: str) -> Path | None:
    """Return a file of a folder or hub model; None if it has none of this name."""
    file = cached_file(
        str(config.path),
        name,
        revision=config.revision or "main",
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if file is None else Path(file)
