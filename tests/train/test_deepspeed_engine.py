"""The DeepSpeed engine computes the same results as the torch engine: two processes over loopback
for ZeRO 0 to 3, started once for each part, and one rank in this process."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from burnish.config import load_config
from burnish.config.load import ConfigError
from burnish.config.model import ModelConfig, PrecisionConfig, ScratchConfig
from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.models.tensor_files import TensorInfo, write_tensors
from burnish.train.deepspeed.engine import DeepSpeedError, check_version
from burnish.train.loss_scaler import DynamicLossScaler

SCRIPT = Path(__file__).with_name("deepspeed_ranks.py")
_SPEC = importlib.util.spec_from_file_location("deepspeed_ranks", SCRIPT)
assert _SPEC is not None and _SPEC.loader is not None
script: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["deepspeed_ranks"] = script  # its dataclasses look their module up
_SPEC.loader.exec_module(script)

# Adam divides by the root of the second moment, so fp32 sums in another order move a weight by up
# to some thousandths of a step of 1e-3; a wrong gradient moves it by whole steps.
WEIGHTS = 5e-6
OUTPUTS = 3e-6  # log-probs of size 4: a few ulps
LOADED = ScratchConfig(hidden_size=32, num_layers=6, tie_word_embeddings=False)


def two_processes(test: Any) -> Any:
    """Marks of a test that may be the first to wait for two processes."""
    return pytest.mark.slow(pytest.mark.timeout(900)(test))


@dataclass(frozen=True)
class Reports:
    """Reports of the two ranks."""

    folder: Path
    found: dict[str, Any]
    tensors: tuple[dict[str, Tensor], dict[str, Tensor]]

    def case(self, key: str) -> dict[str, Tensor]:
        """A case's tensors, which are equal on both ranks."""
        own = [
            {n.partition("|")[2]: t for n, t in r.items() if n.split("|")[0] == key}
            for r in self.tensors
        ]
        assert script.same(*own), "both ranks have the same bits"
        return own[0]


RunPart = Callable[[str, Path], "Reports"]


@pytest.fixture(scope="module")
def run_part(run_together: Callable[..., list[int]]) -> RunPart:
    """Run a part of the script on two ranks and return their reports."""

    def run(part: str, folder: Path) -> Reports:
        arguments = [[part, str(folder), str(rank)] for rank in range(2)]
        options = {"log": f"{part}-", "PYTHONWARNINGS": "ignore"}
        run_together(SCRIPT, arguments, folder, timeout_s=800, **options)
        return reports_of(part, folder)

    return run


