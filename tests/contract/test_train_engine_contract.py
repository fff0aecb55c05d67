"""What every train engine must do, whatever it is made of and wherever it runs. A new engine adds
one line to ``pools.KINDS``.

Written against the protocol in ``train/base.py`` alone; the plain loop of transformers, or the
torch engine on one rank, is the oracle. A test has one engine at a time: several ranks make the
next one in the place of the last.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.config.model import Fp16Config, PrecisionConfig
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.rollout.base import Completion, Request, Sampling
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import LocalRolloutEngine
from burnish.train.base import Role, TrainEngine
from burnish.train.loss_scaler import DynamicLossScaler
from burnish.types import Batch, rows_to_batch

pools: Any = sys.modules["tests.contract.pools"]
Make = Callable[[Any], TrainEngine]
Refused = Callable[[Make, Any], bool]
Wanted, MODEL, nll, overflowing = pools.Wanted, pools.MODEL, pools.nll, pools.overflowing

# Adam divides by the root of the second moment, so fp32 sums in another order move a weight by up
# to some thousandths of a step of 1e-3; a wrong gradient moves it by whole steps.
WEIGHTS = 5e-6
FP16 = PrecisionConfig(dtype="fp16", fp16=Fp16Config(initial_scale_power=8, hysteresis=1))


def weights(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.weights()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def near(first: dict[str, Tensor], second: dict[str, Tensor], bound: float) -> None:
    assert first.keys() == second.keys()
    for name, tensor in second.items():
        torch.testing.assert_close(first[name], tensor, atol=bound, rtol=0)


def take_steps(engine: TrainEngine, batch: Batch, count: int) -> list[float]:
    """Gradient norms."""
    norms = []
    for _ in range(count):
        engine.forward_backward(batch, nll)
        norms.append(engine.optim_step().grad_norm)
    return norms


@pytest.fixture
def one(group_of_one: None) -> Make:
    """The oracle: torch on one rank, in this process."""
    return partial(pools.Here().make, pools.KINDS["torch"])


def test_weights_after_five_steps_equal_those_of_torch_on_one_rank(
    make: Make, one: Make, ragged_batch: Batch
) -> None:
    """And so are norms, rates and counts."""
    found = []
    for maker in (one, make):
        engine, said = maker(Wanted(micro=2, lr=1e-3)), []
        for _ in range(5):
            stats = engine.forward_backward(ragged_batch, nll)
            step = engine.optim_step()
            said.append((stats.floats()["tokens"], step.grad_norm, step.lr))
        found.append((weights(engine), said))
    near(found[1][0], found[0][0], WEIGHTS)
    for ours, theirs in zip(found[1][1], found[0][1], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)  # fp32 sums in another order


@pytest.mark.parametrize(("temperature", "kept"), [(1.0, 0), (0.5, 3)])
def test_logprobs_are_aligned_with_the_tokens_and_zero_elsewhere(
    temperature: float, kept: int, make: Make, ragged_batch: Batch
) -> None:
    """With ``kept``: over this many ids per token, the token and the ids after it. Entropies are
    over the full vocabulary."""
    own = (ragged_batch.tokens[:, None] + torch.arange(kept)).int() if kept else None
    engine, batch = make(Wanted(temperature=temperature)), replace(ragged_batch, kept_ids=own)
    ours, entropies = engine.logprobs(batch), engine.entropies(batch)
    model, ends = load_causal_lm(MODEL), ragged_batch.offsets.tolist()
    expected, of_states = torch.zeros(2, ragged_batch.tokens.numel())
    for begin, end in itertools.pairwise(ends):
        tokens = ragged_batch.tokens[begin:end]
        with torch.no_grad():
            logits = model(tokens[None]).logits[0] / temperature
        of_states[begin + 1 : end] = torch.distributions.Categorical(logits=logits[:-1]).entropy()
        if own is not None:
            dropped = torch.ones_like(logits, dtype=torch.bool)
            dropped[:-1].scatter_(-1, own[begin + 1 : end].long(), False)
            logits.masked_fill_(dropped, -torch.inf)
        log_p = logits.log_softmax(-1)
        expected[begin + 1 : end] = log_p[:-1].gather(-1, tokens[1:, None])[:, 0]
    expected = torch.where(ragged_batch.action_mask, expected, 0.0)
    assert ours.shape == expected.shape and ours.dtype == torch.float32 and not ours.requires_grad
    # log-probs of size 4 in fp32
    torch.testing.assert_close(ours.cpu(), expected, atol=5e-6, rtol=0)
    of_states = torch.where(ragged_batch.action_mask, of_states, 0.0)
    torch.testing.assert_close(entropies.cpu(), of_states, atol=5e-6, rtol=0)
    assert torch.equal(engine.base_logprobs(batch), ours), "no adapter"
    both = engine.logprobs_and_entropies(batch)
    # other kernels of log-probs alone
    torch.testing.assert_close(both, torch.stack([ours, entropies], 1), atol=5e-6, rtol=0)
    few = batch.select([1])  # fewer rows than ranks
    torch.testing.assert_close(
        engine.logprobs_and_entropies(few), both[ends[1] : ends[2]], atol=5e-6, rtol=0
    )


def test_outputs_of_forward_backward_equal_those_of_logprobs(
    make: Make, ragged_batch: Batch
) -> None:
    engine = make(Wanted())
    expected, offsets = engine.logprobs(ragged_batch).cpu(), ragged_batch.offsets.tolist()
    begins = [(b, ragged_batch.tokens[b:e].tolist()) for b, e in itertools.pairwise(offsets)]
    stats = engine.forward_backward(ragged_batch, partial(pools.watching, expected, begins))
    assert stats.floats()["gap"] <= 1e-6


@pytest.mark.parametrize("role", ["critic", "reward"])
def test_values_are_at_action_tokens_or_at_last_tokens(
    role: Role, make: Make, one: Make, ragged_batch: Batch
) -> None:
    """A new critic says 0 for every token, so it takes a step first."""

    def said(maker: Make) -> Tensor:
        engine = maker(Wanted(role))
        if role == "critic":
            engine.forward_backward(ragged_batch, pools.rising)
            engine.optim_step()
        return engine.values(ragged_batch).cpu()

    values = said(make)
    last = torch.zeros_like(ragged_batch.action_mask)
    last[ragged_batch.offsets[1:] - 1] = True
    where = ragged_batch.action_mask if role == "critic" else last
    assert bool((values[~where] == 0).all()) and bool((values[where] != 0).all())
    assert values.dtype == torch.float32 and not values.requires_grad
    torch.testing.assert_close(values, said(one), atol=3e-6, rtol=0)  # of size 1, fp32


@pytest.mark.parametrize("passes", [1, 4])
def test_a_step_does_not_depend_on_the_micro_batch_split(
    passes: int, make: Make, one: Make, kind: Any, ragged_batch: Batch
) -> None:
    """Eight rows in one micro-batch of each rank, and in four (at most one per row); in one call
    and in two."""
    whole = one(Wanted(lr=1e-3))
    stats = whole.forward_backward(ragged_batch, nll)
    assert stats.floats() == {"tokens": 39.0}
    norm, expected = whole.optim_step().grad_norm, weights(whole)
    micro = max(1, ragged_batch.num_rows // kind.ranks // passes)
    parts = make(Wanted(micro=micro, lr=1e-3))
    assert parts.forward_backward(ragged_batch.select([3, 1]), nll).floats() == {"tokens": 18.0}
    parts.forward_backward(ragged_batch.select([7, 0, 6, 2, 4, 5]), nll)
    # fp32 sums in another order
    assert parts.optim_step().grad_norm == pytest.approx(norm, rel=1e-5)
    near(weights(parts), expected, WEIGHTS)
    again = make(Wanted(micro=micro, lr=1e-3))
    assert again.forward_backward(ragged_batch, nll).floats() == {"tokens": 39.0}
    assert again.optim_step().grad_norm == pytest.approx(norm, rel=1e-5)
    near(weights(again), expected, WEIGHTS)


def test_a_step_lowers_the_loss_increments_the_version_and_clears_gradients(
    make: Make, ragged_batch: Batch
) -> None:
    engine = make(Wanted())
    assert engine.version == 0
    losses = []
    for step in range(1, 6):
        losses.append(-float(engine.logprobs(ragged_batch).sum()))
        engine.forward_backward(ragged_batch, nll)
        stats = engine.optim_step()
        assert engine.version == step and stats.lr == pytest.approx(1e-2) and not stats.skipped
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    assert engine.optim_step().grad_norm == 0, "the gradient was cleared"


def test_passes_before_the_step_change_no_state(make: Make, ragged_batch: Batch) -> None:
    engine = make(Wanted())
    before = weights(engine)
    first = engine.logprobs(ragged_batch)
    assert torch.equal(first, engine.logprobs(ragged_batch))
    engine.forward_backward(ragged_batch, nll)
    assert torch.equal(first, engine.logprobs(ragged_batch)), "nothing moves before the step"
    assert same(before, weights(engine)) and engine.version == 0


def test_a_non_finite_loss_skips_the_step(make: Make, ragged_batch: Batch) -> None:
    engine = make(Wanted())
    before = weights(engine)
    engine.forward_backward(ragged_batch, nll)
    engine.forward_backward(ragged_batch, pools.bad)
    assert engine.optim_step().skipped
    assert same(before, weights(engine)) and engine.version == 0
    engine.forward_backward(ragged_batch, nll)
    assert not engine.optim_step().skipped and engine.version == 1


def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(
    make: Make, refused: Refused, ragged_batch: Batch
) -> None:
    wanted = Wanted(precision=FP16, lr=1e-3)
    if refused(make, wanted):
        return
    engine, steps, states = make(wanted), [], []
    for loss in (nll, overflowing, nll):
        engine.forward_backward(ragged_batch, loss)
        steps.append(engine.optim_step())
        states.append(weights(engine))
    assert [s.skipped for s in steps] == [s.overflow for s in steps] == [False, True, False]
    assert [s.loss_scale for s in steps] == [256.0, 256.0, 128.0]
    assert [s.skipped_total for s in steps] == [0, 1, 1] and engine.version == 2
    assert same(states[0], states[1]) and not same(states[1], states[2])


def test_the_loss_scale_follows_the_scaler_of_burnish(
    make: Make, refused: Refused, ragged_batch: Batch
) -> None:
    options: dict[str, Any] = {"initial_scale_power": 10, "hysteresis": 2, "loss_scale_window": 3}
    wanted = Wanted(precision=PrecisionConfig(dtype="fp16", fp16=Fp16Config(**options)), lr=1e-4)
    if refused(make, wanted):
        return
    engine, scaler = make(wanted), DynamicLossScaler(**options)
    batch, found, expected = ragged_batch.select([0, 3, 4, 5]), [], []
    for overflow in map(int, "00011000011101000000010000"):
        engine.forward_backward(batch, overflowing if overflow else nll)
        step = engine.optim_step()
        assert step.skipped == bool(overflow) and step.scaled
        found.append(step.loss_scale)
        expected.append(scaler.scale)
        scaler.update(bool(overflow))
    assert found == expected and len(set(found)) > 3


def test_weights_have_the_names_and_shapes_of_transformers(make: Make) -> None:
    expected = {n: p.shape for n, p in load_causal_lm(MODEL).named_parameters()}
    assert {n: t.shape for n, t in make(Wanted()).weights()} == expected


def test_a_restored_engine_continues_bit_for_bit(
    make: Make, ragged_batch: Batch, tmp_path: Path
) -> None:
    first = make(Wanted())
    take_steps(first, ragged_batch, 3)
    first.save(tmp_path / "policy")
    saved = weights(first)
    norms = take_steps(first, ragged_batch, 2)
    end = weights(first)
    second = make(Wanted())
    take_steps(second, ragged_batch, 1)  # what it had before does not matter
    second.load(tmp_path / "policy")
    assert second.version == 3 and same(saved, weights(second))
    assert take_steps(second, ragged_batch, 2) == norms
    assert same(end, weights(second)) and second.version == 5


def test_moving_to_host_memory_between_calls_changes_no_number(
    make: Make, kind: Any, ragged_batch: Batch, tmp_path: Path
) -> None:
    """Before each pass, between the passes and the step, before a save and before a load."""

    def found(*, moves: bool) -> list[Any]:
        engine: Any = make(Wanted(offload=moves))

        def move() -> None:
            if moves:
                engine.offload()
            if moves and kind.place == "here":
                assert pools.held_bytes(engine) == 0

        folder, norms = tmp_path / f"{moves}" / "policy", []
        for _ in range(2):
            engine.forward_backward(ragged_batch, nll)
            move()
            norms.append(engine.optim_step().grad_norm)
            move()
        engine.save(folder)
        norms += take_steps(engine, ragged_batch, 1)
        move()
        logprobs = engine.logprobs(ragged_batch)
        move()
        engine.load(folder)
        move()
        return [norms, logprobs.tolist(), weights(engine)]

    stays, moved = found(moves=False), found(moves=True)
    assert stays[:2] == moved[:2] and same(stays[2], moved[2])


def test_a_run_continues_on_one_torch_rank_and_back(
    make: Make, one: Make, ragged_batch: Batch, tmp_path: Path
) -> None:
    """Two steps, one on one rank, one more: as four steps of torch on one rank."""
    whole = one(Wanted(lr=1e-3))
    norms = take_steps(whole, ragged_batch, 4)
    engine = make(Wanted(lr=1e-3))
    found = take_steps(engine, ragged_batch, 2)
    engine.save(tmp_path / "ranks")
    between = one(Wanted(lr=1e-3))
    between.load(tmp_path / "ranks")
    assert same(weights(between), weights(engine)), "nothing is lost on the way"
    found += take_steps(between, ragged_batch, 1)
    between.save(tmp_path / "one")
    engine = make(Wanted(lr=1e-3))
    engine.load(tmp_path / "one")
    assert same(weights(between), weights(engine)) and engine.version == 3
    found += take_steps(engine, ragged_batch, 1)
    assert found == pytest.approx(norms, rel=1e-5)  # fp32 sums in another order
    near(weights(engine), weights(whole), WEIGHTS)


def test_checkpoint_files_are_not_pickles_and_have_the_announced_size(
    make: Make, ragged_batch: Batch, tmp_path: Path
) -> None:
    engine = make(Wanted())
    take_steps(engine, ragged_batch, 1)
    engine.save(tmp_path / "policy")
    files = [f for f in (tmp_path / "policy").rglob("*") if f.is_file()]
    assert {f.suffix for f in files} <= {".safetensors", ".json", ".jinja"}
    written = sum(f.stat().st_size for f in files)
    assert engine.state_bytes <= written <= engine.state_bytes + 100_000, (
        "headers, config, tokenizer"
    )


def test_the_checkpoint_of_another_role_is_refused(make: Make, tmp_path: Path) -> None:
    make(Wanted("critic")).save(tmp_path / "critic")
    with pytest.raises(ValueError, match="critic"):
        make(Wanted()).load(tmp_path / "critic")


def test_a_rollout_engine_samples_the_same_from_its_weights_as_from_those_of_torch(
    make: Make, one: Make, ragged_batch: Batch
) -> None:
    """The same greedy tokens, and the trainer's log-probs of them are the sampler's."""
    tokens = []
    for maker in (one, make):
        engine = maker(Wanted())
        take_steps(engine, ragged_batch, 3)
        rollout = LocalRolloutEngine(load_causal_lm(MODEL), load_tokenizer(MODEL), LocalEngine())
        rollout.load_weights(engine.version, engine.weights())
        requests = [Request("a", (7, 8, 9)), Request("b", tuple(range(6, 20)))]
        done = sorted(rollout.generate(requests, Sampling(12, 0.0)), key=lambda c: c.request_id)
        assert [c.version for c in done] == [3, 3]
        tokens.append([c.token_ids for c in done])
    assert tokens[0] == tokens[1]
    prompts = {r.request_id: r.prompt_ids for r in requests}
    for prompt, c in ((prompts[c.request_id], c) for c in done):
        check_logprobs(engine, prompt, c)


def check_logprobs(engine: TrainEngine, prompt: tuple[int, ...], c: Completion) -> None:
    row = [*prompt, *c.token_ids]
    mask = [i >= len(prompt) for i in range(len(row))]
    ours = engine.logprobs(rows_to_batch([row, row], [mask, mask], prompt_lens=[len(prompt)] * 2))
    # fp32, log-probs of size 4 through a cache instead of one pass
    torch.testing.assert_close(
        torch.tensor(c.logprobs), ours[len(prompt) : len(row)].cpu(), atol=3e-5, rtol=0
    )
