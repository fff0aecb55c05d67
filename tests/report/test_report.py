"""The report is one safe page that needs no network, for every kind of run."""

from __future__ import annotations

import json
import math
import os
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from report_page import HOSTILE, PAYLOADS, Page, samples_of

from burnish.episodes.runner import episode_stats
from burnish.errors import BurnishError
from burnish.observe.metrics import MetricsLog, read_metrics
from burnish.observe.public_recipe import read_recipe
from burnish.observe.samples import SCHEMA, write_samples
from burnish.report import page as page_module
from burnish.report.build import ReportError, build_report
from burnish.report.catalog import CHARTS, EPISODES, LEARNING, MORE, arrange
from burnish.report.charts import smooth, thin
from burnish.report.samples import embed_samples
from burnish.report.times import time_splits
from burnish.runs.curves import curves_of
from burnish.runs.folder import load_run
from burnish.transcript import Episode, Turn
from burnish.types import Group, Prompt, Sample


def _config(run_dir: Path, **changes: Any) -> None:
    config = {"job": "rl", "max_steps": 4, "model": {"path": "models/tiny-instruct"}, "seed": 0}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config | changes), encoding="utf-8")


def _metrics(run_dir: Path, *lines: dict[str, float], first_step: int = 0) -> None:
    log = MetricsLog(run_dir)
    for step, line in enumerate(lines, start=first_step):
        log.log(step, line)
    log.close()


def _rl_metrics(run_dir: Path, *, extra: str = "reward/exact") -> None:
    lines: list[dict[str, float]] = [{"eval/pass@1": 0.125}]
    for step in range(1, 5):
        lines.append(
            {
                "reward/mean": 0.1 * step,
                extra: 0.05 * step,
                "train/grad_norm": 1.0 / step,
                "train/kl": math.nan if step == 2 else 0.01 * step,
                "time/rollout_s": 3.0,
                "time/train_s": 1.0,
                "memory/peak_rss_bytes": 3.0 * 2**30,
            }
        )
    lines[-1]["eval/pass@1"] = 0.5
    _metrics(run_dir, *lines)


def _group(number: int, response: str = "2", size: int = 2) -> Group:
    prompt = Prompt(f"p{number}", (1,), f"prompt {number} {response[:80]}", label=response[:80])
    samples = tuple(
        Sample(
            f"p{number}/{i}",
            prompt.id,
            number,
            (1,),
            (2,),
            (0.0,),
            (True,),
            (0,),
            response,
            "stop",
            0.5,
        )
        for i in range(size)
    )
    return Group(number, prompt, samples)


def test_the_page_loads_no_external_resources(tmp_path: Path) -> None:
    _config(tmp_path)
    _rl_metrics(tmp_path)
    write_samples(tmp_path, 4, [_group(1)], None, limit=8)
    page = Page(build_report(tmp_path))
    assert not [a for _, a in page.tags if "src" in a]
    assert all((a["href"] or "").startswith("#") for _, a in page.tags if "href" in a)
    assert not {"link", "iframe", "object", "embed", "img"} & {tag for tag, _ in page.tags}
    policy = [a["content"] or "" for t, a in page.tags if a.get("http-equiv")]
    assert policy and policy[0].startswith("default-src 'none'") and "http" not in policy[0]
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "@import" not in text and "url(" not in text


def test_an_rl_report_shows_headlines_figures_time_config_and_samples(tmp_path: Path) -> None:
    _config(tmp_path)
    _rl_metrics(tmp_path)
    write_samples(tmp_path, 4, [_group(1)], {"p1/0": 1.5}, limit=8)
    write_samples(tmp_path, 4, [_group(2)], None, limit=8, split="eval")
    path = build_report(tmp_path)
    assert path == tmp_path / "report.html"
    page = Page(path)
    for words in (
        "tiny-instruct",
        "Reinforcement learning",
        "50.0%",  # last pass@1
        "+37.5 points from 12.5%",
        "0.400",  # last reward
        "from 0.100 at step 1",
        "of 4 planned",
        "16s",  # 4 steps x (3 + 1) s
        "3 GiB",
        "KL to the reference",
        "path: models/tiny-instruct",
    ):
        assert words in page.text, words
    rows = page.samples()["rows"]
    assert {(r["split"], r["id"], r["advantage"]) for r in rows} == {
        ("train", "p1/0", 1.5),
        ("train", "p1/1", None),
        ("eval", "p2/0", None),
        ("eval", "p2/1", None),
    }


