"""The preference job from its recipe to its export: every loss, resume, the kept reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.config import JobConfig, load_config
from burnish.config.model import ModelConfig
from burnish.config.schedule import ConstantLr
from burnish.driver.run_dir import REFERENCE_FILE as FILE
from burnish.models.load import load_causal_lm
from burnish.observe.metrics import read_metrics
from burnish.runtime.inline import InlineRuntime
from burnish.train.base import TrainEngine
from burnish.train.spec import EngineSpec

SCRATCH = {
    "alphabet": "0123456789+=",
    "hidden_size": 32,
    "num_layers": 1,
    "max_position_embeddings": 64,
}
MakeConfig = Callable[..., JobConfig]
NF4 = "{lora_rank: 4, quantization: nf4}"
LOSSES = ["dpo", "cdpo", "ipo", "simpo", "orpo", "kto", "aot_unpaired", "bco_pair"]
OPTIONS = {
    "dpo": ["f_divergence=js", "ld_alpha=0.5"],
    "simpo": ["weight_pairs=true"],
    "bco_pair": ["added_losses={dpo: 0.8, apo_zero: 0.5}"],
}
"""Further options of a loss in the runs that learn."""


@pytest.fixture
def preference(tmp_path: Path, write_rows: Callable[..., str]) -> MakeConfig:
    """12 pairs: the right digit before a wrong one; 3 steps of 4 (for kto 6 of 4 responses)."""
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{(a + b + 3) % 10}"}
        for a in range(4)
        for b in range(3)
    ]
    pairs = write_rows("pairs", rows)

    def make(*overrides: str) -> JobConfig:
        tree: dict[str, Any] = {
            "job": "preference",
            "run_dir": str(tmp_path / "run"),
            "model": {"scratch": SCRATCH},
            "data": {"sources": [pairs], "max_len": 16},
            "eval": {"data": {"sources": [pairs], "max_len": 16}},
            "train": {"train_batch_size": 4, "lr": 1e-2},
        }
        return load_config(tree, overrides)

    return make


def run(config: JobConfig) -> list[dict[str, float]]:
    return read_metrics(burnish.run(config).run_dir)


def numbers(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    """What does not depend on the clock."""
    keep = ("train/", "eval/", "data/")
    drop = ("tokens_per_s",)
    return [
        {k: v for k, v in line.items() if k.startswith(keep) and not k.endswith(drop)}
        for line in lines
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss=dpo"],
        ["loss=dpo", "reference.precompute=true"],
        ["loss=dpo", "reference.precompute=true", "model.lora={}"],
        ["loss=dpo", "weight_pairs=true"],
        ["loss=aot"],
        ["loss=aot", "reference.precompute=true", "model.lora={}"],
        ["loss=kto"],
        ["loss=kto", "model.lora={}"],
        ["loss=kto", "reference.precompute=true"],
        ["loss=kto", "reference.precompute=true", "model.lora={}"],
    ],
    ids=" ".join,
)
def test_steps_make_the_planned_passes(
    overrides: list[str], preference: MakeConfig, passes_of_two_steps: Callable[..., Any]
) -> None:
    made, planned = passes_of_two_steps(preference(*overrides, "eval=null", "max_steps=3"))
    assert made == planned


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_learns_its_pairs(loss: str, preference: MakeConfig) -> None:
    lines = run(preference(f"loss={loss}", "max_epochs=20", *OPTIONS.get(loss, [])))
    evaluated = [line for line in lines if "eval/loss" in line]
    first, last = evaluated[0], evaluated[-1]
    assert last["eval/loss"] < first["eval/loss"]
    # kto's verdicts are on single responses, against 0
    assert last["eval/accuracy"] >= (0.8 if loss == "kto" else 1.0)
    if loss == "dpo":
        # 1e-6: the log-probs of policy and reference are the same sums
        assert first["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    if loss == "kto":
        assert first["eval/kl_estimate"] == pytest.approx(0.0, abs=1e-6)
        assert last["eval/reward_desirable"] > last["eval/reward_undesirable"] + 1
    elif loss != "orpo":
        assert last["eval/reward_margin"] > first["eval/reward_margin"]


@pytest.mark.parametrize("lora", ["{lora_rank: 4}", NF4])
def test_the_first_dpo_loss_is_ln_2_with_lora_and_its_base_as_the_reference(
    lora: str, preference: MakeConfig
) -> None:
    lines = [x for x in run(preference(f"model.lora={lora}")) if "train/loss" in x]
    assert lines[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[1]["train/loss"] != lines[0]["train/loss"], "it moves"


def test_a_run_starts_from_an_exported_adapter(preference: MakeConfig, tmp_path: Path) -> None:
    lora = "{lora_rank: 4, target_modules: [q_proj, up_proj]}"
    first = run(preference(f"model.lora={lora}", f"run_dir={tmp_path / 'first'}"))
    folder = burnish.export(tmp_path / "first", tmp_path / "adapter", lora="adapter")
    second = run(preference(f"model.lora.path={folder}", "train.lr=1e-9"))
    ends, begins = (
        {k: v for k, v in line.items() if k.startswith("eval/")} for line in (first[-1], second[0])
    )
    assert ends["eval/reward_margin"] > 0.01
    assert begins == pytest.approx(ends, rel=1e-5, abs=1e-6)  # the same adapter in another batch


@pytest.mark.parametrize("lora", [[], ["model.lora.lora_rank=4"]])
def test_a_kept_reference_changes_no_number_and_is_not_computed_again(
    lora: list[str], preference: MakeConfig, tmp_path: Path
) -> None:
    plain = run(preference(f"run_dir={tmp_path / 'plain'}", *lora))
    kept = preference("reference.precompute=true", *lora)
    found = run(kept)
    for one, other in zip(numbers(plain), numbers(found), strict=True):
        # 1e-5: rows computed beside other rows
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    written = (tmp_path / "run" / FILE).stat().st_mtime_ns
    burnish.run(kept.model_copy(update={"max_epochs": 2}), resume=tmp_path / "run")
    assert (tmp_path / "run" / FILE).stat().st_mtime_ns == written


def test_a_kept_reference_without_a_row_of_the_resumed_run_is_computed_again_and_says_why(
    preference: MakeConfig,
    write_rows: Callable[..., str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Held-out rows that are new, as by another template or length limit; then another number
    format."""
    kept = "reference.precompute=true"
    burnish.run(preference(kept, "eval=null"))
    new = write_rows("new", [{"prompt": "1=", "chosen": "1", "rejected": "0"}])
    held_out = f"eval.data={{sources: [{new}], max_len: 16}}"
    result = burnish.run(preference(kept, held_out, "max_epochs=2"), resume=tmp_path / "run")
    assert math.isfinite(result.metrics["eval/loss"])
    assert f"{FILE} lacks 2 of 26 rows" in caplog.text
    again = preference(kept, held_out, "max_epochs=3", "precision.dtype=bf16")
    burnish.run(again, resume=tmp_path / "run")
    assert f"{FILE} was computed in fp32 instead of bf16" in caplog.text


