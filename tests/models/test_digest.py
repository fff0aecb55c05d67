"""The digest of a model's weights: equal for equal files in any folder, another one for others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from burnish.config.model import LoraConfig, ModelConfig
from burnish.models.digest import weight_paths, weights_changed, weights_digest

MIB = 1 << 20
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in two shards with an index, with weights of other formats, and an adapter."""
    model = tmp_path / "model"
    (model / "adapter").mkdir(parents=True)
    for number, name in enumerate((*SHARDS, "a.gguf", "b.gguf", "pytorch_model.bin")):
        (model / name).write_bytes(bytes([number]) * (12 * MIB))
    weight_map = {f"layer.{number}": name for number, name in enumerate(SHARDS)}
    index = json.dumps({"weight_map": weight_map})
    (model / "model.safetensors.index.json").write_text(index)
    (model / "adapter" / "adapter_model.safetensors").write_bytes(b"adapter")
    (model / "config.json").write_text("{}")
    return model


def model_in(folder: Path, form: str) -> ModelConfig:
    if form == "gguf":
        return ModelConfig(path=str(folder), gguf_file="a.gguf")
    lora = LoraConfig.model_construct(path=str(folder / "adapter")) if form == "adapter" else None
    return ModelConfig(path=str(folder)).model_copy(update={"lora": lora})


def overwrite(file: Path, start: int, end: int) -> None:
    content = bytearray(file.read_bytes())
    content[start:end] = bytes([99]) * (end - start)
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("form", "name", "place", "changes"),
    [
        ("shards", SHARDS[0], (0, 1), True),
        ("shards", SHARDS[1], (12 * MIB - 1, 12 * MIB), True),
        ("shards", SHARDS[1], (6 * MIB, 7 * MIB), True),  # one matrix in the middle
        ("shards", "pytorch_model.bin", (0, 1), False),  # never read
        ("shards", "adapter/adapter_model.safetensors", (0, 1), False),
        ("adapter", "adapter/adapter_model.safetensors", (0, 1), True),
        ("adapter", SHARDS[0], (0, 1), True),
        ("gguf", "a.gguf", (0, 1), True),
        ("gguf", "b.gguf", (0, 1), False),
        ("gguf", SHARDS[0], (0, 1), False),
        ("shards", "config.json", (0, 1), True),
        ("gguf", "config.json", (0, 1), False),
    ],
)
def test_the_digest_covers_the_files_that_are_read_and_not_their_place(
    folder: Path, form: str, name: str, place: tuple[int, int], changes: bool
) -> None:
    before = weights_digest([model_in(folder, form)])
    moved = Path(shutil.move(folder, folder.with_name("moved")))
    assert weights_digest([model_in(moved, form)]) == before
    overwrite(moved / name, *place)
    assert weights_changed(before, weights_digest([model_in(moved, form)])) is changes


@pytest.mark.parametrize("damage", [lambda f: f.unlink(), lambda f: f.rename(f"{f}.safetensors")])
def test_a_missing_or_renamed_shard_is_a_change(
    folder: Path, damage: Callable[[Path], object]
) -> None:
    before = weights_digest([model_in(folder, "shards")])
    damage(folder / SHARDS[1])
    assert weights_changed(before, weights_digest([model_in(folder, "shards")]))


@pytest.mark.parametrize(
    "then", [None, 7, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b"]
)
def test_digests_of_earlier_versions_are_not_compared(folder: Path, then: object) -> None:
    assert not weights_changed(then, weights_digest([model_in(folder, "shards")]))


def test_a_hub_model_is_its_snapshot_in_the_cache_if_that_is_complete(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has links to blobs; a copy in a folder is equal."""
    cache = tmp_path / "hub" / "models--owner--name"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache.parent))
    hub = ModelConfig(path="owner/name")
    assert not weight_paths(hub)
    snapshot = cache / "snapshots" / "abc"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors.index.json", SHARDS[0]):
        (snapshot / name).symlink_to(folder / name)
    assert not weight_paths(hub), "the second shard is not downloaded"
    (snapshot / SHARDS[1]).symlink_to(folder / SHARDS[1])
    assert weights_digest([hub]) == weights_digest([model_in(folder, "shards")])


@pytest.mark.parametrize("path", ["./missing", "/missing/model", "owner/not-in-the-cache"])
def test_a_model_that_is_not_on_this_machine_has_no_weights(path: str) -> None:
    assert not weight_paths(ModelConfig(path=path))
