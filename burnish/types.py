# house: ok the types that all modules share are read together
"""Data types of a run: Prompt -> Sample -> Group -> Batch, and Stats.

Read this file first; every other module consumes or produces these types. All are frozen: a stage
returns a new value (``dataclasses.replace``) instead of modifying its input.

Shapes: N rows (one row = one prompt with one response), M tokens in all rows together. A sample is
one row, or an *episode* of several turns, which may take several rows. Token arrays are *ragged*:
rows are concatenated in one flat array, and ``offsets`` contains the start of each row. Stored and
transferred data are never padded; padding and packing are choices of ``train/batching.py``.

Per-token data of prompts and samples are compact sequences (``compact.py``), which behave like
tuples. Constructors also take tuples, and convert them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.compact import BoolRuns, Compact, FloatArray, IntArray, IntLists, IntRuns, concatenated
from burnish.tensors import upload
from burnish.transcript import Episode, FinishReason

Ids = IntArray | tuple[int, ...]
"""Token ids."""
Logprobs = FloatArray | tuple[float, ...]
"""Log-prob of each token, in nats."""
Mask = BoolRuns | tuple[bool, ...]
"""A boolean for each token."""
Labels = IntRuns | tuple[int, ...]
"""A number for each token, equal for many consecutive tokens."""
KeptIds = IntLists | tuple[Sequence[int], ...]
"""Ids that top-k and top-p kept for each token."""

ROUNDING = 1e-9
"""Tolerance of equal weighted sums of rewards, which may differ in their last bits."""


def all_equal(scores: Sequence[float]) -> bool:
    """Return whether all scores are equal, up to :data:`ROUNDING`."""
    return max(scores) - min(scores) <= ROUNDING


def least_score(threshold: float) -> float:
    """Return the smallest score that reaches ``threshold``, up to :data:`ROUNDING`. 0 reaches no
    positive one."""
    return threshold - (min(ROUNDING, threshold / 2) if threshold > 0 else ROUNDING)


def pack(record: object, **columns: type[Compact[Any]]) -> None:
    """Convert fields of a new frozen dataclass to compact sequences of the given types."""
    values = vars(record)
    for name, kind in columns.items():
        if type(values[name]) is not kind:
            values[name] = kind(values[name])


_COLUMNS: dict[str, type[Compact[Any]]] = {
    "prompt_ids": IntArray,
    "response_ids": IntArray,
    "sampler_logprobs": FloatArray,
    "action_mask": BoolRuns,
    "versions": IntRuns,
    "turns": IntRuns,
    "kept_ids": IntLists,
}
"""Per-token fields of rows and samples."""


def one_turn(action_mask: Mask) -> IntRuns:
    """Return turn 0 for action tokens and -1 for the others."""
    return IntRuns.of_runs((0 if on else -1, count) for on, count in BoolRuns(action_mask).runs())


@dataclass(frozen=True)
class Prompt:
    """One prompt to respond to.

    Example: ``Prompt(id="train:17@0", token_ids=(5, 9, 2), text="1+1=", label="2",
    source="train")``.
    """

    id: str
    """Unique within a run and stable across resumes: ``source:row@epoch``."""
    token_ids: Ids
    """Exact input tokens of the model. Never recomputed from ``text``."""
    text: str
    """The same prompt as text, for rewards and logs."""
    label: Any = None
    """Reference answer (or any other value the reward needs), unchanged from the data row."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the data row, for rewards and environments."""
    source: str = ""
    """Name of the row's data source."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """Conversation that ``text`` was rendered from. None: the prompt is plain text."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """Tools that the chat template rendered with ``messages``."""

    def __post_init__(self) -> None:
        pack(self, token_ids=IntArray)


@dataclass(frozen=True)
class TokenRow:
    """One training row of an episode: a prompt and the tokens after it, with per-token data [T].

    Every sampled token of an episode is an action token of exactly one of its rows. A call whose
    prompt begins with all tokens of a row continues that row; any other call begins a new one.

    Example: turn 0 samples ``7 1`` (a tool call), the tool answers ``30 31``, turn 1 samples
    ``8``::

        TokenRow(prompt_ids=(5, 9), response_ids=(7, 1, 30, 31, 8),
                 sampler_logprobs=(-0.2, -0.1, 0.0, 0.0, -0.3),
                 action_mask=(True, True, False, False, True), versions=(3, 3, 3, 3, 4),
                 turns=(0, 0, -1, -1, 1))
    """

    prompt_ids: Ids
    response_ids: Ids
    sampler_logprobs: Logprobs
    action_mask: Mask
    versions: Labels
    turns: Labels
    """Number of the turn that sampled each token, -1 for the other tokens. Turns are numbered from
    0, in the order of time, over all rows of the episode. All tokens of a turn are in one row."""
    kept_ids: KeptIds = ()
    """Ids that top-k and top-p kept for each token (``rollout.base.Completion``). Empty: none."""

    def __post_init__(self) -> None:
        pack(self, **_COLUMNS)

    @property
    def last_response(self) -> tuple[Ids, Ids]:
        """(token ids that the policy read before its last response, ids of that response)."""
        *_, (turn, length) = (-1, 0), *IntRuns(self.turns).runs()
        begin = len(self.response_ids) - (length if turn >= 0 else 0)
        return self.prompt_ids + self.response_ids[:begin], self.response_ids[begin:]


@dataclass(frozen=True)
class Sample:
    """One response to one prompt, or one episode of several turns, with per-token data.

    ``response_ids``, ``sampler_logprobs``, ``action_mask`` and ``versions`` have one entry per
    response token [T]. Of an episode, they are those of the last row (:attr:`rows`).

    Example: prompt ``1+1=``, response ``2`` and an end token, sampled by the weights of step 3::

        Sample(sample_id="train:17@0/0", prompt_id="train:17@0", group_id=17, prompt_ids=(5, 9, 2),
               response_ids=(7, 1), sampler_logprobs=(-0.2, -0.01), action_mask=(True, True),
               versions=(3, 3), text="2", finish_reason="stop", reward=1.0, reward_parts={"exact":
               1.0})
    """

    sample_id: str
    prompt_id: str
    group_id: int
    """Samples with the same id are compared with each other. Groups are formed by id, never by
    position."""
    prompt_ids: Ids
    response_ids: Ids
    """Token ids after the prompt, end token included."""
    sampler_logprobs: Logprobs
    """log p(token) of the rollout engine at the temperature, in nats; over ``kept_ids``, if any."""
    action_mask: Mask
    """True if the policy sampled the token; False if an environment or tool wrote it."""
    versions: Labels
    """Number of optimizer steps of the weights that sampled each token."""
    text: str
    """Text of the response; of an episode, of its last response."""
    finish_reason: FinishReason
    """``length``: a token limit ended the response or the episode. The end of an episode's last
    response is that of its last turn (:attr:`is_cut`)."""
    reward: float = float("nan")
    """Weighted sum of ``reward_parts`` after shaping; of an episode its total, which includes
    ``turn_rewards``. NaN until scored."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    turns: Labels = ()
    """As in :class:`TokenRow`, of the last row. Empty: one turn."""
    kept_ids: KeptIds = ()
    """As in :class:`TokenRow`, of the last row."""
    earlier_rows: tuple[TokenRow, ...] = ()
    """Rows of the calls that the last row does not extend, in the order of time."""
    turn_rewards: tuple[float, ...] = ()
    """Reward of each turn, already weighted and contained in ``reward``. Empty: none."""
    episode: Episode | None = None
    """Record of a multi-turn episode. None: a single response."""

    def __post_init__(self) -> None:
        pack(self, **_COLUMNS)

    def scored(
        self, reward: float, parts: Mapping[str, float], turn_rewards: tuple[float, ...]
    ) -> Sample:
        """Return the sample with rewards. A seventh of the time of ``dataclasses.replace``, which
        would convert all columns again."""
        sample = object.__new__(type(self))
        new = {"reward": reward, "reward_parts": parts, "turn_rewards": turn_rewards}
        vars(sample).update(vars(self) | new)
        return sample

    @property
    def rows(self) -> tuple[TokenRow, ...]:
        """All training rows, in the order of time."""
        last = TokenRow(
            self.prompt_ids,
            self.response_ids,
            self.sampler_logprobs,
            self.action_mask,
            self.versions,
            self.turns or one_turn(self.action_mask),
            self.kept_ids,
        )
        return (*self.earlier_rows, last)

    @property
    def last_response(self) -> tuple[Ids, Ids]:
        """(token ids that the policy read before its last response, ids of that response)."""
        return self.rows[-1].last_response

    @property
    def is_cut(self) -> bool:
        """True if the model did not end its last response, for example because a token limit cut
        it."""
        turns = () if self.episode is None else self.episode.turns
        return (turns[-1] if turns else self).finish_reason != "stop"

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled, in all rows."""
        return self.action_mask.count(True) + sum(
            row.action_mask.count(True) for row in self.earlier_rows
        )


@dataclass(frozen=True)
class Group:
    """All samples of one prompt."""

    group_id: int
    prompt: Prompt
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Batch:
    """Rows for a train engine: flat token arrays [M], per-row arrays [N], and the GLOBAL
    denominators.

    Two rows ``[5 9 2 | 7 1]`` and ``[5 9 2 | 8]`` (prompt | response) are::

        tokens      = [5 9 2 7 1  5 9 2 8]        offsets     = [0 5 9]
        action_mask = [0 0 0 1 1  0 0 0 1]        prompt_lens = [3 3]       group_ids = [4 4]

    Every per-token array is aligned with ``tokens``: entry t belongs to token t, whose
    log-probability is computed from the tokens before it. Entries outside ``action_mask`` are 0 and
    have no meaning. ``num_tokens`` and ``num_sequences`` are counts over the entire optimizer step,
    all micro-batches and all ranks. Every split keeps them, so a loss that divides by them does not
    depend on how the step was split.

    If samples are episodes, rows with equal ``sample_ids`` are one sequence. ``rewards`` then
    repeats the sample's reward on each of its rows."""

    tokens: Tensor
    """[M] int64"""
    offsets: Tensor
    """[N + 1] int64, on the CPU; row i is ``tokens[offsets[i]:offsets[i + 1]]``"""
    prompt_lens: Tensor
    """[N] int64, on the CPU; number of leading tokens that the row shares with its group"""
    action_mask: Tensor
    """[M] bool: tokens to train on"""
    group_ids: Tensor
    """[N] int64, on the CPU"""
    num_tokens: int
    """Action tokens in the entire optimizer step."""
    num_sequences: int
    """Samples in the entire optimizer step. A sample is a row unless ``sample_ids`` is set."""
    num_read_tokens: int = 0
    """Tokens in the entire optimizer step, prompts included. Only the load-balancing loss of
    experts is averaged over all of them."""
    rows_per_unit: int = 1
    """Rows that must stay in one micro-batch (2 for preference pairs: row 2i chosen, 2i + 1
    rejected)."""
    sample_ids: Tensor | None = None
    """[N] int64, on the CPU: sample of each row. None: every row is a sample of its own"""
    sample_tokens: Tensor | None = None
    """[N] int64: action tokens of all rows of the row's sample, also of rows in other
    micro-batches"""
    turn_ids: Tensor | None = None
    """[M] int64: turn of each action token, in the order of time; -1 for other tokens"""
    turn_rewards: Tensor | None = None
    """[M] fp32: reward of a turn on its last action token; contained in ``rewards``"""
    samples_together: bool = False
    """True if all rows of a sample must stay in one micro-batch, because the loss reduces over
    samples."""
    sampler_logprobs: Tensor | None = None
    """[M] fp32"""
    kept_ids: Tensor | None = None
    """[M, K] int32: ids that top-k and top-p kept for each action token, padded with -1. Log-probs
    of a token are over its ids, or over the full vocabulary if it has none"""
    ages: Tensor | None = None
    """[M] int64: RL steps between the weights that sampled each action token and the weights at the
    start of the update; 0 for other tokens. None: a synchronous run"""
    old_logprobs: Tensor | None = None
    """[M] fp32"""
    ref_logprobs: Tensor | None = None
    """[M] fp32"""
    teacher_logprobs: Tensor | None = None
    """[M] fp32"""
    teacher_states: Tensor | None = None
    """[M, H] in the teacher's format: its last hidden state before token t (only for the job
    distill)"""
    advantages: Tensor | None = None
    """[M] fp32"""
    values: Tensor | None = None
    """[M] fp32, the critic's values at the start of the update"""
    returns: Tensor | None = None
    """[M] fp32"""
    rewards: Tensor | None = None
    """[N] fp32, one scalar per row: the reward of its sample"""
    margins: Tensor | None = None
    """[N] fp32, preference margins (only for reward models)"""
    pair_terms: Tensor | None = None
    """[N] fp32, computed before the update: log-ratios of equal rank (AOT), or mean collision
    entropies of the responses (WPO)"""
    labels: Tensor | None = None
    """[N] bool, whether the response was liked (KTO); [N, A] fp32 scores, or [N] int64 classes"""
    step_labels: Tensor | None = None
    """[M] fp32: probability that a step is correct, on the last token of each step (process reward
    models). If set, a reward model scores every action token instead of the row's last token."""
    kl_estimate: float = 0.0
    """Distance of the policy from the reference over the entire optimizer step, in nats per
    response (only for KTO)."""
    host: Batch | None = field(default=None, repr=False, compare=False)
    """The same batch in host memory, if this one was moved to a device (see :attr:`on_host`)."""

    @property
    def on_host(self) -> Batch:
        """Batch to compute indices from. Reading a device's tensors would wait for all work queued
        there."""
        return self if self.host is None else self.host

    @property
    def num_rows(self) -> int:
        return int(self.offsets.numel()) - 1

    @property
    def lengths(self) -> Tensor:
        """[N] int64: number of tokens in each row."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def row_ids(self) -> Tensor:
        """[M] int64: row of each token."""
        rows = torch.repeat_interleave(torch.arange(self.num_rows), self.lengths)
        return upload(rows, self.tokens.device)

    @property
    def num_samples(self) -> int:
        """Number of samples with rows in this batch."""
        return self.row_samples()[1].numel()

    @property
    def token_samples(self) -> Tensor:
        """[M] int64: sample of each token, equal within a sample and different between samples."""
        if self.sample_ids is None:
            return self.row_ids
        return upload(torch.repeat_interleave(self.sample_ids, self.lengths), self.tokens.device)

    def row_samples(self) -> tuple[Tensor, Tensor]:
        """Return ([N] index of the sample of each row, [S] first row of each sample), on the CPU.
        Samples are in the order of ``sample_ids``."""
        rows = torch.arange(self.num_rows)
        if self.sample_ids is None:
            return rows, rows
        ids, index = torch.unique(self.sample_ids, return_inverse=True)
        first = torch.full_like(ids, self.num_rows).scatter_reduce(0, index, rows, "amin")
        return index, first

    @property
    def last_tokens(self) -> Tensor:
        """[N] int64, on the CPU: index of the last token of each row."""
        return self.offsets[1:] - 1

    def select(self, rows: Sequence[int], *, copy: bool = True) -> Batch:
        """Return a batch of the given rows, in the given order, with this batch's global
        denominators. With ``copy=False`` its arrays may share memory with this batch."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        zero = torch.zeros(1, dtype=torch.int64)
        changed: dict[str, Any] = {"offsets": torch.cat([zero, self.lengths[index].cumsum(0)])}
        if self.host is not None:
            changed["host"] = self.host.select(rows, copy=copy)
        begins = self.offsets.tolist()
        spans = [(begins[first], begins[last + 1]) for first, last in row_runs(rows)]
        for name, value in self._arrays():
            if name == "offsets":
                continue
            per_row = name in _PER_ROW
            changed[name] = value[index.to(value.device)] if per_row else _join(value, spans, copy)
        return replace(self, **changed)

    def model_inputs(self) -> Batch:
        """Return this batch without the per-token columns that only losses read."""
        unread = [n for n, _ in self._arrays() if n not in _PER_ROW | _MODEL_INPUTS]
        nothing: dict[str, Any] = dict.fromkeys(unread)
        return replace(self, **nothing)

    def with_global_counts(self) -> Batch:
        """Return this batch as an entire optimizer step, with its own counts as denominators."""
        return replace(
            self,
            num_tokens=int(self.action_mask.sum()),
            num_sequences=self.num_samples,
            num_read_tokens=self.tokens.numel(),
        )

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with token arrays on ``device``, without waiting for the copy. Offsets
        and ids stay on the CPU. :attr:`host` of the result is the original batch, because indices
        are computed there."""
        moved: dict[str, Any] = {
            name: upload(value, device) for name, value in self._arrays() if name not in _ON_CPU
        }
        same = torch.device(device).type == self.tokens.device.type
        return replace(self, **moved, host=self.host if same else self.on_host)

    def _arrays(self) -> Iterable[tuple[str, Tensor]]:
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                yield name, value


_PER_ROW = frozenset(
    {
        "prompt_lens",
        "group_ids",
        "sample_ids",
        "sample_tokens",
        "rewards",
        "margins",
        "pair_terms",
        "labels",
    }
)
_ON_CPU = frozenset({"offsets", "prompt_lens", "group_ids", "sample_ids"})
_MODEL_INPUTS = frozenset(
    {"tokens", "offsets", "action_mask", "step_labels", "teacher_states", "kept_ids"}
)
"""Columns that a pass without a loss reads, except those per row."""


def row_runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, last) of each run of consecutive rows, in order.

    >>> row_runs([4, 5, 6, 1, 3, 2])
    [(4, 6), (1, 1), (3, 3), (2, 2)]
    """
    index = np.asarray(rows, dtype=np.int64)
    if not index.size:
        return []
    breaks = np.diff(index) != 1
    first, last = index[np.append(True, breaks)], index[np.append(breaks, True)]
    return list(zip(first.tolist(), last.tolist(), strict=True))