def test_hostile_text_is_escaped_everywhere(tmp_path: Path) -> None:
    _config(tmp_path, model={"path": f"models/{HOSTILE}"}, note=HOSTILE)
    _rl_metrics(tmp_path, extra=f"reward/{HOSTILE}")
    write_samples(tmp_path, 4, [_group(1, HOSTILE)], None, limit=8)
    page = Page(build_report(tmp_path))
    assert not [tag for tag, attrs in page.tags if tag == "img" or "onerror" in attrs]
    assert not [script for script in page.scripts if script.startswith("alert")]
    data = page.samples()
    assert data["rows"][0]["response"] == HOSTILE
    assert data["prompts"] == [f"prompt 1 {HOSTILE[:80]}"]
    assert "innerHTML" not in "".join(page.scripts)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_only_the_pages_own_scripts_run(payload: str, tmp_path: Path) -> None:
    """A payload everywhere: in the config, a metric's name, a prompt, a response. The page has no
    other tags than with plain text, and every script that is not data has the nonce of this page.
    """
    tags = []
    for name, text in (("plain", "plain"), ("hostile", payload)):
        folder = tmp_path / name
        folder.mkdir()
        _config(folder, model={"path": text}, note=text)
        _rl_metrics(folder, extra=f"reward/{text}")
        write_samples(folder, 4, [_group(1, text)], None, limit=8)
        page = Page(build_report(folder))
        assert page.samples()["rows"][0]["response"] == text
        tags.append({tag for tag, _ in page.tags})
    assert tags[1] - tags[0] <= {"details", "summary"}, "a metric whose name has no section"
    assert not [a for _, a in page.tags if "javascript:" in str(a.get("href"))]
    attributes = {name for _, attrs in page.tags for name in attrs}
    assert not [name for name in attributes if name.startswith("on")]
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv"))
    nonce = re.search(r"script-src 'nonce-([\w-]{22})'; style-src 'nonce-\1';", str(policy))
    assert nonce is not None and "default-src 'none'" in str(policy)
    given = [a.get("nonce") for t, a in page.tags if t == "script" and "type" not in a]
    assert len(given) > 3 and set(given) == {nonce[1]}
    assert "style" not in attributes, "blocked by the policy"


def test_every_page_has_a_different_nonce(tmp_path: Path) -> None:
    _metrics(tmp_path, {"train/loss": 2.0})
    pages = [build_report(tmp_path).read_text(encoding="utf-8") for _ in range(2)]
    assert len({re.search("nonce-([^']+)", page)[1] for page in pages}) == 2  # type: ignore[index]


def test_metrics_alone_are_enough_and_missing_parts_are_omitted(tmp_path: Path) -> None:
    _metrics(tmp_path, {"train/loss": 2.0}, {"train/loss": 1.5})
    page = Page(build_report(tmp_path))
    anchors = {a["href"] for t, a in page.tags if t == "a"}
    assert anchors == {"#content", "#learning"}
    assert "1.500" in page.text and "from 2.000 at step 0" in page.text
    assert "samples-data" not in {a.get("id") for _, a in page.tags}


@pytest.mark.parametrize("job", ["sft", "rm", "evaluate", "generate", "something-new"])
def test_every_job_gets_a_report(tmp_path: Path, job: str) -> None:
    _config(tmp_path, job=job)
    _metrics(tmp_path, {"eval/accuracy": 0.75, "train/loss": math.nan, "time/train_s": 0.0})
    assert "75.0%" in Page(build_report(tmp_path)).text


def test_a_run_without_metrics_gets_a_page_with_a_note(tmp_path: Path) -> None:
    _config(tmp_path, model={"scratch": {"num_layers": 2, "hidden_size": 64}})
    text = Page(build_report(tmp_path)).text
    assert "No step has been logged yet" in text
    assert "From-scratch model, 2 layers of width 64" in text


def test_a_folder_that_is_not_a_run_is_refused_with_the_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"neither config\.yaml nor metrics\.jsonl"):
        build_report(tmp_path)
    with pytest.raises(ReportError, match="does not exist"):
        build_report(tmp_path / "nowhere")
    (tmp_path / "config.yaml").write_text("a: [", encoding="utf-8")
    with pytest.raises(ReportError, match="is not valid YAML"):
        build_report(tmp_path)


def test_beyond_the_limit_the_newest_and_oldest_steps_are_shown_with_a_note(
    tmp_path: Path,
) -> None:
    """Seven steps of 2 samples and room for 8: steps 7, 1, 6, 2 in turn."""
    for step in range(1, 8):
        write_samples(tmp_path, step, [_group(step)], None, limit=8)
    embedded = embed_samples(tmp_path, max_rows=8)
    assert embedded is not None
    steps = [row["step"] for row in samples_of(embedded.json)["rows"]]
    assert steps == [1, 1, 2, 2, 6, 6, 7, 7]
    assert embedded.num_rows == 8
    assert "8 of 14 samples, from the newest and the oldest steps" in embedded.note


