"""Options of supervised runs: noise on embeddings, times of evaluations, another end token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import burnish
from burnish.config import JobConfig
from burnish.config.model import ModelConfig, ScratchConfig
from burnish.models.load import ModelError, load_tokenizer
from burnish.observe.metrics import read_metrics
from burnish.train.forward import EmbeddingNoise

MakeSFT = Callable[..., JobConfig]
LENGTHS = torch.tensor([4, 4, 4, 4, 2, 2])
"""Rows of 4 and 2 tokens."""


@pytest.fixture
def sft(tmp_path: Path) -> MakeSFT:
    """``sft("train.lr=1e-2")``: 10 rows in batches of 4, two passes: five steps."""
    rows = [{"prompt": f"{i}=", "response": str(i)} for i in range(10)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree: dict[str, Any] = {
        "job": "sft",
        "max_epochs": 2,
        "model": {"scratch": {"alphabet": "0123456789=", "hidden_size": 32, "num_layers": 1}},
        "data": {"sources": [str(path)]},
        "eval": {"data": {"sources": [str(path)]}},
        "train": {"train_batch_size": 4, "lr": 1e-2},
    }
    return lambda name, *overrides: burnish.load_config(
        {**tree, "run_dir": str(tmp_path / name)}, list(overrides)
    )


def losses(run_dir: Path, name: str) -> dict[float, float]:
    """A metric by step."""
    return {line["step"]: line[name] for line in read_metrics(run_dir) if name in line}


def test_noise_has_the_scale_of_its_row_and_only_in_training_passes() -> None:
    """Width 8, alpha 5: a row of L tokens has noise up to 5 / sqrt(8 L)."""
    embedding = torch.nn.Embedding(3, 8)
    noise = EmbeddingNoise(embedding, 5.0)
    ids = torch.zeros(1, 7, dtype=torch.int64)
    plain = embedding(ids).detach()  # no rows are set
    found = []
    for _ in range(200):
        noise.set_rows(torch.arange(6), LENGTHS, ids.shape)
        found.append((embedding(ids).detach() - plain).abs().amax(-1)[0])
    most = torch.stack(found).amax(0)
    bounds = 5 / (8 * LENGTHS).sqrt()
    assert bool((most[:6] <= bounds + 1e-6).all()) and float(most[6]) == 0, "the last is padding"
    assert bool((most[:6] > 0.99 * bounds).all()), "1600 draws: 0.99^1600 is 1e-7"
    embedding.eval()
    noise.set_rows(torch.arange(6), LENGTHS, ids.shape)
    assert torch.equal(embedding(ids), plain)
    embedding.train()
    assert torch.equal(embedding(ids), plain), "the rows of the pass before are forgotten"


def test_noise_changes_training_alone_and_a_resumed_run_draws_the_same(
    sft: MakeSFT, tmp_path: Path
) -> None:
    """Ten rows in steps of four: the first pass ends in step 3, the second in step 5. The resumed
    run evaluates from step 4 on."""
    noisy = ("neftune_noise_alpha=5", "checkpoint.every_n_steps=2")
    whole = burnish.run(sft("whole", *noisy, "eval.every_n_epochs=1")).run_dir
    assert list(losses(whole, "eval/loss")) == [0, 3, 5]
    plain = burnish.run(sft("plain", "max_steps=1")).run_dir
    assert losses(whole, "eval/loss")[0] == losses(plain, "eval/loss")[0]
    assert losses(whole, "train/loss")[1] != losses(plain, "train/loss")[1]
    part = burnish.run(sft("part", *noisy, "max_steps=2", "eval.delay_steps=1")).run_dir
    burnish.run(sft("part", *noisy, "eval.every_n_steps=1", "eval.delay_steps=4"), resume=part)
    assert list(losses(part, "eval/loss")) == [2, 4, 5]
    assert losses(part, "eval/loss")[5] == losses(whole, "eval/loss")[5]


def test_another_end_token_ends_rows_and_an_unknown_one_is_refused() -> None:
    model = ModelConfig(scratch=ScratchConfig(), eos_token="\n")
    assert load_tokenizer(model).eos_token_id == load_tokenizer(model).encode("\n")[-1]
    plain = load_tokenizer(ModelConfig(scratch=ScratchConfig()))
    assert plain.eos_token_id != load_tokenizer(model).eos_token_id
    with pytest.raises(ModelError, match=r"'<eso>' is not a token .*nearest: <eos>.* are .*<eos>"):
        load_tokenizer(ModelConfig(scratch=ScratchConfig(), eos_token="<eso>"))


def test_an_exported_tokenizer_reads_texts_as_the_run_did(tmp_path: Path) -> None:
    """Ids and text, without special tokens, of a plain character that became the end token."""
    config = ModelConfig(scratch=ScratchConfig(alphabet="12;"), eos_token=";")
    ours = load_tokenizer(config)
    ours.save_pretrained(tmp_path)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    for tokenizer in (ours, exported):
        ids = tokenizer("1;2")["input_ids"]
        assert ids == ours("1;2")["input_ids"] and len(ids) == 3
        assert tokenizer.decode(ids, skip_special_tokens=True) == "12"
        assert len(tokenizer) == len(load_tokenizer(ModelConfig(scratch=config.scratch)))
