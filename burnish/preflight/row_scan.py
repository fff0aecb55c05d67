"""Validate rows of a data section with the functions that the run uses to read and encode them.

``python -m burnish.preflight.row_scan`` is a worker process of :mod:`burnish.preflight.launch`. It
reads a JSON object with a :class:`DataSection` and the spans to scan from standard input, and
writes one JSON line per span. A process started this way does not import the caller's
``__main__`` module."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish.config.model import ModelConfig
from burnish.data.config import DataConfig
from burnish.data.encoded import OverlongError, encoder_of, fit
from burnish.data.forms import open_rows
from burnish.data.notices import Notices
from burnish.data.responses.encode import GivenResponse
from burnish.data.sources import DataError, Source
from burnish.data.stream import RowRef
from burnish.models.load import load_tokenizer
from burnish.preflight.scored_prompts import ScoredPrompts, Scorers
from burnish.rewards.labels import label_problem
from burnish.types import Prompt

SHOWN = 20
"""Most bad rows listed in one error message."""

MOST_REASONS = 50
"""Most reasons that are counted apart."""
OTHER_REASONS = "other errors"
_PLACES = 6

ERRORS = ("unusable", "too long", "bad label", "not scored")
"""Kinds of rows at which a run stops."""

Span = tuple[int, int, int]
"""Number of a source, its first row, and the row after the last."""


@dataclass(frozen=True)
class DataSection:
    """One data section of a recipe, with its length limit within the model's positions."""

    name: str
    """Its key, such as ``eval.data``."""
    data: DataConfig
    model: ModelConfig
    """Model of the tokenizer."""
    num_rows: int | None = None
    """Rows that the job reads at most, in file order. None: all."""
    label_readers: tuple[str, ...] = ()
    """Kinds of the job's rewards that read labels (:mod:`burnish.rewards.labels`)."""
    in_episodes: bool = False
    """The prompts start episodes."""
    scorers: Scorers = ()
    """The job's reward models, which render the prompts."""

    def to_json(self) -> dict[str, Any]:
        """Return the section as JSON."""
        return {
            "name": self.name,
            "class": f"{type(self.data).__module__}:{type(self.data).__qualname__}",
            "data": self.data.model_dump(mode="json"),
            "model": self.model.model_dump(mode="json"),
            "num_rows": self.num_rows,
            "label_readers": list(self.label_readers),
            "in_episodes": self.in_episodes,
            "scorers": [(name, model.model_dump(mode="json")) for name, model in self.scorers],
        }

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> DataSection:
        """Return the section that :meth:`to_json` wrote."""
        kind: type[DataConfig] = resolve_name(body["class"])
        data, model = kind.model_validate(body["data"]), ModelConfig.model_validate(body["model"])
        readers = tuple(body["label_readers"])
        scorers = tuple((name, ModelConfig.model_validate(m)) for name, m in body["scorers"])
        rest = (body["num_rows"], readers, body["in_episodes"], scorers)
        return cls(body["name"], data, model, *rest)


@dataclass
class Found:
    """Result of a scan."""

    rows: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Rows by kind: unusable, too long, bad label, not scored (all are errors), skipped, dropped,
    truncated."""
    problems: list[str] = field(default_factory=list)
    """The first errors, or the first skipped rows."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of all such rows by :func:`reason_of` their error."""

    def to_json(self) -> list[Any]:
        """Return the result as JSON."""
        return [self.rows, self.counts, self.problems, self.reasons]

    @classmethod
    def from_json(cls, body: list[Any]) -> Found:
        """Return the result that :meth:`to_json` wrote."""
        rows, counts, problems, reasons = body
        return cls(rows, Counter(counts), problems, Counter(reasons))

    @property
    def num_bad(self) -> int:
        """Number of rows at which the run would stop."""
        return sum(self.counts[kind] for kind in ERRORS)

    def add(self, other: Found) -> None:
        """Add the result of a later span."""
        self.rows += other.rows
        self.counts.update(other.counts)
        self.problems = [*self.problems, *other.problems][:SHOWN]
        for reason, count in other.reasons.items():
            known = reason in self.reasons or len(self.reasons) < MOST_REASONS
            self.reasons[reason if known else OTHER_REASONS] += count

    def add_problem(self, kind: str, problem: str) -> None:
        """Count an unusable, too long or skipped row with its error."""
        self.add(Found(0, Counter([kind]), [problem], Counter([reason_of(problem)])))

    def by_reason(self) -> str:
        """Return the first errors, one line per reason, with the number of rows of each."""
        shown: dict[str, list[str]] = {reason: [] for reason in self.reasons}
        for problem in self.problems:
            shown.setdefault(reason_of(problem), []).append(problem)
        lines = []
        for reason, problems in sorted(shown.items(), key=lambda group: -self.reasons[group[0]]):
            places = [problem.partition(": ")[0] for problem in problems[1:_PLACES]]
            also = f"\n    also {', '.join(places)}" if places else ""
            count = self.reasons[reason]
            rows = f"{count} rows: " if count > 1 else ""
            lines.append(f"\n  - {rows}{problems[0] if problems else reason}{also}")
        return "".join(lines)


def scan(
    section: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[Source],
    spans: Iterable[Span],
) -> Iterator[Found]:
    """Yield the result of each span. Raises DataError if the tokenizer cannot be used."""
    encoder = encoder_of(section.data, tokenizer, sources, in_episodes=section.in_episodes)
    notices, scored = Notices(), ScoredPrompts(section.scorers)
    for number, start, stop in spans:
        scanned, source = Found(rows=stop - start), sources[number]
        for row in range(start, stop):
            ref = RowRef(source.name, row, 0)
            try:
                fitted = fit(source, ref, encoder, section.data, notices=notices)
            except DataError as error:
                kind = "too long" if isinstance(error, OverlongError) else "unusable"
                scanned.add_problem(kind, str(error))
                continue
            if fitted.bad is not None:
                scanned.add_problem("skipped", fitted.bad)
                continue
            if fitted.item is None or fitted.truncated:
                scanned.counts["truncated" if fitted.truncated else "dropped"] += 1
            item = fitted.item
            prompt = item.group.prompt if isinstance(item, GivenResponse) else item
            problem = None
            if section.label_readers and isinstance(prompt, Prompt):
                problem = label_problem(section.label_readers, prompt)
            if problem is not None:
                scanned.add_problem("bad label", f"{source[row].where}: {problem}")
            elif isinstance(prompt, Prompt) and (problem := scored.problem(prompt)) is not None:
                scanned.add_problem("not scored", f"{source[row].where}: {problem}")
        yield scanned


def reason_of(problem: str) -> str:
    """Return an error without the position of its row, and with dots for quoted texts and numbers,
    by which rows with the same mistake are grouped.

    >>> reason_of("rows.jsonl:7: the column 'a' has 3 entries")
    'the column ... has ... entries'
    """
    return _OWN_TEXT.sub("...", problem.partition(": ")[2] or problem)


_OWN_TEXT = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress log messages: the run logs the same ones when it reads the rows."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def main() -> None:
    """Scan the spans given on standard input."""
    logging.disable(logging.WARNING)
    request = json.load(sys.stdin.buffer)
    section, spans = DataSection.from_json(request["section"]), request["spans"]
    sources = open_rows(section.data)
    for scanned in scan(section, load_tokenizer(section.model), sources, spans):
        print(json.dumps(scanned.to_json()), flush=True)


if __name__ == "__main__":
    main()
