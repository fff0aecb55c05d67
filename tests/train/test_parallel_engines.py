"""Ranks that compute the same rows together (sequence and tensor parallelism) compute what the
plain engine computes on one: processes over loopback, started once for each number of ranks."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.optimization import Adafactor

from burnish.distributed.process_group import SINGLE

SCRIPT = Path(__file__).with_name("parallel_ranks.py")
RunTogether = Callable[..., list[int]]
_SPEC = importlib.util.spec_from_file_location("parallel_ranks", SCRIPT)
assert _SPEC is not None and _SPEC.loader is not None
parallel: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["parallel_ranks"] = parallel  # its dataclasses look their module up
_SPEC.loader.exec_module(parallel)

slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(900)
STEPS = 5e-6
"""A few Adam steps of 1e-3 with eps 1e-6. Gradients differ by some 1e-9 (sums in another order), so
an entry that is that small itself may take a step that is off by 1e-9 / 1e-6 x 1e-3 = 1e-6."""
OUTPUTS = 3e-6
"""Log-probs of size 4 in fp32: a few ulps."""
NAMES = list(parallel.ENGINES[2])


@dataclass(frozen=True)
class Reports:
    """Reports of all ranks."""

    folder: Path
    found: list[dict[str, Any]]
    tensors: list[dict[str, Tensor]]

    def same(self, engine: str, name: str) -> Any:
        """A report that is equal on all ranks."""
        first = self.found[0][engine][name]
        assert all(found[engine][name] == first for found in self.found)
        return first


@pytest.fixture(scope="module")
def start(run_together: RunTogether) -> Callable[[Path, int], Reports]:
    """Run the script on every rank and return the reports."""

    def run(folder: Path, size: int) -> Reports:
        parallel.prepare(folder)
        arguments = [[str(folder), str(rank), str(size)] for rank in range(size)]
        run_together(SCRIPT, arguments, folder, timeout_s=900)
        texts = [(folder / f"rank{rank}.json").read_text(encoding="utf-8") for rank in range(size)]
        tensors = [load_file(folder / f"rank{rank}.safetensors") for rank in range(size)]
        return Reports(folder, [json.loads(text) for text in texts], tensors)

    return run


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, start: Callable[[Path, int], Reports]) -> Reports:
    return start(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(
    tmp_path_factory: pytest.TempPathFactory, start: Callable[[Path, int], Reports]
) -> Reports:
    return start(tmp_path_factory.mktemp("four"), 4)


ALREADY: dict[str, Any] = {}


def alone(case: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Results of the plain engine, computed once for all engines that are compared with it."""
    plain = replace(case, engine={})
    if plain.key not in ALREADY:
        ALREADY[plain.key] = parallel.cases.run_case(plain, SINGLE)
    found: tuple[dict[str, Tensor], dict[str, float]] = ALREADY[plain.key]
    return found


def assert_as_alone(case: Any, reports: Reports) -> None:
    """Weights after two steps, outputs before them and stats are those of the plain engine."""
    expected, said = alone(case)
    names = {n.removeprefix(f"{case.key}|") for n in reports.tensors[0] if f"{case.key}|" in n}
    assert names == expected.keys(), "all weights, under the same names"
    for name, tensor in expected.items():
        first, *others = (found[f"{case.key}|{name}"] for found in reports.tensors)
        assert all(torch.equal(first, other) for other in others), f"{case.key}: {name}"
        error = float((first - tensor).abs().max())
        bound = OUTPUTS if name == "outputs" else STEPS
        assert error <= bound, f"{case.key}: {name} is off by {error:.2e}"
    for found in reports.found:  # norms and sums of about 40 terms of size 1, in another order
        assert found["cases"][case.key] == pytest.approx(said, rel=2e-5, abs=2e-5), case.key


@slow
@pytest.mark.parametrize("engine", NAMES)
def test_steps_of_a_model_parallel_group_of_two_are_those_of_one(engine: str, two: Reports) -> None:
    """Losses and layouts, rows for one micro-batch only, a token budget, checkpointing, fewer
    key/value heads than ranks, adapters."""
    for case in parallel.cases_of(2, engine):
        assert_as_alone(case, two)


