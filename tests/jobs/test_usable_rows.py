"""The number of steps follows from the usable rows: an epoch trains each of them exactly once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.config import ConfigError, load_config
from burnish.data.encoded import EncodedStream
from burnish.driver.digests import DIGESTS_FILE
from burnish.driver.errors import RunError
from burnish.observe.metrics import read_metrics

MODEL = {"scratch": {"alphabet": "0123456789+=", "hidden_size": 16, "num_layers": 1}}
NEVER_READ = {"prompt": None, "response": 3, "chosen": 3, "rejected": 3, "label": "x"}
LONG = dict.fromkeys(("prompt", "response", "chosen", "rejected"), "1" * 90) | {"label": True}
NUM_USABLE = 7


def rows_file(folder: Path) -> str:
    """12 rows: 7 usable, 3 that cannot be read and 2 over the length limit."""
    rows: list[dict[str, Any]] = [
        {"prompt": f"{i}=", "response": str(i), "chosen": str(i), "rejected": "77", "label": True}
        for i in range(NUM_USABLE)
    ]
    rows[1:1] = [NEVER_READ, LONG]
    rows[5:5] = [NEVER_READ, LONG]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, NEVER_READ]))
    return str(path)


def recipe(folder: Path, job: str, **options: Any) -> dict[str, Any]:
    limit = "prompt_max_len" if job == "rl" else "max_len"
    data = {"sources": [rows_file(folder)], limit: 32, "on_bad_row": "skip", "overlong": "drop"}
    tree: dict[str, Any] = {"job": job, "model": MODEL, "run_dir": str(folder / "run")}
    tree |= {"train": {"train_batch_size": 4}, "data": data | options.pop("data", {})}
    if job == "rl":
        tree["rollout"] = {"rollout_batch_size": 2, "n_samples_per_prompt": 2}
        tree["rollout"]["generate_max_len"] = 4
    if job == "distill":
        tree["teacher"] = {"model": MODEL}
    return tree | options


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All items that a stream gave out."""
    found: list[str] = []
    take = EncodedStream.take

    def recorded(self: Any, num: int) -> Any:
        items = take(self, num)
        found.extend(map(repr, items))
        return items

    monkeypatch.setattr(EncodedStream, "take", recorded)
    return found


