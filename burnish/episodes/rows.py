"""Training rows of an episode: exact ids, each sampled token in exactly one row.

A call whose prompt begins with all tokens of a row extends that row: the tokens between are
observations, which are masked. A call that extends no row (edited history, a compacted
conversation, a sub-agent) begins a row of its own, in which its entire prompt is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from burnish.episodes.play import Call
from burnish.types import TokenRow


@dataclass
class _Row:
    """A row under construction."""

    ids: list[int]
    prompt_len: int
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    kept_ids: list[Sequence[int]] = field(default_factory=list)

    def add(self, call: Call, turn: int) -> None:
        """Append the observations of a call's prompt and its sampled tokens."""
        observed = call.prompt_ids[len(self.ids) :]
        sampled = call.completion
        self.ids += [*observed, *sampled.token_ids]
        gap, count = len(observed), len(sampled.token_ids)
        version = sampled.spans[0].version if sampled.spans else 0
        self.logprobs += [*[0.0] * gap, *sampled.logprobs]
        self.mask += [*[False] * gap, *[True] * count]
        self.versions += [*[version] * gap, *sampled.versions]
        self.turns += [*[-1] * gap, *[turn] * count]
        self.kept_ids += [*[()] * gap, *(sampled.kept_ids or [()] * count)]

    def finished(self) -> TokenRow:
        """Return the row."""
        return TokenRow(
            prompt_ids=tuple(self.ids[: self.prompt_len]),
            response_ids=tuple(self.ids[self.prompt_len :]),
            sampler_logprobs=tuple(self.logprobs),
            action_mask=tuple(self.mask),
            versions=tuple(self.versions),
            turns=tuple(self.turns),
            kept_ids=tuple(self.kept_ids) if any(self.kept_ids) else (),
        )


def episode_rows(calls: Sequence[Call]) -> tuple[TokenRow, ...]:
    """Return the rows of an episode's calls, given in time order. Rows are ordered by their last
    call."""
    rows: list[_Row] = []
    for turn, call in enumerate(calls):
        fitting = [row for row in rows if _extends(call.prompt_ids, row.ids)]
        if fitting:
            row = max(fitting, key=lambda row: len(row.ids))
            rows.remove(row)
        else:
            row = _Row(list(call.prompt_ids), len(call.prompt_ids))
        row.add(call, turn)
        rows.append(row)
    return tuple(row.finished() for row in rows)


def _extends(prompt: tuple[int, ...], ids: list[int]) -> bool:
    return len(ids) <= len(prompt) and list(prompt[: len(ids)]) == ids