def test_with_an_odd_number_of_files_all_are_shown_without_a_note(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_samples(tmp_path, step, [_group(step)], None, limit=8)
    embedded = embed_samples(tmp_path)
    assert embedded is not None
    assert [row["step"] for row in samples_of(embedded.json)["rows"]] == [1, 1, 2, 2, 3, 3]
    assert embedded.note == ""


def test_a_very_long_text_is_truncated_in_the_middle_with_a_note(tmp_path: Path) -> None:
    write_samples(
        tmp_path, 1, [_group(1, "a" * 3000 + "b" * 10_000 + "c" * 3000, 1)], None, limit=8
    )
    embedded = embed_samples(tmp_path)
    assert embedded is not None
    response = samples_of(embedded.json)["rows"][0]["response"]
    assert response == "a" * 3000 + "\n[... 10,000 characters left out ...]\n" + "c" * 3000
    assert "1 long texts are truncated" in embedded.note


def test_exact_names_win_over_patterns_and_unknown_metrics_come_last() -> None:
    names = ["odd/thing_bytes", "reward/style", "reward/std", "reward/code/retries", "time/train_s"]
    charts = {c.title: (c.section, c.unit, c.names) for c in arrange(names)}
    assert charts == {
        "Spread of the reward": (LEARNING, "standard deviation", ("reward/std",)),
        "Reward parts": (LEARNING, "mean per response", ("reward/style",)),
        "Odd: thing": (MORE, "bytes", ("odd/thing_bytes",)),
        "Reward: retries": (MORE, "", ("reward/code/retries",)),
    }


def test_every_section_occurs_once() -> None:
    """The report groups neighboring figures: a section in two places would be two sections."""
    sections = [chart.section for chart in CHARTS]
    assert len([section for section, _ in groupby(sections)]) == len(set(sections))


def test_metrics_of_episodes_have_a_section_and_statuses_that_do_not_occur_no_curve(
    tmp_path: Path,
) -> None:
    turn = Turn(message={}, answer=(), counts={"tool_calls": 2.0, "moves": 1.0}, engine_s=1.0)
    stats = episode_stats([Episode("done", (), turns=(turn,))] * 2).floats() | {
        "episodes/groups_dropped": 0.0
    }
    assert {chart.section for chart in arrange(list(stats))} == {EPISODES}
    _metrics(tmp_path, stats, stats)
    page = Page(build_report(tmp_path))
    assert "#episodes" in {a["href"] for t, a in page.tags if t == "a"}
    assert "Ended by the environment or a limit" in page.text
    assert "Failed, not trained on" not in page.text and "More metrics" not in page.text


def test_time_is_split_by_phase_and_the_rest_is_other() -> None:
    """Rollout 3 + 3, train 1 + 1, other (5 - 4) + 0 = 1; total 9, rollout 6 / 9."""
    lines = [
        {"step": 1, "time": 0.0, "time/rollout_s": 3.0, "time/train_s": 1.0, "time/step_s": 5.0},
        {"step": 2, "time": 9.0, "time/rollout_s": 3.0, "time/train_s": 1.0, "time/step_s": 4.0},
    ]
    (split,) = time_splits(lines)
    phases = split.phases
    assert split.total_s == pytest.approx(9.0)  # sums of a few floats: default relative 1e-6
    assert [(p.name, p.total, p.per_step) for p in phases] == [
        ("rollout", "6s", "3 s"),
        ("train", "2s", "1 s"),
        ("other", "1s", "0.5 s"),
    ]
    assert phases[0].percent == pytest.approx(100 * 6 / 9)


def test_the_lanes_of_an_asynchronous_run_are_split_on_their_own() -> None:
    """A step of 10 s: the trainer waits 4 and trains 6, the sampler works 7 and loads 1, so its
    rest is 2. No lane contains the seconds of another."""
    line = {"step": 1, "time": 0.0, "time/step_s": 10.0, "time/wait_s": 4.0, "time/train_s": 6.0}
    line |= {"time/sampler/rollout_s": 7.0, "time/sampler/load_s": 1.0}
    line |= {"time/trainer_idle_frac": 0.4}
    trainer, sampler = time_splits([line])
    assert (trainer.total_s, sampler.total_s) == (10.0, 10.0)
    assert [(p.name, p.percent) for p in trainer.phases] == [("train", 60.0), ("wait", 40.0)]
    found = [(p.name, p.percent) for p in sampler.phases]
    assert found == [("rollout", 70.0), ("other", 20.0), ("load", 10.0)]
    assert sampler.chart.title == "Time per step, sampler"
    (idle,) = arrange([name for name in line if name.startswith("time/")])
    assert (idle.title, idle.names) == ("Idle", ("time/trainer_idle_frac",))


def test_a_long_run_is_drawn_in_few_points_that_keep_its_mean() -> None:
    lines = [{"step": i, "time": 0.0, "a/b": float(i)} for i in range(10_000)]
    curve, size = thin(curves_of(lines)["a/b"])
    assert (len(curve.steps), size) == (500, 20)
    # Means of equal parts: exact integers and halves in binary, so no tolerance.
    assert sum(curve.values) / len(curve.values) == 4999.5


def test_the_running_mean_keeps_a_line_in_place() -> None:
    line = [float(i) for i in range(100)]
    assert smooth(line, 5)[10:90] == line[10:90]


def _write_row(run_dir: Path, name: str = "step_000003.parquet", **changes: Any) -> None:
    row = {field.name: None for field in SCHEMA} | {
        "step": 3, "split": "train", "prompt_id": "p", "group_id": 1, "sample_id": "s",
        "prompt": "asked", "response": "answered", "reward": 1.0, "reward_parts": '{"a": 1}',
        "finish_reason": "stop", "response_tokens": 1,
    }  # fmt: skip
    (run_dir / "samples").mkdir(exist_ok=True)
    table = pa.Table.from_pylist([row | changes], schema=SCHEMA)
    pq.write_table(table, run_dir / "samples" / name)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"reward": math.nan}, "1 samples have numbers that are not finite"),
        ({"advantage": -math.inf}, "1 samples have numbers that are not finite"),
        ({"reward_parts": '{"a": NaN}'}, "1 samples have numbers that are not finite"),
        ({"reward_parts": '{"a": 1' + "0" * 400 + "}"}, "have numbers that are not finite"),
        ({"reward_parts": "{broken"}, "the reward parts of 1 samples cannot be read"),
        ({"reward_parts": "[" * 100_000}, "the reward parts of 1 samples cannot be read"),
        ({"reward_parts": '{"a": "x"}'}, "the reward parts of 1 samples cannot be read"),
        ({"step": None}, ""),
        ({"split": None, "label": None, "response": None}, ""),
    ],
    ids=["nan", "inf", "nan part", "huge part", "no json", "deep", "text part", "step", "nulls"],
)
def test_malformed_samples_are_shown_as_far_as_they_can_be_read(
    changes: dict[str, Any], note: str, tmp_path: Path
) -> None:
    _config(tmp_path)
    _rl_metrics(tmp_path)
    _write_row(tmp_path, **changes)
    _write_row(tmp_path, "step_000004.parquet", step=4)
    page = Page(build_report(tmp_path))
    first, second = page.samples()["rows"]
    assert first["step"] == 3 and note in page.text
    assert second["reward"] == 1.0 and second["parts"] == {"a": 1}


