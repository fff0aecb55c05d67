"""Samples as plain arrays and lists, for checkpoints of asynchronous runs and recorded rollouts.

The per-token data of all rows are concatenated, as in ``types.Batch``, so that a file has few
arrays however many samples it has. Every value survives exactly.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from burnish.transcript import Episode, Turn
from burnish.types import Sample, TokenRow


def samples_to_plain(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return samples as a mapping that ``checkpoint.state.save_state`` can write.

    Bytes per response token: 4 (token) + 4 (log-prob; 8 if one is not an fp32 number) + 1 (mask) +
    4 (version), 4 more (turn) for episodes of several turns, and 4 + 4 per id if the ids that top-k
    and top-p kept are recorded.
    """
    rows = [row for sample in samples for row in sample.rows]
    return {
        "rows_per_sample": _array([1 + len(s.earlier_rows) for s in samples], np.int32),
        "prompt_lens": _array([len(row.prompt_ids) for row in rows], np.int32),
        "response_lens": _array([len(row.response_ids) for row in rows], np.int32),
        "prompt_ids": _flat((row.prompt_ids for row in rows), np.int32),
        "response_ids": _flat((row.response_ids for row in rows), np.int32),
        "logprobs": _exact(_flat((row.sampler_logprobs for row in rows), np.float64)),
        "action_mask": _flat((row.action_mask for row in rows), np.bool_),
        "versions": _flat((row.versions for row in rows), np.int32),
        "turns": _flat((row.turns for row in rows), np.int32)
        if any(sample.turns for sample in samples)
        else None,
        **_kept_to_plain(rows),
        "samples": [
            {
                "sample_id": s.sample_id,
                "prompt_id": s.prompt_id,
                "group_id": s.group_id,
                "text": s.text,
                "finish_reason": s.finish_reason,
                "reward": s.reward,
                "reward_parts": dict(s.reward_parts),
                "turn_rewards": s.turn_rewards,
                "has_turns": bool(s.turns),
                "episode": None if s.episode is None else episode_to_plain(s.episode),
            }
            for s in samples
        ],
    }


def samples_from_plain(plain: Mapping[str, Any]) -> list[Sample]:
    """Return the samples of :func:`samples_to_plain`."""
    rows = _rows(plain)
    samples = []
    for count, own in zip(plain["rows_per_sample"].tolist(), plain["samples"], strict=True):
        mine = [next(rows) for _ in range(count)]
        last = mine[-1]
        values = {k: v for k, v in own.items() if k not in ("has_turns", "episode")}
        found = own["episode"]
        samples.append(
            Sample(
                **values,
                prompt_ids=last.prompt_ids,
                response_ids=last.response_ids,
                sampler_logprobs=last.sampler_logprobs,
                action_mask=last.action_mask,
                versions=last.versions,
                turns=last.turns if own["has_turns"] else (),
                kept_ids=last.kept_ids,
                earlier_rows=tuple(mine[:-1]),
                episode=None if found is None else episode_from_plain(found),
            )
        )
    return samples


def episode_to_plain(episode: Episode) -> dict[str, Any]:
    """Return the record of an episode as a plain mapping."""
    return asdict(episode)


def episode_from_plain(plain: Mapping[str, Any]) -> Episode:
    """Return the record of :func:`episode_to_plain`."""
    return Episode(**{**plain, "turns": tuple(Turn(**turn) for turn in plain["turns"])})


def _rows(plain: Mapping[str, Any]) -> Iterator[TokenRow]:
    prompts = _split(plain["prompt_ids"], plain["prompt_lens"])
    lens = plain["response_lens"]
    ids, logprobs, masks, versions = (
        _split(plain[name], lens)
        for name in ("response_ids", "logprobs", "action_mask", "versions")
    )
    turns = [tuple(0 if action else -1 for action in mask) for mask in masks]
    if plain["turns"] is not None:
        turns = _split(plain["turns"], lens)
    kept: list[tuple[Any, ...]] = [()] * len(ids)
    if plain.get("kept_counts") is not None:  # (recorded by a version that has the field)
        parts = np.split(plain["kept_ids"], np.cumsum(plain["kept_counts"])[:-1])
        each = [array("i", part.tobytes()) if part.size else () for part in parts]
        ends = np.cumsum(plain["kept_lens"]).tolist()
        kept = [
            tuple(each[end - count : end])
            for end, count in zip(ends, plain["kept_lens"].tolist(), strict=True)
        ]
    for fields in zip(prompts, ids, logprobs, masks, versions, turns, kept, strict=True):
        yield TokenRow(*fields)


def _kept_to_plain(rows: Sequence[TokenRow]) -> dict[str, Any]:
    """Return the kept ids of all tokens, their number per token, and the tokens of each row that
    have them; empty if no row recorded any."""
    if not any(row.kept_ids for row in rows):
        return {}
    return {
        "kept_ids": np.concatenate([np.asarray(i, np.int32) for row in rows for i in row.kept_ids]),
        "kept_counts": _array([len(ids) for row in rows for ids in row.kept_ids], np.int32),
        "kept_lens": _array([len(row.kept_ids) for row in rows], np.int32),
    }


def _split(flat: np.ndarray[Any, Any], lens: np.ndarray[Any, Any]) -> list[tuple[Any, ...]]:
    return [tuple(part.tolist()) for part in np.split(flat, np.cumsum(lens)[:-1])]


def _array(values: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    return np.asarray(values, dtype=dtype)


def _flat(parts: Iterable[Sequence[Any]], dtype: Any) -> np.ndarray[Any, Any]:
    return np.fromiter((value for part in parts for value in part), dtype=dtype)


def _exact(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return fp64 numbers as fp32 if that changes none of them."""
    small = values.astype(np.float32)
    same = np.array_equal(small.astype(np.float64), values, equal_nan=True)
    return small if same else values
