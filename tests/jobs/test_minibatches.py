"""How a rollout is cut into optimizer steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from burnish.config import RLConfig, load_config
from burnish.jobs.rl import minibatches
from burnish.types import Batch, rows_to_batch


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


def test_one_update_takes_the_whole_rollout_in_its_order(
    batch: Batch, config: Callable[..., RLConfig]
) -> None:
    (only,) = minibatches(batch, config(16), step=1)
    assert _rows(only) == list(range(16))


def test_several_updates_take_every_row_once_per_epoch_and_keep_groups_together(
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