def reports_of(part: str, folder: Path) -> Reports:
    first, second = (
        json.loads((folder / f"{part}-rank{rank}.json").read_text(encoding="utf-8"))
        for rank in range(2)
    )
    assert first == second, "both ranks found the same"
    tensors = [load_file(folder / f"{part}-rank{rank}.safetensors") for rank in range(2)]
    return Reports(folder, first, (tensors[0], tensors[1]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def trained(folder: Path, run_part: RunPart) -> Reports:
    return run_part("train", folder)


@pytest.fixture(scope="module")
def bad(folder: Path, run_part: RunPart) -> Reports:
    return run_part("bad", folder)


@pytest.fixture(scope="module")
def state(folder: Path, run_part: RunPart) -> Reports:
    model = ModelConfig(scratch=LOADED)
    load_causal_lm(model).save_pretrained(folder / "model")
    load_tokenizer(model).save_pretrained(folder / "model")
    return run_part("state", folder)


def largest_gap(own: dict[str, Tensor], expected: dict[str, Tensor], kind: str) -> float:
    assert own.keys() == expected.keys()
    gaps = [
        float((own[n].float() - t.float()).abs().max())
        for n, t in expected.items()
        if n.startswith(kind)
    ]
    return max(gaps)


# ---- the same run as on one rank of torch --------------------------------------------------


@pytest.mark.parametrize("case", script.CASES, ids=lambda case: case.key)
@two_processes
def test_steps_over_two_ranks_are_those_of_torch_on_one(case: Any, trained: Reports) -> None:
    """Weights, log-probs or values before and after, the base of a LoRA policy, stats, norms and
    learning rates; ragged rows, budgets, a rank without rows."""
    expected, said = script.run_case(case, SINGLE, "torch")
    own = trained.case(case.key)
    assert largest_gap(own, expected, "weight") <= WEIGHTS
    assert largest_gap(own, expected, "outputs") <= OUTPUTS
    moved = float((expected["outputs after"] - expected["outputs before"]).abs().max())
    assert moved > 1e-3, "training must have moved it"
    for theirs, ours in zip(trained.found[case.key], said, strict=True):
        assert theirs == pytest.approx(ours, abs=2e-5)  # sums of about 40 terms of size 1


@pytest.mark.parametrize("case", script.HALF_CASES, ids=lambda case: case.key)
@two_processes
def test_half_precision_trains_as_torch_does(case: Any, trained: Reports) -> None:
    """Other micro-batches round other sums, so the numbers are near, not equal: bf16 has 8 bits,
    log-probs of size 4 move by hundredths."""
    expected, said = script.run_case(case, SINGLE, "torch")
    own = trained.case(case.key)
    assert largest_gap(own, expected, "outputs") <= 2e-2
    for theirs, ours in zip(trained.found[case.key], said, strict=True):
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=0.01)


@two_processes
def test_a_frozen_model_gives_torchs_logprobs_replicated_and_sharded(trained: Reports) -> None:
    case = script.Case("", 0, model=script.UNTIED)
    expected = script.make(case, SINGLE, "torch").logprobs(script.ragged())
    for stage in (0, 3):
        torch.testing.assert_close(
            trained.tensors[1][f"frozen {stage}"], expected, atol=OUTPUTS, rtol=0
        )


ALONE_CASES = [
    script.Case("fp32", stage, micro=3, precision=PrecisionConfig()) for stage in range(4)
] + [
    script.Case(dtype, stage, micro=3, precision=precision)
    for dtype, precision in script.HALF.items()
    for stage in (1, 2, 3)
]


@pytest.mark.slow
@pytest.mark.parametrize("case", ALONE_CASES, ids=lambda case: case.key)
def test_one_rank_steps_as_torch_in_every_format(case: Any, tmp_path: Path) -> None:
    """The same micro-batches in the same formats: fp32 masters as near as fp32 sums allow."""
    ours, theirs = (script.make(case, SINGLE, kind) for kind in ("deepspeed", "torch"))
    norms = [script.take_steps(engine, 3) for engine in (ours, theirs)]
    masters = [script.saved(e, tmp_path / str(i), SINGLE) for i, e in enumerate((ours, theirs))]
    # a half weight may round the other way, and its gradient with it
    bound, of_norm = (WEIGHTS, 1e-5) if case.precision.dtype == "fp32" else (5e-5, 5e-5)
    assert norms[0] == pytest.approx(norms[1], rel=of_norm)
    assert largest_gap(*masters, "master") <= bound


# ---- what is not finite --------------------------------------------------------------------


@two_processes
@pytest.mark.parametrize(("stage", "name"), enumerate(script.SCALERS, 1))
def test_the_loss_scale_follows_the_scaler_of_burnish(stage: int, name: str, bad: Reports) -> None:
    """The gradient of one rank of two overflows in some steps; 43 steps, window and hysteresis
    passed several times. A stage each; the contract suite has every stage."""
    scaler = DynamicLossScaler(initial_scale_power=10, **script.SCALERS[name])
    expected = []
    for overflow in script.PATTERN:
        expected.append(scaler.scale)
        scaler.update(bool(overflow))
    assert bad.found["traces"][f"{stage} {name}"] == [*expected, scaler.scale]
    assert len(set(expected)) > 4


@two_processes
@pytest.mark.parametrize("case", script.SKIP_CASES, ids=lambda case: case.key)
def test_a_skipped_step_changes_no_weight(case: Any, bad: Reports) -> None:
    """Step 2: a gradient that is not finite on one rank. Step 3: a loss that is not, with a finite
    gradient. Hysteresis 2 lets the one overflow pass."""
    found = bad.found["skips"][case.key]
    assert found["skipped"] == [False, True, True, False]
    assert found["overflow"] == [False, True, False, False]
    assert found["skipped_total"] == [0, 1, 2, 2] and found["version"] == 2
    assert found["unmoved"] == [True, True, False]
    scale = {"fp16 constant": 64.0}.get(case.name, 256.0 if "fp16" in case.name else 1.0)
    assert found["scales"] == [scale] * 4


@two_processes
def test_an_overflow_at_the_floor_stops_and_names_the_first_bad_tensor(bad: Reports) -> None:
    """From 2 with hysteresis 2: passed, 1, floor. Rank 1 alone overflows; both ranks have the same
    message."""
    for stage in ("1", "2", "3"):
        found = bad.found["floor"][stage]
        assert found["at_floor"] and not found["after"], "the engine can be used afterwards"
        assert "loss scale is at its minimum (precision.fp16.min_loss_scale=1)" in found["message"]
        assert "at the output of lm_head" in found["message"]


@two_processes
def test_consecutive_skips_stop_and_name_the_first_bad_tensor(bad: Reports) -> None:
    for stage in ("0", "2", "3"):
        found = bad.found["limit"][stage]
        assert "2 consecutive steps of the policy were skipped" in found["message"]
        assert "First bad tensor: loss" in found["message"] and not found["after"]
    assert "the output of model.layers.1.mlp.down_proj" in bad.found["bad weight"]["message"]


# ---- state ---------------------------------------------------------------------------------


@two_processes
@pytest.mark.parametrize("case", script.STATE_CASES, ids=lambda case: case.key)
def test_two_ranks_resume_bitwise_from_a_checkpoint_of_two_ranks(case: Any, state: Reports) -> None:
    found = state.found[case.key]
    assert found["reloaded"] and found["same norms"] and found["same state"]
    assert found["versions"] == [4, 4]
    before, announced, written = found["bytes"]
    headers = 5 * 5000  # one JSON header a file with about a hundred bytes a parameter
    assert before < announced <= written <= announced + headers


@pytest.fixture(scope="module")
def back(state: Reports, run_part: RunPart) -> Reports:
    """Two ranks save, one rank resumes and saves, two ranks resume."""
    for case in script.STATE_CASES:
        engine, place = script.make(case, SINGLE), state.folder / case.key
        engine.load(place / "two")
        assert script.same(
            script.saved(engine, place / "unchanged", SINGLE), tensors_in(place / "two")
        ), "one rank has what two had"
        script.take_steps(engine, 1)
        engine.save(place / "alone")
    return run_part("back", state.folder)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {f"{f.stem} {n}": t for f in files for n, t in load_file(f).items()}


@two_processes
@pytest.mark.parametrize("case", script.STATE_CASES, ids=lambda case: case.key)
def test_resuming_on_one_rank_and_again_on_two_equals_two_ranks(case: Any, back: Reports) -> None:
    place = back.folder / case.key
    assert back.found[case.key]["version"] == 4
    own, expected = tensors_in(place / "back"), tensors_in(place / "first")
    # Half precision rounds other sums in the step on one rank; near 0 Adam's step is all sign.
    bound = WEIGHTS if case.precision.dtype == "fp32" else 2e-3
    assert largest_gap(own, expected, "master") <= bound


@two_processes
@pytest.mark.parametrize("case", script.STATE_CASES, ids=lambda case: case.key)
def test_a_run_can_change_its_engine_both_ways(case: Any, state: Reports, tmp_path: Path) -> None:
    """Torch resumes a checkpoint of two DeepSpeed ranks; DeepSpeed resumes the checkpoint that
    torch then saves."""
    place, theirs = state.folder / case.key, script.make(case, SINGLE, "torch")
    theirs.load(place / "two")
    assert script.same(script.saved(theirs, tmp_path / "a", SINGLE), tensors_in(place / "two"))
    script.take_steps(theirs, 1)
    at_torch = script.saved(theirs, tmp_path / "b", SINGLE)
    ours = script.make(case, SINGLE)
    ours.load(tmp_path / "b")
    assert script.same(script.saved(ours, tmp_path / "c", SINGLE), at_torch)
    norms = [script.take_steps(engine, 1) for engine in (ours, theirs)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    weights = [{f"weight {n}": t.detach() for n, t in e.weights()} for e in (ours, theirs)]
    # one step; half weights are rounded, and an ulp of bf16 at 1 is 8e-3
    bound = WEIGHTS if case.precision.dtype == "fp32" else 8e-3
    assert largest_gap(*weights, "weight") <= bound


@two_processes
@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, id=f"{name}, {case.key}")
        for name, cases in script.TO_ZERO.items()
        for case in cases
    ],
)
def test_what_several_ranks_of_torch_saved_is_read_as_from_one(
    name: str, case: Any, state: Reports
) -> None:
    """One file per rank of FSDP2 or of a tensor-parallel group, and the same state in one file:
    two ranks of DeepSpeed, and one, have the bits of the file and take the same step."""
    place = state.folder / name / case.key
    assert {f.name for f in (place / "ranks").glob("master*")} == {
        f"master-0000{rank}-of-00002.safetensors" for rank in (1, 2)
    }
    expected = dict.fromkeys(
        ("same state", "same as the file", "same norms", "same step", "moved"), True
    )
    expected["versions"] = [3, 3]
    assert state.found[f"from {name}"][case.key] == expected
    assert script.from_both(SINGLE, case, place) == expected