def _join(value: Tensor, spans: Sequence[tuple[int, int]], copy: bool) -> Tensor:
    """Return the entries of ``value`` [M, ...] in ``spans`` (begin, end), one after another; a view
    if there is one span and ``copy`` is False."""
    parts = [value[begin:end] for begin, end in spans] or [value[:0]]
    return parts[0] if len(parts) == 1 and not copy else torch.cat(parts)


Number = float | int | Tensor


def is_metric_name(name: Any) -> bool:
    """Return whether a name given by the user's code or by a server may be part of a metric's name.

    Control characters would rewrite the line of a console, a log or a table of a tracker.
    """
    return isinstance(name, str) and name.isprintable() and bool(name.strip())


@dataclass(frozen=True)
class Stats:
    """Measurements that add up exactly over micro-batches and ranks.

    A mean is stored as (numerator, denominator), so the mean over any split of the data equals the
    mean over all data: ``Stats(means={"clip_frac": (3, 40)}) + Stats(means={"clip_frac": (1,
    10)})`` has clip_frac 4/50. Values may be detached tensors. Only :meth:`floats` and
    :meth:`plain` wait for the device, and they read all values in one copy."""

    means: Mapping[str, tuple[Number, Number]] = field(default_factory=dict)
    maxima: Mapping[str, Number] = field(default_factory=dict)
    sums: Mapping[str, Number] = field(default_factory=dict)

    def __add__(self, other: Stats) -> Stats:
        means = dict(self.means)
        for name, (num, den) in other.means.items():
            have_num, have_den = means.get(name, (0.0, 0.0))
            means[name] = (have_num + num, have_den + den)
        maxima = dict(self.maxima)
        for name, value in other.maxima.items():
            maxima[name] = _larger(maxima[name], value) if name in maxima else value
        sums = dict(self.sums)
        for name, value in other.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        return Stats(means, maxima, sums)

    def floats(self, prefix: str = "") -> dict[str, float]:
        """Return the values as Python floats. A mean with denominator 0 is NaN."""
        plain = self.plain()
        out: dict[str, float] = {}
        for name, (num, den) in plain.means.items():
            out[prefix + name] = float(num) / float(den) if den else float("nan")
        for source in (plain.maxima, plain.sums):
            for name, value in source.items():
                out[prefix + name] = float(value)
        return out

    def plain(self) -> Stats:
        """Return the same numbers as Python floats, read from their device in one copy."""
        flat = [number for pair in self.means.values() for number in pair]
        flat += [*self.maxima.values(), *self.sums.values()]
        floats = iter(_floats(flat))
        return Stats(
            means={name: (next(floats), next(floats)) for name in self.means},
            maxima={name: next(floats) for name in self.maxima},
            sums={name: next(floats) for name in self.sums},
        )


