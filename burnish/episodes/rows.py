"""Training rows of an episode: exact ids, each sampled token in exactly one row.

A call whose prompt begins with all tokens of a row extends that row: the tokens between are
observations, which are masked. A call that extends no row (edited history, a compacted
conversation, a sub-agent) begins a row of its own, in which its entire prompt is masked.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

from burnish.compact import BoolRuns, FloatArray, IntArray, IntLists, IntRuns
from burnish.episodes.loop import EngineCall
from burnish.rollout.base import Completion
from burnish.types import TokenRow


@dataclass
class _Row:
    """A row under construction."""

    prompt_ids: IntArray
    ids: IntArray
    """All ids, those of the prompt included."""
    logprobs: FloatArray = FloatArray()
    mask: BoolRuns = BoolRuns()
    versions: IntRuns = IntRuns()
    turns: IntRuns = IntRuns()
    calls: list[tuple[int, Completion]] = field(default_factory=list)
    """Observed tokens before each call, and what was sampled."""

    def add(self, call: EngineCall, turn: int) -> None:
        """Append the observations of a call's prompt and its sampled tokens."""
        sampled, prompt = call.completion, IntArray(call.prompt_ids)
        gap, count = len(prompt) - len(self.ids), len(sampled.token_ids)
        version = sampled.spans[0].version if sampled.spans else 0
        self.ids = prompt + sampled.token_ids
        self.logprobs += FloatArray.repeat(0.0, gap) + sampled.logprobs
        self.mask += BoolRuns.of_runs([(False, gap), (True, count)])
        self.versions += IntRuns.repeat(version, gap) + sampled.versions
        self.turns += IntRuns.of_runs([(-1, gap), (turn, count)])
        self.calls.append((gap, sampled))

    def finished(self) -> TokenRow:
        return TokenRow(
            prompt_ids=self.prompt_ids,
            response_ids=self.ids[len(self.prompt_ids) :],
            sampler_logprobs=self.logprobs,
            action_mask=self.mask,
            versions=self.versions,
            turns=self.turns,
            kept_ids=self._kept_ids(),
        )

    def _kept_ids(self) -> IntLists:
        """Return the kept ids of each token, none of observations; empty if no call has any."""
        if not any(sampled.kept_ids for _, sampled in self.calls):
            return IntLists()
        flat, counts = IntArray(), array("i")
        for gap, sampled in self.calls:
            kept_ids = IntLists(sampled.kept_ids)
            flat += kept_ids.flat
            counts.extend(repeat(0, gap))
            counts.extend(kept_ids.counts if kept_ids else repeat(0, len(sampled.token_ids)))
        return IntLists.split(flat, counts) if flat else IntLists()


def episode_rows(calls: Sequence[EngineCall]) -> tuple[TokenRow, ...]:
    """Return the rows of an episode's calls, given in time order. Rows are ordered by their last
    call."""
    rows: list[_Row] = []
    for turn, call in enumerate(calls):
        prompt = call.prompt_ids
        fitting = [
            row for row in rows if len(row.ids) <= len(prompt) and prompt[: len(row.ids)] == row.ids
        ]
        if fitting:
            row = max(fitting, key=lambda row: len(row.ids))
            rows.remove(row)
        else:
            row = _Row(IntArray(prompt), IntArray(prompt))
        row.add(call, turn)
        rows.append(row)
    return tuple(row.finished() for row in rows)