@pytest.mark.parametrize("validate", ["all", "off"])
@pytest.mark.parametrize(
    ("job", "options", "steps"),
    [
        ("sft", {}, 4),
        ("distill", {}, 4),
        ("rm", {}, 4),
        ("preference", {}, 4),
        ("preference", {"loss": "kto", "drop_last": True}, 7),  # 28 responses of 14 pairs
        (
            "preference",
            {"loss": "kto", "drop_last": True, "max_epochs": 4, "data": {"label_key": "label"}},
            7,
        ),
        ("sft", {"eval": {"every_n_epochs": 1}, "data": {"held_out": 6}}, None),
    ],
)
def test_an_epoch_trains_each_usable_row_once(
    tmp_path: Path,
    taken: list[str],
    job: str,
    options: dict[str, Any],
    steps: int | None,
    validate: str,
) -> None:
    """7 of 12 rows in batches of 4: 2 epochs are 14 rows, in 3 steps of 4 and one of 2."""
    options = {"max_epochs": 2, "drop_last": False} | options
    options["data"] = {"validate": validate} | options.get("data", {})
    config: Any = load_config(recipe(tmp_path, job, **options))
    lines = read_metrics(burnish.run(config).run_dir)
    counts = set(Counter(taken).values())
    assert counts == {config.max_epochs}
    if steps is None:  # which row is held out, and so the number of others, depends on the split
        evaluated = [line["step"] for line in lines if "eval/loss" in line]
        num = len(set(taken))
        assert evaluated == [0, -(-num // 4), -(-2 * num // 4)]
        return
    assert len(set(taken)) == NUM_USABLE and lines[-1]["step"] == steps
    assert "data: 5 of 12 rows are left out (3 skipped, 2 dropped), so an epoch has 7 rows" in (
        (tmp_path / "run" / "run.log").read_text()
    )


def test_epochs_of_rl_are_passes_over_usable_prompts(tmp_path: Path, taken: list[str]) -> None:
    """2 x 7 prompts, 2 per step."""
    config: Any = load_config(recipe(tmp_path, "rl", max_epochs=2))
    result = burnish.run(config, rewards=lambda response: float(len(response)))
    assert read_metrics(result.run_dir)[-1]["step"] == 7
    assert len(taken) == 14 and result.metrics["data/epoch"] == 2


def test_max_steps_without_max_epochs_repeats_the_data(tmp_path: Path, taken: list[str]) -> None:
    run = recipe(tmp_path, "sft", max_steps=5)
    assert burnish.run(load_config(run)).metrics["data/epoch"] == 2
    assert len(taken) == 20 and set(Counter(taken).values()) == {2, 3}
    longer = load_config(run | {"max_steps": 7})
    lines = read_metrics(burnish.run(longer, resume=tmp_path / "run").run_dir)
    assert lines[-1]["step"] == 7


def test_a_finished_run_that_cannot_train_on_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """7 rows in steps of 4, once: one step."""
    run = recipe(tmp_path, "sft", max_steps=1, max_epochs=1)
    burnish.run(load_config(run))
    assert "max_steps" not in capsys.readouterr().err
    with pytest.raises(RunError, match=r"done 1 steps, and with max_steps: was 1, now 24 it has 1"):
        burnish.run(load_config(run | {"max_steps": 24}), resume=tmp_path / "run")
    burnish.run(load_config(run), resume=tmp_path / "run")
    assert "the run is finished at step 1, so nothing is trained" in capsys.readouterr().err
    more = run | {"max_steps": 24, "max_epochs": 4}
    burnish.run(load_config(more), resume=tmp_path / "run")
    said = capsys.readouterr().err
    assert "max_epochs=4 of 7 rows are 7 steps, and max_steps=24: the run ends after 7" in said


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"drop_last": False, "max_steps": 3}, "drop_last=false"),
        (
            {"data": {"sources": [{"kind": "dataset", "path": "x", "streaming": True}
                                  | {"max_samples": 9}]}},
            "overlong=drop",
        ),
    ],
)  # fmt: skip
def test_lengths_without_effect_or_meaning_are_refused(
    tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(recipe(tmp_path, "sft", **options))


@pytest.mark.parametrize("section", ["data", "eval.data"])
def test_a_resume_notices_rows_that_changed(
    tmp_path: Path, section: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same names and the same number of rows, but another answer."""
    run = recipe(tmp_path, "sft", max_steps=1)
    path = Path(run["data"]["sources"][0])
    other = tmp_path / "other.jsonl"
    other.write_text(path.read_text())
    run["eval"] = {"data": run["data"] | {"sources": [str(other)]}}
    burnish.run(load_config(run))
    burnish.run(load_config(run | {"max_steps": 2}), resume=tmp_path / "run")
    digests = tmp_path / "run" / DIGESTS_FILE  # as a version with flat keys wrote them
    digests.write_text(digests.read_text().replace('"eval.data ', '"eval_data '))
    edited = path if section == "data" else other
    edited.write_text(edited.read_text().replace('"response": "5"', '"response": "6"'))
    longer = load_config(run | {"max_steps": 3})
    with pytest.raises(RunError, match=rf"rows of {section} \({edited.stem}\) changed.*--force"):
        burnish.run(longer, resume=tmp_path / "run")
    lines = read_metrics(burnish.run(longer, resume=tmp_path / "run", force=True).run_dir)
    assert lines[-1]["step"] == 3 and "the run continues with the new rows" in (
        capsys.readouterr().err
    )
    burnish.run(load_config(run | {"max_steps": 4}), resume=tmp_path / "run")
