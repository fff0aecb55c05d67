"""A model sharded over ranks computes what the plain engine computes on one: processes over
loopback, started once for each number of ranks, and their reports."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from burnish.checkpoint.export import export
from burnish.checkpoint.manifest import write_manifest
from burnish.config import SFTConfig
from burnish.config.train_engines import TorchEngine
from burnish.distributed.process_group import SINGLE
from burnish.models.tensor_files import TensorFiles, tensor_sets
from burnish.train.engines import make_engine as engine_of
from burnish.train.torch.engine import TorchTrainEngine

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("fsdp_ranks.py")
RunTogether = Callable[..., list[int]]
_SPEC = importlib.util.spec_from_file_location("fsdp_ranks", SCRIPT)
assert _SPEC is not None and _SPEC.loader is not None
fsdp: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["fsdp_ranks"] = fsdp  # its dataclasses look their module up
_SPEC.loader.exec_module(fsdp)

STEPS = 5e-6
"""A few Adam steps of 1e-3 with eps 1e-6. Gradients differ by some 1e-9 (sums in another order), so
an entry that is that small itself may take a step that is off by 1e-9 / 1e-6 x 1e-3 = 1e-6."""
OUTPUTS = 3e-6
"""Log-probs of size 4 in fp32: a few ulps."""


@dataclass(frozen=True)
class Reports:
    """Reports of all ranks."""

    folder: Path
    found: list[dict[str, Any]]
    tensors: list[dict[str, Tensor]]

    def same(self, name: str) -> Any:
        """A report that is equal on all ranks."""
        assert all(found[name] == self.found[0][name] for found in self.found)
        return self.found[0][name]


@pytest.fixture(scope="module")
def start(run_together: RunTogether) -> Callable[[Path, int], Reports]:
    """Run the script on every rank and return the reports."""

    def run(folder: Path, size: int) -> Reports:
        fsdp.prepare(folder)
        run_together(SCRIPT, arguments(folder, size), folder, timeout_s=900)
        texts = [(folder / f"rank{rank}.json").read_text(encoding="utf-8") for rank in range(size)]
        tensors = [load_file(folder / f"rank{rank}.safetensors") for rank in range(size)]
        return Reports(folder, [json.loads(text) for text in texts], tensors)

    return run


def arguments(folder: Path, size: int, *more: str) -> list[list[str]]:
    return [[str(folder), str(rank), str(size), *more] for rank in range(size)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, start: Callable[[Path, int], Reports]) -> Reports:
    return start(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, start: Callable[[Path, int], Reports]) -> Reports:
    """One rank with a process group: FSDP2 over a single rank."""
    return start(tmp_path_factory.mktemp("one"), 1)


def assert_as_alone(case: Any, reports: Reports) -> None:
    """Weights after two steps, outputs before them and stats are those of the plain engine, which
    compiles nothing."""
    eager = replace(case, train={k: v for k, v in case.train.items() if k != "compile"})
    expected, said = fsdp.run_case(eager, SINGLE)
    names = {n.removeprefix(f"{case.key}|") for n in reports.tensors[0] if f"{case.key}|" in n}
    assert names == expected.keys(), "all weights, under the same names"
    for name, tensor in expected.items():
        for found in reports.tensors:
            assert torch.equal(
                found[f"{case.key}|{name}"], reports.tensors[0][f"{case.key}|{name}"]
            )
        error = float((reports.tensors[0][f"{case.key}|{name}"] - tensor).abs().max())
        bound = OUTPUTS if name == "outputs" else STEPS
        assert error <= bound, f"{case.key}: {name} is off by {error:.2e}"
    for found in reports.found:  # norms and sums of about 40 terms of size 1, in another order
        assert found["cases"][case.key] == pytest.approx(said, rel=2e-5, abs=2e-5), case.key


@pytest.mark.parametrize("layout", fsdp.two_ranks.accumulation.LAYOUTS)
@pytest.mark.parametrize("loss", fsdp.two_ranks.NAMES)
def test_steps_over_two_ranks_are_those_of_one(loss: str, layout: str, two: Reports) -> None:
    """One of the splits, ragged rows, and with rows for one rank only."""
    cases = [c for c in fsdp.CASES if c.loss == loss and c.train.get("layout", layout) == layout]
    assert len(cases) == 2
    for case in cases:
        assert_as_alone(case, two)


@pytest.mark.parametrize("case", fsdp.OPTIONS, ids=lambda c: f"{c.model} {c.train} {c.engine}")
def test_no_option_changes_the_numbers(case: Any, two: Reports) -> None:
    """Untied and tied output projections, adapters, checkpointing, when weights are freed and
    gradients summed, offloading, decay and clipping."""
    assert_as_alone(case, two)


def test_one_rank_with_a_process_group_is_one_rank(one: Reports) -> None:
    for case in [*fsdp.CASES[::4], *fsdp.OPTIONS[:4]]:
        assert_as_alone(case, one)


def test_without_a_process_group_the_plain_engine_is_made() -> None:
    engine = fsdp.make_engine(SINGLE, fsdp.Case())
    assert type(engine) is TorchTrainEngine and engine.spec.role.train.engine.sharding == "full"
    model = fsdp.load_causal_lm(fsdp.MODELS["tied"])
    assert type(engine_of(model, engine.spec)) is TorchTrainEngine


def test_two_ranks_hold_disjoint_halves(two: Reports) -> None:
    """Rows are cut in ceil(rows / 2): of 53 the first rank has 27. FSDP2 pads to that, so both
    hold 27."""
    first, second = (found["held"] for found in two.found)
    whole = first["whole"]
    assert first["own"] + second["own"] == whole
    for own in (first, second):
        assert own["sharded"] and own["own"] == own["masters"] == own["moments"]
        assert abs(own["own"] / whole - 0.5) < 0.01
        assert own["memory"] <= 4 * whole * 0.51, "gathered weights were freed"


def test_a_frozen_model_is_sharded_as_well(two: Reports) -> None:
    expected = fsdp.make_engine(SINGLE, fsdp.Case()).logprobs(fsdp.two_ranks.ragged()).tolist()
    for own in (found["held"]["frozen"] for found in two.found):
        assert own["same"] and own["logprobs"] == pytest.approx(expected, abs=OUTPUTS)
        assert abs(own["own"] / own["whole"] - 0.5) < 0.01
        start = dict(fsdp.make_engine(SINGLE, fsdp.Case()).weights())["model.embed_tokens.weight"]
        mixed, policy = torch.tensor(own["mixed"]), torch.tensor(own["policy"])
        # 1e-6: rounding of the weights, which are below 1, in another form of the same sum
        torch.testing.assert_close(mixed, 0.75 * start + 0.25 * policy, atol=1e-6, rtol=0)
        assert not torch.equal(mixed, start)


def test_half_formats_train_with_fp32_state(two: Reports) -> None:
    found = two.same("precisions")
    for name, fmt in (("bf16", "torch.bfloat16"), ("fp16", "torch.float16")):
        assert found[name]["formats"] == [fmt] and found[name]["state"] == ["torch.float32"]
        assert sum(found[name]["after"]) > sum(found[name]["before"]) + 1
        # rounding of weights and activations: 8 and 11 bits, on log-probs of size 4
        bound = 0.05 if name == "bf16" else 0.01
        assert found[name]["before"] == pytest.approx(found["fp32"]["before"], abs=bound)
        assert found[name]["after"] == pytest.approx(found["fp32"]["after"], abs=2 * bound)


@pytest.mark.parametrize("precision", fsdp.PRECISIONS)
def test_an_overflow_in_one_ranks_rows_skips_the_step_on_all(precision: str, two: Reports) -> None:
    """No weight changes, the count increases, and a dynamic scale is halved immediately (hysteresis
    1)."""
    for found in two.found:
        own = found["overflow"][precision]
        before, clean, skipped, after = own["hashes"]
        assert before != clean and clean == skipped and skipped != after
        assert own["skipped"] == [False, True, False] and own["skipped_total"] == [0, 1, 1]
        scales = [1024.0, 1024.0, 512.0, 512.0] if precision == "fp16" else [1.0] * 4
        assert own["scales"] == scales and own["version"] == 2
    first, second = (found["overflow"][precision]["norms"] for found in two.found)
    assert first == second


def test_the_trace_of_loss_scales_is_that_of_one_rank(two: Reports) -> None:
    """From 2^24 down until the gradient fits, and up again; skips among them."""
    found, alone = two.same("real_overflow"), fsdp.real_overflow(SINGLE)
    assert found == alone
    assert any(skipped for _, skipped in found["trace"]) and found["version"] > 3


def test_a_run_that_must_stop_stops_on_all_ranks_with_the_bad_tensor(two: Reports) -> None:
    """The last rank alone finds the bad loss; a bad weight is found in the rank's own rows."""
    messages = two.same("stop")
    assert "First bad tensor: loss" in messages["loss"]
    weight = "First bad tensor: weight: model.layers.1.mlp.up_proj.weight"
    assert weight in messages["weight"]


