"""The distill job and on-policy distillation, from recipe to export."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import burnish
from burnish.config import ConfigError, JobConfig, load_config
from burnish.config.model import ModelConfig, ScratchConfig
from burnish.config.placement import placement_groups
from burnish.config.schedule import ConstantLr
from burnish.data.sources import DataError
from burnish.models.load import ModelError, load_causal_lm, load_tokenizer
from burnish.observe.metrics import read_metrics

STUDENT = {
    "alphabet": "0123456789+=",
    "hidden_size": 32,
    "num_layers": 1,
    "max_position_embeddings": 64,
}
TEACHER = {**STUDENT, "hidden_size": 48, "num_layers": 2, "seed": 5}
MakeConfig = Callable[..., JobConfig]
LOSSES = ["forward_kl", "reverse_kl", "jsd"]


@pytest.fixture
def rows(write_rows: Callable[..., str]) -> str:
    """16 sums with their results."""
    pairs = [(a, b) for a in range(4) for b in range(4)]
    return write_rows("rows", [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a, b in pairs])


@pytest.fixture
def distill(tmp_path: Path, rows: str) -> MakeConfig:
    """3 steps of 4 rows, all tokens; a larger random model is the teacher."""

    def make(*overrides: str) -> JobConfig:
        tree: dict[str, Any] = {
            "job": "distill",
            "run_dir": str(tmp_path / "run"),
            "model": {"scratch": STUDENT},
            "teacher": {"model": {"scratch": TEACHER}},
            "data": {"sources": [rows], "max_len": 16, "train_on_prompt": True},
            "eval": {"data": {"sources": [rows], "max_len": 16, "train_on_prompt": True}},
            "train": {"train_batch_size": 4, "lr": 1e-2},
            "max_steps": 3,
        }
        return load_config(tree, overrides)

    return make


@pytest.fixture
def teacher_model(tmp_path: Path) -> Path:
    """A teacher that is sure of itself, in a folder, its matrices padded to 40 rows. (Where input
    and output are tied, a random model says again what it reads, and all of them agree.)"""
    untied = ScratchConfig(**TEACHER, tie_word_embeddings=False)
    model = load_causal_lm(ModelConfig(scratch=untied))
    model.resize_token_embeddings(40, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(15.0)
    folder = tmp_path / "teacher"
    model.save_pretrained(folder)
    load_tokenizer(ModelConfig(scratch=ScratchConfig(**TEACHER))).save_pretrained(folder)
    return folder


def run(config: JobConfig) -> list[dict[str, float]]:
    return read_metrics(burnish.run(config).run_dir)


def numbers(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    """What does not depend on the clock."""
    keep = ("train/", "eval/", "data/")
    return [
        {k: v for k, v in line.items() if k.startswith(keep) and not k.endswith("tokens_per_s")}
        for line in lines
    ]


def evaluated(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    return [line for line in lines if "eval/loss" in line]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_student_that_is_its_teacher_has_nothing_to_learn(
    loss: str, distill: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """The first loss is 0, and both agree everywhere."""
    same = [f"teacher.model.scratch.{k}={v}" for k, v in STUDENT.items() if k != "alphabet"]
    config = distill(f"loss={loss}", *same, "teacher.model.scratch.seed=0")
    assert any("the distillation loss is 0" in text for text in config.warnings())
    first = evaluated(run(config))[0]
    assert first["eval/agreement"] == 1.0
    for name in ("loss", "divergence", "teacher_kl"):
        assert first[f"eval/{name}"] == pytest.approx(0, abs=1e-6)  # fp32
    assert first["eval/nll"] > 1


@pytest.mark.parametrize("options", [["loss=forward_kl"], ["loss=reverse_kl", "temperature=2"]])
def test_a_student_comes_to_say_what_its_teacher_says(
    options: list[str], distill: MakeConfig, teacher_model: Path
) -> None:
    """Of a teacher with a larger padded vocabulary; what the data says does not matter to it."""
    config = distill(
        *options,
        "max_steps=60",
        "max_epochs=99",
        "train.train_batch_size=16",
        "teacher.model.scratch=null",
        f"teacher.model.path={teacher_model}",
    )
    lines = evaluated(run(config))
    first, last = lines[0], lines[-1]
    assert first["eval/agreement"] < 0.5 and first["eval/teacher_kl"] > 0.4
    assert last["eval/agreement"] > 0.9 and last["eval/teacher_kl"] < 0.1
    assert last["eval/nll"] > 1, "the teacher knows no sums"


def test_the_loss_is_the_mix_that_the_recipe_asks_for(distill: MakeConfig) -> None:
    config = distill("loss={kind: jsd, beta: 0.3}", "temperature=2", "nll_weight=0.25")
    for line in (x for x in run(config) if "train/loss" in x):
        mixed = 0.75 * 4 * line["train/divergence"] + 0.25 * line["train/nll"]
        assert line["train/loss"] == pytest.approx(mixed, rel=1e-5)  # fp32
        assert line["train/divergence"] < line["train/teacher_kl"], "jsd is the smaller"


def test_only_responses_count_unless_all_tokens_are_asked_for(
    distill: MakeConfig, tmp_path: Path
) -> None:
    few = evaluated(run(distill("eval.data.train_on_prompt=false")))[0]
    assert few["eval/loss"] == pytest.approx(few["eval/divergence"], rel=1e-5)
    assert (
        run(distill(f"run_dir={tmp_path / 'all'}", "max_steps=1"))[0]["eval/loss"]
        != few["eval/loss"]
    )


@pytest.mark.parametrize("options", [[], ["loss=jsd", "model.lora.lora_rank=4"]])
def test_a_resumed_run_is_bit_equal_to_one_that_went_through(
    options: list[str], distill: MakeConfig, tmp_path: Path
) -> None:
    whole = run(distill("max_steps=6", "max_epochs=9", f"run_dir={tmp_path / 'a'}", *options))
    half = distill("max_steps=3", "max_epochs=9", f"run_dir={tmp_path / 'b'}", *options)
    half = half.model_copy(
        update={"train": half.train.model_copy(update={"lr_scheduler": ConstantLr()})}
    )
    burnish.run(half)
    again = distill("max_steps=6", "max_epochs=9", f"run_dir={tmp_path / 'b'}", *options)
    burnish.run(again, resume=tmp_path / "b")
    assert numbers(whole)[-1] == numbers(read_metrics(tmp_path / "b"))[-1]


@pytest.mark.parametrize(
    "split",
    [
        ["train.micro_train_batch_size=1"],
        ["train.max_tokens_per_micro_batch=9"],
        ["train.layout=padded"],
        ["train.logprob_chunk_tokens=3"],
    ],
)
def test_how_a_step_is_split_changes_nothing(
    split: list[str], distill: MakeConfig, tmp_path: Path
) -> None:
    whole = run(distill("loss=jsd", "nll_weight=0.2"))
    parts = run(distill("loss=jsd", "nll_weight=0.2", f"run_dir={tmp_path / 'parts'}", *split))
    for one, other in zip(numbers(whole), numbers(parts), strict=True):
        # 1e-4: fp32 sums in another order, through three steps of Adam
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_the_teacher_has_a_format_of_its_own_and_the_export_loads(
    distill: MakeConfig, tmp_path: Path
) -> None:
    lines = run(distill("teacher.dtype=bf16"))
    exact = run(distill(f"run_dir={tmp_path / 'fp32'}"))
    gap = abs(lines[1]["train/teacher_kl"] - exact[1]["train/teacher_kl"])
    # bf16 has 8 bits, and logits of size 1: some thousandths of a nat at most, and not the same
    assert 0 < gap < 0.01
    folder = burnish.export(tmp_path / "run", tmp_path / "out")
    assert load_causal_lm(ModelConfig(path=str(folder))).config.hidden_size == 32
    plan = (tmp_path / "run" / "plan.txt").read_text()
    assert "teacher: the model made from scratch" in plan


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_student_in_a_half_format_learns_too(precision: str, distill: MakeConfig) -> None:
    lines = run(distill(f"precision.dtype={precision}", "max_epochs=9", "max_steps=20"))
    assert evaluated(lines)[-1]["eval/loss"] < 0.7 * evaluated(lines)[0]["eval/loss"]


def test_a_row_with_a_token_that_the_teacher_lacks_is_named(
    distill: MakeConfig, tmp_path: Path
) -> None:
    fewer = "teacher.model.scratch.alphabet=0123456789+"  # no "="
    with pytest.raises(DataError, match=r"contains token 17 \('='\), which is not in the teacher"):
        burnish.run(distill(fewer))


def test_a_teacher_of_another_family_is_refused_before_anything_is_trained(
    distill: MakeConfig, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="another vocabulary than the student"):
        burnish.run(distill("teacher.model.scratch.alphabet=ab0123456789"))
    with pytest.raises(ModelError, match=r"nowhere.* does not exist"):
        burnish.run(distill("teacher.model={path: ./nowhere}", f"run_dir={tmp_path / 'again'}"))


# ---- on-policy -------------------------------------------------------------------------------


@pytest.fixture
def on_policy(rl: MakeConfig) -> MakeConfig:
    """``rl`` with a teacher: 16 prompts, one sample each, and no rewards."""

    def make(*overrides: str) -> JobConfig:
        return rl(
            "algorithm.advantage=on_policy_distill",
            f"teacher={{model: {{scratch: {TEACHER}}}}}",
            "rollout.rollout_batch_size=16",
            "rollout.n_samples_per_prompt=1",
            *overrides,
        )

    return make


def test_a_policy_comes_to_say_what_its_teacher_says_without_any_reward(
    on_policy: MakeConfig, teacher_model: Path, tmp_path: Path
) -> None:
    config = on_policy(
        f"teacher={{model: {{path: {teacher_model}}}}}",
        "max_steps=24",
        "train.lr=1e-2",
        "rollout.n_samples_per_prompt=8",
        "train.train_batch_size=128",
    )
    assert config.model_dump()["rewards"] == ()
    lines = [x for x in run(config) if "train/loss" in x]
    assert not [k for k in lines[0] if k.startswith("reward/")]
    assert lines[0]["train/teacher_kl"] > 0.5
    last = sum(x["train/teacher_kl"] for x in lines[-5:]) / 5
    assert last < 0.7 * lines[0]["train/teacher_kl"]
    # one update per rollout, ratio 1: the loss is minus the mean advantage
    assert lines[0]["train/loss"] == pytest.approx(lines[0]["train/teacher_kl"], rel=1e-4)
    samples = pq.read_table(next((tmp_path / "run" / "samples").glob("*1.parquet"))).to_pylist()
    assert samples and all(math.isfinite(s["advantage"]) for s in samples)
    assert (tmp_path / "run" / "report.html").is_file()


def test_rewards_are_measured_and_change_nothing(
    on_policy: MakeConfig, reward: Callable[[str], float], tmp_path: Path
) -> None:
    plain = run(on_policy())
    config = on_policy(f"run_dir={tmp_path / 'two'}", "rewards=[{kind: function}]")
    scored = read_metrics(burnish.run(config, rewards=reward).run_dir)
    assert "reward/mean" in scored[-1] and "reward/mean" not in plain[-1]
    for key in ("train/loss", "train/grad_norm", "train/teacher_kl"):
        assert [x[key] for x in plain] == [x[key] for x in scored]


def test_an_on_policy_run_goes_on_as_one_that_was_never_stopped(
    on_policy: MakeConfig, tmp_path: Path
) -> None:
    constant = "train.lr_scheduler=constant"
    whole = run(on_policy("max_steps=4", constant, f"run_dir={tmp_path / 'a'}"))
    burnish.run(on_policy("max_steps=2", constant, f"run_dir={tmp_path / 'b'}"))
    config = on_policy("max_steps=4", constant, f"run_dir={tmp_path / 'b'}")
    burnish.run(config, resume=tmp_path / "b")
    assert numbers(whole)[-1] == numbers(read_metrics(tmp_path / "b"))[-1]


def test_a_sampled_token_that_the_teacher_lacks_counts_as_one_it_would_never_say(
    on_policy: MakeConfig,
) -> None:
    """An untrained policy draws from 18 tokens alike, and the teacher has 8 of them: log-probs of
    about -ln 18 against -30 for more than half, so a gap of about 15 nats."""
    lines = run(on_policy("teacher.model.scratch.alphabet='01'", "max_steps=1"))
    assert math.isfinite(lines[-1]["train/loss"]) and 8 < lines[-1]["train/teacher_kl"] < 22


# ---- on a cluster ----------------------------------------------------------------------------


def test_the_teacher_is_placed_as_the_reference_is(
    distill: MakeConfig, on_policy: MakeConfig
) -> None:
    ray = ["cluster.runtime=ray", "cluster.policy_ranks=2"]
    assert [role.name for role in distill().roles()] == ["policy", "teacher"]
    assert [p.roles for p in placement_groups(distill(*ray))] == [("policy", "teacher")]
    apart = distill(*ray, "cluster.layout=separate", "cluster.teacher_ranks=3")
    assert {p.roles: p.count for p in placement_groups(apart)} == {("policy",): 2, ("teacher",): 3}
    assert [role.name for role in on_policy().roles()] == ["policy", "rollout", "teacher"]
    with pytest.raises(ConfigError, match="puts policy and teacher on the same GPUs"):
        distill(*ray, "cluster.teacher_ranks=3")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "engine",
    [
        ["teacher.dtype=bf16"],
        ["train.engine.sharding=full"],
        ["train.engine.sequence_parallel_size=2"],
        ["train.engine.tensor_parallel_size=2"],
        ["train.engine={kind: deepspeed, zero_stage: 3}"],
    ],
)
def test_two_ranks_on_ray_find_the_numbers_of_one_process(
    engine: list[str], distill: MakeConfig, tmp_path: Path, ray_cluster: None
) -> None:
    own = [x for x in engine if x.startswith("teacher")]
    alone = run(distill("loss=jsd", "nll_weight=0.2", *own))
    ray = ["cluster.runtime=ray", "cluster.policy_ranks=2", f"run_dir={tmp_path / 'ray'}"]
    several = run(distill("loss=jsd", "nll_weight=0.2", *ray, *engine))
    keep = ("divergence", "teacher_kl", "nll", "agreement", "loss", "grad_norm")
    for one, other in zip(numbers(alone), numbers(several), strict=True):
        for key in (k for k in one if k.endswith(keep)):
            # 1e-3: fp32 sums in another order, through three steps of Adam (bf16: other products)
            assert other[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_policy_distillation_on_ray_finds_the_numbers_of_one_process(
    on_policy: MakeConfig, tmp_path: Path, ray_cluster: None
) -> None:
    alone = run(on_policy())
    ray = ["cluster.runtime=ray", "cluster.policy_ranks=2", f"run_dir={tmp_path / 'ray'}"]
    several = run(on_policy(*ray, "cluster.layout=colocate_actor_ref"))
    for one, other in zip(alone, several, strict=True):
        for key in ("train/loss", "train/teacher_kl", "train/teacher_logprob", "train/grad_norm"):
            assert other[key] == pytest.approx(one[key], rel=1e-3)  # fp32 in another order
