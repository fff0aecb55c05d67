"""Reward models of families of every kind are trained, exported and used with equal scores."""

from __future__ import annotations

import copy
import json
import re
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
)

from burnish.checkpoint.export import export
from burnish.checkpoint.save import CheckpointStore
from burnish.checkpoint.state import EXPORT_METADATA, save_state
from burnish.config.model import LoraConfig, ModelConfig
from burnish.config.reward_model import RewardModelConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.jobs.reward_model import KINDS
from burnish.models.empty import weight_files
from burnish.models.load import ModelError
from burnish.models.scalar_model import is_own
from burnish.models.scalar_support import scalar_support
from burnish.models.shrink import build, shrink
from burnish.models.value_head import load_scalar_model
from burnish.rewards.model.reward import load_reward_engine, score_rows
from burnish.serve.base import ServeOptions
from burnish.serve.scorer import load_text_scorer
from burnish.train.base import Outputs, Role
from burnish.train.engine import BaseTrainEngine
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, Stats, rows_to_batch

TOLERANCE = 1e-5
"""Of fp32 scores near 1: the same operations, in packed or padded rows."""
ROWS = [[5, 9, 7, 6, 11], [12, 6, 8], [7, 13, 10, 9, 5, 6, 8]]
PROJECTED = {"word_embed_proj_dim": 16, "hidden_size": 32, "do_layer_norm_before": False}
"""OPT-350m: the body ends in a projection to fewer entries than ``hidden_size``."""
SMALL_OPT = {"num_attention_heads": 4, "ffn_dim": 32, "num_hidden_layers": 2, "vocab_size": 400}
OWN = ("granite", "cohere", "glm4_moe", "gemma4", "minimax_m2", "bart", "blt", "falcon_mamba")
OWN += ("qwen3_5_moe",)
FAMILIES: dict[str, dict[str, Any]] = {
    # transformers' classifier: its body is called model, transformer, gpt_neox, model.decoder
    **{name: {} for name in ("llama", "gpt2", "gpt_neox", "bloom", "mixtral", "deepseek_v3")},
    "opt": {**PROJECTED, **SMALL_OPT},
    # none, or one with another head
    **{name: {} for name in OWN},
}


