"""Conversion of scored groups to a :class:`burnish.types.Batch`: a sample becomes one row, an
episode one or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.compact import IntLists, IntRuns, concatenated
from burnish.types import Batch, Group, Sample, TokenRow, flat_batch


def groups_to_batch(groups: Sequence[Group], ages: Mapping[int, int] | None = None) -> Batch:
    """Build one :class:`Batch` from scored groups, rows in group order, with sampler log-probs and
    rewards.

    ``ages`` maps versions of the policy (:attr:`Sample.versions`) to their ages in RL steps, for
    ``Batch.ages``. None: a synchronous run. The fields of episodes (``sample_ids``,
    ``sample_tokens``, ``turn_ids``, ``turn_rewards``) are set only if a sample has turns, several
    rows or turn rewards. Raises ValueError if turns and action masks contradict each other, or if
    ``ages`` lacks the version of an action token."""
    samples = [sample for group in groups for sample in group.samples]
    if not any(s.turns or s.earlier_rows or s.turn_rewards for s in samples):
        return _with_ages(_scored_rows(samples, samples), samples, ages)
    for sample in samples:
        _check_turns(sample)
    rows = [(i, row) for i, sample in enumerate(samples) for row in sample.rows]
    sample_ids = torch.tensor([i for i, _ in rows], dtype=torch.int64)
    counts = torch.tensor([sample.num_sampled_tokens for sample in samples])
    batch = _scored_rows([row for _, row in rows], [samples[i] for i, _ in rows])
    batch = _with_ages(batch, [row for _, row in rows], ages)
    turns = _after_prompts(
        [(row, row.turns) for _, row in rows], np.int64, name="turns", of_prompts=-1
    )
    batch = replace(
        batch,
        num_sequences=len(samples),
        sample_ids=sample_ids,
        sample_tokens=counts[sample_ids],
        turn_ids=torch.from_numpy(turns),
    )
    if not any(sample.turn_rewards for sample in samples):
        return batch
    return replace(batch, turn_rewards=_placed([s.turn_rewards for s in samples], batch))


def _scored_rows(rows: Sequence[TokenRow | Sample], samples: Sequence[Sample]) -> Batch:
    """Build a batch of rows, each with the group and the reward of its sample."""
    logprobs = _after_prompts(
        [(row, row.sampler_logprobs) for row in rows], np.float32, name="sampler_logprobs"
    )
    masks = [(row, row.action_mask) for row in rows]
    batch = flat_batch(
        concatenated([ids for row in rows for ids in (row.prompt_ids, row.response_ids)], np.int64),
        _after_prompts(masks, np.bool_, name="action_mask"),
        lengths=[len(row.prompt_ids) + len(row.response_ids) for row in rows],
        prompt_lens=[len(row.prompt_ids) for row in rows],
        group_ids=[sample.group_id for sample in samples],
    )
    return replace(
        batch,
        kept_ids=_kept_ids(rows, batch),
        sampler_logprobs=torch.from_numpy(logprobs),
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
    )


def _after_prompts(
    rows: Sequence[tuple[TokenRow | Sample, Sequence[Any]]],
    dtype: Any,
    *,
    name: str,
    of_prompts: int = 0,
) -> np.ndarray[Any, Any]:
    """Return [M]: for each (row, column) ``of_prompts`` at the prompt tokens of the row, then the
    column, which errors call ``name``.

    Raises ValueError if the column of a row does not have one entry per response token."""
    columns = [column for _, column in rows]
    lens = [(len(row.prompt_ids), len(row.response_ids)) for row, _ in rows]
    for i, ((_, length), column) in enumerate(zip(lens, columns, strict=True)):
        if len(column) != length:
            raise ValueError(
                f"row {i} has {length} response tokens and {len(column)} entries of {name}"
            )
    is_response = np.repeat(np.tile([False, True], len(rows)), np.ravel(lens).astype(np.int64))
    placed = np.full(len(is_response), of_prompts, dtype)
    placed[is_response] = concatenated(columns, dtype)
    return placed


def _kept_ids(rows: Sequence[TokenRow | Sample], batch: Batch) -> Tensor | None:
    """Return ``Batch.kept_ids`` of ``rows``; None if no row recorded them. Raises ValueError if an
    action token lacks them, although another one has them."""
    if not any(row.kept_ids for row in rows):
        return None
    kept_of_rows = []
    for row in rows:
        kept = IntLists(row.kept_ids)
        counts_of_row = kept.counts if kept else repeat(0, len(row.response_ids))
        of_prompt = repeat(0, len(row.prompt_ids))  # its tokens have none
        kept_of_rows.append(IntLists.split(kept.flat, chain(of_prompt, counts_of_row)))
    counts = torch.from_numpy(np.concatenate([lists.counts for lists in kept_of_rows]))
    if bool((batch.action_mask & (counts == 0)).any()):
        raise ValueError(
            "some action tokens have the ids that top-k and top-p kept and others do not, so their "
            "log-probs are of different distributions; sample all of them with "
            "rollout.sampling_mask, or none"
        )
    placed = torch.full((len(counts), int(counts.max())), -1, dtype=torch.int32)
    filled = torch.arange(placed.shape[1]) < counts[:, None]
    placed[filled] = torch.from_numpy(
        concatenated([lists.flat for lists in kept_of_rows], np.int32)
    )
    return placed


def _with_ages(
    batch: Batch, rows: Sequence[TokenRow | Sample], ages: Mapping[int, int] | None
) -> Batch:
    """Return the batch of ``rows`` with the age of each action token; unchanged without ``ages``.
    Raises ValueError for a version that is not in ``ages``."""
    if ages is None:
        return batch
    flat = torch.from_numpy(
        _after_prompts([(row, row.versions) for row in rows], np.int64, name="versions")
    )
    sampled_by = flat[batch.action_mask]
    lowest = int(sampled_by.min()) if sampled_by.numel() else 0
    versions = sorted({int(i) + lowest for i in torch.bincount(sampled_by - lowest).nonzero()})
    unknown = [version for version in versions if version not in ages]
    if unknown:
        raise ValueError(
            f"a token was sampled by policy version {unknown[0]}, but ages has only the versions "
            f"{sorted(ages)}; pass an age for every version of the groups"
        )
    table = torch.zeros(versions[-1] - lowest + 1 if versions else 1, dtype=torch.int64)
    for version in versions:
        table[version - lowest] = ages[version]
    placed = torch.zeros_like(batch.tokens)
    placed[batch.action_mask] = table[sampled_by - lowest]
    return replace(batch, ages=placed)


def _check_turns(sample: Sample) -> None:
    """Raise ValueError if the turns of an episode do not label its action tokens, each turn in one
    row."""
    name, seen = f"sample {sample.sample_id!r}", set[int]()
    if sample.earlier_rows and sample.response_ids and not sample.turns:
        raise ValueError(f"{name} has earlier rows and no turns; number the turns of its last row")
    for i, row in enumerate(sample.rows):
        if not np.array_equal(np.asarray(row.turns) >= 0, np.asarray(row.action_mask)):
            raise ValueError(
                f"row {i} of {name}: turns must have one entry per response token, at least 0 "
                "where action_mask is true and -1 elsewhere"
            )
        turns = {turn for turn, _ in IntRuns(row.turns).runs() if turn >= 0}
        if turns & seen:
            raise ValueError(
                f"{name} has turn {min(turns & seen)} in two rows, so its tokens would be trained "
                "twice; mask them in one of the rows"
            )
        seen |= turns
    lost = [turn for turn, reward in enumerate(sample.turn_rewards) if reward and turn not in seen]
    if lost:
        raise ValueError(
            f"{name} has a reward for turn {lost[0]} and no sampled token of that turn; add the "
            "reward to a turn with tokens, or to the total only"
        )


def _placed(turn_rewards: Sequence[Sequence[float]], batch: Batch) -> Tensor:
    """Return [M] fp32: the reward of each turn on its last action token. ``turn_rewards``: those of
    each sample of the batch."""
    assert batch.turn_ids is not None
    actions = batch.action_mask.nonzero()[:, 0]
    samples, turns = batch.token_samples[actions], batch.turn_ids[actions]
    width = max(map(len, turn_rewards))
    is_turn = turns < width
    place = samples[is_turn] * width + turns[is_turn]
    last = torch.full((len(turn_rewards) * width,), -1, dtype=torch.int64)
    last.scatter_reduce_(0, place, actions[is_turn], "amax")
    placed = torch.zeros(batch.tokens.numel())
    for sample, rewards in enumerate(turn_rewards):
        begin = sample * width
        positions = last[begin : begin + len(rewards)]
        placed[positions[positions >= 0]] = torch.tensor(rewards)[positions >= 0]
    return placed
