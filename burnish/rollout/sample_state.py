"""Samples as plain arrays and lists, for checkpoints of asynchronous runs and recorded rollouts.

The per-token data of all rows are concatenated, as in ``types.Batch``, so that a file has few
arrays however many samples it has. Every value survives exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from typing import Any

import numpy as np

from burnish.compact import BoolRuns, FloatArray, IntArray, IntLists, IntRuns, concatenated
from burnish.transcript import Episode, Turn, plain
from burnish.types import Sample, TokenRow, one_turn


def samples_to_plain(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return samples as a mapping that ``checkpoint.state.save_state`` can write.

    Bytes per response token: 4 (token) + 4 (log-prob; 8 if one is not an fp32 number) + 1 (mask) +
    4 (version), 4 more (turn) for episodes of several turns, and 4 + 4 per id if the ids that top-k
    and top-p kept are recorded.
    """
    rows = [row for sample in samples for row in sample.rows]
    logprobs = [row.sampler_logprobs for row in rows]
    exact = all(np.asarray(FloatArray(part)).dtype == np.float32 for part in logprobs)
    return {
        "rows_per_sample": _array([1 + len(s.earlier_rows) for s in samples], np.int32),
        "prompt_lens": _array([len(row.prompt_ids) for row in rows], np.int32),
        "response_lens": _array([len(row.response_ids) for row in rows], np.int32),
        "prompt_ids": concatenated([row.prompt_ids for row in rows], np.int32),
        "response_ids": concatenated([row.response_ids for row in rows], np.int32),
        "logprobs": concatenated(logprobs, np.float32 if exact else np.float64),
        "action_mask": concatenated([row.action_mask for row in rows], np.bool_),
        "versions": concatenated([row.versions for row in rows], np.int32),
        "turns": concatenated([row.turns for row in rows], np.int32)
        if any(sample.turns or sample.earlier_rows for sample in samples)
        else None,
        **_kept_to_plain(rows),
        "samples": plain(
            [
                {
                    "sample_id": s.sample_id,
                    "prompt_id": s.prompt_id,
                    "group_id": s.group_id,
                    "text": s.text,
                    "finish_reason": s.finish_reason,
                    "reward": s.reward,
                    "reward_parts": s.reward_parts,
                    "turn_rewards": s.turn_rewards,
                    "has_turns": bool(s.turns),
                    "episode": None if s.episode is None else episode_to_plain(s.episode),
                }
                for s in samples
            ]
        ),
    }


def samples_from_plain(state: Mapping[str, Any], *, vocab_size: int | None = None) -> list[Sample]:
    """Return the samples of :func:`samples_to_plain`.

    Raises ValueError, LookupError, TypeError or AttributeError if ``state`` is not one of its
    results, or contains a token id that is negative or not below ``vocab_size`` (None: unknown).
    """
    _check_ids(state, vocab_size)
    rows = _rows(state)
    samples: list[Sample] = []
    for count, fields in zip(state["rows_per_sample"].tolist(), state["samples"], strict=True):
        mine = list(islice(rows, count))
        if not mine or len(mine) != count:
            raise ValueError(f"sample {len(samples)} has {len(mine)} of {count} rows")
        last = mine[-1]
        values = {k: v for k, v in fields.items() if k not in ("has_turns", "episode")}
        episode = fields["episode"]
        samples.append(
            Sample(
                **values,
                prompt_ids=last.prompt_ids,
                response_ids=last.response_ids,
                sampler_logprobs=last.sampler_logprobs,
                action_mask=last.action_mask,
                versions=last.versions,
                turns=last.turns if fields["has_turns"] else (),
                kept_ids=last.kept_ids,
                earlier_rows=tuple(mine[:-1]),
                episode=None if episode is None else episode_from_plain(episode),
            )
        )
    if next(rows, None) is not None:
        raise ValueError("there are more rows than its samples count")
    return samples


def _check_ids(state: Mapping[str, Any], vocab_size: int | None) -> None:
    """Raise ValueError with the row of the first token id that a model does not have."""
    for kind in ("prompt", "response"):
        ids = state[f"{kind}_ids"]
        wrong = ids < 0 if vocab_size is None else (ids < 0) | (ids >= vocab_size)
        if wrong.any():
            ends, place = np.cumsum(state[f"{kind}_lens"]), int(wrong.argmax())
            raise ValueError(
                f"row {int(np.searchsorted(ends, place, side='right'))}: the {kind} contains the "
                f"token id {int(ids[place])}, which the model does not have"
                + (f" (it has {vocab_size} token ids)" if vocab_size is not None else "")
            )
    mask_ids = state.get("kept_ids")
    if mask_ids is not None and ((mask_ids < 0) | (mask_ids >= (vocab_size or np.inf))).any():
        raise ValueError("the sampling mask (kept_ids) contains token ids that the model lacks")


_TURNS = ("turns", "untrained")


def episode_to_plain(episode: Episode) -> dict[str, Any]:
    """Return the record of an episode as a plain mapping."""
    lists = {name: tuple(map(dict, map(vars, vars(episode)[name]))) for name in _TURNS}
    return {**vars(episode), **lists}


def episode_from_plain(state: Mapping[str, Any]) -> Episode:
    """Return the record of :func:`episode_to_plain`."""
    # (Those of a version without untrained calls lack them.)
    lists = {name: tuple(Turn(**turn) for turn in state.get(name, ())) for name in _TURNS}
    return Episode(**{**state, **lists})


def _rows(state: Mapping[str, Any]) -> Iterator[TokenRow]:
    lens = state["response_lens"]
    prompts = map(IntArray, _split(state["prompt_ids"], state["prompt_lens"]))
    ids = map(IntArray, _split(state["response_ids"], lens))
    logprobs = map(FloatArray, _split(state["logprobs"], lens))
    masks = [BoolRuns(mask) for mask in _split(state["action_mask"], lens)]
    versions = map(IntRuns, _split(state["versions"], lens))
    turns: Iterable[IntRuns] = map(one_turn, masks)
    if state["turns"] is not None:
        turns = map(IntRuns, _split(state["turns"], lens))
    kept_ids: Iterable[IntLists] = repeat(IntLists(), len(masks))
    if state.get("kept_counts") is not None:  # (recorded by a version that has the field)
        counts = _split(state["kept_counts"], state["kept_lens"])
        flat = _split(state["kept_ids"], _array([int(each.sum()) for each in counts], np.int64))
        kept_ids = (IntLists.split(IntArray(i), n) for i, n in zip(flat, counts, strict=True))
    for fields in zip(prompts, ids, logprobs, masks, versions, turns, kept_ids, strict=True):
        yield TokenRow(*fields)


def _kept_to_plain(rows: Sequence[TokenRow]) -> dict[str, Any]:
    """Return the kept ids of all tokens, their number per token, and the tokens of each row that
    have them; empty if no row recorded any."""
    lists = [IntLists(row.kept_ids) for row in rows]
    if not any(lists):
        return {}
    return {
        "kept_ids": concatenated([ids.flat for ids in lists], np.int32),
        "kept_counts": np.concatenate([ids.counts for ids in lists]).astype(np.int32),
        "kept_lens": _array([len(ids) for ids in lists], np.int32),
    }


def _split(flat: np.ndarray[Any, Any], lens: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    if flat.ndim != 1 or lens.sum() != len(flat) or (lens < 0).any():
        raise ValueError(f"an array of shape {flat.shape} is not {len(lens)} rows of these lengths")
    return np.split(flat, np.cumsum(lens)[:-1])


def _array(values: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    return np.asarray(values, dtype=dtype)
