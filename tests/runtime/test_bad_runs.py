"""Mistakes that show when a job starts or runs: each message says what, where, and what to do."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.config import ConfigError, JobConfig
from burnish.config.model import ModelConfig
from burnish.config.train import CheckpointConfig
from burnish.data.sources import DataError
from burnish.driver.errors import RunError
from burnish.models.load import ModelError, load_causal_lm, load_tokenizer
from burnish.observe.metrics import read_metrics
from burnish.observe.samples import read_samples
from burnish.rewards.base import RewardError

MakeConfig = Callable[..., JobConfig]
Reward = Callable[[str], float]


def test_a_missing_model_folder_is_named_and_the_mended_recipe_starts_in_the_same_folder(
    rl: MakeConfig, reward: Reward, tmp_path: Path
) -> None:
    missing = tmp_path / "no-model"
    with pytest.raises(ModelError, match=f"{missing} does not exist"):
        burnish.run(rl("model.scratch=null", f"model.path={missing}"), rewards=reward)
    burnish.run(rl("max_steps=1"), rewards=reward)


def test_a_missing_data_file_is_named_with_the_nearest_one(
    rl: MakeConfig, reward: Reward, sums: str
) -> None:
    with pytest.raises(DataError, match=r"sum\.jsonl does not exist.*\(nearest: sums\.jsonl\)"):
        burnish.run(rl(f"data.sources=[{sums.replace('sums', 'sum')}]"), rewards=reward)


def test_a_row_without_the_field_is_named_by_file_and_line(
    rl: MakeConfig, reward: Reward, write_rows: Callable[..., str]
) -> None:
    path = write_rows("holes", [{"prompt": "1+1="}, {"question": "2+2="}])
    with pytest.raises(DataError, match=r"holes\.jsonl:2: there is no column 'prompt'"):
        burnish.run(rl(f"data.sources=[{path}]"), rewards=reward)


def test_an_empty_data_set_is_refused(
    rl: MakeConfig, reward: Reward, write_rows: Callable[..., str]
) -> None:
    with pytest.raises(DataError, match=r"nothing\.jsonl: the data set is empty"):
        burnish.run(rl(f"data.sources=[{write_rows('nothing', [])}]"), rewards=reward)


def test_a_prompt_over_the_limit_stops_the_run_under_error_and_is_counted_under_drop(
    rl: MakeConfig, reward: Reward, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    rows = [{"prompt": "1+1="}, {"prompt": "1234567+1234567="}, {"prompt": "2+2="}]
    path = write_rows("long", rows)
    base = [f"data.sources=[{path}]", "data.prompt_max_len=8", "data.shuffle=false"]
    with pytest.raises(DataError, match=r"long\.jsonl:2: the prompt has 16 tokens.*is 8"):
        burnish.run(rl(*base), rewards=reward)
    config = rl(*base, "data.overlong=drop", f"run_dir={tmp_path / 'drop'}")
    metrics = burnish.run(config, rewards=reward).metrics
    # Two steps take 8 prompts: rows 1 and 3 of four epochs, and row 2 falls out of each.
    assert metrics["data/prompts_dropped"] == 4.0


BAD_REWARDS: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (lambda response: 1 / 0, "raised ZeroDivisionError"),
    "NaN": (lambda response: math.nan, "returned nan"),
    "a string": (lambda response: "good", "returned 'good'"),
    "the wrong count": (lambda responses: [1.0], "returned 1 values for 16 responses"),
}


@pytest.mark.parametrize("kind", BAD_REWARDS)
def test_a_bad_reward_stops_the_run_with_the_sample_and_what_to_do(
    kind: str, rl: MakeConfig
) -> None:
    function, said = BAD_REWARDS[kind]
    with pytest.raises(RewardError, match=said) as caught:
        burnish.run(rl(), rewards=function)
    assert "test_bad_runs.py" in str(caught.value), "says where the function is"
    assert "What to do" in str(caught.value)


@pytest.mark.parametrize("bad", [math.nan, "good", None])
def test_groups_of_a_bad_reward_are_replaced_by_fresh_prompts_and_counted(
    bad: Any, rl: MakeConfig
) -> None:
    """Every prompt with an odd first digit fails: 8 of the 16 prompts of the epoch.

    Two steps need 8 good groups of the epoch's 8, so all 16 prompts are drawn at most once each,
    and every group that is trained on has an even first digit.
    """

    def picky(prompt: str, response: str) -> Any:
        return bad if int(prompt[0]) % 2 else len(response) / 4

    config = rl("on_reward_failure.then=drop_group")
    result = burnish.run(config, rewards=picky)
    trained = [s["prompt"] for s in read_samples(result.run_dir) if s["split"] == "train"]
    assert len(trained) == 2 * 16
    assert all(int(prompt[0]) % 2 == 0 for prompt in trained)
    lines = read_metrics(result.run_dir)
    dropped = sum(line["reward/groups_dropped"] for line in lines)
    assert dropped == lines[-1]["data/prompts_seen"] - 8 > 0


def test_groups_keep_distinct_ids_after_a_refill(rl: MakeConfig) -> None:
    def picky(prompt: str, response: str) -> float:
        return math.nan if int(prompt[0]) % 2 else len(response) / 4

    config = rl("max_steps=1", "on_reward_failure.then=drop_group")
    samples = read_samples(burnish.run(config, rewards=picky).run_dir)
    ids = {s["group_id"]: s["prompt_id"] for s in samples if s["split"] == "train"}
    assert sorted(ids) == [0, 1, 2, 3]
    assert len(set(ids.values())) == 4


def test_a_reward_that_fails_on_everything_ends_the_run_with_the_first_failure(
    rl: MakeConfig,
) -> None:
    with pytest.raises(RewardError, match=r"after 10 refills only 0 of 4(.|\n)*ZeroDivisionError"):
        burnish.run(rl("on_reward_failure.then=drop_group"), rewards=lambda response: 1 / 0)


def test_a_run_folder_that_is_not_empty_is_refused_without_resume(
    rl: MakeConfig, reward: Reward
) -> None:
    config = rl("max_steps=1")
    run_dir = burnish.run(config, rewards=reward).run_dir
    before = (run_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match=f"{run_dir} is not empty; resume .* --resume {run_dir}"):
        burnish.run(config, rewards=reward)
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_any_file_in_the_run_folder_counts_as_not_empty(
    rl: MakeConfig, reward: Reward, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="not empty"):
        burnish.run(rl(), rewards=reward)


def test_a_run_whose_reward_fails_at_once_can_be_started_again_in_its_folder(
    rl: MakeConfig, reward: Reward
) -> None:
    with pytest.raises(RewardError):
        burnish.run(rl("max_steps=1"), rewards=lambda response: math.nan)
    result = burnish.run(rl("max_steps=1"), rewards=reward)
    assert [line["step"] for line in read_metrics(result.run_dir)] == [1]


def test_resuming_a_folder_that_is_no_run_is_refused(
    rl: MakeConfig, reward: Reward, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=r"no config\.yaml, so this is not a run folder"):
        burnish.run(rl(), resume=tmp_path, rewards=reward)


def test_resuming_with_a_recipe_of_another_job_is_refused_and_changes_nothing(
    rl: MakeConfig, reward: Reward, sums: str
) -> None:
    run_dir = burnish.run(rl("max_steps=1"), rewards=reward).run_dir
    before = (run_dir / "config.yaml").read_bytes()
    other = burnish.load_config(
        {
            "job": "sft",
            "model": {"scratch": {}},
            "data": {"sources": [sums], "response_key": "label"},
            "train": {"train_batch_size": 4},
        }
    )
    with pytest.raises(RunError, match="'rl'"):
        burnish.run(other, resume=run_dir)
    assert (run_dir / "config.yaml").read_bytes() == before


def test_resuming_with_another_model_is_refused_and_the_recipe_in_the_folder_stays(
    rl: MakeConfig, reward: Reward
) -> None:
    run_dir = burnish.run(rl("max_steps=1"), rewards=reward).run_dir
    before = (run_dir / "config.yaml").read_bytes()
    wider = rl("max_steps=2", "model.scratch.hidden_size=64")
    with pytest.raises(RunError, match=r"does not match this recipe: .*of another model"):
        burnish.run(wider, resume=run_dir, rewards=reward)
    assert (run_dir / "config.yaml").read_bytes() == before


def test_a_finished_run_goes_on_with_a_larger_max_steps(rl: MakeConfig, reward: Reward) -> None:
    run_dir = burnish.run(rl("max_steps=2"), rewards=reward).run_dir
    burnish.run(rl("max_steps=4"), resume=run_dir, rewards=reward)
    assert [line["step"] for line in read_metrics(run_dir)] == [1, 2, 3, 4]


def test_a_recipe_for_another_job_is_refused(rl: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="for the job 'rl', not 'sft'"):
        burnish.load_config(rl().model_dump(mode="json"), job="sft")


def test_an_evaluation_cannot_be_resumed(sums: str, tmp_path: Path) -> None:
    config = burnish.load_config(
        {
            "job": "evaluate",
            "model": {"scratch": {}},
            "eval": {"data": {"sources": [sums]}, "generate_max_len": 4},
        }
    )
    with pytest.raises(RunError, match="cannot be resumed"):
        burnish.run(config, resume=tmp_path, rewards=lambda response: 0.0)


def test_a_prompt_the_model_has_no_positions_for_is_over_the_limit(
    rl: MakeConfig, reward: Reward, write_rows: Callable[..., str]
) -> None:
    """64 positions and 4 new tokens leave 60 for the prompt, whatever prompt_max_len allows."""
    path = write_rows("long", [{"prompt": "1" * 61}, {"prompt": "1+1="}])
    config = rl(f"data.sources=[{path}]", "data.prompt_max_len=1000", "data.shuffle=false")
    with pytest.raises(DataError, match=r"61 tokens, but prompt_max_len is 60"):
        burnish.run(config, rewards=reward)


def test_a_response_limit_beyond_the_models_positions_is_refused(
    rl: MakeConfig, reward: Reward
) -> None:
    problem = r"up to 64 tokens \(generate_max_len.* leave no room for a prompt"
    with pytest.raises(ModelError, match=problem):
        burnish.run(rl("rollout.generate_max_len=64"), rewards=reward)


def test_rewards_given_to_a_job_without_rewards_are_refused(
    sums: str, reward: Reward, tmp_path: Path
) -> None:
    config = burnish.load_config(
        {
            "job": "sft",
            "run_dir": str(tmp_path / "run"),
            "model": {"scratch": {}},
            "data": {"sources": [sums], "response_key": "label"},
            "train": {"train_batch_size": 4},
        }
    )
    with pytest.raises(RunError, match="the job sft takes no rewards"):
        burnish.run(config, rewards=reward)


def test_adapters_are_not_put_on_another_base_at_resume(
    rl: MakeConfig, reward: Reward, tmp_path: Path
) -> None:
    burnish.run(rl("model.lora={}"), rewards=reward)
    other = rl("model.lora={}", "model.scratch.seed=1", "max_steps=3")
    with pytest.raises(RunError, match="contains adapters for the base"):
        burnish.run(other, resume=tmp_path / "run", rewards=reward)


@pytest.mark.parametrize("job", ["sft", "rm", "steps", "preference", "distill"])
def test_held_out_rows_that_the_model_has_no_positions_for_are_over_the_limit(
    job: str, write_rows: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """64 positions (of a teacher or reference 32), whatever eval.data.max_len allows."""

    def row(prompt: str) -> dict[str, Any]:
        if job == "steps":
            return {"prompt": prompt, "steps": ["1", "2"], "labels": [1, 0]}
        return {"prompt": prompt, "response": "1", "chosen": "1", "rejected": "2"}

    short, long = write_rows("short", [row("1+"), row("2+")]), row("1" * 70)
    data: dict[str, Any] = {"max_len": 32} | ({"kind": "steps"} if job == "steps" else {})
    held_out = {"sources": [write_rows("both", [row("1+"), long])], "overlong": "drop"}
    scratch = {"alphabet": "0123456789+=", "hidden_size": 32, "num_layers": 1}
    tree: dict[str, Any] = {
        "job": "rm" if job == "steps" else job,
        "run_dir": str(tmp_path / "run"),
        "model": {"scratch": scratch | {"max_position_embeddings": 64}},
        "data": data | {"sources": [short]},
        "eval": {"data": data | held_out | {"max_len": 2048}},
        "train": {"train_batch_size": 2},
    }
    other = {"distill": "teacher", "preference": "reference"}.get(job)
    if other is not None:
        tree[other] = {"model": {"scratch": scratch | {"max_position_embeddings": 32}}}
    metrics = burnish.run(burnish.load_config(tree)).metrics
    assert math.isfinite(metrics["eval/loss"])
    assert f"eval.data.max_len is lowered to {64 if other is None else 32}" in caplog.text
    assert "1 rows dropped" in caplog.text or "1 pairs dropped" in caplog.text


@pytest.mark.parametrize("role", ["reference", "critic"])
def test_a_reference_or_critic_reads_the_ids_of_the_policy_as_the_same_tokens(
    role: str, rl: MakeConfig, reward: Reward, tmp_path: Path
) -> None:
    """It may have more tokens, and special tokens of other names; fewer or others are refused."""
    changed = ["algorithm.advantage=gae", f"{role}.model.path={tmp_path / 'other'}"]
    if role == "reference":
        changed = ["algorithm.kl.init_kl_coef=0.1", changed[1]]
    policy = rl().model

    def run(alphabet: str, **names: str) -> None:
        assert policy.scratch is not None
        scratch = policy.scratch.model_copy(update={"alphabet": alphabet})
        model = ModelConfig(scratch=scratch)
        load_causal_lm(model).save_pretrained(tmp_path / "other")
        tokenizer = load_tokenizer(model)
        text = tokenizer.backend_tokenizer.to_str()
        for old, new in names.items():
            text = text.replace(f"<{old}>", f"<{new}>")
        tokenizer.save_pretrained(tmp_path / "other")
        (tmp_path / "other" / "tokenizer.json").write_text(text)
        burnish.run(rl(*changed), rewards=reward)

    assert policy.scratch is not None
    alphabet = policy.scratch.alphabet
    for kept in (lambda: run(alphabet + "xyz"), lambda: run(alphabet, unk="no")):
        kept()
        shutil.rmtree(tmp_path / "run")
    with pytest.raises(RunError, match=rf"{role}.model: .* could not read token"):
        run(alphabet[:-1])
    with pytest.raises(RunError, match=rf"{role}.model: .* has other tokens than the policy"):
        run(alphabet[::-1])


def test_a_run_folder_that_cannot_be_made_or_written_is_refused_before_anything_is_loaded(
    rl: Callable[..., JobConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for run_dir, said in (
        (file, "is a file; choose another path"),
        (file / "run", "cannot be created: Not a directory"),
        ("", "run_dir is empty"),
    ):
        with pytest.raises(RunError, match=said):
            burnish.run(rl(f"run_dir={run_dir}"))
    run_dir = tmp_path / os.fsdecode(b"run_\xff")
    with pytest.raises(RunError, match=r"run_\\udcff' has a path that is not UTF-8"):
        burnish.run(rl().model_copy(update={"run_dir": str(run_dir)}))
    assert not run_dir.exists()
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("job: rl\n")
    with pytest.raises(RunError, match=r"is not UTF-8.*rename it"):
        burnish.run(rl(), resume=run_dir)
    checkpoint = CheckpointConfig.model_validate({"export_at_end": str(run_dir)})
    with pytest.raises(RunError, match=r"export_at_end: .*run_\\udcff' is not UTF-8"):
        burnish.run(rl().model_copy(update={"checkpoint": checkpoint}))
    monkeypatch.setattr("os.access", lambda path, mode: False)  # the tests may be run by root
    with pytest.raises(RunError, match=r"read-only is not writable for user .*permissions"):
        burnish.run(rl(f"run_dir={tmp_path / 'read-only'}"))
