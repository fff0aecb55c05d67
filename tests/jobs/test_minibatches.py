"""How a rollout is cut into optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from burnish.config import RLConfig, load_config
from burnish.config.algorithm import AlgorithmConfig
from burnish.steps.rl import minibatches, without_truncated
from burnish.types import Batch, Group, Prompt, Sample, rows_to_batch


@pytest.fixture
def batch() -> Batch:
    """8 groups of 2 rows; row i holds token i and i % 3 + 1 action tokens."""
    rows = [[i] * (2 + i % 3) for i in range(16)]
    masks = [[False] + [True] * (1 + i % 3) for i in range(16)]
    groups = [i // 2 for i in range(16)]
    return rows_to_batch(rows, masks, prompt_lens=[1] * 16, group_ids=groups)


@pytest.fixture
def config() -> Callable[..., RLConfig]:
    def make(train_batch_size: int, *, epochs: int = 1, seed: int = 0) -> RLConfig:
        made = load_config(
            {
                "job": "rl",
                "seed": seed,
                "max_steps": 1,
                "model": {"scratch": {}},
                "data": {"sources": ["x.jsonl"]},
                "rollout": {"rollout_batch_size": 8, "n_samples_per_prompt": 2},
                "train": {
                    "train_batch_size": train_batch_size,
                    "epochs_per_rollout": epochs,
                    "lr": 1e-3,
                },
            }
        )
        assert isinstance(made, RLConfig)
        return made

    return make


def _rows(batch: Batch) -> list[int]:
    return batch.tokens[batch.offsets[:-1]].tolist()


def test_one_update_uses_all_rows_of_the_rollout_in_order(
    batch: Batch, config: Callable[..., RLConfig]
) -> None:
    (only,) = minibatches(batch, config(16), step=1)
    assert _rows(only) == list(range(16))


def test_several_updates_use_every_row_once_per_epoch_and_keep_groups_together(
    batch: Batch, config: Callable[..., RLConfig]
) -> None:
    parts = list(minibatches(batch, config(4, epochs=2), step=1))
    assert len(parts) == 8
    for epoch in (parts[:4], parts[4:]):
        assert sorted(row for part in epoch for row in _rows(part)) == list(range(16))
    for part in parts:
        rows = _rows(part)
        assert rows[0] + 1 == rows[1] and rows[2] + 1 == rows[3]
    assert [_rows(p) for p in parts[:4]] != [_rows(p) for p in parts[4:]]


def test_each_update_has_its_own_denominators(
    batch: Batch, config: Callable[..., RLConfig]
) -> None:
    for part in minibatches(batch, config(4), step=1):
        assert part.num_sequences == 4
        assert part.num_tokens == int(part.action_mask.sum())


def test_the_order_depends_on_seed_and_step_alone(
    batch: Batch, config: Callable[..., RLConfig]
) -> None:
    def order(seed: int, step: int) -> list[list[int]]:
        return [_rows(part) for part in minibatches(batch, config(4, seed=seed), step)]

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2)
    assert order(0, 1) != order(1, 1)


# ---- episodes: samples of one or more rows, and fewer samples than planned


def _episodes(samples_of_groups: list[list[int]]) -> Batch:
    """Groups of samples with so many rows each; a row holds the number of its sample."""
    samples = [(g, n) for g, group in enumerate(samples_of_groups) for n in group]
    rows = [(g, s) for s, (g, n) in enumerate(samples) for _ in range(n)]
    ids = torch.tensor([sample for _, sample in rows])
    made = rows_to_batch(
        [[sample, sample] for _, sample in rows],
        [[False, True]] * len(rows),
        prompt_lens=[1] * len(rows),
        group_ids=[group for group, _ in rows],
    )
    return replace(made, sample_ids=ids, sample_tokens=torch.bincount(ids)[ids])


def _samples(batch: Batch) -> list[int]:
    return list(dict.fromkeys(_rows(batch)))


def test_samples_of_several_rows_are_divided_like_single_rows(
    batch: Batch, config: Callable[..., RLConfig]
) -> None:
    """16 samples with 1 to 3 rows: the same samples in each step as of 16 rows."""
    episodes = _episodes([[1 + g % 3, 1 + g % 2] for g in range(8)])
    plan = config(4, epochs=2)
    wanted = list(minibatches(batch, plan, step=3))
    found = list(minibatches(episodes, plan, step=3))
    assert [_samples(part) for part in found] == [_rows(part) for part in wanted]
    for part in found:
        assert part.num_sequences == 4 and part.num_tokens == part.num_rows


def test_failed_members_leave_the_number_of_steps(config: Callable[..., RLConfig]) -> None:
    """13 of 16 samples in 7 groups: 4 steps that take every sample once and whole groups."""
    episodes = _episodes([[1, 2], [1], [3, 1], [1, 1], [2], [1, 1], [1, 1, 1]])
    for step in range(1, 20):
        parts = list(minibatches(episodes, config(4), step=step))
        assert len(parts) == 4
        assert sorted(s for part in parts for s in _samples(part)) == list(range(13))
        groups = [set(part.group_ids.tolist()) for part in parts]
        assert sum(map(len, groups)) == 7, "no group is in two steps"
        assert all(1 <= part.num_sequences <= 6 for part in parts)
        assert sum(part.num_rows for part in parts) == episodes.num_rows


def test_a_step_is_never_empty_while_there_are_samples(config: Callable[..., RLConfig]) -> None:
    """Fewer groups than steps: 5 samples of one group in 4 steps are 1 + 1 + 1 + 2. Fewer samples
    than steps: as many steps as samples."""
    sizes = [part.num_sequences for part in minibatches(_episodes([[1] * 5]), config(4), step=1)]
    assert sizes == [1, 1, 1, 2]
    sizes = [part.num_sequences for part in minibatches(_episodes([[1, 2, 1]]), config(4), step=1)]
    assert sizes == [1, 1, 1]


def test_a_single_step_keeps_the_order_of_an_incomplete_rollout(
    config: Callable[..., RLConfig],
) -> None:
    (only,) = minibatches(_episodes([[1, 2], [1]]), config(16), step=1)
    assert _rows(only) == [0, 1, 1, 2]


@pytest.mark.parametrize("cut", [{1, 6, 7}, set(range(16)), set()])
def test_samples_that_were_cut_off_leave_the_loss(batch: Batch, cut: set[int]) -> None:
    batch = replace(batch, advantages=torch.ones(batch.tokens.shape))
    groups = [
        Group(
            g,
            Prompt(id=str(g), token_ids=(0,), text="0"),
            tuple(_sample(i, cut_off=i in cut) for i in (2 * g, 2 * g + 1)),
        )
        for g in range(8)
    ]
    left_in = without_truncated(batch, groups, AlgorithmConfig())
    assert left_in is batch
    masked = without_truncated(batch, groups, AlgorithmConfig(mask_truncated=True))
    assert masked.advantages is not None
    assert _rows(masked) == [i for i in range(16) if i not in cut]
    assert bool(masked.advantages.all())


def test_without_samples_there_is_no_update(batch: Batch, config: Callable[..., RLConfig]) -> None:
    for size in (16, 4):
        assert not list(minibatches(batch.select([]), config(size, epochs=2), step=1))


def _sample(i: int, *, cut_off: bool) -> Sample:
    return Sample(
        sample_id=str(i),
        prompt_id=str(i // 2),
        group_id=i // 2,
        prompt_ids=(i,),
        response_ids=(i,),
        sampler_logprobs=(-1.0,),
        action_mask=(True,),
        versions=(0,),
        text="",
        finish_reason="length" if cut_off else "stop",
    )
