"""Checkpoints that are reduced to their weights, and the model folder at the end of a run."""

from __future__ import annotations

import errno
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file

import burnish
from burnish.checkpoint import CheckpointStore, read_manifest, verify
from burnish.checkpoint.reduce import reduce_to_weights
from burnish.config import JobConfig, RLConfig, load_config
from burnish.config.early_stopping import EarlyStoppingConfig
from burnish.distributed.process_group import RankGroup
from burnish.driver.early_stopping import StopCounters
from burnish.driver.errors import RunError
from burnish.observe.metrics import read_metrics

MakeSFT = Callable[..., JobConfig]
MakeConfig = Callable[..., JobConfig]
FOUR_STEPS = ("max_steps=4", "checkpoint.every_n_steps=1", "checkpoint.keep_last=3")


@pytest.fixture
def sft(tmp_path: Path) -> MakeSFT:
    """``sft("train.lr=1e-2")``: the config of a tiny run of supervised fine-tuning."""
    rows = [{"prompt": f"{i}=", "response": str(i)} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "job": "sft",
        "run_dir": str(tmp_path / "run"),
        "model": {"scratch": {"alphabet": "0123456789=", "hidden_size": 32, "num_layers": 1}},
        "data": {"sources": [str(tmp_path / "rows.jsonl")]},
        "train": {"train_batch_size": 4, "lr": 1e-2, "ema_decay": 0.5},
    }
    return lambda *overrides: burnish.load_config(tree, list(overrides))


def test_older_checkpoints_keep_their_weights_and_cannot_be_resumed(
    sft: MakeSFT, tmp_path: Path
) -> None:
    """Steps 2 and 3 are reduced, step 4 is full: a resume continues from it and gives the weights
    of an undisturbed run. Without step 4 there is nothing to resume."""
    whole = burnish.run(sft("run_dir=" + str(tmp_path / "whole"), "max_steps=5")).run_dir
    run_dir = burnish.run(sft(*FOUR_STEPS, "checkpoint.keep=weights")).run_dir
    steps = sorted((run_dir / "checkpoints").glob("step_*"))
    assert [step.name[-1] for step in steps] == ["2", "3", "4"]
    names = [{p.name for p in (step / "policy").glob("*.safetensors")} for step in steps]
    weights = {"master.safetensors", "ema.safetensors"}
    assert names[0] == names[1] == weights < names[2]
    assert [verify(step) for step in steps] == [[], [], []]
    assert burnish.export(steps[0], tmp_path / "early", model="policy-ema").is_dir()

    burnish.run(sft(*FOUR_STEPS, "max_steps=5", "checkpoint.keep=weights"), resume=run_dir)
    ours, theirs = (load_file(d / "checkpoints/step_000005/policy/master.safetensors")
                    for d in (run_dir, whole))  # fmt: skip
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    shutil.rmtree(run_dir / "checkpoints" / "step_000005")
    with pytest.raises(RunError, match=r"step_000004 contains only weights(.|\n)*burnish export"):
        burnish.run(sft(*FOUR_STEPS, "max_steps=6"), resume=run_dir)


def test_a_reduction_that_was_interrupted_is_completed_by_the_next(
    sft: MakeSFT, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = burnish.run(sft("max_steps=1")).run_dir
    folder = run_dir / "checkpoints" / "step_000001"

    unlink = Path.unlink

    def killed(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".safetensors":
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", killed)
        reduce_to_weights(folder)
    assert (folder / "policy" / "exp_avg.safetensors").is_file() and not verify(folder)
    store = CheckpointStore(folder.parent, keep_last=1, best_mode="max")
    assert (store.latest(), store.latest(resumable=True)) == (folder, None)
    reduce_to_weights(folder)
    assert not (folder / "policy" / "exp_avg.safetensors").exists() and not verify(folder)
    assert read_manifest(folder).extra == {"metric": None, "contents": "weights"}


def test_the_trained_model_is_exported_at_the_end_and_replaced_by_a_resume(
    sft: MakeSFT, tmp_path: Path
) -> None:
    at_end = ("checkpoint.export_at_end='{run_dir}/hf'", "checkpoint.export_at_end.dtype=bf16")
    run_dir = burnish.run(sft("max_steps=1", *at_end)).run_dir
    for more in (1, 2):
        burnish.run(sft(f"max_steps={more}", *at_end), resume=run_dir)
        by_hand = burnish.export(run_dir, tmp_path / f"by hand {more}", dtype="bf16")
        found = [load_file(d / "model.safetensors") for d in (run_dir / "hf", by_hand)]
        assert found[0].keys() == found[1].keys()
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])
    assert {t.dtype for t in found[0].values()} == {torch.bfloat16}