def test_unreadable_sample_files_are_omitted_and_named(tmp_path: Path) -> None:
    _config(tmp_path)
    _write_row(tmp_path)
    (tmp_path / "samples" / "step_000001.parquet").write_bytes(b"torn")
    pq.write_table(pa.table({"step": ["x"]}), tmp_path / "samples" / "step_000002.parquet")
    page = Page(build_report(tmp_path))
    assert [row["step"] for row in page.samples()["rows"]] == [3]
    assert "omitted because they cannot be read" in page.text
    assert "step_000001.parquet" in page.text and "step_000002.parquet" in page.text


@pytest.mark.parametrize(
    "line",
    [
        '{"step": null, "time": 1}',
        '{"step": true, "time": 1}',
        '{"step": 1, "time": null}',
        '{"step": 1, "time": NaN}',
        '{"step": 1, "time": 1e300}',
        '{"step": 1' + "0" * 5000 + ', "time": 1}',
        '{"step": 1, "time": 1, "x": ' + "[" * 100_000 + "}",
        "[1]",
        "nonsense",
    ],
    ids=["null", "bool", "no time", "nan time", "far", "huge", "deep", "list", "text"],
)
def test_a_line_that_is_not_a_measurement_is_left_out_and_counted(
    line: str, tmp_path: Path
) -> None:
    good = '{"step": 1, "time": 1, "reward/mean": 1}\n'
    (tmp_path / "metrics.jsonl").write_text(f"{good}{line}\n{good}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not a metrics line"):
        read_metrics(tmp_path)
    text = Page(build_report(tmp_path)).text
    assert "1 line of metrics.jsonl is damaged and left out" in text and "Mean reward" in text