def _larger(first: Number, second: Number) -> Number:
    """Return the maximum, or NaN if either is NaN. The result is a tensor if either input is, on
    the same device."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return torch.maximum(torch.as_tensor(first), torch.as_tensor(second))
    return second if second > first or math.isnan(second) else first


def _floats(numbers: Sequence[Number]) -> list[float]:
    """Return each number as a float. Scalar tensors of one device are read together, in fp64, which
    represents fp32 numbers and counts exactly."""
    devices: dict[torch.device, list[int]] = {}
    for i, number in enumerate(numbers):
        if isinstance(number, Tensor):
            devices.setdefault(number.device, []).append(i)
    floats = [0.0 if isinstance(x, Tensor) else float(x) for x in numbers]
    for places in devices.values():
        wide = [torch.as_tensor(numbers[i]).detach().double().reshape(()) for i in places]
        for i, value in zip(places, torch.stack(wide).tolist(), strict=True):
            floats[i] = value
    return floats


def rows_to_batch(
    rows: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]],
    *,
    prompt_lens: Sequence[int],
    group_ids: Sequence[int] | None = None,
) -> Batch:
    """Build a :class:`Batch` from lists of token ids and masks, with its own counts as
    denominators.

    ``group_ids`` default to one group per row. Raises ValueError if a mask and its row differ in
    length."""
    for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        if len(row) != len(mask):
            raise ValueError(f"row {i} has {len(row)} tokens and a mask of {len(mask)}")
    return flat_batch(
        concatenated(rows, np.int64),
        concatenated(masks, np.bool_),
        lengths=[len(row) for row in rows],
        prompt_lens=prompt_lens,
        group_ids=range(len(rows)) if group_ids is None else group_ids,
    )


def flat_batch(
    tokens: np.ndarray[Any, Any],
    action_mask: np.ndarray[Any, Any],
    *,
    lengths: Sequence[int],
    prompt_lens: Sequence[int],
    group_ids: Sequence[int],
) -> Batch:
    """Build a :class:`Batch` from flat arrays [M] of rows with ``lengths``, with its own counts as
    denominators. It shares their memory."""
    zero = torch.zeros(1, dtype=torch.int64)
    return Batch(
        tokens=torch.from_numpy(tokens),
        offsets=torch.cat([zero, torch.tensor([*lengths], dtype=torch.int64).cumsum(0)]),
        prompt_lens=torch.tensor([*prompt_lens], dtype=torch.int64),
        action_mask=torch.from_numpy(action_mask),
        group_ids=torch.tensor([*group_ids], dtype=torch.int64),
        num_tokens=int(action_mask.sum()),
        num_sequences=len(lengths),
        num_read_tokens=len(tokens),
    )


def steps_to_batch(
    rows: Sequence[Sequence[int]], ends: Sequence[Sequence[int]], *, prompt_lens: Sequence[int]
) -> Batch:
    """Build a batch of rows to be scored at the tokens ``ends`` of each row, without labels (all
    0)."""
    marked = [set(places) for places in ends]
    masks = [[t in at for t in range(len(row))] for row, at in zip(rows, marked, strict=True)]
    batch = rows_to_batch(rows, masks, prompt_lens=prompt_lens)
    return replace(batch, step_labels=torch.zeros(batch.tokens.numel()))
