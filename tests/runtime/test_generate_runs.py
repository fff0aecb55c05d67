"""The generate job from its recipe to the next job: its rows, and who reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.config import JobConfig, load_config
from burnish.data.batches import load_batch
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.models.load import load_tokenizer
from burnish.observe.metrics import read_metrics
from burnish.observe.samples import read_samples

MakeConfig = Callable[..., JobConfig]
Reward = Callable[[str], float]
RowsOf = Callable[..., list[dict[str, Any]]]


# ---- rows ------------------------------------------------------------------------------------


def test_every_prompt_and_every_sample_is_in_the_output_once(
    generate: MakeConfig, reward: Reward, rows_of: RowsOf
) -> None:
    result = burnish.run(generate("with_tokens=true"), rewards=reward)
    rows = rows_of(result.run_dir)
    names = [(row["prompt_id"], row["sample"]) for row in rows]
    assert names == [(f"asked:{i}@0", k) for i in range(22) for k in range(4)]
    for row in rows:
        assert row["reward"] == row["rewards"]["digits"] == reward(row["response"])
        assert row["level"] == (int(row["label"]) - 1) % 3, "columns of the same row of the data"
        assert 1 <= len(row["response_tokens"]) <= 4
        assert row["finish_reason"] in ("stop", "length")
    assert len({r["response"] for r in rows[:4]}) > 1, "samples of a prompt differ"
    assert not (result.run_dir / "parts").exists(), "what they held is in the output"


def test_metrics_samples_and_the_report_are_those_of_the_rows(
    generate: MakeConfig, reward: Reward, rows_of: RowsOf
) -> None:
    """22 prompts in steps of 4: 6 steps, the last of 2."""
    config = generate("observe.samples_per_step=8")
    result = burnish.run(config, rewards=reward)
    rows, lines = rows_of(result.run_dir), read_metrics(result.run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["generate/prompts_done"] for line in lines] == [4, 8, 12, 16, 20, 22]
    assert sum(line["generate/rows"] for line in lines) == len(rows) == 88
    assert sum(line["rollout/samples"] for line in lines) == 88
    means = [(line["reward/mean"], line["rollout/samples"]) for line in lines]
    # 1e-9: sums of 88 quarters
    assert sum(m * n for m, n in means) == pytest.approx(sum(r["reward"] for r in rows), abs=1e-9)
    assert all(line["rollout/tokens_per_s"] > 0 for line in lines)
    assert result.metrics["total/rows"] == 88 and result.metrics["total/prompts"] == 22
    kept = read_samples(result.run_dir)
    assert len(kept) == 6 * 8 and {s["split"] for s in kept} == {"generate"}
    page = (result.run_dir / "report.html").read_text(encoding="utf-8")
    assert "Generation" in page and "Rows written" in page
    assert "verdict" in (result.run_dir / "plan.txt").read_text()


def test_without_rewards_answers_are_just_written(generate: MakeConfig, rows_of: RowsOf) -> None:
    config = generate("rewards=[]", "rollout.n_samples_per_prompt=1", "rollout.temperature=0")
    result = burnish.run(config)
    rows = rows_of(result.run_dir)
    assert len(rows) == 22 and all("reward" not in row for row in rows)
    assert not any(name.startswith("reward/") for name in result.metrics)


def test_parquet_holds_the_rows_of_json_lines(
    generate: MakeConfig, reward: Reward, rows_of: RowsOf
) -> None:
    lines = burnish.run(generate(name="a"), rewards=reward).run_dir
    table = generate("output='{run_dir}/rows.parquet'", name="b")
    assert rows_of(burnish.run(table, rewards=reward).run_dir, "rows.parquet") == rows_of(lines)


def test_what_is_left_out_is_counted_and_said(
    generate: MakeConfig,
    capsys: pytest.CaptureFixture[str],
    write_rows: Callable[..., str],
    modes: dict[str, list[str]],
    rows_of: RowsOf,
) -> None:
    """Every second answer is worth 1 by its label's parity, so all rewards of a prompt are equal;
    one prompt is too long."""
    rows = [{"prompt": f"{i}=", "label": i % 2} for i in range(8)] + [{"prompt": "1" * 50}]
    config = generate(
        *modes["best_of_n"],
        "mode.min_reward=0.5",
        f"data.sources=[{write_rows('few', rows)}]",
        "data.overlong=drop",
    )
    result = burnish.run(config, rewards=lambda response, label: float(label))
    assert [row["label"] for row in rows_of(result.run_dir)] == [1] * 4
    said = capsys.readouterr()
    assert "dropped: 4 prompts whose best response is below mode.min_reward" in said.out
    assert "dropped: 1 prompts longer than data.prompt_max_len" in said.out
    assert result.metrics["total/prompts_below_min_reward"] == 4
    assert result.metrics["total/prompts_overlong"] == 1


def test_an_output_without_rows_is_written_with_a_warning(
    generate: MakeConfig, capsys: pytest.CaptureFixture[str], modes: dict[str, list[str]]
) -> None:
    result = burnish.run(generate(*modes["pairs"]), rewards=lambda response: 0.0)
    assert (result.run_dir / "generated.jsonl").read_bytes() == b""
    assert result.metrics["total/prompts_equal_rewards"] == 22
    assert "has no rows: every row was dropped" in capsys.readouterr().err


def test_columns_that_would_be_taken_for_something_else_are_left_out_and_named(
    generate: MakeConfig,
    reward: Reward,
    write_rows: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    rows_of: RowsOf,
) -> None:
    """SFT learns from a column ``messages`` before it looks at prompt and response."""
    rows = [{"prompt": "1=", "response": "old", "messages": [], "note": "n"}]
    config = generate(f"data.sources=[{write_rows('old', rows)}]")
    found = rows_of(burnish.run(config, rewards=reward).run_dir)
    assert all(row["note"] == "n" and "messages" not in row for row in found)
    assert all(row["response"] != "old" for row in found)
    assert "messages, response" in capsys.readouterr().err


# ---- the next job ----------------------------------------------------------------------------


FORMS: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "text": ([{"q": f"{i}+1="} for i in range(6)], ["data.prompt_key=q"]),
    "template": ([{"q": i} for i in range(6)], ["data.prompt_template='0{q}='"]),
    "wrapped": (
        [{"prompt": f"{i}+1="} for i in range(6)],
        ["data.apply_chat_template=true", "data.system_prompt='ss'"],
    ),
    "messages": (
        [{"prompt": [{"role": "user", "content": f"{i}+"}]} for i in range(6)],
        ["data.system_prompt='su'"],
    ),
}


@pytest.mark.parametrize("case", list(product(FORMS, ("jsonl", "parquet"))), ids="-".join)
def test_the_next_job_reads_the_very_tokens_that_the_model_read(
    case: tuple[str, str],
    generate: MakeConfig,
    reward: Reward,
    write_rows: Callable[..., str],
    chat_template: str,
    rows_of: RowsOf,
) -> None:
    form, kind = case
    rows, options = FORMS[form]
    config = generate(
        *options,
        f"data.sources=[{write_rows('form', rows)}]",
        f"model.chat_template={json.dumps(chat_template)}",
        "with_tokens=true",
        f"output='{{run_dir}}/rows.{kind}'",
    )
    run_dir = burnish.run(config, rewards=reward).run_dir
    written = rows_of(run_dir, f"rows.{kind}")
    assert len(written) == 24
    batch = load_batch(
        SFTDataConfig(sources=(str(run_dir / f"rows.{kind}"),)), load_tokenizer(config.model)
    )
    ends = batch.offsets.tolist()
    for row, (a, b), length in zip(written, pairwise(ends), batch.prompt_lens, strict=True):
        assert batch.tokens[a : a + int(length)].tolist() == row["prompt_tokens"]
        assert batch.action_mask[a + int(length) : b].any()


@pytest.mark.parametrize("chat", [False, True])
def test_best_of_n_is_sft_data_as_it_stands(
    chat: bool,
    generate: MakeConfig,
    reward: Reward,
    chat_template: str,
    modes: dict[str, list[str]],
    rows_of: RowsOf,
) -> None:
    model = [f"model.chat_template={json.dumps(chat_template)}"]
    options = ["data.apply_chat_template=true"] if chat else []
    config = generate(*modes["best_of_n"], *model, *options)
    run_dir = burnish.run(config, rewards=reward).run_dir
    rows = rows_of(run_dir)
    assert len(rows) == 22
    sft = load_config(
        {
            "job": "sft",
            "run_dir": str(run_dir.parent / "sft"),
            "model": config.model.model_dump(),
            "data": {"sources": [str(run_dir / "generated.jsonl")]},
            "max_epochs": 6,
            "train": {"train_batch_size": 11, "lr": 1e-2},
        }
    )
    losses = [line["train/loss"] for line in read_metrics(burnish.run(sft).run_dir)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", ["jsonl", pytest.param("parquet", marks=pytest.mark.slow)])
def test_pairs_are_preference_and_reward_model_data_as_they_stand(
    kind: str,
    generate: MakeConfig,
    reward: Reward,
    tmp_path: Path,
    modes: dict[str, list[str]],
    rows_of: RowsOf,
) -> None:
    config = generate(*modes["pairs"], f"output='{{run_dir}}/rows.{kind}'")
    run_dir = burnish.run(config, rewards=reward).run_dir
    rows = rows_of(run_dir, f"rows.{kind}")
    assert 10 <= len(rows) < 23 and all(row["margin"] > 0 for row in rows)
    data = {"sources": [str(run_dir / f"rows.{kind}")]}
    pairs = load_batch(PreferenceDataConfig(**data), load_tokenizer(config.model))
    assert pairs.num_rows == 2 * len(rows)
    common = {"model": config.model.model_dump(), "max_epochs": 5}
    train = {"train_batch_size": 5, "lr": 1e-2}
    for job, more in (("preference", {}), ("rm", {"margin_key": "margin"})):
        tree = {"job": job, "run_dir": str(tmp_path / job), "data": data | more, "train": train}
        lines = read_metrics(burnish.run(load_config(common | tree)).run_dir)
        assert lines[-1]["train/accuracy"] > 0.8, f"{job} learns which of its pairs is chosen"


def test_a_wanted_reward_is_stated_in_the_prompts_that_are_sampled(
    generate: MakeConfig, reward: Reward, modes: dict[str, list[str]], rows_of: RowsOf
) -> None:
    rows = rows_of(burnish.run(generate(*modes["conditioned"]), rewards=reward).run_dir)
    assert len(rows) == 88
    assert all(row["prompt"].startswith(f"{row['reward']:.1f}|") for row in rows)
    assert len({row["prompt"][:4] for row in rows}) > 2, "rewards differ"
    asked = ["condition.template='{reward:g}|{prompt}'", "condition.wanted_reward=1"]
    plain = burnish.run(generate(*asked, "rewards=[]", "with_tokens=true", name="inference"))
    prompts = [row["prompt"] for row in rows_of(plain.run_dir)]
    assert prompts[::4] == [f"1|{i}+1=" for i in range(22)]
