"""Select data rows from scored groups (job generate).

The modes are all responses, the best response, pairs of best and worst, and all responses with
their reward stated in the prompt. Pure functions. Every dropped row is counted.

A row's ``prompt`` is the model's input. Rows with ``prompt`` and ``response`` are therefore valid
SFT data. Rows with ``prompt``, ``chosen``, ``rejected`` and ``margin`` are valid data for
``preference`` and ``rm``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish.config.generate import BestOfN, BestWorstPairs, GenerateMode
from burnish.data.decoding import response_text
from burnish.data.episode_rows import STATUS, TURNS, conversation_columns, token_columns
from burnish.data.prompts.generation import Content, GenerationPrompt, with_reward
from burnish.transcript import Episode
from burnish.types import Group, Sample, all_equal, least_score

DataRow = dict[str, Any]

DROPS: Mapping[str, str] = {
    "prompts_overlong": "prompts longer than data.prompt_max_len (data.overlong=drop)",
    "prompts_reward_failed": "prompts on which a reward failed (on_reward_failure.then=drop_group) "
    "or that lost their episodes (failures, or first messages longer than episodes.max_tokens)",
    "samples_failed": "episodes that failed, of prompts with others that did not",
    "samples_truncated": "responses truncated at a token limit (mode.keep_truncated)",
    "prompts_truncated": "prompts with too few complete responses",
    "prompts_below_min_reward": "prompts whose best response is below mode.min_reward",
    "prompts_equal_rewards": "prompts whose responses all have the same reward",
    "prompts_same_text": "prompts whose best and worst response are the same text",
    "prompts_below_min_margin": "prompts whose two rewards differ by less than mode.min_margin",
}
"""Reason of a drop -> description. ``prompts_...`` count prompts, each at most once;
``samples_...`` count responses."""


@dataclass(frozen=True)
class Selection:
    """Selected rows, with counts of dropped items and sums over the rows."""

    rows: tuple[DataRow, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Counts above 0, by the names in DROPS."""
    sums: Mapping[str, float] = field(default_factory=dict)
    """Sums over the rows, by the names that the mode gives them."""


def select(  # house: ok the options of the rows
    mode: GenerateMode,
    groups: Sequence[Group],
    generation_prompts: Mapping[str, GenerationPrompt],
    *,
    template: str = "",
    with_tokens: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    as_text: bool = False,
) -> Selection:
    """Return the rows selected from ``groups``, in order.

    ``generation_prompts`` is indexed by prompt id. ``template`` states the reward (mode
    conditioned). With ``tokenizer``, a response's text is decoded as a continuation of its prompt;
    decoded alone (``Sample.text``) it can lack its first space. ``as_text``: write the messages,
    prompts and tools of episodes as JSON text, because columns of the output have one type.

    Example: one prompt, rewards 0, 1, 1, 0.5: ``all`` gives 4 rows, ``best_of_n`` the second
    response, ``pairs`` the second over the first with margin 1.
    """
    writer = _Writer(generation_prompts, template, with_tokens, tokenizer, as_text)
    rows: list[DataRow] = []
    dropped: Counter[str] = Counter()
    for group in groups:
        samples = group.samples
        if not mode.keep_truncated:
            samples = tuple(s for s in samples if s.finish_reason == "stop" and not s.is_cut)
            dropped["samples_truncated"] += len(group.samples) - len(samples)
        selected = _SELECT[mode.kind](mode, samples, writer)
        if isinstance(selected, str):
            dropped[selected] += 1
        else:
            rows += selected
    sums = {name: sum(row[column] for row in rows) for name, column in mode.sums.items()}
    return Selection(tuple(rows), {k: n for k, n in dropped.items() if n}, sums)


def best(samples: Sequence[Sample], *, min_reward: float | None = None) -> Sample | str:
    """Return the first sample with the highest reward, or the reason why there is none (a name in
    DROPS)."""
    if not samples:
        return "prompts_truncated"
    highest = max(samples, key=lambda s: s.reward)
    if min_reward is not None and highest.reward < least_score(min_reward):
        return "prompts_below_min_reward"
    return highest


def best_and_worst(
    samples: Sequence[Sample], *, min_margin: float = 0.0
) -> tuple[Sample, Sample] | str:
    """Return the first samples with the highest and the lowest reward.

    If there is no pair, return the reason (a name in DROPS).
    """
    if len(samples) < 2:
        return "prompts_truncated"
    high, low = max(samples, key=lambda s: s.reward), min(samples, key=lambda s: s.reward)
    margin = high.reward - low.reward
    if all_equal((high.reward, low.reward)):
        return "prompts_equal_rewards"
    if high.text == low.text:
        return "prompts_same_text"
    if margin < least_score(min_margin):
        return "prompts_below_min_margin"
    return high, low