def test_a_checkpoint_of_step_0_has_no_moments(tmp_path: Path) -> None:
    script.make(script.Case("", 2), SINGLE, "torch").save(tmp_path / "start")
    engine = script.make(script.Case("", 2), SINGLE)
    script.take_steps(engine, 1)
    engine.load(tmp_path / "start")
    assert engine.version == 0 and engine.optimizer.state.num_updates is None


def test_parameters_with_different_numbers_of_updates_are_refused(tmp_path: Path) -> None:
    """torch leaves a parameter that got no gradient out of a step; nothing is loaded then."""
    theirs = script.make(script.Case("", 2), SINGLE, "torch")
    theirs.forward_backward(script.ragged(), script.nll)
    theirs.optimizer.masters[3].grad = None
    theirs.optim_step()
    theirs.save(tmp_path / "torch")
    ours = script.make(script.Case("", 2), SINGLE)
    before = script.saved(ours, tmp_path / "before", SINGLE)
    with pytest.raises(ValueError, match=r"different numbers of updates \(0 to 1\).*kind=torch"):
        ours.load(tmp_path / "torch")
    assert script.same(script.saved(ours, tmp_path / "after", SINGLE), before)


@two_processes
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_with_zero_init_no_rank_ever_holds_the_full_model(dtype: str, state: Reports) -> None:
    """Entries of weights that are unsharded at the same time, counted at every new weight and every
    gathering while the model is created and read: at most the largest module. Masters equal the
    file's values, unrounded."""
    found, own = state.found[f"zero init {dtype}"], state.case(f"zero init {dtype}")
    total = sum(p.numel() for p in load_causal_lm(ModelConfig(scratch=LOADED)).parameters())
    assert found["total"] == total
    assert 0 < found["most"] < 0.1 * total
    assert found["held"] <= 0.51 * total, "half of it, and padding"
    file = load_file(state.folder / "model" / "model.safetensors")
    for name, tensor in file.items():
        assert torch.equal(own[f"master {name}"], tensor), name
    case = script.Case(
        "", 3, model=ModelConfig(scratch=LOADED), micro=3, precision=PrecisionConfig(dtype=dtype)
    )
    theirs = script.make(case, SINGLE, "torch")
    bound = OUTPUTS if dtype == "fp32" else 5e-2
    torch.testing.assert_close(
        own["logprobs"], theirs.logprobs(script.ragged()), atol=bound, rtol=0
    )
    expected = script.take_steps(theirs, 2)
    assert found["norms"] == pytest.approx(expected, rel=1e-5 if dtype == "fp32" else 0.01)