@pytest.mark.parametrize("value", ["null", "NaN", "1e999", "1" + "0" * 400, '"x"', "[1]", "true"])
def test_a_value_that_is_not_a_number_is_not_drawn(value: str, tmp_path: Path) -> None:
    lines = (f'{{"step": {i}, "time": {i}, "reward/mean": {value}, "a/b": 1}}' for i in (1, 2))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    page = Page(build_report(tmp_path))
    assert "Mean reward" not in page.text and "A: b" in page.text


@pytest.mark.parametrize("value", ['"x"', "[1]", "1" + "0" * 400])
@pytest.mark.parametrize("name", ["time/step_s", "time/train_s", "time/a/wait_s"])
def test_a_time_that_is_not_a_number_is_not_drawn(name: str, value: str, tmp_path: Path) -> None:
    line = f'{{"step": 1, "time": 1, "time/rollout_s": 1, "{name}": {value}, "a/b": 1}}\n'
    (tmp_path / "metrics.jsonl").write_text(line, encoding="utf-8")
    assert "A: b" in Page(build_report(tmp_path)).text


@pytest.mark.parametrize("name", ["x{}", "reward/r{}", "time/lane{}/wait_s", "time/p{}_s"])
def test_a_run_with_thousands_of_metrics_has_a_report_with_a_warning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "MAX_METRICS", 3)
    line: dict[str, float] = {name.format(i): 1.0 for i in range(20_000)}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1.0, **line}))
    text = Page(build_report(tmp_path)).text
    assert "20,000 metrics" in text
    assert "Steps" in text and "19999" not in text


def test_aliases_in_the_saved_recipe_of_a_run_are_not_expanded_without_limit(
    tmp_path: Path,
) -> None:
    """30 levels of ten aliases each would be 10^30 values."""
    levels = [f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 10)}]" for i in range(1, 30)]
    text = "\n".join(["job: sft", "k0: &k0 [x]", *levels])
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    for read in (build_report, read_recipe):
        with pytest.raises(BurnishError, match=r"config\.yaml is not valid YAML"):
            read(tmp_path)


@pytest.mark.parametrize("name", ["config.yaml", "memory.json"])
def test_deeply_nested_files_are_refused_or_omitted(name: str, tmp_path: Path) -> None:
    _config(tmp_path)
    _rl_metrics(tmp_path)
    (tmp_path / name).write_text("[" * 5000, encoding="utf-8")
    if name == "config.yaml":
        with pytest.raises(ReportError, match="is not valid YAML"):
            build_report(tmp_path)
    else:
        build_report(tmp_path)


def test_a_log_that_exhausts_the_memory_is_named_and_a_folder_refused(tmp_path: Path) -> None:
    _rl_metrics(tmp_path)
    with (tmp_path / "run.log").open("w") as file:
        file.truncate(1 << 40)
    page = build_report(tmp_path)
    assert "run.log has 1099511627776 bytes" in page.read_text(encoding="utf-8")
    page.unlink()
    page.mkdir()
    with pytest.raises(ReportError, match=r"report\.html is a folder"):
        build_report(tmp_path)


def test_pipes_in_place_of_files_are_not_read(tmp_path: Path) -> None:
    _rl_metrics(tmp_path)
    for name in ("config.yaml", "memory.json", "timeline.json", "run.log"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "samples").mkdir(exist_ok=True)
    os.mkfifo(tmp_path / "samples" / "extra_000001.parquet")
    build_report(tmp_path)


def test_the_data_of_a_page_is_plain_json_and_constants_are_apart(tmp_path: Path) -> None:
    _config(tmp_path)
    _metrics(tmp_path, *({"train/lr": 1e-5, "train/loss": loss} for loss in (2.0, math.nan, 1.0)))
    (tmp_path / "run.log").write_text("2026-01-01 00:00:00,000 WARNING odd\n" * 2)
    page = page_module.page_of(load_run(tmp_path))
    data = json.loads(json.dumps(page.as_json(), allow_nan=False))
    (learning, update) = data["sections"]
    (chart,) = learning["charts"]
    assert (chart["title"], chart["x"]) == ("Loss", [0, 2])
    assert [(line["name"], line["values"]) for line in chart["lines"]] == [("loss", [2.0, 1.0])]
    assert update["charts"] == [] and data["state"]["kind"] == "ended"
    assert data["warnings"] == [{"text": "odd", "count": 2}]
    assert update["constants"] == [
        {"title": "Learning rate", "unit": "", "value": "1e-5", "note": "over 3 steps"}
    ]
