"""The preference loss as engines take it: values by hand, micro-batches, KTO's reference point, and
the cache of the reference's log-probs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from burnish.config.model import ModelConfig, ScratchConfig
from burnish.config.preference_losses import PreferenceLossConfig
from burnish.driver.errors import RunError
from burnish.jobs.preference import preference_objective, preparation
from burnish.models.load import load_causal_lm
from burnish.steps.reference_cache import CachedReference, compute, load, save
from burnish.train.base import Loss, Outputs
from burnish.types import Batch, Stats, rows_to_batch

LENGTHS = [2, 1, 3, 2]
LOSSES = ["dpo", "cdpo", "ipo", "simpo", "orpo", "kto", "bco_pair", "aot", "aot_unpaired"]


def make(kind: str, **options: Any) -> Loss:
    names = ("added", "nll_coef", "divergence", "alpha", "ld_alpha")
    more = {name: options.pop(name) for name in names if name in options}
    return preference_objective(loss_config(kind, **options), **more)


def loss_config(kind: str, **options: Any) -> PreferenceLossConfig:
    return TypeAdapter(PreferenceLossConfig).validate_python({"kind": kind, **options})


def pairs(**arrays: Any) -> Batch:
    """Two pairs; prompts of one token, responses of 2 and 1, 3 and 2 tokens."""
    rows = [[9 + i // 2] + [8] * n for i, n in enumerate(LENGTHS)]
    masks = [[False] + [True] * n for n in LENGTHS]
    batch = rows_to_batch(rows, masks, prompt_lens=[1] * 4, group_ids=[0, 0, 1, 1])
    return replace(batch, rows_per_unit=2, **arrays)


def per_token(*rows: list[float]) -> Tensor:
    return torch.tensor([x for row in rows for x in (0.0, *row)], dtype=torch.float64)


POLICY = per_token([-1, -1], [-4], [-1, -1, -1], [-2, -2])
REFERENCE = per_token([-2, -2], [-3], [-1, -1, -1], [-2, -2])


def test_dpo_of_two_pairs_by_hand() -> None:
    """Sums: -2 and -4 (reference -4, -3): h = 2 + 1 = 3; the second pair is the reference's: h = 0.
    beta 0.5: (ln(1 + e^-1.5) + ln 2) / 2 = (0.201413 + 0.693147) / 2 = 0.447280. Rewards of the
    chosen: 0.5 x 2 and 0: mean 0.5; of the rejected 0.5 x -1 and 0: -0.25. One of two is right."""
    batch = pairs(ref_logprobs=REFERENCE)
    loss, stats = make("dpo", beta=0.5)(Outputs(POLICY), batch)
    # 1e-6: six written decimals
    assert float(loss) == pytest.approx(0.447280, abs=1e-6)
    found = stats.floats()
    assert found["reward_chosen"] == pytest.approx(0.5)
    assert found["reward_rejected"] == pytest.approx(-0.25)
    assert found["reward_margin"] == pytest.approx(0.75)
    assert found["accuracy"] == 0.5
    assert found["logprob_chosen"] == pytest.approx(-2.5)
    assert found["nll"] == pytest.approx(1.0), "(2/2 + 3/3) / 2"


def test_the_nll_term_is_the_chosen_responses_mean_per_token() -> None:
    batch = pairs(ref_logprobs=REFERENCE)
    plain, with_nll = (
        make("dpo", nll_coef=coef)(Outputs(POLICY), batch)[0] for coef in (0.0, 0.25)
    )
    assert float(with_nll - plain) == pytest.approx(0.25)


def test_ipo_of_means_divides_by_the_length() -> None:
    """Means: -1 against -4 (reference -2, -3): h = 1 + 1 = 2 = 1 / (2 x 0.25): 0. Second pair:
    h = 0: 4. Mean 2. With sums h = 3: 1, and 4: 2.5."""
    batch = pairs(ref_logprobs=REFERENCE)
    by_mean = make("ipo", beta=0.25, mean_logprobs=True)(Outputs(POLICY), batch)[0]
    by_sum = make("ipo", beta=0.25)(Outputs(POLICY), batch)[0]
    assert (float(by_mean), float(by_sum)) == pytest.approx((2.0, 2.5))


def test_added_losses_divergences_and_desensitized_sums_by_hand() -> None:
    """Log-ratios (2, -1), (0, 0), beta 0.5. bco_pair: ln(1 + e^-1) + ln(1 + e^-0.5) = 0.787339, 2
    ln 2: mean 1.086817; 0.25 of it is added. forward_kl: 1 - e^-2 - 1 + e = 2.582947:
    ln(1 + e^-1.291473) = 0.242841, with ln 2 a mean of 0.467994. ld_alpha 0: the first tokens of
    the first pair, (-1 + 2) - (-4 + 3) = 2: ln(1 + e^-1) = 0.313262, mean 0.503204. Means per
    token: the same."""
    batch = pairs(ref_logprobs=REFERENCE)
    added = [(loss_config("bco_pair", beta=0.5), 0.25)]
    for options, expected in (
        ({"added": added}, 0.447280 + 0.25 * 1.086817),
        ({"divergence": "forward_kl"}, 0.467994),
        ({"ld_alpha": 0.0}, None),
        ({"mean_logprobs": True}, 0.503204),
    ):
        loss, stats = make("dpo", beta=0.5, **options)(Outputs(POLICY), batch)
        if expected is None:  # h = (-1 + 2) - (-4 + 3) = 2
            expected = 0.503204
            assert stats.floats()["logprob_chosen"] == pytest.approx(-2.5), "entire responses"
        # 1e-5: six written decimals of sums
        assert float(loss) == pytest.approx(expected, abs=1e-5), options


def test_losses_without_a_reference_need_none() -> None:
    """simpo, beta 1, gamma 0: d = -1 + 4 = 3 and -1 + 2 = 1: (0.048587 + 0.313262) / 2."""
    loss, _ = make("simpo", beta=1.0, gamma=0.0)(Outputs(POLICY), pairs())
    assert float(loss) == pytest.approx((0.048587 + 0.313262) / 2, abs=1e-6)
    assert math.isfinite(float(make("orpo")(Outputs(POLICY), pairs())[0]))


def test_kto_takes_single_responses_and_the_steps_reference_point() -> None:
    """Log-ratios 2, -1, 0, 0; z 1, beta 1. Liked: 1 - sigmoid(1) = 0.268941, 1 - sigmoid(-1) =
    0.731059. Disliked: 1 - sigmoid(2) = 0.119203, 1 - sigmoid(1) = 0.268941. Mean 0.347036."""
    labels = torch.tensor([True, False, True, False])
    batch = replace(pairs(ref_logprobs=REFERENCE), labels=labels, kl_estimate=1.0, rows_per_unit=1)
    loss, stats = make("kto", beta=1.0)(Outputs(POLICY), batch)
    assert float(loss) == pytest.approx(0.347036, abs=1e-6)
    found = stats.floats()
    assert found["reward_desirable"] == pytest.approx(1.0)
    assert found["reward_undesirable"] == pytest.approx(-0.5)
    assert found["kl_estimate"] == 1.0


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_and_stats_of_micro_batches_add_up_to_those_of_the_step(kind: str) -> None:
    labels = torch.tensor([True, False, True, False])
    batch = pairs(ref_logprobs=REFERENCE, labels=labels, kl_estimate=0.3, pair_terms=torch.ones(4))
    objective = make(kind)
    whole, whole_stats = objective(Outputs(POLICY), batch)
    total, stats = 0.0, Stats()
    for rows, tokens in (([0, 1], slice(0, 5)), ([2, 3], slice(5, 12))):
        loss, part = objective(Outputs(POLICY[tokens]), batch.select(rows))
        total, stats = total + float(loss), stats + part
    # 1e-12: float64 sums in another order
    assert total == pytest.approx(float(whole), rel=1e-12)
    assert stats.floats() == pytest.approx(whole_stats.floats(), rel=1e-9)


@pytest.mark.parametrize("kind", LOSSES[:-1])  # aot_unpaired has constant matches
def test_the_gradient_is_that_of_finite_differences(kind: str) -> None:
    labels = torch.tensor([True, False, True, False])
    batch = pairs(ref_logprobs=REFERENCE, labels=labels, kl_estimate=0.3, pair_terms=torch.ones(4))
    objective = make(kind, **({} if kind == "kto" else {"nll_coef": 0.2}))
    x = (POLICY + 0.01 * torch.arange(12)).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: objective(Outputs(p), batch)[0], (x,))


class Known:
    """A model whose log-prob of a token is its id times ``scale``."""

    def __init__(self, scale: float) -> None:
        self.scale, self.calls = scale, 0

    def logprobs(self, batch: Batch) -> Tensor:
        self.calls += 1
        return torch.where(batch.action_mask, batch.tokens * self.scale, 0.0).float()


def test_ktos_reference_point_is_measured_on_other_prompts_responses() -> None:
    """Responses sum to 16, 8, 24, 16 token ids. Rows 0 and 1 share a prompt and get rows 2's
    and 3's responses (24, 16), rows 2 and 3 get rows 0's and 1's: mean 16 x (-0.1 + 0.3) = 3.2."""
    config = TypeAdapter(PreferenceLossConfig).validate_python({"kind": "kto"})
    prepare = preparation(config, Known(-0.1), Known(-0.3), max_len=99)
    batch = prepare(replace(pairs(), rows_per_unit=1, labels=torch.tensor([True, False] * 2)))
    # 1e-5: fp32
    assert batch.kl_estimate == pytest.approx(3.2, abs=1e-5)
    assert batch.ref_logprobs is not None
    torch.testing.assert_close(batch.ref_logprobs, Known(-0.3).logprobs(batch))