@dataclass(frozen=True)
class _Writer:
    """Converts samples to rows. Columns copied from the data come last."""

    generation_prompts: Mapping[str, GenerationPrompt]
    template: str
    with_tokens: bool
    tokenizer: PreTrainedTokenizerBase | None
    as_text: bool

    def response(self, sample: Sample) -> list[DataRow]:
        """Return the row of one response, or the rows of one episode."""
        if sample.episode is not None:
            return list(self._episode(sample, sample.episode))
        return [self._row(sample, self.generation_prompts[sample.prompt_id].content)]

    def _episode(self, sample: Sample, episode: Episode) -> Iterator[DataRow]:
        """Yield a row for each token row of an episode."""
        prompt = self.generation_prompts[sample.prompt_id]
        common = _of_the_data(prompt) | {
            "prompt_id": sample.prompt_id,
            "sample": int(sample.sample_id.rpartition("/")[2]),
            **self._columns({"prompt": prompt.content}),
            STATUS: episode.status,
            TURNS: len(episode.turns),
        }
        if sample.reward_parts:
            common |= {"reward": sample.reward, "rewards": dict(sample.reward_parts)}
        for token_row in sample.rows:
            conversation = conversation_columns(episode, token_row)
            row = common | self._columns(conversation)
            if self.with_tokens and self.tokenizer is not None:
                row |= token_columns(episode, token_row, conversation, self.tokenizer)
            yield row

    def _columns(self, columns: DataRow) -> DataRow:
        if not self.as_text:
            return columns
        return {k: json.dumps(v) if isinstance(v, list) else v for k, v in columns.items()}

    def reward_conditioned(self, sample: Sample) -> DataRow:
        """Return the row of one response, with its reward stated in the prompt."""
        prompt = self.generation_prompts[sample.prompt_id].unconditioned
        return self._row(sample, with_reward(prompt, self.template, sample.reward), tokens=False)

    def pair(self, chosen: Sample, rejected: Sample) -> DataRow:
        """Return the row of a chosen and a rejected response."""
        generation_prompt = self.generation_prompts[chosen.prompt_id]
        row: DataRow = {
            "prompt_id": chosen.prompt_id,
            "prompt": generation_prompt.content,
            "chosen": self._text(chosen),
            "rejected": self._text(rejected),
            "margin": chosen.reward - rejected.reward,
        }
        for side, sample in (("chosen", chosen), ("rejected", rejected)):
            row[f"{side}_reward"] = sample.reward
            row[f"{side}_rewards"] = dict(sample.reward_parts)
            row[f"{side}_finish_reason"] = sample.finish_reason
        if self.with_tokens:
            row["prompt_tokens"] = list(chosen.prompt_ids)
            row["chosen_tokens"] = list(chosen.response_ids)
            row["rejected_tokens"] = list(rejected.response_ids)
        return row | _of_the_data(generation_prompt)

    def _text(self, sample: Sample) -> str:
        if self.tokenizer is None:
            return sample.text
        return response_text(self.tokenizer, sample.prompt_ids, sample.response_ids)

    def _row(self, sample: Sample, prompt: Content, *, tokens: bool = True) -> DataRow:
        """``tokens``: True if the sample's prompt tokens encode ``prompt``."""
        row: DataRow = {
            "prompt_id": sample.prompt_id,
            "sample": int(sample.sample_id.rpartition("/")[2]),
            "prompt": prompt,
            "response": self._text(sample),
            "finish_reason": sample.finish_reason,
        }
        if sample.reward_parts:
            row |= {"reward": sample.reward, "rewards": dict(sample.reward_parts)}
        if self.with_tokens:
            row |= {"prompt_tokens": list(sample.prompt_ids)} if tokens else {}
            row["response_tokens"] = list(sample.response_ids)
        return row | _of_the_data(self.generation_prompts[sample.prompt_id])


def _of_the_data(generation_prompt: GenerationPrompt) -> DataRow:
    label = {"label": generation_prompt.label} if generation_prompt.has_label else {}
    return label | dict(generation_prompt.columns)


def _of_best(mode: BestOfN, samples: Sequence[Sample], writer: _Writer) -> list[DataRow] | str:
    sample = best(samples, min_reward=mode.min_reward)
    return sample if isinstance(sample, str) else writer.response(sample)


def _of_pair(
    mode: BestWorstPairs, samples: Sequence[Sample], writer: _Writer
) -> list[DataRow] | str:
    pair = best_and_worst(samples, min_margin=mode.min_margin)
    return pair if isinstance(pair, str) else [writer.pair(*pair)]


_SELECT: Mapping[str, Callable[[Any, Sequence[Sample], _Writer], list[DataRow] | str]] = {
    "all": lambda _, samples, writer: [row for s in samples for row in writer.response(s)],
    "best_of_n": _of_best,
    "pairs": _of_pair,
    "conditioned": lambda _, samples, writer: [writer.reward_conditioned(s) for s in samples],
}
"""Kind of a mode -> (mode, samples of a prompt, writer) -> its rows, or the reason why there are
none (a name in DROPS)."""
