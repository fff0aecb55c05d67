"""Files of a checkpoint from somebody else: what an export reads, copies and refuses."""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from os.path import realpath
from pathlib import Path

from torch import Tensor

from burnish.checkpoint.errors import CheckpointError
from burnish.errors import BurnishError
from burnish.messages import library_text
from burnish.models.untrusted import UNREADABLE
from burnish.small_files import read_small

log = logging.getLogger("burnish")

_MAX_LAYERS = 512
"""Layers that a config may have without weights for them: a vision tower that was not read."""
_EXPORTED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "*.spm", "sentencepiece*",
    "spiece*", "tekken.json", "chat_template.json", "chat_template.jinja", "generation_config.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "bpe.codes", "byte_maps.json", "dict.txt", "emoji.json", "entity_vocab.json", "normalizer.json",
    "prophetnet.tokenizer", "target_vocab.json", "word_shape.json", "word_pronunciation.json",
)  # fmt: skip
"""Files of a checkpoint's ``hf`` folder that an export copies, in addition to the config. Python
files only with ``trust_remote_code``."""


@contextmanager
def reading(source: Path) -> Iterator[None]:
    """Raise CheckpointError for an error that the files of ``source`` cause."""
    try:
        yield
    except BurnishError:
        raise
    except UNREADABLE as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EACCES, errno.EROFS):
            raise  # of the export folder
        raise CheckpointError(
            f"the model in {source} cannot be read ({type(error).__name__}: {library_text(error)});"
            " use another checkpoint"
        ) from error


def check_files(folder: Path) -> None:
    """Raise CheckpointError if a symbolic link in ``folder`` points outside of it, or if ``folder``
    contains a pipe or a device, which may block a reader forever.

    The target of a link, which may be any file of this machine, would be copied into the export.
    """
    inside = folder.resolve()
    for path in sorted(folder.rglob("*")):
        is_outside = path.is_symlink() and not Path(realpath(path)).is_relative_to(inside)
        if not is_outside and not path.is_file() and not path.is_dir():  # also a link to nothing
            raise CheckpointError(
                f"{path} is neither a file nor a folder; remove it, or use another checkpoint"
            )
        if is_outside:
            raise CheckpointError(
                f"{path} is a symbolic link to {path.readlink()}, outside the checkpoint, and "
                "its target would be copied into the export; if you trust the checkpoint, make a "
                f"copy without links first: cp -rL {folder} COPY"
            )


def check_sizes(source: Path, weights: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if the config describes a model that is much larger than the weights,
    which would be allocated first."""
    config = json.loads(read_small(source / "hf" / "config.json"))
    largest = max((size for tensor in weights.values() for size in tensor.shape), default=0)
    numbers = [("", config)]
    while numbers:
        key, value = numbers.pop()
        if isinstance(value, dict):
            numbers += value.items()
        is_count = isinstance(value, int) and key.endswith(("_layers", "n_layer", "depth"))
        is_size = isinstance(value, int) and key.endswith(("_size", "_dim", "_experts", "n_embd"))
        most_layers, most_rows = max(_MAX_LAYERS, len(weights)), 64 * max(largest, 1 << 14)
        if (is_count and value > most_layers) or (is_size and value > most_rows):
            raise CheckpointError(
                f"{source / 'hf' / 'config.json'} has {key}={value}, but {len(weights)} weights of "
                f"at most {largest} rows or columns; use another checkpoint"
            )


def copy_tokenizer(hf: Path, target: Path, *, trust: bool) -> None:
    """Copy the files of the tokenizer, the model's own generation config, which contains its end
    tokens, and its Python code. Other files of ``hf`` are not copied: loaders of other programs
    would read them (a pickle, an index of weights)."""
    left_out = []
    for file in sorted(hf.iterdir()):
        written = file.name != "generation_config.json" and (target / file.name).exists()
        if file.name == "config.json" or written:
            continue
        is_exported = any(fnmatchcase(file.name, pattern) for pattern in _EXPORTED)
        if file.is_file() and (is_exported or (trust and file.suffix == ".py")):
            shutil.copy2(file, target / file.name)
        elif file.is_dir() and file.name == "additional_chat_templates":
            (target / file.name).mkdir(exist_ok=True)
            for template in sorted(file.glob("*.jinja")):
                shutil.copy2(template, target / file.name / template.name)
        else:
            left_out.append(file.name)
    if left_out:
        log.warning("files of the checkpoint that are not exported: %s", ", ".join(left_out[:10]))