def test_aot_is_prepared_with_the_ranks_of_the_entire_step_and_then_split() -> None:
    """Sums of the policy: 16 x -0.1 = -1.6, -0.8, -2.4, -1.6: gaps -0.8, -0.8. Of the reference, at
    -0.3: -4.8, -2.4, -7.2, -4.8: gaps -2.4, -2.4. Log-ratios: chosen 3.2, 4.8; rejected 1.6,
    3.2."""
    matched = {"aot": [-2.4] * 4, "aot_unpaired": [1.6, 3.2, 3.2, 4.8]}
    for kind, expected in matched.items():
        prepare = preparation(loss_config(kind), Known(-0.1), Known(-0.3), max_len=99)
        batch = prepare(pairs())
        assert batch.pair_terms is not None
        # 1e-5: fp32
        assert batch.pair_terms.tolist() == pytest.approx(expected, abs=1e-5)
        assert batch.select([2, 3]).pair_terms.tolist() == pytest.approx(expected[2:], abs=1e-5)  # type: ignore[union-attr]


def test_reference_logprobs_are_computed_once_and_found_in_any_order(tmp_path: Path) -> None:
    batch, reference = pairs(), Known(-0.5)
    cache = compute(reference, [batch, batch], rows_at_once=3)
    assert reference.calls == 2, "4 rows, 3 at a time; the second batch is known"
    turned = batch.select([3, 0, 2])
    torch.testing.assert_close(cache.logprobs(turned), Known(-0.5).logprobs(turned))
    path, model = tmp_path / "cache", ModelConfig(scratch=ScratchConfig(hidden_size=32))
    save(cache, path, model=model, dtype="fp32")
    again = load(path, [batch], model=model, dtype="fp32", begun=False)
    assert isinstance(again, CachedReference) and len(again) == 4
    torch.testing.assert_close(again.logprobs(batch), Known(-0.5).logprobs(batch))
    assert load(tmp_path / "nothing", [batch], model=model, dtype="fp32", begun=False) is None


