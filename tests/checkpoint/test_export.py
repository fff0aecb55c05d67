"""Exports load with plain transformers and peft and compute the same outputs as the run's
engine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from burnish.checkpoint.errors import CheckpointError
from burnish.checkpoint.export import export
from burnish.checkpoint.manifest import write_manifest
from burnish.checkpoint.save import CheckpointStore
from burnish.config.model import LoraConfig, ModelConfig, ScratchConfig
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.train.base import Loss, Outputs
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, Stats

MakeEngine = Callable[..., TorchTrainEngine]
TOKENS = torch.tensor([[7, 8, 9, 10, 11, 12]])
TIED = ScratchConfig(hidden_size=32)
UNTIED = ScratchConfig(hidden_size=32, tie_word_embeddings=False)


@pytest.fixture
def base(tmp_path: Path) -> ModelConfig:
    """A model in a folder, as a run would start from."""
    made = ModelConfig(scratch=TIED)
    folder = tmp_path / "base"
    load_causal_lm(made).save_pretrained(folder)
    load_tokenizer(made).save_pretrained(folder)
    return ModelConfig(path=str(folder))


def trained(engine: TorchTrainEngine, batch: Batch, loss: Loss, steps: int = 2) -> TorchTrainEngine:
    for _ in range(steps):
        engine.forward_backward(batch, loss)
        engine.optim_step()
    return engine


def checkpoint(folder: Path, **engines: TorchTrainEngine) -> Path:
    folder.mkdir()
    for role, engine in engines.items():
        engine.save(folder / role)
    write_manifest(folder, step=1, extra={"metric": None})
    return folder


def square(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
    assert outputs.values is not None
    return (outputs.values - 1).square().sum() / batch.num_tokens, Stats()


def plain(folder: Path) -> PreTrainedModel:
    """As anyone would load it: transformers' own attention and dtype."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.config._attn_implementation != "burnish"
    return model.eval()


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits[0]


# ---- policies
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scratch", [TIED, UNTIED])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_exported_policy_has_the_logits_of_the_run(
    dtype: str,
    scratch: ScratchConfig,
    make_engine: MakeEngine,
    ragged_batch: Batch,
    nll: Loss,
    tmp_path: Path,
) -> None:
    engine = trained(
        make_engine(config=ModelConfig(scratch=scratch), dtype=dtype, lr=0.02), ragged_batch, nll
    )
    folder = export(checkpoint(tmp_path / "c", policy=engine), tmp_path / "out", dtype=dtype)
    model = plain(folder)
    assert {p.dtype for p in model.parameters()} == {engine.model.dtype}
    assert torch.equal(logits(model), logits(engine.model))
    assert (
        model.config.use_cache and model.config.tie_word_embeddings == scratch.tie_word_embeddings
    )
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == scratch.tie_word_embeddings


def test_without_a_dtype_a_bf16_run_is_exported_as_its_fp32_masters(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss, tmp_path: Path
) -> None:
    engine = trained(make_engine(dtype="bf16"), ragged_batch, nll)
    model = plain(export(checkpoint(tmp_path / "c", policy=engine), tmp_path / "out"))
    assert engine.optimizer is not None
    masters = dict(zip(engine.optimizer.names, engine.optimizer.masters, strict=True))
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, masters[name])


def test_the_moving_average_is_exported_as_a_separate_model(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss, tmp_path: Path
) -> None:
    engine = trained(make_engine(ema_decay=0.5, lr=0.02), ragged_batch, nll)
    source = checkpoint(tmp_path / "c", policy=engine)
    average = plain(export(source, tmp_path / "ema", model="policy-ema"))
    assert engine.optimizer is not None and engine.optimizer.ema is not None
    for (_, parameter), expected in zip(
        average.named_parameters(), engine.optimizer.ema, strict=True
    ):
        assert torch.equal(parameter, expected)
    assert not torch.equal(logits(average), logits(plain(export(source, tmp_path / "last"))))


def test_shards_have_the_requested_size_and_load_together(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss, tmp_path: Path
) -> None:
    engine = trained(make_engine(), ragged_batch, nll)
    source = checkpoint(tmp_path / "c", policy=engine)
    folder = export(source, tmp_path / "out", max_shard_size="20KB")
    shards = list(folder.glob("model-*.safetensors"))
    assert len(shards) > 3 and (folder / "model.safetensors.index.json").is_file()
    assert all(f.stat().st_size < 25_000 for f in shards)
    assert torch.equal(logits(plain(folder)), logits(engine.model))


