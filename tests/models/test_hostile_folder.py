"""Model folders of somebody else: no file outside is read, no code runs, and nothing waits."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from burnish.config.model import ModelConfig, ScratchConfig
from burnish.errors import BurnishError
from burnish.models.load import ModelError, load_causal_lm, load_tokenizer
from burnish.plan.shapes import find_config

Change = Callable[[Path], Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in a folder."""
    config = ModelConfig(scratch=ScratchConfig(hidden_size=16, num_layers=1, num_heads=2))
    folder = tmp_path_factory.mktemp("model")
    load_causal_lm(config).save_pretrained(folder)
    load_tokenizer(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """A copy of the model, next to a file of weights with the same names."""
    shutil.copy(model / "model.safetensors", tmp_path / "outside.safetensors")
    return Path(shutil.copytree(model, tmp_path / "copy"))


def _config(**values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def _index(file: str) -> Change:
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    return _file(
        "model.safetensors.index.json", json.dumps({"weight_map": dict.fromkeys(names, file)})
    )


def _file(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


CHANGES: dict[str, Change] = {
    "weights of the folder above": _index("../outside.safetensors"),
    "an absolute path": _index("/etc/hostname"),
    "a folder": _index(".."),
    "an index of nonsense": _file("model.safetensors.index.json", "[1]"),
    "a nested index": _file("model.safetensors.index.json", "[" * 100_000),
    "a pipe": lambda folder: os.mkfifo(folder / "extra.safetensors"),
    "another base model": _file(
        "adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "/other"}'
    ),
    "a kernel of the hub": _config(attn_implementation="owner/kernel"),
    "a kernel, internally": _config(_attn_implementation="owner/kernel:attention"),
    "no heads": _config(num_attention_heads=0),
    "other sizes": _config(hidden_size=10**12),
    "a quantization of nonsense": _config(quantization_config=5),
    "a config of nonsense": _file("config.json", "[" * 100_000),
    "weights of nonsense": _file("model.safetensors", "pickle"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_model_is_refused(change: Change, folder: Path) -> None:
    change(folder)
    with pytest.raises(ModelError, match=r"copy"):
        load_causal_lm(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("name", ["weights of the folder above", "a pipe", "another base model"])
def test_a_sharded_model_is_refused_alike(name: str, folder: Path) -> None:
    CHANGES[name](folder)
    with pytest.raises(ModelError, match=r"copy"):
        load_causal_lm(ModelConfig(path=str(folder)), empty=True)


def test_plan_refuses_kernels_of_the_hub_without_trust(folder: Path) -> None:
    CHANGES["a kernel of the hub"](folder)
    with pytest.raises(ModelError, match="owner/kernel"):
        find_config(ModelConfig(path=str(folder)))
    find_config(ModelConfig(path=str(folder), trust_remote_code=True))


@pytest.mark.parametrize(
    "content",
    ["[" * 100_000, "{", "[]", '{"model_type": "llama", "num_attention_heads": {}}', None],
)
def test_plan_and_doctor_refuse_a_config_of_nonsense(content: str | None, folder: Path) -> None:
    if content is None:
        os.truncate(folder / "config.json", 1 << 40)
    else:
        (folder / "config.json").write_text(content)
    with pytest.raises(BurnishError, match=r"config\.json"):
        find_config(ModelConfig(path=str(folder)))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", "[]"),
        ("tokenizer.json", '{"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}}}'),
    ],
)
def test_a_tokenizer_of_nonsense_is_a_model_error(file: str, content: str, folder: Path) -> None:
    (folder / file).write_text(content)
    with pytest.raises(ModelError, match="copy"):
        load_tokenizer(ModelConfig(path=str(folder)))