def test_an_export_never_replaces_foreign_files_and_its_failure_names_the_command(
    sft: MakeSFT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(RunError, match="mine exists and was not written by this run"):
        burnish.run(sft(f"checkpoint.export_at_end={tmp_path / 'mine'}"))
    below_a_file = tmp_path / "mine" / "file" / "model"
    with pytest.raises(RunError, match=r"checkpoint.export_at_end: .* cannot be written"):
        burnish.run(sft(f"checkpoint.export_at_end={below_a_file}"))
    folder = tmp_path / "model"

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("burnish.publish.export.export", fails)
    with pytest.raises(RunError, match=rf"run is complete(.|\n)*burnish export .* {folder}"):
        burnish.run(sft("max_steps=1", f"checkpoint.export_at_end={folder}"))


def test_epochs_over_prompts_set_the_steps_of_a_run_and_of_its_resume(
    rl: MakeConfig, reward: Any, tmp_path: Path
) -> None:
    """1 pass over 16 prompts, 4 at a time: 4 steps. A Hugging Face dataset is counted when the
    run starts. The run saves the derived number, so its resume trains with the same schedule."""
    datasets.Dataset.from_list([{"prompt": f"{i}+1="} for i in range(16)]).save_to_disk(
        str(tmp_path / "prompts")
    )
    source = f"data.sources=[{{kind: dataset, path: {tmp_path / 'prompts'}}}]"
    config = rl(source, "max_steps=null", "max_epochs=1", "train.lr_scheduler=linear")
    burnish.run(config, rewards=reward)
    lines = [line for line in read_metrics(Path(config.run_dir)) if "train/loss" in line]
    explicit = rl(source, "max_steps=4", "train.lr_scheduler=linear", f"run_dir={tmp_path / 'b'}")
    burnish.run(explicit, rewards=reward)
    expected = [line for line in read_metrics(tmp_path / "b") if "train/loss" in line]
    assert [line["train/lr"] for line in lines] == [line["train/lr"] for line in expected]
    assert len(lines) == 4
    saved = load_config(Path(config.run_dir) / "config.yaml")
    assert isinstance(saved, RLConfig)
    assert (saved.max_steps, saved.max_epochs) == (4, None)


def test_a_run_without_improvement_ends_early_and_a_resumed_run_at_the_same_step(
    sft: MakeSFT, tmp_path: Path
) -> None:
    """No loss improves by 100, so the measurements of steps 1, 2 and 3 count up to patience 3. The
    stopped run is complete (export, report), ends at once if it is resumed, and trains on without
    early stopping."""
    stop = "early_stopping={metric: eval/loss, patience: 3, min_delta: 100}"
    rows = "eval.data={sources: [" + str(tmp_path / "rows.jsonl") + "]}"
    early = ("eval.every_n_steps=1", rows, stop)
    undisturbed = burnish.run(
        sft("run_dir=" + str(tmp_path / "whole"), "checkpoint.export_at_end=true", *early)
    ).run_dir
    assert [line["step"] for line in read_metrics(undisturbed)] == [0, 1, 2, 3]
    assert (undisturbed / "export").is_dir() and (undisturbed / "report.html").is_file()
    why = (undisturbed / "stopped.txt").read_text(encoding="utf-8")
    assert "stopped early at step 3 of 6: eval/loss did not improve in 3 consecutive" in why

    run_dir = burnish.run(sft("max_steps=2", *early)).run_dir
    assert not (run_dir / "stopped.txt").exists()
    for _ in range(2):  # the second is already stopped
        burnish.run(sft(*early), resume=run_dir)
        assert [line["step"] for line in read_metrics(run_dir)] == [0, 1, 2, 3]
        assert (run_dir / "stopped.txt").exists()
    burnish.run(sft(*early, "early_stopping=null"), resume=run_dir)
    assert read_metrics(run_dir)[-1]["step"] == 6 and not (run_dir / "stopped.txt").exists()


def test_a_run_above_its_limit_of_the_kl_ends_early_with_an_evaluation(
    rl: MakeConfig, reward: Callable[[str], float], sums: str
) -> None:
    """At step 1 the policy is the reference, so its KL is 0. Steps 2 and 3 are above the limit."""
    config = rl(
        "max_steps=6",
        "algorithm.kl={init_kl_coef: 0.001}",
        "early_stopping={max_kl: {limit: 1.0e-12, steps: 2}}",
        "train.lr=0.01",
        "eval={generate_max_len: 4, data: {sources: [" + sums + "], prompt_max_len: 16}}",
    )
    lines = read_metrics(burnish.run(config, rewards=reward).run_dir)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[1]["train/kl"] == 0 and "eval/pass@1" in lines[3]


@pytest.mark.parametrize(
    ("values", "higher", "without", "stops"),
    [
        ([1.0, 0.8, 0.9, 0.85], None, [0, 0, 1, 2], True),
        ([1.0, 0.95, 0.89], None, [0, 1, 0], False),  # 1.0 - 0.89 is more than 0.1, 0.05 is not
        ([0.2, 0.1, 0.5, math.nan], True, [0, 1, 0, 1], False),
        ([math.nan, math.nan], None, [1, 2], True),
    ],
)
def test_measurements_without_improvement_are_counted(
    values: list[float], higher: bool | None, without: list[int], stops: bool
) -> None:
    config = EarlyStoppingConfig(
        metric="eval/loss", patience=2, min_delta=0.1, higher_is_better=higher
    )
    counters, found = StopCounters(), []
    for value in values:
        counters = StopCounters.of_state(counters.after(config, {"eval/loss": value}).state_dict())
        counters = counters.after(config, {"train/loss": 5.0})  # a step without a measurement
        found.append(counters.without_improvement)
    assert found == without and (counters.reason(config) is not None) == stops


def test_all_ranks_count_what_rank_0_measured(
    sft: MakeSFT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process has the metrics of rank 1; the values of rank 0 never improve."""
    bad = StopCounters("train/loss", best=0.0, without_improvement=2)
    plain = RankGroup.from_first

    def of_rank_0(ranks: RankGroup, make: Callable[[], Any]) -> Any:
        found = plain(ranks, make)
        return bad if isinstance(found, StopCounters) else found

    monkeypatch.setattr(RankGroup, "from_first", of_rank_0)
    stop = "early_stopping={metric: train/loss, patience: 2}"
    lines = read_metrics(burnish.run(sft(stop)).run_dir)
    assert [line["step"] for line in lines] == [1]
