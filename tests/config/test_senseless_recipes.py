"""Combinations that make no sense are refused at load, all at once; those that are merely odd are
warned of, once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from burnish.config import ConfigError, dump_yaml, load_config
from burnish.config.columns import columns_of
from burnish.config.train import better

Recipes = dict[str, dict[str, Any]]


def problems(recipe: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides)
    return [line.removeprefix("  - ") for line in str(caught.value).split("\n")[1:]]


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


@pytest.fixture
def every_job(recipes: Recipes) -> Recipes:
    preference = {**recipes["rm"], "job": "preference"}
    steps = {**recipes["rm"], "data": {"kind": "steps", "sources": ["steps.jsonl"]}}
    return {**recipes, "preference": preference, "process": steps}


SENSELESS = {
    "a group baseline with one sample": (
        "rl",
        ["rollout.n_samples_per_prompt=1", "train.train_batch_size=8"],
        "recipe: algorithm.advantage=grpo compares the samples of one prompt",
    ),
    "the same of reinforce++ with a baseline": (
        "rl",
        [
            "rollout.n_samples_per_prompt=1",
            "train.train_batch_size=8",
            "algorithm.advantage=reinforce_pp_baseline",
        ],
        "recipe: algorithm.advantage=reinforce_pp_baseline compares the samples of one prompt",
    ),
    "a discount with a group's advantage": (
        "rl",
        ["algorithm.advantage={kind: rloo, gamma: 0.99}"],
        "algorithm.advantage: gamma=0.99 with the group baseline rloo",
    ),
    "a discount with a group's baseline": (
        "rl",
        ["algorithm.advantage={kind: reinforce_pp_baseline, gamma: 0.99}"],
        "recipe: algorithm.advantage.gamma=0.99 with a group baseline",
    ),
    "a discount of turns that discounts nothing": (
        "rl",
        ["algorithm.advantage={kind: reinforce_pp, discount: turn}"],
        "algorithm.advantage: discount=turn does nothing with gamma=1",
    ),
    "the same of gae": (
        "rl",
        ["algorithm.advantage={kind: gae, lam: 1, discount: turn}"],
        "algorithm.advantage: discount=turn does nothing with gamma=1 and lam=1",
    ),
    "a correction by tokens of unknown number": (
        "rl",
        ["algorithm.correction={}", "rollout.top_p=0.9"],
        "rollout.top_p<1 records the tokens that it keeps for algorithm.correction, and without",
    ),
    "more recorded tokens than the bound": (
        "rl",
        ["rollout.sampling_mask=true", "rollout.top_k=4000"],
        "rollout.top_k>0 records the tokens that it keeps, and without a bound these may be the "
        "entire vocabulary (top_k=4000); set rollout.top_k to at most 1024",
    ),
    "a mask of all tokens": (
        "rl",
        ["rollout.sampling_mask=true"],
        "rollout.sampling_mask records the tokens that top_p and top_k keep, and with top_p=1",
    ),
    "a correction without the mask that it needs": (
        "rl",
        ["algorithm.correction={}", "rollout.top_k=5", "rollout.sampling_mask=false"],
        "algorithm.correction divides by the sampler's probabilities, and with rollout.top_k>0",
    ),
    "a reference that nothing reads": (
        "rl",
        ["reference={}"],
        "recipe: reference is set, but algorithm.kl.init_kl_coef=0 does not use it",
    ),
    "a reference for a loss without one": (
        "preference",
        ["reference={}", "loss=simpo"],
        "recipe: reference is set, but loss=simpo does not use one",
    ),
    "an adaptive weight without a reference term": (
        "rl",
        ["algorithm.kl.adaptive.target=0.1"],
        "algorithm.kl: adaptive changes init_kl_coef, which is 0",
    ),
    "KTO without labels": (
        "preference",
        ["loss=kto", "data.sources=[SINGLE]"],
        "recipe: loss=kto without labels: data.label_key is not set",
    ),
    "KTO with a label column that is not there": (
        "preference",
        ["loss=kto", "data.sources=[SINGLE]", "data.label_key=likd"],
        "data: label_key=likd: SINGLE has no such column; its columns are prompt, response, liked "
        "(nearest: liked)",
    ),
    "a margin column that is not there": (
        "rm",
        ["data.sources=[PAIRS]", "data.margin_key=margn"],
        "data: margin_key=margn: PAIRS has no such column; its columns are prompt, chosen, "
        "rejected, margin (nearest: margin)",
    ),
    "a column of pairs that is not there": (
        "rm",
        ["data.sources=[PAIRS]", "data.chosen_key=choosen"],
        "recipe: data.chosen_key=choosen: PAIRS has no such column; its columns are prompt, chosen",
    ),
    "rows that are no pairs for a loss of pairs": (
        "preference",
        ["data.sources=[PAIRS]", "data.rejected_key=worse"],
        "recipe: data.rejected_key=worse: PAIRS has no such column",
    ),
    "a prompt column that is not there": (
        "rl",
        ["data.sources=[SINGLE]", "data.prompt_key=question"],
        "data: prompt_key=question: SINGLE has no such column; its columns are prompt, response",
    ),
    "the same of pairs": (
        "rm",
        ["data.sources=[PAIRS]", "data.prompt_key=question"],
        "data: prompt_key=question: PAIRS has no such column",
    ),
    "the same of solutions": (
        "process",
        ["data.sources=[STEPS]", "data.prompt_key=question"],
        "data: prompt_key=question: STEPS has no such column",
    ),
    "margins for a loss without any": (
        "preference",
        ["data.margin_key=margin"],
        "recipe: data.margin_key=margin has no effect: margins are used only by reward models",
    ),
    "step labels that are not there": (
        "process",
        ["data.sources=[STEPS]", "data.labels_key=label"],
        "data: labels_key=label: STEPS has no such column",
    ),
    "two normalisations of one reward": (
        "rl",
        ["rewards=[{kind: model, model: {path: x}, normalize: true, running_norm: std}]"],
        "rewards[0]: normalize=true and running_norm=std would both normalize the score",
    ),
    "pre-training rows at a sampling temperature": (
        "rl",
        [
            "ptx={data: {sources: [x]}, ptx_coef: 0.1, batch_size: 4}",
            "rollout.temperature=0.7",
        ],
        "recipe: ptx with rollout.temperature=0.7",
    ),
    "an even load of no experts": (
        "rl",
        ["train.moe_aux_loss_coef=0.01"],
        "recipe: train.moe_aux_loss_coef=0.01 balances the load of experts",
    ),
    "the language-model loss of a loss that has one": (
        "preference",
        ["loss=orpo", "nll_coef=0.5"],
        "recipe: nll_coef=0.5 adds the chosen response's negative log-likelihood, which "
        "loss=orpo already contains",
    ),
    "a lower bound where there is only an upper one": (
        "rl",
        ["algorithm.correction={mode: truncate, low: 0.2}"],
        "algorithm.correction: low=0.2 has no effect with mode=truncate",
    ),
    "an eps without a standard deviation": (
        "rl",
        ["algorithm.advantage={kind: opo, eps: 0.1}"],
        "algorithm.advantage: eps=0.1 is added to a standard deviation, but opo does not",
    ),
    "two upper bounds of one weight": (
        "rl",
        ["algorithm.policy_loss={kind: cispo, max_ratio: 4, clip_high: 3}"],
        "algorithm.policy_loss: clip_high=3 and max_ratio=4 both set the upper bound",
    ),
    "rewards that count for nothing": (
        "rl",
        ["rewards=[{kind: math, weight: 0}, {kind: function, weight: 0}]"],
        "recipe: every entry of rewards has weight 0",
    ),
    "rows to choose by rewards that count for nothing": (
        "generate",
        ["rewards=[{kind: math, weight: 0}]", "mode=best_of_n", "rollout.n_samples_per_prompt=2"],
        "recipe: mode=best_of_n chooses by reward, but every entry of rewards has weight 0",
    ),
    "a score in its running mean in rows": (
        "generate",
        ["rewards=[{kind: math, running_norm: mean_std}]"],
        "recipe: rewards[0].running_norm=mean_std normalizes each score by the "
        "statistics of all previous scores",
    ),
    "held-out margins for a loss without any": (
        "preference",
        ["eval_data={sources: [x], margin_key: by}"],
        "recipe: eval_data.margin_key=by has no effect: margins are used only by reward models",
    ),
    "held-out margins for a reward model's loss without any": (
        "rm",
        ["eval_data={sources: [x], margin_key: by}", "loss=log_exp"],
        "recipe: eval_data.margin_key=by has no effect with loss=log_exp",
    ),
    "held-out single responses for a reward model": (
        "rm",
        ["eval_data={sources: [x], label_key: liked}"],
        "recipe: eval_data.label_key=liked means that rows are single responses",
    ),
}


IN_REWARD = "{init_kl_coef: 0.1, placement: reward, estimator: k1}"


@pytest.mark.parametrize(
    ("job", "overrides"),
    [
        ("rl", ["algorithm.advantage={kind: grpo, eps: 0.1}"]),
        ("rl", ["algorithm.correction={mode: clip, low: 0.2}"]),
        ("rl", ["algorithm.policy_loss={kind: cispo, max_ratio: 4}"]),
        ("rl", ["algorithm.kl={init_kl_coef: 0.1, adaptive: {target: 0.1, horizon: 500}}"]),
        *(
            ("rl", [f"algorithm.advantage={kind}", f"algorithm.kl={IN_REWARD}"])
            for kind in ("rloo", "grpo", "dr_grpo", "opo")
        ),
        ("rl", ["rewards=[{kind: math, weight: 0}, {kind: function}]"]),
        ("rl", ["rewards=[{kind: math, weight: 0}]", "shaping.length_penalty=0.1"]),
        ("generate", ["rewards=[{kind: math, weight: 0}]"]),
        ("rm", ["eval_data={sources: [x], margin_key: by}"]),
        ("preference", ["loss=simpo", "nll_coef=0.5"]),
    ],
)
def test_similar_valid_recipes_load_and_so_do_their_resolved_forms(
    job: str, overrides: list[str], every_job: Recipes
) -> None:
    config = load_config(every_job[job], overrides)
    assert load_config(yaml.safe_load(dump_yaml(config))) == config


@pytest.mark.parametrize("case", SENSELESS)
def test_invalid_combinations_are_rejected_at_load(
    case: str, every_job: Recipes, file: Callable[..., str]
) -> None:
    job, overrides, said = SENSELESS[case]
    paths = {
        "SINGLE": file("single.jsonl", {"prompt": "1", "response": "2", "liked": True}),
        "PAIRS": file("p.jsonl", {"prompt": "1", "chosen": "2", "rejected": "3", "margin": 1}),
        "STEPS": file("steps.jsonl", {"prompt": "1", "completions": ["2"], "labels": [1]}),
    }
    for name, path in paths.items():
        overrides = [override.replace(name, path) for override in overrides]
        said = said.replace(name, path)
    (line,) = problems(every_job[job], overrides)
    assert said in line


def test_several_errors_are_reported_together(every_job: Recipes, file: Callable[..., str]) -> None:
    """One recipe, six mistakes of five kinds, six lines."""
    said = problems(
        every_job["rl"],
        [
            "rollout.n_samples_per_prompt=1",
            "train.train_batch_size=8",
            "algorithm.advantage={kind: grpo, gamma: 0.9}",
            "algorithm.correction={}",
            "rollout.top_p=0.9",
            "reference={}",
            "ptx={data: {sources: [x]}, ptx_coef: 0.1, batch_size: 4}",
            "rollout.temperature=0.7",
            "train.moe_aux_loss_coef=0.01",
        ],
    )
    expected = [
        "recipe: algorithm.advantage=grpo compares the samples",
        "algorithm.advantage: gamma=0.9",
        "recipe: rollout.top_p<1 records the tokens",
        "recipe: reference is set",
        "recipe: ptx with rollout.temperature",
        "recipe: train.moe_aux_loss_coef=0.01",
    ]
    assert sorted(said) == sorted(line for begin in expected for line in said if begin in line)
    assert len(said) == len(expected)
    single = file("single.jsonl", {"prompt": "1", "response": "2"})
    said = problems(
        every_job["preference"],
        [
            f"data.sources=[{single}]",
            f"eval_data={{sources: [{single}], label_key: liked}}",
            "loss=kto",
            "nll_coef=1",
            "data.margin_key=by",
            "train.train_batch_size=3",
        ],
    )
    assert [line.partition(" ")[0] for line in said].count("recipe:") == 5
    assert any(line.startswith("data: margin_key=by") for line in said)
    assert any(line.startswith("eval_data: label_key=liked") for line in said)


ODD = {
    "training on tokens drawn from a part of the distribution": (
        "rl",
        ["rollout.top_k=5"],
        "recipe: rollout.top_k>0 without sampling_mask: tokens are drawn from another",
    ),
    "held-out scores that are always 0": (
        "evaluate",
        ["rewards=[{kind: math, weight: 0}]"],
        "recipe: every entry of rewards has weight 0",
    ),
    "k1 as a loss": (
        "rl",
        ["algorithm.kl={init_kl_coef: 0.1, estimator: k1}", "model={path: x}"],
        "algorithm.kl: estimator=k1 as a loss",
    ),
    **{
        f"{estimator} in the reward": (
            "rl",
            [
                f"algorithm.kl={{init_kl_coef: 0.1, placement: reward, estimator: {estimator}}}",
                "model={path: x}",
            ],
            f"algorithm.kl: estimator={estimator} in the reward",
        )
        for estimator in ("k2", "k3")
    },
    "KL to random weights": (
        "rl",
        ["algorithm.kl.init_kl_coef=0.1"],
        "recipe: algorithm.kl measures against a reference model, but none is set",
    ),
    "preferences against random weights": (
        "preference",
        [],
        "recipe: loss=dpo measures against a reference model, but none is set",
    ),
    "a best checkpoint by a reward without a scale": (
        "rl",
        ["rewards=[{kind: math, running_norm: mean_std}]", "early_stopping.metric=reward/math"],
        "recipe: checkpoint.best_metric=reward/mean is normalized by running statistics",
    ),
    "a threshold that no sum of scores reaches": (
        "rl",
        [
            "rewards=[{kind: math, weight: 0.5}, {kind: math, weight: 0.3}]",
            "eval.data={sources: [x.jsonl]}",
        ],
        "recipe: eval.pass_threshold=1 is above the sum of the positive weights (0.8)",
    ),
}


@pytest.mark.parametrize("place", ["eval.data", "eval.sets.more"])
def test_evaluation_sections_have_the_keys_of_data_that_they_do_not_set(
    every_job: Recipes, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    given = ["data.prompt_template=Q: {prompt}", "data.prompt_max_len=77", "data.shuffle=false"]
    given += ["eval.data={sources: [x]}", f"{place}={{sources: [x.jsonl], label_key: answer}}"]
    config: Any = load_config(every_job["rl"], given)
    section = config.eval.sections[place]
    assert (section.prompt_template, section.prompt_max_len) == ("Q: {prompt}", 77)
    assert section.label_key == "answer" and config.data.label_key == "label"
    assert load_config(config.model_dump(mode="json")) == config  # as a resumed run reads it
    other: Any = load_config(every_job["rl"], [*given, f"{place}.prompt_template=null"])
    assert other.eval.sections[place].prompt_template is None
    assert not caplog.records


def test_held_out_data_of_supervised_jobs_have_the_keys_of_data(every_job: Recipes) -> None:
    for job in ("sft", "rm", "preference"):
        tree = every_job[job] | {"eval_data": {"sources": ["x.jsonl"]}}
        tree |= {"eval_sets": {"more": {"sources": ["y.jsonl"], "max_len": 9}}}
        config: Any = load_config(tree, ["data.max_len=77", "data.system_prompt=Be brief."])
        assert [d.max_len for d in (config.eval_data, config.eval_sets["more"])] == [77, 9], job
        assert config.eval_sets["more"].system_prompt == "Be brief."


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
    metric: str, direction: str | None, every_job: Recipes
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
            load_config(every_job["rl"], named)
        named.append("checkpoint.best_mode=min")
    if metric not in ("eval/loss", "eval/nll", "eval/accuracy", "eval/x"):  # not metrics of rl
        load_config(every_job["rl"], named)


@pytest.mark.parametrize("case", ODD)
def test_unusual_recipes_load_with_one_warning(
    case: str, every_job: Recipes, caplog: pytest.LogCaptureFixture
) -> None:
    job, overrides, said = ODD[case]
    with caplog.at_level(logging.WARNING, "burnish"):
        load_config(every_job[job], overrides)
    (record,) = caplog.records
    assert record.message.startswith(f"recipe: warning: {said}")


def test_no_reference_warning_if_one_is_set(
    every_job: Recipes, caplog: pytest.LogCaptureFixture
) -> None:
    given = ["reference.model.path=x"]
    load_config(every_job["rl"], ["algorithm.kl.init_kl_coef=0.1", *given])
    load_config(every_job["preference"], given)
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