def test_exports_contain_tokenizer_template_and_end_tokens(
    make_engine: MakeEngine, tmp_path: Path, ragged_batch: Batch, nll: Loss
) -> None:
    engine = trained(make_engine(), ragged_batch, nll)
    engine.model.generation_config.eos_token_id = [1, 5]
    folder = export(checkpoint(tmp_path / "c", policy=engine), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert engine.tokenizer is not None
    assert tokenizer("1 + 1")["input_ids"] == engine.tokenizer("1 + 1")["input_ids"]
    assert tokenizer.chat_template == engine.tokenizer.chat_template
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [1, 5]
    assert plain(folder).config.architectures == ["LlamaForCausalLM"]


def test_a_run_folder_resolves_to_its_newest_good_checkpoint(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=3, best_mode="max")
    engine, expected = make_engine(), {}
    for step in (1, 2, 3):
        trained(engine, ragged_batch, nll, 1)
        store.save(step, lambda folder: engine.save(folder / "policy"))
        expected[step] = logits(engine.model)
    file = store.folder / "step_000003" / "policy" / "master.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert torch.equal(logits(plain(export(tmp_path / "run", tmp_path / "out"))), expected[2])


# ---- adapters
# --------------------------------------------------------------------------------------


def with_adapter(
    base: ModelConfig, make_engine: MakeEngine, batch: Batch, loss: Loss
) -> TorchTrainEngine:
    torch.manual_seed(0)
    lora = LoraConfig(lora_rank=4, lora_alpha=12)
    return trained(
        make_engine(config=base.model_copy(update={"lora": lora}), lr=0.02), batch, loss, 3
    )


def test_a_merged_adapter_is_a_plain_model(
    base: ModelConfig, make_engine: MakeEngine, ragged_batch: Batch, nll: Loss, tmp_path: Path
) -> None:
    engine = with_adapter(base, make_engine, ragged_batch, nll)
    model = plain(export(checkpoint(tmp_path / "c", policy=engine), tmp_path / "out"))
    assert not any("lora" in name for name, _ in model.named_parameters())
    # (W + BA) x against W x + BA x in fp32
    torch.testing.assert_close(logits(model), logits(engine.model), atol=5e-6, rtol=0)


def test_an_adapter_alone_loads_with_peft_on_its_base(
    base: ModelConfig, make_engine: MakeEngine, ragged_batch: Batch, nll: Loss, tmp_path: Path
) -> None:
    base = base.model_copy(update={"revision": "v1"})  # (which a folder does not have)
    engine = with_adapter(base, make_engine, ragged_batch, nll)
    source = checkpoint(tmp_path / "c", policy=engine)
    folder = export(source, tmp_path / "out", lora="adapter")
    names = {f.name for f in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert not any(name.startswith("model") for name in names)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == base.path and settings["r"] == 4
    assert settings["revision"] == base.revision
    original = AutoModelForCausalLM.from_pretrained(base.path)
    before = logits(original)
    model = PeftModel.from_pretrained(original, folder).eval()
    ours = logits(engine.model)
    torch.testing.assert_close(logits(model), ours, atol=1e-6, rtol=0)
    assert (before - ours).abs().max() > 0.01, "the adapter must matter"


# ---- critics and reward models
# ---------------------------------------------------------------------


@pytest.mark.parametrize("role", ["critic", "reward"])
@pytest.mark.parametrize("lora", [None, LoraConfig(lora_rank=4)])
def test_a_scalar_model_is_a_sequence_classifier_with_the_same_scores(
    role: str,
    lora: LoraConfig | None,
    base: ModelConfig,
    make_engine: MakeEngine,
    ragged_batch: Batch,
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    config = base.model_copy(update={"lora": lora})
    engine = trained(make_engine(role=role, config=config, lr=0.01), ragged_batch, square, 3)
    folder = export(checkpoint(tmp_path / "c", **{role: engine}), tmp_path / "out", model=role)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert model.config.num_labels == 1
    ends = ragged_batch.offsets.tolist()
    for begin, end in itertools.pairwise(ends):
        tokens = ragged_batch.tokens[begin:end][None]
        with torch.no_grad():
            theirs = model(tokens).logits[0, 0]
            ours = engine.model.score(engine.model.model(tokens).last_hidden_state)[0, -1, 0]
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)  # merged or not, in fp32
    if role == "reward":
        scores = engine.values(ragged_batch)[ragged_batch.offsets[1:] - 1]
        torch.testing.assert_close(scores[-1], theirs, atol=1e-5, rtol=0)


def test_one_of_several_models_is_chosen_by_name(make_engine: MakeEngine, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "c", policy=make_engine(), critic=make_engine(role="critic"))
    export(source, tmp_path / "p")
    export(source, tmp_path / "v", model="critic")
    names = [json.loads((tmp_path / d / "config.json").read_text())["architectures"] for d in "pv"]
    assert names == [["LlamaForCausalLM"], ["LlamaForSequenceClassification"]]


# ---- errors
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "critic"}, "contains"),
        (
            {"model": "policy-ema"},
            r"train\.ema_decay",
        ),
        (
            {"model": "policy-best"},
            "model='policy-best'",
        ),
        ({"lora": "adapter"}, "was fully fine-tuned"),
    ],
)
def test_a_missing_model_or_adapter_is_named(
    options: dict[str, str], message: str, make_engine: MakeEngine, tmp_path: Path
) -> None:
    source = checkpoint(tmp_path / "c", policy=make_engine())
    with pytest.raises(CheckpointError, match=message):
        export(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists(), (
        "nothing half-made is left, so that the next try can use the name"
    )


def test_an_adapter_without_the_head_of_its_critic_is_refused(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    config = ModelConfig(scratch=TIED, lora=LoraConfig(lora_rank=2))
    source = checkpoint(tmp_path / "c", critic=make_engine(role="critic", config=config))
    with pytest.raises(CheckpointError, match="an adapter does not contain the head of a critic"):
        export(source, tmp_path / "out", model="critic", lora="adapter")
    assert not (tmp_path / "out").exists()


def test_a_missing_checkpoint_and_an_empty_run_have_different_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="/nowhere"):
        export(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="good checkpoint"):
        export(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "no manifest"])
def test_a_damaged_checkpoint_is_refused(
    damage: str, make_engine: MakeEngine, tmp_path: Path
) -> None:
    source = checkpoint(tmp_path / "c", policy=make_engine())
    file = source / "policy" / "master.safetensors"
    content = file.read_bytes()
    if damage == "flip":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "truncate":
        file.write_bytes(content[:-1])
    elif damage == "remove":
        file.unlink()
    else:
        (source / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"is damaged: .*; use another one"):
        export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_non_empty_export_folder_is_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "c", policy=make_engine())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="is not empty; choose a new one"):
        export(source, tmp_path / "out")
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    export(source, tmp_path / "empty")
