"""Runs save the tokens of their first samples, and the groups that no step trains. They train with
the same bits as without."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import burnish
from burnish.config import JobConfig
from burnish.observe.metrics import read_metrics
from burnish.observe.samples import (
    DROPPED,
    read_sample_file,
    read_samples,
    read_tokens,
    sample_files,
    samples_with_tokens,
    split_of,
)
from burnish.rollout.runner import Rollout
from burnish.steps.kept_samples import SampleWriter
from burnish.types import Batch

MakeConfig = Callable[..., JobConfig]
COMMON = ["max_steps=3", "train.lr=1e-2", "checkpoint.every_n_steps=3"]
KL = "algorithm.kl.init_kl_coef=0.1"
GAE = ["algorithm.advantage=gae", "rollout.rollout_batch_size=16", "rollout.n_samples_per_prompt=1"]
ASYNC = ["rollout.asynchronous.max_staleness=1", "rollout.engine.own_weights=true"]
ASYNC += ["algorithm.correction={mode: truncate}"]
OFFLOAD = "cluster.offload_between_phases=[policy, critic, reference]"


def _weights(run_dir: Path) -> dict[str, str]:
    folder = run_dir / "checkpoints/step_000003"
    files = [*folder.rglob("*.safetensors")]
    assert files
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def _numbers(run_dir: Path) -> list[dict[str, float]]:
    clocks = ("time", "memory/", "sync/")
    return [
        {k: v for k, v in line.items() if not k.startswith(clocks) and "tokens_per_s" not in k}
        for line in read_metrics(run_dir)
    ]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["train.epochs_per_rollout=2", "train.micro_train_batch_size=4"],
        ["algorithm.old_policy=sampler", "train.epochs_per_rollout=2", "algorithm.correction=null"],
        [*GAE, KL, "rollout.engine.own_weights=true", OFFLOAD],
        ["model.lora.lora_rank=4", KL],
        ASYNC,
        ["rollout.top_p=0.9", "rollout.top_k=9", "algorithm.correction={}"],
    ],
    ids=["plain", "epochs", "sampler", "gae-offload", "lora", "async", "masks"],
)
def test_saving_tokens_changes_no_bit_and_saves_the_numbers_of_the_update(
    options: list[str], rl: MakeConfig, reward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``epochs_per_rollout`` the log-probs before the update are those that the loss uses."""
    batches: dict[int, tuple[Rollout, Batch]] = {}
    write = SampleWriter.write

    def seen(self: SampleWriter, step: int, rollout: Rollout, batch: Batch) -> None:
        batches[step] = rollout, batch
        write(self, step, rollout, batch)

    runs = []
    for count in (0, 5):
        monkeypatch.setattr(SampleWriter, "write", seen if count else write)
        config = rl(*COMMON, *options, f"observe.samples_with_tokens={count}")
        config = config.model_copy(update={"run_dir": f"{config.run_dir}-{count}"})
        runs.append(burnish.run(config, rewards=reward).run_dir)
    without, with_tokens = runs
    if options != ASYNC:  # its samples depend on the time that each part takes
        assert _numbers(without) == _numbers(with_tokens)
        assert _weights(without) == _weights(with_tokens)
        assert read_samples(without) == read_samples(with_tokens)
    assert not any(samples_with_tokens(path) for _, path in sample_files(without))

    for step, path in sample_files(with_tokens):
        rollout, batch = batches[step]
        samples = [s for group in rollout.groups for s in group.samples][:5]
        assert samples_with_tokens(path) == [s.sample_id for s in samples]
        begins = batch.offsets.tolist()
        for row, sample in enumerate(samples):
            columns, span = read_tokens(path, sample.sample_id), slice(*begins[row : row + 2])
            assert columns is not None and columns["token_ids"] == batch.tokens[span].tolist()
            mask = batch.action_mask[span]
            assert columns["action_mask"] == mask.tolist()
            wanted = {
                "sampler_logprobs": batch.sampler_logprobs,
                "token_advantages": batch.advantages,
                "ref_logprobs": batch.ref_logprobs,
                "values": batch.values,
            }
            if "algorithm.old_policy=sampler" not in options and batch.old_logprobs is not None:
                wanted["trainer_logprobs"] = batch.old_logprobs
            for name, values in wanted.items():
                assert (columns[name] is None) == (values is None), name
                if values is not None:
                    saved = [v for v in columns[name] if v is not None]
                    assert saved == values[span][mask].tolist(), name
            trainer = torch.tensor([v for v in columns["trainer_logprobs"] if v is not None])
            entropies = [v for v in columns["entropies"] if v is not None]
            assert len(trainer) == len(entropies) == int(mask.sum())
            assert min(entropies) > 0
            if options != ASYNC:  # the same weights: rounding of fp32
                assert batch.sampler_logprobs is not None
                torch.testing.assert_close(
                    trainer, batch.sampler_logprobs[span][mask], atol=1e-5, rtol=0
                )