def base_of(family: str, tokenizer: Any, folder: Path) -> ModelConfig:
    config = CONFIG_MAPPING[family](**FAMILIES[family])
    build(config if family == "opt" else shrink(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ModelConfig(path=str(folder))


def squared(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
    assert outputs.values is not None
    return (outputs.values[batch.offsets[1:] - 1] - 1).square().sum() / batch.num_rows, Stats()


def trained(base: ModelConfig, tokenizer: Any) -> BaseTrainEngine:
    model = load_scalar_model(base, new_head="random", seed=3)
    spec = EngineSpec(TrainRole.alone("reward", TrainConfig(lr=0.01), base, dropout=False))
    engine = TorchTrainEngine(model, spec, tokenizer=tokenizer)
    masks = [[False] * (len(row) - 1) + [True] for row in ROWS]
    batch = rows_to_batch(ROWS, masks, prompt_lens=[1] * len(ROWS))
    engine.forward_backward(batch, squared)
    engine.optim_step()
    return engine


def exported(engine: BaseTrainEngine, folder: Path, **options: Any) -> ModelConfig:
    store = CheckpointStore(folder / "checkpoints", keep_last=1, best_mode="max")
    saved = store.save(1, lambda part: engine.save(part / "reward"))
    return ModelConfig(path=str(export(saved, folder / "export", model="reward", **options)))


def frozen_scores(model: ModelConfig) -> Tensor:
    return torch.tensor(score_rows(load_reward_engine(model, dtype="fp32", device="cpu"), ROWS))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_reward_model_has_the_trained_scores(
    family: str, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """As a reward, in ``serve-reward``, as the start of another run, and, if transformers has a
    classifier with the same scores, in transformers."""
    engine = trained(base_of(family, tiny_tokenizer, tmp_path / "base"), tiny_tokenizer)
    scores = torch.tensor(score_rows(engine, ROWS))
    model = exported(engine, tmp_path)
    config = PretrainedConfig.from_pretrained(model.path)
    assert is_own(config) is (family in OWN)
    assert torch.allclose(frozen_scores(model), scores, atol=TOLERANCE, rtol=TOLERANCE)
    scorer = load_text_scorer(model, ServeOptions(dtype="fp32", device="cpu"))
    served = torch.tensor(score_rows(scorer.engine, ROWS))
    assert torch.allclose(served, scores, atol=TOLERANCE, rtol=TOLERANCE)
    again = trained(model, tiny_tokenizer)
    assert not torch.allclose(torch.tensor(score_rows(again, ROWS)), scores, atol=TOLERANCE)
    if family not in OWN:
        plain = AutoModelForSequenceClassification.from_pretrained(model.path).eval()
        with torch.no_grad():
            logits = [plain(input_ids=torch.tensor([row])).logits[0, 0] for row in ROWS]
        assert torch.allclose(torch.stack(logits), scores, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", ["gpt_neox", "granite"])
def test_adapters_of_a_reward_model_are_merged_into_its_export(
    family: str, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    base = base_of(family, tiny_tokenizer, tmp_path / "base")
    engine = trained(base.model_copy(update={"lora": LoraConfig(lora_rank=2)}), tiny_tokenizer)
    scores = torch.tensor(score_rows(engine, ROWS))
    model = exported(engine, tmp_path)
    assert torch.allclose(frozen_scores(model), scores, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", ["gpt2", "cohere"])
def test_several_outputs_and_half_precision_are_exported(
    family: str, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    base = base_of(family, tiny_tokenizer, tmp_path / "base")
    network = load_scalar_model(base, new_head="random", num_outputs=3)
    spec = EngineSpec(TrainRole.alone("reward", TrainConfig(), base, outputs=3, dropout=False))
    engine = TorchTrainEngine(network, spec, tokenizer=tiny_tokenizer)
    model = exported(engine, tmp_path, dtype="bf16", max_shard_size="20KB")
    files = sorted(Path(str(model.path)).glob("*.safetensors"))
    assert len(files) > 1
    for file in files:
        with safe_open(file, "pt") as opened:
            dtypes = {opened.get_tensor(name).dtype for name in opened.keys()}  # noqa: SIM118
        assert dtypes <= {torch.bfloat16, torch.bool}
    names = PretrainedConfig.from_pretrained(model.path).id2label
    assert len(names) == 3
    with pytest.raises(ModelError, match="has 3 outputs"):
        load_scalar_model(model)
    assert load_scalar_model(model, new_head="random", num_outputs=3).score.out_features == 3
    for empty in (False, True):  # a rank that reads its own rows of the other weights
        order = ("LABEL_2", "LABEL_0", "LABEL_1")
        options = {"num_outputs": 3, "output_names": order, "empty": empty}
        head = load_scalar_model(model, new_head="random", **options).score.weight
        assert torch.equal(head, network.score.weight[[2, 0, 1]].bfloat16().float())
    weighted = load_scalar_model(model, output_weights={"LABEL_1": 1.0})
    assert torch.equal(weighted.score.weight[0], network.score.weight[1].bfloat16().float())


def test_a_family_that_cannot_be_exported_is_refused_before_it_is_loaded(
    tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_of("granite", tiny_tokenizer, tmp_path)

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("no such form")

    monkeypatch.setattr("burnish.models.scalar_support._as_own", fails)
    monkeypatch.setattr("burnish.models.support._IN_MEMORY", {})
    monkeypatch.setattr("burnish.models.support.recall", lambda *_: None)
    monkeypatch.setattr("burnish.models.value_head.load_causal_lm", fails)
    with pytest.raises(ModelError, match="could not be used after training"):
        load_scalar_model(base, new_head="random")


def test_a_folder_of_the_own_form_that_lacks_a_weight_is_refused(
    tiny_tokenizer: Any, tmp_path: Path
) -> None:
    engine = trained(base_of("granite", tiny_tokenizer, tmp_path / "base"), tiny_tokenizer)
    model = exported(engine, tmp_path)
    config = PretrainedConfig.from_pretrained(model.path).to_dict()
    kind = CONFIG_MAPPING["granite"].from_dict({**config, "num_hidden_layers": 3})
    kind.save_pretrained(model.path)
    with pytest.raises(ModelError, match=r"do not fit \(model\.layers\.2"):
        load_scalar_model(model)


def test_a_classifier_with_another_head_is_refused(tmp_path: Path) -> None:
    config = shrink(CONFIG_MAPPING["bart"]())
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="not a linear output"):
        load_scalar_model(ModelConfig(path=str(tmp_path)), new_head="random", num_outputs=3)


@pytest.mark.parametrize(("family", "path"), [("opt", "model.decoder"), ("gpt2", "transformer")])
def test_the_body_is_found_in_the_classifier(family: str, path: str) -> None:
    assert scalar_support(CONFIG_MAPPING[family]()).body_path == path


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma4"])
@pytest.mark.parametrize("exports", [False, True])
def test_a_rank_reads_its_rows_under_the_names_in_the_files(
    family: str, exports: bool, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """A model without weights has none whose name the files lack; else it is loaded in full."""
    base = base_of(family, tiny_tokenizer, tmp_path / "base")
    if exports:
        base = exported(trained(base, tiny_tokenizer), tmp_path)
    model = load_scalar_model(base, new_head="random", empty=True)
    files = weight_files(base)
    assert files is not None
    empty = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    assert empty <= set(files) and (family != "llama" or len(empty) > 10)


SINGLE = {"prompt": "a", "response": "b", "score": 1.0, "help": 1.0, "style": 2.0, "passed": True}
TRAINED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, float]]] = {
    # keys of data, a row, and metrics of the held-out rows
    "pairs": (
        {},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"eval/score_mean": 1.0, "eval/score_std": 2.0},
    ),
    "steps": (
        {"kind": "steps", "step_separator": ";"},
        {"prompt": "a", "completions": ["b"], "labels": [True]},
        {"eval/score_min_mean": 3.0, "eval/score_min_std": 4.0},
    ),
    "score": ({"kind": "scores", "score_keys": ["score"]}, SINGLE, {}),
    "pass": (
        {"kind": "classes", "label_key": "passed"},
        SINGLE,
        {"eval/score_mean": 5.0, "eval/score_std": 6.0},
    ),
    "critic": ({}, {"prompt": "a", "chosen": "b", "rejected": "c"}, {}),
}


def recipe(kind: str, file: str) -> RewardModelConfig:
    data = {**TRAINED[kind][0], "sources": [file]}
    tree = {"job": "rm", "run_dir": "run", "model": {"path": "base"}, "data": data}
    return RewardModelConfig.model_validate({**tree, "train": {"train_batch_size": 1}})


def exported_as(kind: str, start: ModelConfig, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """Return the config of an export to ``folder/export`` after training ``kind`` from
    ``start``."""
    role: Role = "critic" if kind == "critic" else "reward"
    rows = folder / "rows.jsonl"
    folder.mkdir()
    rows.write_text(json.dumps(TRAINED[kind][1]) + "\n", encoding="utf-8")
    network = load_scalar_model(start, new_head="random")
    engine = TorchTrainEngine(
        network, EngineSpec(TrainRole.alone(role, TrainConfig(), start)), tokenizer=tokenizer
    )
    config = None if role == "critic" else recipe(kind, str(rows))
    metadata = None if config is None else KINDS[config.data.kind].metadata(config)

    def write(part: Path) -> None:
        engine.save(part / role)
        save_state(part, "session", {"step": 1, "evaluated_step": 1, "last": TRAINED[kind][2]})
        if metadata is not None:
            save_state(part, EXPORT_METADATA, metadata)

    saved = CheckpointStore(folder / "checkpoints", keep_last=1, best_mode="max").save(1, write)
    out = export(saved, folder / "export", model=role)
    found: dict[str, Any] = json.loads((out / "config.json").read_text(encoding="utf-8"))
    return found


def test_an_export_tells_of_its_own_training_alone(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Whatever reward model or critic it was trained from, its config is the one it has if it was
    trained from the language model."""
    base = base_of("llama", tiny_tokenizer, tmp_path / "base")
    alone = {n: exported_as(n, base, tiny_tokenizer, tmp_path / n) for n in TRAINED}
    assert alone["steps"]["process_reward"] and alone["pass"]["id2label"] == {"0": "pass"}
    for start, kind in permutations(TRAINED, 2):
        model = ModelConfig(path=str(tmp_path / start / "export"))
        again = exported_as(kind, model, tiny_tokenizer, tmp_path / f"{start}-{kind}")
        assert again == alone[kind], (start, kind)


@pytest.mark.parametrize("family", ["llama", "gpt2", "granite"])
@pytest.mark.parametrize("name", ["pad_token", "unk_token"])
def test_an_export_is_padded_with_a_token_that_has_an_embedding(
    name: str, family: str, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """Llama 2's ``[PAD]`` was added without an embedding. A batch of padded rows has the scores of
    the single rows, and the tokens keep their ids."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    config = shrink(CONFIG_MAPPING[family](vocab_size=len(tokenizer), pad_token_id=None))
    config.vocab_size = len(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.add_special_tokens({name: "[ADDED]"})
    assert tokenizer.convert_tokens_to_ids("[ADDED]") == config.vocab_size
    build(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    engine = trained(ModelConfig(path=str(tmp_path / "base")), tokenizer)
    model = exported(engine, tmp_path)
    scores = frozen_scores(model)
    saved = AutoTokenizer.from_pretrained(model.path)
    pad = PretrainedConfig.from_pretrained(model.path).pad_token_id
    assert pad is None or (pad < config.vocab_size and saved.pad_token_id == pad)
    assert pad is not None or saved.pad_token == tokenizer.pad_token
    assert saved.get_vocab() == tokenizer.get_vocab()
    if family not in OWN:
        plain = AutoModelForSequenceClassification.from_pretrained(model.path).eval()
        assert pad is not None
        width = max(map(len, ROWS))
        batch = torch.tensor([[*row, *[pad] * (width - len(row))] for row in ROWS])
        mask = torch.tensor([[i < len(row) for i in range(width)] for row in ROWS])
        with torch.no_grad():
            logits = plain(input_ids=batch, attention_mask=mask.long()).logits[:, 0]
        assert torch.allclose(logits, scores, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_folder_of_the_own_form_with_an_impossible_config_is_refused(
    tiny_tokenizer: Any, tmp_path: Path
) -> None:
    engine = trained(base_of("granite", tiny_tokenizer, tmp_path / "base"), tiny_tokenizer)
    model = exported(engine, tmp_path)
    file = Path(str(model.path)) / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, "pad_token_id": config["vocab_size"]}), encoding="utf-8")
    with pytest.raises(ModelError, match=re.escape(str(model.path))):
        load_scalar_model(model)
