"""Paths of models, checked before a library or the network is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from burnish.config.model import LoraConfig, ModelConfig
from burnish.config.paths import folder_problem, looks_local, model_problems
from burnish.demo import demo_config
from burnish.models.load import ModelError


@pytest.mark.parametrize(
    "path", ["/a/b", "./a", "../a", "~/a", "a/b/c", "runs/tiny", "m.gguf", "a b", "a--b/c", "x/"]
)
def test_paths_that_are_not_hub_names_are_local_folders(path: str) -> None:
    assert looks_local(path)
    said = folder_problem(path)
    assert said is not None and f"the model folder {path} does not exist" in said


@pytest.mark.parametrize("path", ["gpt2", "Qwen/Qwen2.5-1.5B-Instruct", "owner/name_1.x"])
def test_possible_hub_names_are_not_checked_locally(path: str) -> None:
    assert not looks_local(path) and folder_problem(path) is None


def test_error_for_a_folder_without_a_model_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/sft/checkpoints/step_000001").mkdir(parents=True)
    Path("runs/sft/checkpoints/step_000001/manifest.json").write_text("{}")
    Path("nothing").mkdir()
    Path("model.gguf").write_bytes(b"GGUF")
    said = folder_problem("runs/sft")
    assert said is not None and "is a run folder, not a model" in said
    assert said.endswith("burnish export runs/sft --out DIR")
    step = "runs/sft/checkpoints/step_000001"
    Path(f"{step}/policy/hf").mkdir(parents=True)
    Path(f"{step}/policy/engine.json").write_text("{}")
    for folder, kind, source in (
        (step, "is a checkpoint", step),
        (f"{step}/policy", "is a part of a checkpoint", step),
        ("runs/sft/checkpoints", "the checkpoints of a run", "runs/sft"),
    ):
        said = folder_problem(folder) or ""
        assert kind in said and said.endswith(f"burnish export {source} --out DIR")
        (problem,) = model_problems(ModelConfig(path="a/b", lora=LoraConfig(path=folder)))
        assert problem.endswith(f"burnish export {source} --lora adapter --out DIR")
    Path(f"{step}/policy/hf/config.json").write_text("{}")
    assert folder_problem(f"{step}/policy/hf") is None, "it may be the tokenizer_path"
    assert (folder_problem("nothing") or "").startswith("the model folder nothing is empty; ")
    assert "that contains it, ., and model.gguf_file=model.gguf" in (
        folder_problem("model.gguf") or ""
    )
    assert (folder_problem("runs/sftt") or "").endswith("(nearest: runs/sft)")


def test_the_demo_finds_the_gguf_file_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    for given in (tmp_path, tmp_path / "a.gguf"):
        model = demo_config(str(given)).model
        assert (model.path, model.gguf_file) == (str(tmp_path), "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"several GGUF files.*--model .*a\.gguf \(found: a\.gguf"):
        demo_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")  # a full model in the folder of its GGUF files
    assert demo_config(str(tmp_path)).model.gguf_file is None
    assert demo_config("owner/name").model.path == "owner/name"
