"""Valid recipes that resemble refused ones, what evaluation sections inherit, the direction of a
metric, and the columns of data files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from burnish.config import ConfigError, dump_yaml, load_config
from burnish.config.held_out import with_evaluation_sections
from burnish.config.train import better
from burnish.data_files.reading import columns_of

Recipes = dict[str, dict[str, Any]]


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., str]:
    """``file("a.jsonl", {"prompt": "x"})``: a data file of one row, and its path."""

    def write(name: str, row: dict[str, Any]) -> str:
        path = tmp_path / name
        if name.endswith("parquet"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
        elif name.endswith("csv"):
            path.write_text(",".join(row) + "\n" + ",".join(map(str, row.values())) + "\n")
        else:
            text = json.dumps([row] if name.endswith("json") else row)
            path.write_text(text + "\n")
        return str(path)

    return write


IN_REWARD = "{init_kl_coef: 0.1, placement: reward, estimator: k1}"


@pytest.mark.parametrize(
    ("job", "overrides"),
    [
        ("rl", ["algorithm.advantage={kind: grpo, eps: 0.1}"]),
        ("rl", ["algorithm.correction={mode: {kind: clip, low: 0.2}}"]),
        ("rl", ["algorithm.policy_loss={kind: cispo, max_ratio: 4}"]),
        ("rl", ["algorithm.kl={init_kl_coef: 0.1, adaptive: {target: 0.1, horizon: 500}}"]),
        *(
            ("rl", [f"algorithm.advantage={kind}", f"algorithm.kl={IN_REWARD}"])
            for kind in ("rloo", "grpo", "dr_grpo", "opo")
        ),
        ("rl", ["rewards=[{kind: math, weight: 0}, {kind: function}]"]),
        ("rl", ["rewards=[{kind: math, weight: 0}]", "shaping.length_penalty=0.1"]),
        ("generate", ["rewards=[{kind: math, weight: 0}]"]),
        ("rm", ["eval.data={sources: [x], margin_key: by}"]),
        ("preference", ["loss=simpo", "nll_coef=0.5"]),
    ],
)
def test_similar_valid_recipes_load_and_so_do_their_resolved_forms(
    job: str, overrides: list[str], recipes: Recipes
) -> None:
    config = load_config(recipes[job], overrides)
    assert load_config(yaml.safe_load(dump_yaml(config))) == config


@pytest.mark.parametrize("place", ["eval.data", "eval.sets.more"])
def test_evaluation_sections_have_the_keys_of_data_that_they_do_not_set(
    recipes: Recipes, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    given = ["data.prompt_template=Q: {prompt}", "data.prompt_max_len=77", "data.shuffle=false"]
    given += ["eval.data={sources: [x]}", f"{place}={{sources: [x.jsonl], label_key: answer}}"]
    config: Any = load_config(recipes["rl"], given)
    section = config.eval.sections[place]
    assert (section.prompt_template, section.prompt_max_len) == ("Q: {prompt}", 77)
    assert section.label_key == "answer" and config.data.label_key == "label"
    assert load_config(config.model_dump(mode="json")) == config  # as a resumed run reads it
    other: Any = load_config(recipes["rl"], [*given, f"{place}.prompt_template=null"])
    assert other.eval.sections[place].prompt_template is None
    assert not caplog.records


def test_held_out_data_of_supervised_jobs_have_the_keys_of_data(recipes: Recipes) -> None:
    for job in ("sft", "rm", "preference"):
        sets = {"more": {"sources": ["y.jsonl"], "max_len": 9}}
        tree = recipes[job] | {"eval": {"data": {"sources": ["x.jsonl"]}, "sets": sets}}
        config: Any = load_config(tree, ["data.max_len=77", "data.system_prompt=Be brief."])
        assert [d.max_len for d in (config.eval.data, config.eval.sets["more"])] == [77, 9], job
        assert config.eval.sets["more"].system_prompt == "Be brief."


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"chosen": "good", "rejected": "bad"}, "pairs"),
        ({"response": "good", "score": 1.5}, "scores"),
        ({"response": "good", "label": True}, "classes"),
    ],
)
def test_a_named_kind_of_evaluation_is_compared_with_the_recognized_kind_of_data(
    row: dict[str, Any], kind: str, recipes: Recipes, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "q"} | row))
    rows = {"sources": [str(file)]}
    other = {"kind": "steps", "sources": ["x.jsonl"]}
    evaluation = {"data": rows | {"kind": kind}, "sets": {"more": rows | {"kind": kind}}}
    tree = recipes["rm"] | {"data": rows | {"max_len": 77}, "eval": evaluation}
    config: Any = load_config(tree)
    assert config.data.kind == kind
    assert [section.max_len for section in config.eval.sections.values()] == [77, 77]
    filled = with_evaluation_sections(tree | {"eval": {"data": other}})
    assert filled["eval"]["data"] == other


@pytest.mark.parametrize(
    ("metric", "direction"),
    [
        *((name, "min") for name in ("train/loss", "eval/loss", "eval/nll", "train/kl")),
        *((name, "min") for name in ("rollout/kl", "eval/response_len", "reward/truncated_frac")),
        *((name, "min") for name in ("train/mismatch_abs", "reward/equal_groups_frac")),
        *((name, "max") for name in ("eval/pass@1", "eval/pass@16", "reward/mean", "eval/reward")),
        *((name, "max") for name in ("reward/len", "eval/accuracy", "train/reward_margin")),
        *((name, None) for name in ("reward/std", "train/entropy", "train/ratio", "eval/x")),
    ],
)
def test_best_mode_follows_the_name_of_the_metric(
    metric: str, direction: str | None, recipes: Recipes
) -> None:
    """A reward may be called len; a metric whose name says nothing needs best_mode."""
    assert better(metric) == direction
    named = [
        f"checkpoint.best_metric={metric}",
        "eval={data: {sources: [x.jsonl]}, n_samples_per_prompt: 16, pass_k: [16], temperature: 1}",
        "rewards=[{kind: math, name: len}]",
    ]
    if direction is None:
        with pytest.raises(ConfigError, match="set best_mode=max or best_mode=min"):
            load_config(recipes["rl"], named)
        named.append("checkpoint.best_mode=min")
    if metric not in ("eval/loss", "eval/nll", "eval/accuracy", "eval/x"):  # not metrics of rl
        load_config(recipes["rl"], named)


def test_no_reference_warning_if_one_is_set(
    recipes: Recipes, caplog: pytest.LogCaptureFixture
) -> None:
    given = ["reference.model.path=x"]
    load_config(recipes["rl"], ["algorithm.kl.init_kl_coef=0.1", *given])
    load_config(recipes["preference"], given)
    assert not caplog.records


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_the_columns_of_every_kind_of_file(file: Callable[..., str], name: str) -> None:
    assert columns_of(file(name, {"prompt": "1", "by": 2})) == ("prompt", "by")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b""),
        ("a.jsonl", b"{broken"),
        ("a.jsonl", b"[1]\n"),
        ("a.jsonl", b"\xff\xfe"),
        ("a.json", b"{}"),
        ("a.json", b"[]"),
        ("a.csv", b""),
        ("a.parquet", b"PAR1"),
        ("a.txt", b"prompt"),
    ],
)
def test_an_unreadable_file_gives_no_column_error(
    tmp_path: Path, name: str, content: bytes
) -> None:
    """Opening the data says what is wrong with it."""
    path = tmp_path / name
    path.write_bytes(content)
    assert columns_of(str(path)) is None
    assert columns_of(str(tmp_path / "absent.jsonl")) is None
    assert columns_of(str(tmp_path)) is None