def test_a_run_whose_policy_does_not_load_can_be_started_again_with_its_kept_reference(
    preference: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference's log-probs are all that is in the folder then."""
    plain = InlineRuntime.language_model

    def no_policy(self: InlineRuntime, spec: EngineSpec, *rest: Any) -> TrainEngine:
        if spec.role.engine_role == "policy":
            raise RuntimeError("no memory for the policy")
        return plain(self, spec, *rest)

    config = preference("reference.precompute=true")
    with monkeypatch.context() as patch:
        patch.setattr(InlineRuntime, "language_model", no_policy)
        with pytest.raises(RuntimeError, match="no memory for the policy"):
            burnish.run(config)
    kept = tmp_path / "run" / FILE
    written = kept.stat().st_mtime_ns
    assert not (tmp_path / "run" / "config.yaml").exists()
    (tmp_path / "run" / f".{FILE}.part").write_bytes(b"killed while it was written")
    burnish.run(config)
    assert kept.stat().st_mtime_ns == written, "and is not computed again"


def test_held_out_responses_may_be_as_long_as_the_training_limit(
    preference: MakeConfig, write_rows: Callable[..., str]
) -> None:
    """KTO puts responses behind other prompts. 8 digits and an end token against a limit of 8 for
    the rows that are trained on: before, no token of the prompt was left."""
    rows = [{"prompt": f"{a}=", "chosen": f"{a}" * 8, "rejected": "0" * 8} for a in range(1, 4)]
    longer = f"eval.data={{sources: [{write_rows('long', rows)}], max_len: 16}}"
    lines = run(preference("loss=kto", "data.max_len=8", longer))
    assert all(math.isfinite(line["eval/loss"]) for line in lines if "eval/loss" in line)


def test_kto_with_a_kept_reference_is_bit_equal_to_one_with_the_model(
    preference: MakeConfig, tmp_path: Path
) -> None:
    """Three epochs of 6 steps; the first ends after step 7, and its resumption with larger batches
    pairs other prompts, so the log-probs of its remaining steps are computed again."""
    options = ["loss=kto", "max_epochs=3", "max_steps=12"]
    whole = run(preference(f"run_dir={tmp_path / 'plain'}", *options))
    kept = preference("reference.precompute=true", *options)
    half = kept.model_copy(
        update={
            "max_steps": 7,
            "train": kept.train.model_copy(update={"lr_scheduler": ConstantLr()}),
        }
    )
    first = run(half)
    assert numbers(first)[0] == numbers(whole)[0]
    file = tmp_path / "run" / FILE
    burnish.run(kept, resume=tmp_path / "run")
    assert numbers(read_metrics(tmp_path / "run"))[-1] == numbers(whole)[-1]
    written = file.stat().st_mtime_ns
    burnish.run(kept, resume=tmp_path / "run")
    assert file.stat().st_mtime_ns == written
    larger = ("max_epochs=9", "max_steps=14", "train.train_batch_size=6")
    for folder, more in (("plain", []), ("run", ["reference.precompute=true"])):
        config = preference(f"run_dir={tmp_path / folder}", *options, *more, *larger)
        burnish.run(config, resume=tmp_path / folder)
    plain, cached = (read_metrics(tmp_path / name)[-1:] for name in ("plain", "run"))
    assert numbers(cached) == numbers(plain)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["loss=kto"],
        ["reference.precompute=true"],
        [f"model.lora={NF4}"],
        ["loss=kto", "reference.moving.every_n_steps=3", "checkpoint.every_n_steps=2"],
    ],
)
def test_a_resumed_run_is_bit_equal_to_one_that_went_through(
    options: list[str], preference: MakeConfig, tmp_path: Path
) -> None:
    whole = run(preference("max_steps=6", "max_epochs=9", f"run_dir={tmp_path / 'a'}", *options))
    half = preference("max_steps=3", "max_epochs=9", f"run_dir={tmp_path / 'b'}", *options)
    half = half.model_copy(
        update={"train": half.train.model_copy(update={"lr_scheduler": ConstantLr()})}
    )
    burnish.run(half)
    again = preference("max_steps=6", "max_epochs=9", f"run_dir={tmp_path / 'b'}", *options)
    burnish.run(again, resume=tmp_path / "b")
    resumed = read_metrics(tmp_path / "b")
    assert numbers(whole)[-1] == numbers(resumed)[-1]


def test_unpaired_rows_train_kto_and_the_export_loads(
    preference: MakeConfig, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    rows = [
        {"prompt": f"{a}+1=", "response": f"{a + k}", "ok": k == 1}
        for a in range(6)
        for k in (1, 2)
    ]
    judged = write_rows("judged", rows)
    config = preference("loss=kto", "data.label_key=ok", f"data.sources=[{judged}]", "eval=null")
    lines = run(config)
    assert lines[-1]["data/rows_seen"] == 12
    folder = burnish.export(tmp_path / "run", tmp_path / "out")
    assert load_causal_lm(ModelConfig(path=str(folder))).config.hidden_size == 32