def test_sampled_tokens_are_saved_without_a_trainer(
    generate: MakeConfig, rl: MakeConfig, reward: Any, evaluation: list[str]
) -> None:
    """``generate``, and evaluations of a run: no policy computes log-probs of their tokens."""
    config = generate("observe.samples_with_tokens=3", name="generated")
    folders = [(burnish.run(config, rewards={"digits": reward}).run_dir, 3)]
    folders.append((burnish.run(rl(*evaluation), rewards=reward).run_dir, 8))
    for folder, count in folders:
        paths = [path for _, path in sample_files(folder) if not path.name.startswith("step")]
        assert paths
        for path in paths:
            (first, *_), found = samples_with_tokens(path), samples_with_tokens(path)
            assert len(found) == count
            columns = read_tokens(path, first)
            assert columns is not None and columns["trainer_logprobs"] is None
            mask = columns["action_mask"]
            assert [v is not None for v in columns["sampler_logprobs"]] == mask and any(mask)


def _failing(prompt: str, response: str) -> float:
    """Equal for all responses to ``2+``, and an error for ``1+``."""
    if prompt.startswith("1+"):
        raise ValueError(f"no reward for {prompt}")
    return 0.5 if prompt.startswith("2+") else sum(c.isdigit() for c in response) / 4


@pytest.mark.parametrize("options", [[], ASYNC], ids=["sync", "async"])
def test_groups_that_no_step_trains_are_saved_with_the_reason(
    options: list[str], rl: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the prompts are lost. They are not in the files of trained samples."""
    lost: dict[int, dict[str, str]] = {}
    write = SampleWriter.write

    def seen(self: SampleWriter, step: int, rollout: Rollout, batch: Batch) -> None:
        lost[step] = dict(rollout.lost)
        write(self, step, rollout, batch)

    monkeypatch.setattr(SampleWriter, "write", seen)
    config = rl(
        *COMMON, *options, "rollout.dynamic_sampling={}", "on_reward_failure.then=drop_group"
    )
    run_dir = burnish.run(config, rewards=_failing).run_dir
    assert any(lost.values())
    saved: dict[int, list[dict[str, Any]]] = {step: [] for step in lost}
    for step, path in sample_files(run_dir):
        rows = read_sample_file(path)
        if split_of(path) == DROPPED:
            saved[step] = rows
        else:
            assert {row["dropped"] for row in rows} == {None}
            assert not {row["prompt_id"] for row in rows} & set(lost[step])
    for step, rows in saved.items():
        groups = {row["prompt_id"]: row["dropped"] for row in rows}
        assert set(groups) <= set(lost[step]) and len(groups) == min(4, len(lost[step]))
        assert len(rows) == 4 * len(groups)
        for row in rows:
            assert row["advantage"] is None and row["split"] == DROPPED
            if lost[step][row["prompt_id"]] == "failed":
                assert "no reward for 1+" in row["dropped"] and row["reward"] is None
            else:
                assert row["dropped"].startswith("filtered: all rewards are equal")
                assert row["reward"] is not None
    reasons = {row["dropped"] for rows in saved.values() for row in rows}
    assert any(r.startswith("failed reward") for r in reasons)
    assert any(r.startswith("filtered") for r in reasons)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sharded_ranks_of_which_one_has_no_row_train_with_the_same_bits(
    rl: MakeConfig, reward: Any, ray_cluster: Any
) -> None:
    """One sample with tokens, two ranks. The numbers are those that the sampler computed."""
    options = ["cluster.runtime=ray", "cluster.policy_ranks=2", "train.engine.sharding=full"]
    runs = []
    for count in (0, 1):
        config = rl(*COMMON, *options, f"observe.samples_with_tokens={count}")
        config = config.model_copy(update={"run_dir": f"{config.run_dir}-{count}"})
        runs.append(burnish.run(config, rewards=reward).run_dir)
    assert _numbers(runs[0]) == _numbers(runs[1])
    assert _weights(runs[0]) == _weights(runs[1])
    for _, path in sample_files(runs[1]):
        (name,) = samples_with_tokens(path)
        columns = read_tokens(path, name)
        assert columns is not None
        trainer, sampler = (
            [v for v in columns[f"{side}_logprobs"] if v is not None]
            for side in ("trainer", "sampler")
        )
        assert trainer and trainer == pytest.approx(sampler, abs=1e-5)  # rounding of fp32
