"""Digests of a model's weight and tokenizer files, to detect that they were replaced."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from burnish.config.model import ModelConfig
from burnish.config.paths import looks_local
from burnish.models.paths import ModelError
from burnish.small_files import read_small

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt")
"""Suffixes of weight files."""
_TOKENIZER_FILES = (
    *("tokenizer*.json", "tokenizer*.model", "spiece.model", "sentencepiece*.model", "vocab.*"),
    *("merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.*"),
)
_FORM = "2:"
"""Start of a digest. Digests of earlier versions have none and are not comparable."""
_ENDS_BYTES = 1 << 22
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 1 << 14


def weights_digest(models: Sequence[ModelConfig]) -> str:
    """Return a digest of the weight files of models and of their adapters (``lora.path``), and of
    the configs next to them.

    It covers name, size, and parts of each file (:func:`file_parts_digest`), so it detects other
    weights under the same path without reading all of them. The place of a folder has no influence.
    Raises ModelError if a file cannot be read.
    """
    return _digest([file for model in models for file in weight_paths(model)])


def present_weights_digest(model: ModelConfig) -> str | None:
    """Return the digest of one model; None if its weights are not on this machine."""
    return weights_digest([model]) if weight_paths(model) else None


def weights_changed(then: object, now: str | None) -> bool:
    """Return whether a stored digest is of other files than ``now``. A digest of an earlier
    version, and files that are not on this machine (None), are not compared."""
    is_comparable = isinstance(then, str) and then.startswith(_FORM) and now is not None
    return is_comparable and then != now


def weight_paths(model: ModelConfig) -> list[Path]:
    """Return the weight files that are read for a model and its adapter, and their configs: those
    of a local folder, or of a hub model that is completely in the cache. Empty if there are no
    weights."""
    folder = None if model.path is None else _folder(model.path, model.revision)
    paths: list[Path] = []
    if folder is not None and model.gguf_file is not None:
        paths = [folder / model.gguf_file]
    elif folder is not None:
        paths = _with_config(folder, "config.json")
    if model.lora is not None and model.lora.path is not None:
        paths += _with_config(Path(model.lora.path), "adapter_config.json")
    return [path for path in paths if path.is_file()]


def _with_config(folder: Path, config: str) -> list[Path]:
    paths = sorted(folder.glob("*.safetensors"))
    return [*paths, folder / config] if paths else []


def present_tokenizer_digest(model: ModelConfig) -> str | None:
    """Return a digest of the files of the tokenizer and the chat template; None if none of them is
    on this machine. Raises ModelError if a file cannot be read."""
    name, revision = model.tokenizer_override, None
    if name is None:
        name, revision = model.path, model.revision
    folder = None if name is None else _folder(name, revision)
    paths: list[Path] = []
    if folder is not None and model.gguf_file is not None and model.tokenizer_override is None:
        paths = [folder / model.gguf_file]
    elif folder is not None:
        paths = sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)})
    if model.template_file is not None:
        paths.append(model.template_file)
    files = [path for path in paths if path.is_file()]
    return _digest(files) if files else None


def present_config_digest(model: ModelConfig) -> str | None:
    """Return a digest of what a run reads from a model's ``config.json`` and
    ``generation_config.json`` whatever weights it has: settings of the architecture, and the end
    tokens. None if there is no config on this machine. Raises ModelError if a file cannot be
    read."""
    folder = None if model.path is None else _folder(model.path, model.revision)
    if folder is None or not (folder / "config.json").is_file():
        return None
    ends = _json(folder / "generation_config.json").get("eos_token_id")
    settings = {"config": _settings(_json(folder / "config.json")), "eos_token_id": ends}
    text = json.dumps(settings, sort_keys=True)
    return f"{_FORM}{hashlib.sha256(text.encode()).hexdigest()}"


_NO_SETTINGS = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "architectures")
"""Keys of a ``config.json`` that do not change what a model computes from given weights."""


def _settings(content: Any) -> Any:
    if not isinstance(content, dict):
        return content
    return {key: _settings(value) for key, value in content.items() if key not in _NO_SETTINGS}


def _json(file: Path) -> dict[str, Any]:
    """Return the object in a file; {} if the file does not exist. Raises ModelError."""
    try:
        content = json.loads(read_small(file)) if file.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"the file {file} of a model cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"the file {file} of a model is not a JSON object")
    return content


def _folder(name: str, revision: str | None) -> Path | None:
    """Return the folder of a model: a local one, or a complete snapshot in the hub's cache."""
    if Path(name).is_dir():
        return Path(name)
    if looks_local(name):
        return None
    config = try_to_load_from_cache(name, "config.json", revision=revision or "main")
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    index = folder / "model.safetensors.index.json"
    try:
        shards = json.loads(read_small(index))["weight_map"].values() if index.is_file() else ()
        return folder if all((folder / str(shard)).is_file() for shard in shards) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # a damaged download, which the loader repairs or refuses


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        try:
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            for part in _parts(file):
                digest.update(part)
        except OSError as error:
            raise ModelError(
                f"the file {file} of a model cannot be read ({error.strerror}); make it readable "
                "for this user"
            ) from error
    return f"{_FORM}{digest.hexdigest()}"


def file_parts_digest(file: Path) -> str:
    """Return a digest of the first and last 4 MiB of a file, and of 64 samples of 16 KiB at equal
    distances."""
    digest = hashlib.sha256()
    for part in _parts(file):
        digest.update(part)
    return digest.hexdigest()


def _parts(file: Path) -> Iterator[bytes]:
    """Yield the bytes that a digest covers: parts of a weight file, and all of another one."""
    if file.suffix not in WEIGHT_SUFFIXES:
        yield file.read_bytes()
        return
    size = file.stat().st_size
    with file.open("rb") as opened:
        yield opened.read(_ENDS_BYTES)
        opened.seek(max(0, size - _ENDS_BYTES))
        yield opened.read(_ENDS_BYTES)
        for number in range(_NUM_SAMPLES if size > 2 * _ENDS_BYTES else 0):
            opened.seek(size * number // _NUM_SAMPLES)
            yield opened.read(_SAMPLE_BYTES)
