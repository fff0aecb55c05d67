"""The jobs evaluate and generate against the same things computed directly: transformers' own
generation, a loop over responses, and every subset of the samples."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

import burnish
from burnish.config import load_config
from burnish.config.model import ModelConfig, ScratchConfig
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.observe.samples import read_samples

NEW_TOKENS = 5
WriteRows = Callable[..., str]
RowsOf = Callable[..., list[dict[str, Any]]]


def even_digits(response: str, label: str) -> float:
    """Share of even digits; 1 more if the label is in the response."""
    digits = [c for c in response if c.isdigit()]
    return sum(int(c) % 2 == 0 for c in digits) / max(1, len(digits)) + float(label in response)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model whose answers differ from prompt to prompt, and its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    scratch = ModelConfig(
        scratch=ScratchConfig(alphabet="0123456789+=", hidden_size=32, tie_word_embeddings=False)
    )
    model = load_causal_lm(scratch)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.4)
    model.save_pretrained(path)
    load_tokenizer(scratch).save_pretrained(path)
    return path


@pytest.fixture
def prompts(write_rows: WriteRows) -> list[dict[str, str]]:
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(6) for b in range(3)]
    write_rows("asked", rows)
    return rows


def _greedy(folder: Path, prompts: list[dict[str, str]]) -> list[str]:
    """Transformers' own greedy answers, one prompt at a time."""
    model = load_causal_lm(ModelConfig(path=str(folder))).eval()
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    answers = []
    for row in prompts:
        ids = torch.tensor([tokenizer(row["prompt"])["input_ids"]])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
        )
        answers.append(str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)))
    return answers


def _evaluate(folder: Path, tmp_path: Path, **options: Any) -> burnish.RunResult:
    tree = {
        "job": "evaluate",
        "run_dir": str(tmp_path / "evaluate"),
        "model": {"path": str(folder)},
        "eval": {
            "data": {"sources": [str(tmp_path / "asked.jsonl")]},
            "generate_max_len": NEW_TOKENS,
            **options,
        },
    }
    return burnish.run(load_config(tree), rewards=even_digits)


def _generate(folder: Path, tmp_path: Path, name: str, *overrides: str) -> Path:
    tree = {
        "job": "generate",
        "run_dir": str(tmp_path / name),
        "model": {"path": str(folder)},
        "data": {"sources": [str(tmp_path / "asked.jsonl")]},
        "rollout": {
            "rollout_batch_size": 5,
            "n_samples_per_prompt": 4,
            "generate_max_len": NEW_TOKENS,
        },
        "rewards": [{"kind": "function"}],
    }
    return burnish.run(load_config(tree, overrides), rewards=even_digits).run_dir


def test_greedy_evaluation_is_transformers_own_generation_scored_in_a_loop(
    folder: Path, prompts: list[dict[str, str]], tmp_path: Path
) -> None:
    answers = _greedy(folder, prompts)
    scores = [even_digits(a, row["label"]) for a, row in zip(answers, prompts, strict=True)]
    assert len(set(answers)) > 4 and 0 < sum(s >= 0.5 for s in scores) < len(scores)
    result = _evaluate(folder, tmp_path, pass_threshold=0.5)
    samples = read_samples(result.run_dir)
    assert [sample["response"] for sample in samples] == answers
    assert [sample["reward"] for sample in samples] == scores
    metrics = result.metrics
    assert metrics["eval/prompts"] == len(prompts)
    # 1e-12: a sum of 18 small fractions
    assert metrics["eval/reward"] == pytest.approx(sum(scores) / len(scores), abs=1e-12)
    passed = sum(s >= 0.5 for s in scores)
    assert metrics["eval/pass@1"] == pytest.approx(passed / len(scores), abs=1e-12)


def test_pass_at_k_is_the_share_of_all_subsets_of_k_samples_with_one_that_passes(
    folder: Path, prompts: list[dict[str, str]], tmp_path: Path
) -> None:
    options = {"n_samples_per_prompt": 5, "temperature": 1.0, "pass_k": [1, 2, 3, 5]}
    result = _evaluate(folder, tmp_path, pass_threshold=1.0, **options)
    by_prompt: dict[str, list[bool]] = {}
    for sample in read_samples(result.run_dir):
        score = even_digits(sample["response"], sample["label"])
        assert sample["reward"] == score
        by_prompt.setdefault(sample["prompt_id"], []).append(score >= 1.0)
    assert len(by_prompt) == len(prompts) and {len(p) for p in by_prompt.values()} == {5}
    for k in (1, 2, 3, 5):
        shares = [
            sum(any(subset) for subset in subsets) / len(subsets)
            for subsets in (list(combinations(passed, k)) for passed in by_prompt.values())
        ]
        # 1e-12: means of 18 fractions with denominators up to 10
        direct = pytest.approx(sum(shares) / len(shares), abs=1e-12)
        assert result.metrics[f"eval/pass@{k}"] == direct


def test_generated_rows_are_transformers_own_and_choices_are_those_of_a_loop(
    folder: Path, prompts: list[dict[str, str]], tmp_path: Path, rows_of: RowsOf
) -> None:
    """Greedy answers are transformers'. With one seed, best_of_n and pairs choose among the very
    samples that mode all writes."""
    one = ("rollout.n_samples_per_prompt=1", "rollout.temperature=0")
    greedy = rows_of(_generate(folder, tmp_path, "greedy", *one))
    assert [row["response"] for row in greedy] == _greedy(folder, prompts)
    sampled = rows_of(_generate(folder, tmp_path, "all"))
    groups: dict[str, list[tuple[float, str]]] = {}
    for row in sampled:
        score = even_digits(row["response"], row["label"])
        assert row["reward"] == score
        groups.setdefault(row["prompt_id"], []).append((score, row["response"]))
    keep = "mode.keep_truncated=true"
    best = rows_of(_generate(folder, tmp_path, "best", "mode.kind=best_of_n", keep))
    assert len(best) == len(prompts)
    for row in best:
        group = groups[row["prompt_id"]]
        assert row["reward"] == max(score for score, _ in group)
        assert (row["reward"], row["response"]) in group
    pairs = rows_of(_generate(folder, tmp_path, "pairs", "mode.kind=pairs", keep))
    apart = {name for name, group in groups.items() if len({score for score, _ in group}) > 1}
    assert {row["prompt_id"] for row in pairs} == apart and len(pairs) == len(apart) > 3
    for row in pairs:
        responses = {text: score for score, text in groups[row["prompt_id"]]}
        scores = responses.values()
        assert responses[row["chosen"]] == max(scores) and responses[row["rejected"]] == min(scores)