def test_tensors_written_one_by_one_are_read_by_safetensors(tmp_path: Path) -> None:
    tensors = {"a.b": torch.randn(3, 5), "c": torch.tensor(2.5), "d": torch.randn(0, 4)}
    infos = [TensorInfo(name, tuple(t.shape), torch.float32) for name, t in tensors.items()]
    write_tensors(tmp_path / "x.safetensors", infos, tensors.values())
    assert script.same(load_file(tmp_path / "x.safetensors"), tensors)


def test_a_failed_write_is_reported(tmp_path: Path) -> None:
    engine = script.make(script.Case("", 2), SINGLE)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        engine.save(tmp_path / "file" / "policy")


# ---- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.16.0", "0.16.4", "0.16.7"])
def test_versions_that_keep_gathered_weights_are_refused_with_the_reason(version: str) -> None:
    told = r"does not release gathered weights .* 6726, reverted by 7258"
    with pytest.raises(DeepSpeedError, match=told):
        check_version(version)


@pytest.mark.parametrize("version", ["0.15.4", "0.16.8", "0.19.7"])
def test_older_versions_are_refused(version: str) -> None:
    with pytest.raises(DeepSpeedError, match=r"does not check .* install 0\.19\.8 or newer"):
        check_version(version)


def test_the_guard_reads_the_installed_version(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    check_version("0.20.0")
    monkeypatch.setattr(deepspeed, "__version__", "0.16.5")
    with pytest.raises(DeepSpeedError, match=r"DeepSpeed 0\.16\.5"):
        script.make(script.Case("", 2), SINGLE)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(DeepSpeedError, match=r"pip install 'burnish\[deepspeed\]'"):
        script.make(script.Case("", 2), SINGLE)


def test_no_extension_is_compiled_and_deepspeed_is_restored() -> None:
    script.make(script.Case("", 1), SINGLE)
    module = sys.modules["deepspeed.comm.torch"]
    assert sys.modules["deepspeed.comm.comm"].cdb.shm_comm_op is None  # type: ignore[attr-defined]
    assert module.build_shm_op.__module__ == "deepspeed.comm.torch"  # type: ignore[attr-defined]


def test_a_rank_count_different_from_the_process_group_is_refused() -> None:
    script.make(script.Case("", 1), SINGLE)

    class Two(RankGroup):
        def __init__(self) -> None:
            super().__init__()
            self.size = 2

    with pytest.raises(
        DeepSpeedError, match=r"this engine has 2 ranks but torch\.distributed has 1"
    ):
        script.make(script.Case("", 1), Two())


@pytest.mark.parametrize(
    ("stage", "precision", "told"),
    [
        (0, {"dtype": "fp16"}, "ignores hysteresis and the minimum"),
        (0, {"dtype": "bf16"}, "accumulates gradients only in bf16"),
        (2, {"dtype": "fp16", "fp16": {"min_loss_scale": 0.5}}, "only whole numbers"),
    ],
)
def test_formats_that_a_stage_does_not_support_are_refused(
    stage: int, precision: dict[str, Any], told: str
) -> None:
    case = script.Case("", stage, precision=PrecisionConfig(**precision))
    with pytest.raises(DeepSpeedError, match=told):
        script.make(case, SINGLE)


def test_an_engine_on_a_cpu_pins_nothing() -> None:
    engine = script.make(script.Case("", 2, engine={"adam_offload": True}), SINGLE)
    offload = engine.engine.config["zero_optimization"]["offload_optimizer"]
    assert engine.device.type == "cpu" and offload == {"device": "cpu", "pin_memory": False}


def test_an_engine_may_be_given_by_name_only() -> None:
    recipe = {
        "job": "sft",
        "model": {"scratch": {}},
        "data": {"sources": ["x.jsonl"]},
        "train": {"train_batch_size": 4, "engine": "deepspeed"},
    }
    config = load_config(recipe, ["train.engine.zero_stage=3"])
    assert config.train.engine.model_dump()["zero_stage"] == 3


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({"zero_stage": 0, "adam_offload": True}, "adam_offload offloads shards"),
        ({"param_offload": True}, "param_offload applies to shards"),
        ({"zero_stage": 1, "zero_init": True}, "zero_init applies to shards"),
        ({"zero_hpz_partition_size": 8}, "zero_hpz_partition_size=8 adds a second shard"),
        ({"zero_stage": 4}, "zero_stage"),
        ({"zero_stage": 0, "precision": "fp16"}, "ignores hysteresis and the minimum"),
    ],
)
def test_contradictory_recipes_are_refused(engine: dict[str, Any], told: str) -> None:
    engine = dict(engine)
    recipe = {
        "job": "sft",
        "model": {"scratch": {}},
        "data": {"sources": ["x.jsonl"]},
        "precision": {"dtype": engine.pop("precision", "fp32")},
        "train": {"train_batch_size": 4, "engine": {"kind": "deepspeed", **engine}},
    }
    with pytest.raises(ConfigError, match=told):
        load_config(recipe)