@slow
@pytest.mark.parametrize("engine", parallel.ENGINES[4])
def test_steps_of_four_ranks_are_those_of_one(engine: str, four: Reports) -> None:
    """A team of four, and two teams of two with rows of their own; rows of which some rank has
    none, stretches that are all padding."""
    for case in parallel.cases_of(4, engine):
        assert_as_alone(case, four)


@slow
@pytest.mark.parametrize("size", [2, 4])
def test_attention_over_ranks_is_attention(size: int, two: Reports, four: Reports) -> None:
    """Outputs and gradients summed over 11 tokens x heads x 8 entries of size 1, with evenly
    divided heads, with fewer key/value heads than ranks, and with key/value heads that ranks do not
    divide."""
    for found in (two if size == 2 else four).found:
        assert len(found["attention"]) == 16
        for case, error in found["attention"].items():
            assert error <= 1000 * 1e-6, case  # some ulps each


@slow
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_adafactor_on_parts_of_weights_is_that_of_transformers(
    parts: int, scale: bool, four: Reports
) -> None:
    """Four ranks that split rows (FSDP2), rows or columns in groups of ``parts`` (tensor parallel),
    or both, from equal gradients. The threshold of 0.5 clips every update. Weights of size 1 and
    updates of 1e-2: some ulps of 1, from sums of up to 72 squares in another order."""
    inputs = parallel.cases.adafactor_inputs()
    weights = {name: whole[0].clone() for name, whole in inputs.items()}
    matrices = [w for w in weights.values() if w.ndim > 1]
    vectors = [w for w in weights.values() if w.ndim == 1]
    theirs = Adafactor(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}],
        lr=1e-2,
        clip_threshold=0.5,
        scale_parameter=scale,
        relative_step=False,
    )
    for step in range(1, 4):
        for name, weight in weights.items():
            grad = inputs[name][step]
            weight.grad = grad if grad.any() else None
        theirs.step()
    for rank, found in enumerate(own["adafactor"][f"{parts} {scale}"] for own in four.found):
        for name, expected in weights.items():
            shape, dim = parallel.cases.ADAFACTOR_WEIGHTS[name]
            columns = theirs.state[expected].get("exp_avg_sq_col", torch.zeros(()))
            if dim is not None:
                expected = expected.chunk(parts, dim)[rank % parts]
                columns = columns.chunk(parts)[rank % parts] if dim == 1 else columns
            each = -(-len(expected) // (4 // parts))
            mine = slice(rank // parts * each, (rank // parts + 1) * each)
            weight = torch.tensor(found[name]["weight"]).reshape(expected[mine].shape)
            torch.testing.assert_close(weight, expected[mine], atol=5e-7, rtol=0, msg=name)
            if len(shape) == 2:  # on every rank of a column; of size 1
                torch.testing.assert_close(
                    torch.tensor(found[name]["columns"]), columns, atol=0, rtol=1e-6
                )


@slow
@pytest.mark.parametrize("engine", NAMES)
def test_entropies_and_their_gradient_are_those_of_one_rank(engine: str, two: Reports) -> None:
    found, alone = two.same(engine, "entropies"), parallel.entropies(SINGLE, {})
    assert found["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    assert found["sums"] == pytest.approx(alone["sums"], rel=1e-5)


@slow
@pytest.mark.parametrize("engine", NAMES)
def test_weights_are_mixed_into_every_part(engine: str, two: Reports) -> None:
    assert two.same(engine, "mixed") < 1e-7, "weights below 1 in fp32, halved exactly"


@slow
@pytest.mark.parametrize("engine", NAMES)
def test_a_run_that_must_stop_stops_on_all_ranks_with_one_message(
    engine: str, two: Reports
) -> None:
    messages = two.same(engine, "stop")
    assert "First bad tensor: loss" in messages["loss"]
    assert "First bad tensor: weight: model.layers.1.mlp.up_proj.weight" in messages["weight"]


@slow
@pytest.mark.parametrize("engine", NAMES)
def test_the_trace_of_loss_scales_is_that_of_one_rank(engine: str, two: Reports) -> None:
    """From 2^21 down until the gradient fits, and up again; skips among them."""
    found, alone = two.same(engine, "overflow"), parallel.overflow(SINGLE, {})
    assert found["trace"] == alone["trace"] and any(skipped for _, skipped in found["trace"])
    assert found["weights"].keys() == alone["weights"].keys()


@slow
@pytest.mark.parametrize("engine", NAMES)
def test_bf16_trains(engine: str, two: Reports) -> None:
    """Rounding of weights and activations to 8 bits, on log-probs of size 4, after 4 steps."""
    found, alone = two.same(engine, "bf16"), parallel.bf16(SINGLE, {})
    assert found == pytest.approx(alone, abs=0.1)


def assert_goes_on(reports: Reports, engine: str, name: str) -> None:
    """n -> n, 1 -> n and n -> 1 have the norms of a run that was never interrupted."""
    found, case = reports.same(engine, "resumed")[name], parallel.SAVED[name]
    assert found["again"] == found["norms"] and found["version"] == 5
    whole = parallel.cases.make_engine(SINGLE, case)
    expected = parallel.cases.steps_of(case, whole, 5)[3:]
    assert found["norms"] == pytest.approx(expected, rel=1e-5)
    assert found["from_alone"] == pytest.approx(expected, rel=1e-5)
    resumed = parallel.cases.make_engine(SINGLE, case)
    resumed.load(reports.folder / engine / f"saved {name}")
    assert resumed.version == 3
    assert parallel.cases.steps_of(case, resumed, 2) == pytest.approx(expected, rel=1e-5)
    assert found["announced"] == resumed.state_bytes


@slow
@pytest.mark.parametrize("engine", NAMES)
def test_a_run_resumes_on_the_same_ranks_and_on_one(engine: str, two: Reports) -> None:
    for name in parallel.SAVED_BY[engine]:
        assert_goes_on(two, engine, name)


@slow
@pytest.mark.parametrize("engine", parallel.ENGINES[4])
def test_a_run_of_four_ranks_resumes_on_four_and_on_one(engine: str, four: Reports) -> None:
    for name in parallel.SAVED_BY[engine]:
        assert_goes_on(four, engine, name)


@slow
@pytest.mark.parametrize("kind", parallel.KINDS)
@pytest.mark.parametrize("engine", NAMES)
def test_models_with_biases_and_norms_of_heads_train_as_on_one_rank(
    engine: str, kind: str, two: Reports
) -> None:
    expected = parallel.from_folder(SINGLE, {}, two.folder)[kind]
    for found in (found[engine]["folders"][kind] for found in two.found):
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=OUTPUTS)
        assert found["sums"].keys() == expected["sums"].keys()
        for name, sums in expected["sums"].items():  # of up to 1696 entries of size 0.1
            assert found["sums"][name] == pytest.approx(sums, rel=1e-5, abs=1e-4), name


@slow
def test_a_tensor_parallel_rank_has_its_shard_of_the_layers(two: Reports) -> None:
    """qwen3, untied: of 2 x 53 x 32 entries outside of the layers and 2 x (2 x 32 x 32 + 2 x 32 x
    16 + 3 x 32 x 48) = 15360 in matrices inside, a rank has half of the latter; norms are 208."""
    matrices, ends, norms = 15360, 3392, 2 * (2 * 32 + 2 * 8) + 32
    expected = (matrices / 2 + ends + norms) / (matrices + ends + norms)
    for found in two.found:
        assert found["tp2"]["folders"]["qwen3"]["own"] == pytest.approx(expected)


@slow
@pytest.mark.parametrize("engine", [n for n in NAMES if n.startswith("tp")])
def test_a_rank_that_cannot_write_fails_the_save_on_all(engine: str, two: Reports) -> None:
    for found in two.found:
        told, exists = found[engine]["failed"]
        assert "no space left" in told and exists == "False"


@slow
def test_communication_between_ranks_is_as_documented(two: Reports) -> None:
    """70 tokens, 2 layers, width 32, 4 heads and 2 key/value heads of 8, forward and backward.
    Tokens spread: 2 x 2 x 35 x (4 + 2 + 2 + 4) x 8 = 13440, of which half stays. Layers cut: 2 sums
    forward and 2 backward, 2 x 4 x 70 x 32 = 17920."""
    for name in NAMES:
        expected = {"exchanged": 13440, "summed": 0}
        if name.startswith("tp"):
            expected = {"exchanged": 0, "summed": 17920}
        assert two.same(name, "traffic") == expected, name
