"""Check that the model and tokenizer folders of a recipe exist. Does not import torch."""

from __future__ import annotations

import logging
from pathlib import Path

from burnish.config.model import ModelConfig
from burnish.config.paths import folder_problem
from burnish.errors import BurnishError

log = logging.getLogger("burnish")


class ModelError(BurnishError, ValueError):
    """A model or tokenizer cannot be loaded or trained. The message gives the reason and a fix."""


_SINGLE = "model.safetensors"


def check_path(config: ModelConfig, *, warn: bool = False) -> None:
    """Raise ModelError if ``config.path`` looks like a folder that does not exist, or a folder
    without safely readable weights.

    ``warn`` logs a warning if a missing path inside an existing folder is taken for a hub name.
    """
    assert config.path is not None
    path = Path(config.path)
    if problem := folder_problem(config.path):
        raise ModelError(f"{problem}; check model.path")
    if warn and path.parts[:-1] and path.parent.is_dir() and not path.exists():
        log.warning(
            "%s does not exist, although the folder %s does: it is treated as a hub name",
            *(config.path, path.parent),
        )
    if warn and all((path / name).is_file() for name in (_SINGLE, f"{_SINGLE}.index.json")):
        log.warning(
            "%s has %s and the index of a model in several files: the first is read, as by "
            "transformers (vLLM reads the others); remove one of them",
            *(path, _SINGLE),
        )
    if config.gguf_file and path.is_dir() and not (path / config.gguf_file).is_file():
        have = sorted(p.name for p in path.glob("*.gguf"))
        raise ModelError(
            f"model.gguf_file={config.gguf_file!r} is not in {path}; GGUF files there: "
            f"{', '.join(have) or 'none'}"
        )
    has_gguf_only = path.is_dir() and not any(path.glob("*.safetensors"))
    if has_gguf_only and not config.gguf_file and (files := sorted(path.glob("*.gguf"))):
        raise ModelError(
            f"{path} has its weights as GGUF; choose a file: model.gguf_file={files[0].name}"
        )
    only_pickle = path.is_dir() and not config.gguf_file and not list(path.glob("*.safetensors"))
    if only_pickle and (list(path.glob("*.bin")) or list(path.glob("*.pt"))):
        raise ModelError(
            f"{path} has weights only as pickle files, which can run code when read; convert them "
            "to safetensors (transformers: AutoModel.from_pretrained(...).save_pretrained(...)) on "
            "an isolated machine"
        )


def check_tokenizer_path(config: ModelConfig) -> None:
    """Raise ModelError if ``config.tokenizer_path`` looks like a folder that does not exist."""
    name = config.tokenizer_path
    if name is not None and (problem := folder_problem(name)):
        raise ModelError(f"{problem}; check model.tokenizer_path")
