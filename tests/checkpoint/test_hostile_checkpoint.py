"""An untrusted checkpoint: its export runs no code and reads no file outside of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from burnish.checkpoint.errors import CheckpointError
from burnish.checkpoint.export import export
from burnish.checkpoint.manifest import verify, write_manifest
from burnish.checkpoint.save import CheckpointStore
from burnish.checkpoint.untrusted import check_sizes
from burnish.cli import app
from burnish.config.model import LoraConfig, ModelConfig, ScratchConfig
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.train.torch.engine import TorchTrainEngine

MakeEngine = Callable[..., TorchTrainEngine]
CODE = """
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
pathlib.Path({marker!r}).write_text("code ran")
class HostileConfig(LlamaConfig):
    model_type = "hostile"
class HostileModel(LlamaForCausalLM):
    config_class = HostileConfig
class HostileTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def base(tmp_path: Path) -> ModelConfig:
    """A small model in a folder."""
    made = ModelConfig(scratch=ScratchConfig(hidden_size=16, num_layers=1, num_heads=2))
    load_causal_lm(made).save_pretrained(tmp_path / "base")
    load_tokenizer(made).save_pretrained(tmp_path / "base")
    return ModelConfig(path=str(tmp_path / "base"))


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that only code of the checkpoint would make. Modules are copied below tmp_path."""
    folder = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
    monkeypatch.setattr("builtins.input", lambda _: "y")  # transformers asks on a terminal
    yield tmp_path / "marker"


def written(tmp_path: Path, engine: TorchTrainEngine) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    engine.save(folder / "policy")
    write_manifest(folder, step=1, extra={"metric": None})
    return folder


def changed(folder: Path, file: str, change: Callable[[Any], None]) -> None:
    """Change a JSON file of a checkpoint and make the manifest fit."""
    path = folder / "policy" / file
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))
    write_manifest(folder, step=1, extra={"metric": None})


def add_code(folder: Path, marker: Path) -> None:
    """Make ``folder`` a model whose config, model and tokenizer are custom Python code."""
    (folder / "hostile.py").write_text(CODE.format(marker=str(marker)))
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "hostile"
    config["auto_map"] = {
        "AutoConfig": "hostile.HostileConfig",
        "AutoModelForCausalLM": "hostile.HostileModel",
    }
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "tokenizer_config.json"
    if path.exists():
        tokenizer = json.loads(path.read_text())
        tokenizer["auto_map"] = {"AutoTokenizer": [None, "hostile.HostileTokenizer"]}
        tokenizer["tokenizer_class"] = "HostileTokenizer"
        path.write_text(json.dumps(tokenizer))


def adapted(base: ModelConfig, make_engine: MakeEngine) -> TorchTrainEngine:
    return make_engine(config=base.model_copy(update={"lora": LoraConfig(lora_rank=2)}))


@pytest.fixture
def hostile(base: ModelConfig, make_engine: MakeEngine, tmp_path: Path, marker: Path) -> Path:
    """Adapters for a model with code, whose config sets trust_remote_code itself."""
    folder = written(tmp_path, adapted(base, make_engine))
    shutil.copytree(str(base.path), tmp_path / "evil")
    add_code(tmp_path / "evil", marker)
    where = {"path": str(tmp_path / "evil"), "trust_remote_code": True}
    changed(folder, "engine.json", lambda tree: tree["model"].update(where))
    return folder


def test_adapters_cannot_switch_on_trust_in_their_base(
    hostile: Path, marker: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="--trust-remote-code runs its Python code"):
        export(hostile, tmp_path / "out")
    result = CliRunner().invoke(app, ["export", str(hostile), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert not marker.exists() and not (tmp_path / "out").exists()


def test_the_command_line_switches_trust_on(hostile: Path, marker: Path, tmp_path: Path) -> None:
    flags = ["--out", str(tmp_path / "out"), "--trust-remote-code"]
    result = CliRunner().invoke(app, ["export", str(hostile), *flags])
    assert result.exit_code == 0, result.output
    assert marker.exists()


def test_another_base_can_be_given(hostile: Path, marker: Path, tmp_path: Path) -> None:
    export(hostile, tmp_path / "out", base=str(tmp_path / "base"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not marker.exists()


def test_a_base_for_full_weights_is_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    folder = written(tmp_path, make_engine())
    with pytest.raises(CheckpointError, match="contains full weights"):
        export(folder, tmp_path / "out", base="x")


def test_code_of_the_checkpoint_itself_does_not_run(
    make_engine: MakeEngine, tmp_path: Path, marker: Path
) -> None:
    """Nor does the question on the terminal appear that transformers asks by default."""
    folder = written(tmp_path, make_engine())
    add_code(folder / "policy" / "hf", marker)
    changed(folder, "engine.json", lambda tree: tree["model"].update(trust_remote_code=True))
    with pytest.raises(CheckpointError, match="contains Python code, which runs only with"):
        export(folder, tmp_path / "out")
    assert not marker.exists()


@pytest.mark.parametrize("where", ["policy/hf/notes.txt", "policy/hf", "policy/engine.json"])
def test_a_link_out_of_the_checkpoint_is_refused(
    where: str, make_engine: MakeEngine, tmp_path: Path
) -> None:
    folder = written(tmp_path, make_engine())
    outside = tmp_path / "private"
    if (folder / where).exists():
        (folder / where).rename(outside)
    else:
        outside.write_text("a secret")
    (folder / where).symlink_to(outside)
    write_manifest(folder, step=1, extra={"metric": None})
    with pytest.raises(CheckpointError, match=r"is a symbolic link to .*private"):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "policy/../../outside"])
def test_a_manifest_cannot_name_files_outside_its_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (tmp_path / "outside").write_bytes(b"")
    manifest = write_manifest(folder, step=1, extra={})
    record = {name: {"num_bytes": 0, "sha256": "0" * 64}}
    changed_manifest = manifest.model_validate(manifest.model_dump() | {"files": record})
    body = changed_manifest.model_dump() | {"sha256": changed_manifest.own_sha256()}
    (folder / "manifest.json").write_text(json.dumps(body))
    assert verify(folder) == [
        f"{folder / 'manifest.json'} lists {name!r}, which is outside the folder"
    ]


def test_a_pipe_in_place_of_a_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"")
    write_manifest(tmp_path, step=1, extra={})
    (tmp_path / "state").unlink()
    os.mkfifo(tmp_path / "state")
    assert verify(tmp_path) == [f"{tmp_path / 'state'} is not a regular file"]


@pytest.mark.parametrize("text", ["[]", "{", '{"role": "policy"}', "[" * 100_000])
def test_an_engine_file_of_nonsense_is_a_checkpoint_error(
    text: str, make_engine: MakeEngine, tmp_path: Path
) -> None:
    folder = written(tmp_path, make_engine())
    (folder / "policy" / "engine.json").write_text(text)
    write_manifest(folder, step=1, extra={"metric": None})
    with pytest.raises(CheckpointError, match=r"engine\.json cannot be read"):
        export(folder, tmp_path / "out")


def _set(**values: Any) -> Callable[[Path], None]:
    def write(policy: Path) -> None:
        path = policy / "hf" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return write


def _file(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda policy: (policy / name).write_bytes(data) and None


HOSTILE: dict[str, Callable[[Path], None]] = {
    "a pipe": lambda policy: os.mkfifo(policy / "hf" / "vocab.txt"),
    "a header that is too large": _file("master.safetensors", (1 << 62).to_bytes(8, "little")),
    "an empty file of weights": _file("master.safetensors", b""),
    "a header of nonsense": _file("master.safetensors", (4).to_bytes(8, "little") + b"[[[["),
    "buffers of nonsense": _file("buffers.safetensors", b"12345678"),
    "10^12 hidden units": _set(hidden_size=10**12),
    "10^12 layers": _set(num_hidden_layers=10**12),
    "10^12 tokens": _set(vocab_size=10**12),
    "a negative size": _set(hidden_size=-8),
    "no heads": _set(num_attention_heads=0),
    "a text as a size": _set(hidden_size="many"),
    "another type": _set(model_type="bert"),
    "no type": _set(model_type=None),
    "nested JSON": _file("hf/config.json", b"[" * 100_000),
    "a list": _file("hf/config.json", b"[]"),
    "a tokenizer of nonsense": _file("hf/config.json", b"\xff\xfe"),
    "no config": lambda policy: (policy / "hf" / "config.json").unlink(),
    "no folder": lambda policy: shutil.rmtree(policy / "hf"),
}


@pytest.mark.parametrize("change", HOSTILE)
def test_a_hostile_model_in_a_checkpoint_is_a_checkpoint_error(
    change: str, make_engine: MakeEngine, tmp_path: Path
) -> None:
    folder = written(tmp_path, make_engine())
    HOSTILE[change](folder / "policy")
    if change != "a pipe":
        write_manifest(folder, step=1, extra={"metric": None})
    with pytest.raises(CheckpointError, match=str(folder)):
        export(folder, tmp_path / "out")


def test_an_export_copies_the_files_of_the_tokenizer_and_no_others(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    folder = written(tmp_path, make_engine())
    hf = folder / "policy" / "hf"
    for name in ("pytorch_model.bin", "model.safetensors.index.json", "evil.py", "x.pkl", "README"):
        (hf / name).write_bytes(b"evil")
    (hf / "vocab.txt").write_text("a")
    (hf / "more").mkdir()
    (hf / "more" / "training_args.bin").write_bytes(b"evil")
    write_manifest(folder, step=1, extra={"metric": None})
    found = {p.name for p in export(folder, tmp_path / "out").rglob("*")}
    assert {"vocab.txt", "tokenizer.json", "tokenizer_config.json", "model.safetensors"} <= found
    wrong = {"pytorch_model.bin", "model.safetensors.index.json", "evil.py", "x.pkl", "README"}
    assert not found & {*wrong, "more", "training_args.bin"}


def test_a_manifest_is_not_written_through_a_planted_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / ".manifest.json.tmp").symlink_to(tmp_path / "mine")
    write_manifest(folder, step=1, extra={})
    assert (tmp_path / "mine").read_text() == "precious" and verify(folder) == []


def test_retention_does_not_delete_through_links(tmp_path: Path) -> None:
    """A link with the name of an old step goes; the folder that it names stays."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("mine")
    write_manifest(tmp_path / "precious", step=1, extra={"metric": None})
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1, best_mode="max")
    store.folder.mkdir()
    (store.folder / "step_000001").symlink_to(tmp_path / "precious")
    store.save(2, lambda folder: (folder / "state").write_text("x") and None)
    store.save(3, lambda folder: (folder / "state").write_text("x") and None)
    assert [path.name for path in store.all()] == ["step_000003"]
    assert (tmp_path / "precious" / "file").read_text() == "mine"


def test_a_config_may_have_layers_of_a_tower_without_weights(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    config = {"num_hidden_layers": 2, "vision_config": {"depth": 27}}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    check_sizes(tmp_path, {"weight": torch.zeros(4, 4)})
    config["vision_config"] = {"depth": 10**6}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="depth"):
        check_sizes(tmp_path, {"weight": torch.zeros(4, 4)})