def test_a_cache_of_another_reference_or_with_missing_rows_is_ignored_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batch, path = pairs(), tmp_path / "cache"
    model = ModelConfig(scratch=ScratchConfig(hidden_size=32))
    other = ModelConfig(scratch=ScratchConfig(hidden_size=32, seed=5))
    known = batch.select([0, 1, 2])
    save(compute(Known(-0.5), [known], rows_at_once=2), path, model=model, dtype="fp32")
    kept = load(path, [known], model=model, dtype="fp32", begun=False)
    assert kept is not None and not caplog.records
    for rows, of, dtype, why in (
        (known, other, "fp32", "was computed with another model"),
        (known, model, "bf16", "was computed in fp32 instead of bf16"),
        (batch, model, "fp32", "lacks 1 of 4 rows"),
    ):
        caplog.clear()
        assert load(path, [rows], model=of, dtype=dtype, begun=False) is None
        assert f"{path} {why}" in caplog.text and "computed again" in caplog.text


def test_a_cache_of_changed_weights_is_used_only_by_a_started_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model retrained into the same folder is another reference; a resumed run keeps its original
    one."""
    folder, path, rows = tmp_path / "model", tmp_path / "cache", [pairs()]
    for seed in (0, 1):
        scratch = ScratchConfig(hidden_size=32, seed=seed)
        load_causal_lm(ModelConfig(scratch=scratch)).save_pretrained(folder)
        model = ModelConfig(path=str(folder))
        if seed == 0:
            save(compute(Known(-0.5), rows, rows_at_once=4), path, model=model, dtype="fp32")
            assert load(path, rows, model=model, dtype="fp32", begun=False) is not None
    assert not caplog.records
    assert load(path, rows, model=model, dtype="fp32", begun=False) is None
    assert f"{path} was computed with weights that {folder} no longer contains" in caplog.text
    caplog.clear()
    assert load(path, rows, model=model, dtype="fp32", begun=True) is not None
    assert f"the weights in {folder} changed after the start of this run" in caplog.text


def test_a_cache_by_batch_knows_only_entire_batches_and_may_be_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, model = tmp_path / "cache", ModelConfig(scratch=ScratchConfig(hidden_size=32))
    options: dict[str, Any] = {"model": model, "dtype": "fp32", "begun": False}
    cache = compute(Known(-0.5), [pairs(), pairs()], rows_at_once=None)
    assert len(cache) == 4 and cache.count_missing([pairs().select([0, 1])]) == (2, 2)
    save(cache, path, model=model, dtype="fp32")
    assert load(path, [pairs()], **options, by_batch=True) is not None
    assert load(path, [pairs()], **options) is None
    assert "was computed for another loss" in caplog.text
    save(compute(Known(-0.5), [], rows_at_once=None), path, model=model, dtype="fp32")
    empty = load(path, [], **options, by_batch=True)
    assert empty is not None and len(empty) == 0


def test_a_row_missing_from_the_cache_is_an_error_with_a_fix() -> None:
    cache = compute(Known(-0.5), [pairs().select([0, 1])], rows_at_once=2)
    with pytest.raises(RunError, match=r"changed during the run\. Resume with --resume"):
        cache.logprobs(pairs())