def test_a_gradient_that_overflows_at_the_floor_is_named(two: Reports) -> None:
    found = two.same("gradient_overflow")
    assert found["unmoved"] and "loss scale is at its minimum" in found["message"]
    assert "First bad tensor: " in found["message"]


def test_passes_without_backward_leave_no_list_of_modules(two: Reports) -> None:
    """Also in versions of torch whose list is not reset by a method."""
    for report in two.found:
        reset, older = report["forward_order"]["reset"], report["forward_order"]["older"]
        assert older == reset and reset["lengths"] == [0, 0, 0]


def test_ranks_with_different_loads_make_as_many_passes(two: Reports) -> None:
    """Rank 0 has one long row and four empty passes; two calls and a step."""
    alone = fsdp.uneven(SINGLE)
    for found in two.found:
        own = found["uneven"]
        assert own["passes"] == 10 and own["rows"] == [21, 21]
        assert own["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        assert own["logprobs"] == pytest.approx(alone["logprobs"], abs=OUTPUTS)


def test_a_lora_policy_that_was_its_own_reference_first_trains_on(two: Reports) -> None:
    found, alone = two.same("frozen_base"), fsdp.frozen_base(SINGLE)
    for name in ("base", "norms", "again", "tuned"):
        # norms of three steps, log-probs of size 4
        assert found[name] == pytest.approx(alone[name], abs=1e-5), name
    assert found["base"] == found["again"] != found["tuned"]


def test_nf4_weights_are_sharded_without_a_change_of_a_bit(two: Reports) -> None:
    assert two.same("nf4_weights") == {"fp32": True, "bf16": True}


def test_blocks_of_8_bit_moments_are_sharded_without_a_change_of_a_bit(two: Reports) -> None:
    """With equal gradients two ranks have the bits of one, also in the checkpoint, and after the
    checkpoint of one. Rows that are not multiples of a block are refused on both."""
    found, alone = two.same("eight_bit"), fsdp.eight_bit(two.folder, SINGLE)
    assert found["saved"] == alone["saved"] and found["bytes"] == alone["bytes"]
    assert any("exp_avg_absmax" in name for name in found["saved"])
    assert found["runs"][0] == found["runs"][1] == alone["runs"][0] == alone["runs"][1]
    assert not alone["refused"] and "multiples of 256 entries" in found["refused"]


@pytest.mark.parametrize("key", ["policy fp32", "policy bf16", "critic fp32", "critic bf16"])
def test_a_rank_reads_its_own_rows_of_a_folder_only(key: str, two: Reports) -> None:
    """The model came empty (but for a new value head), and both ranks together read each element
    once."""
    first, second = (found["from_folder"][key] for found in two.found)
    new_head = 32 if key.startswith("critic") else 0
    assert first["empty"] == first["whole"] - new_head
    assert first["read"] + second["read"] == first["empty"]
    assert abs(first["read"] / first["empty"] - 0.5) < 0.01
    alone = fsdp.from_folder(two.folder, SINGLE)[key]
    bound = OUTPUTS if "fp32" in key else 0.05  # bf16: other micro-batches, other roundings
    assert first["outputs"] == pytest.approx(alone["outputs"], abs=bound)
    assert first["norms"] == pytest.approx(alone["norms"], rel=1e-5 if "fp32" in key else 0.02)
    assert first["end_tokens"] == alone["end_tokens"]


def test_adapters_on_a_base_read_in_rows_do_not_depend_on_the_ranks(
    one: Reports, two: Reports
) -> None:
    for key in ("policy fp32", "critic fp32"):
        own, alone = (r.found[0]["lora_from_folder"][key] for r in (two, one))
        assert 0 < own["empty"] < own["whole"], "the adapters are no part of the folder"
        assert own["outputs"] == pytest.approx(alone["outputs"], abs=OUTPUTS)
        assert own["norms"] == pytest.approx(alone["norms"], rel=1e-5)


@pytest.mark.parametrize("name", fsdp.SAVED)
def test_a_run_resumes_exactly_and_on_another_number_of_ranks(name: str, two: Reports) -> None:
    """2 -> 2 has the same bits. 1 -> 2, 2 -> 1 and 2 (from 1) -> 1 have the norms of a run that
    was never interrupted."""
    found, case = two.same("resumed")[name], fsdp.SAVED[name]
    assert found["same"] and found["version"] == 3
    whole = fsdp.make_engine(SINGLE, case)
    expected = fsdp.steps_of(case, whole, 7)
    assert found["norms"] == pytest.approx(expected[3:5], rel=1e-5)
    assert found["from_alone"] == pytest.approx(expected[3:5], rel=1e-5)
    resumed = fsdp.make_engine(SINGLE, case)
    resumed.load(two.folder / f"saved {name}")
    assert fsdp.steps_of(case, resumed, 2) == pytest.approx(expected[3:5], rel=1e-5)
    resumed.load(two.folder / f"again {name}")  # 1 -> 2 -> 1
    assert resumed.version == 5
    assert fsdp.steps_of(case, resumed, 2) == pytest.approx(expected[5:], rel=1e-5)


@pytest.mark.parametrize("name", fsdp.SAVED)
def test_a_save_has_no_pickle_each_row_once_and_the_announced_size(name: str, two: Reports) -> None:
    folder = two.folder / f"saved {name}"
    files = [f for f in folder.rglob("*") if f.is_file()]
    assert {f.suffix for f in files} <= {".safetensors", ".json", ".jinja"}
    assert len(list(folder.glob("master-*-of-00002.safetensors"))) == 2
    written = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    announced = two.same("resumed")[name]["announced"]
    # ten headers with some 200 bytes for each of about 60 parameters
    assert announced <= written <= announced + 10 * 200 * 60
    alone = tensor_sets(two.folder / f"alone {name}")
    for kind, own in tensor_sets(folder).items():
        assert {n: own.shape(n) for n in own} == {n: alone[kind].shape(n) for n in alone[kind]}
        for tensor in own:
            error = (own.read(tensor) - alone[kind].read(tensor)).abs().max()
            assert float(error) <= STEPS, (kind, tensor)


@pytest.mark.parametrize("name", fsdp.SAVED)
def test_a_sharded_checkpoint_is_exported(name: str, two: Reports, tmp_path: Path) -> None:
    """The checkpoint of two ranks gives the HuggingFace folder that the weights are."""
    role = "critic" if name == "critic" else "policy"
    case = fsdp.SAVED[name]
    step = tmp_path / "step"
    step.mkdir()
    shutil.copytree(two.folder / f"again {name}", step / role)
    write_manifest(step, extra={})
    out = export(step, tmp_path / "out", model=role)
    engine = fsdp.make_engine(SINGLE, case)
    engine.load(two.folder / f"again {name}")
    auto: Any = AutoModelForSequenceClassification if role == "critic" else AutoModelForCausalLM
    found = dict(auto.from_pretrained(out).named_parameters())
    expected = dict(engine.weights())
    assert found.keys() == expected.keys()
    if name != "lora":  # (its base is made anew, and its adapters are merged by the export)
        assert all(torch.equal(found[n], expected[n]) for n in expected)
    for n in expected:
        torch.testing.assert_close(found[n], expected[n], atol=1e-7, rtol=0)  # 1 ulp below 1


def test_a_background_save_has_the_state_of_its_start(two: Reports) -> None:
    found = two.same("async")
    assert found["done"], "the next save waited for it"
    assert found["limit_s"] == 120, "what ranks wait for each other in it is limited as they are"
    assert found["version"] == 5 and found["same"], "resumed from it, two steps are the same bits"
    at_once, meanwhile = (tensor_sets(two.folder / n) for n in ("at once", "meanwhile"))
    for kind, files in at_once.items():
        assert all(torch.equal(files.read(n), meanwhile[kind].read(n)) for n in files)


def test_a_rank_that_cannot_write_fails_the_save_on_all(two: Reports) -> None:
    said = two.same("async")["failed"]
    assert "could not be written: rank 1: OSError: no space left" in said
    assert not (two.folder / "failed" / "engine.json").exists()
    with pytest.raises(ValueError, match="contains no policy"):
        fsdp.make_engine(SINGLE, fsdp.Case()).load(two.folder / "failed")


def test_a_run_killed_during_a_save_keeps_the_previous_checkpoint(
    tmp_path: Path, run_together: RunTogether
) -> None:
    killed = arguments(tmp_path, 2, "killed")
    codes = run_together(SCRIPT, killed, tmp_path, timeout_s=900, end_well=False)
    assert -9 in codes and 0 not in codes
    assert list(tmp_path.glob("killed*")) and list((tmp_path / "bad").glob("*.safetensors"))
    assert not (tmp_path / "bad" / "engine.json").exists()
    engine = fsdp.make_engine(SINGLE, fsdp.Case())
    with pytest.raises(ValueError, match="contains no policy"):
        engine.load(tmp_path / "bad")
    engine.load(tmp_path / "good")
    assert engine.version == 2


def test_an_incomplete_set_of_files_is_refused(two: Reports, tmp_path: Path) -> None:
    parts = sorted((two.folder / "saved tied").glob("master-*.safetensors"))
    for part in parts:
        (tmp_path / part.name).write_bytes(part.read_bytes())
    assert "model.norm.weight" in tensor_sets(tmp_path)["master"]
    with pytest.raises(ValueError, match="is incomplete: rows of"):
        TensorFiles(parts[:1])
    (tmp_path / parts[1].name).unlink()
    with pytest.raises(ValueError, match=r"has 1 files of master .*which are not one complete set"):
        tensor_sets(tmp_path)
    (tmp_path / "master.safetensors").write_bytes(parts[0].read_bytes())
    with pytest.raises(ValueError, match="has 2 files of master"):
        tensor_sets(tmp_path)


def test_any_rows_of_a_sharded_tensor_can_be_read(two: Reports) -> None:
    """53 rows of the embedding: 27 in the first file, 26 in the second."""
    files = tensor_sets(two.folder / "saved tied")["master"]
    name = "model.embed_tokens.weight"
    whole = files.read(name)
    assert whole.shape == files.shape(name) == (53, 32)
    for begin, end in ((0, 53), (0, 27), (27, 53), (26, 28), (5, 5), (53, 53), (52, 53)):
        assert torch.equal(files.read(name, (begin, end)), whole[begin:end])


def test_options_of_sharding_require_sharding() -> None:
    engine = TorchEngine(reduce_gradients="once", cpu_offload=True)
    assert [text.split()[0] for text in engine.rules()] == ["reduce_gradients", "cpu_offload"]
    assert not list(TorchEngine(sharding="full", cpu_offload=True).rules())
    with pytest.raises(ValueError, match="sharded gradients are accumulated in fp32"):
        SFTConfig.model_validate(
            {
                "model": {"scratch": {}},
                "data": {"sources": [{"path": "x.jsonl"}]},
                "precision": {"dtype": "bf16", "grad_accum_dtype": "bf16"},
                "train": {"train_batch_size": 8, "engine": {"sharding": "full"}},
            }
        )
