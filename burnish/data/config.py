"""The contract of data: the keys of every data section, and the facts of its kind. Free of torch.

A kind is a folder. ``config.py``: a subclass of :class:`DataConfig`. ``encode.py``: a function
``make_encoder`` (``data/encoded.py``), whose encoder makes batches if rows are trained on.
``read.py``, if rows have more than a prompt and the columns of ``content_keys``: a class ``Reader``
(``data/reader.py``). ``data/kinds.py`` is the registry of the kinds of the job ``rm``.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal

from pydantic import Field

from burnish.config.base import Node
from burnish.config.columns import missing_columns
from burnish.config.forms import (
    NAMES,
    FormChoice,
    FormError,
    Keys,
    Reading,
    form_of,
)
from burnish.config.sources import SourceConfig
from burnish.data_files.reading import first_row
from burnish.data_files.splits import FilesError

Overlong = Literal["error", "truncate_left", "truncate_right", "drop"]


def shortenings(*, can_lose_start: bool, can_lose_end: bool) -> tuple[Overlong, ...]:
    """Return the settings that handle a row over the limit without an error. ``can_lose_start``:
    rows without their first tokens can be used; ``can_lose_end``: those without their last ones."""
    starts: tuple[Overlong, ...] = ("truncate_left",) if can_lose_start else ()
    ends: tuple[Overlong, ...] = ("truncate_right",) if can_lose_end else ()
    return (*starts, *ends, "drop")


def overlong_rules(overlong: Overlong, accepted: Sequence[Overlong]) -> Iterator[str]:
    """Yield an error if rows would lose a side that they need. ``accepted``: :func:`shortenings` of
    the data."""
    if overlong == "error" or overlong in accepted:
        return
    lost = {
        "truncate_right": "remove the end of a prompt or the labeled end of a row",
        "truncate_left": "use prompts that differ from those in the output",
    }
    yield (
        f"overlong={overlong} would {lost[overlong]}; use {' or '.join(accepted)}, or raise the "
        "length limit"
    )


warnings.filterwarnings(  # DataConfig.validate hides a method that pydantic has deprecated
    "ignore", message='Field name "validate" in "DataConfig" shadows', category=UserWarning
)

Validate = Literal["all", "head", "off"]


class DataConfig(Node):
    """Fields common to all kinds of data."""

    can_lose_start: ClassVar[bool] = True
    """True if rows without their first tokens can be used."""
    can_lose_end: ClassVar[bool] = False
    """True if rows without their last tokens can be trained on."""
    length_key: ClassVar[str] = "max_len"
    """Key of the length limit of rows."""
    is_trained: ClassVar[bool] = True
    """False if no loss is computed on the tokens of rows."""
    reads_in_order: ClassVar[bool] = False
    """True if a job reads all rows once, in their order."""
    has_reader: ClassVar[bool] = False
    """True if the folder has a file ``read.py`` with a class ``Reader``, in place of
    ``data/reader.py``."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    """One or more sources. Several are combined as set by ``mix``."""
    held_out: float | None = Field(None, gt=0)
    """Rows kept for evaluation instead of training: a fraction below 1, or a number of rows. Chosen
    at random, the same for every ``seed`` (docs/evaluation.md). None: none."""
    part: Literal["train", "held_out"] = "train"
    """Rows to use if ``held_out`` is set. The evaluation section is filled with ``held_out``."""
    form: FormChoice = "auto"
    """Form of the rows (docs/data.md). auto: recognized by a source's first row; columns: only the
    columns set by the ``_key`` fields."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages. Environments fill
    ``prompt``."""
    prompt_template: str | None = None
    """Prompt as a Python format string over the row's columns, e.g. ``"Question:
    {prompt}\\nAnswer:"``. None: the column itself."""
    apply_chat_template: bool = False
    """Wrap a string prompt as a user message, and responses or steps as assistant messages, in the
    chat template. Messages always use it."""
    system_prompt: str | None = None
    """System message inserted before every conversation. None: none."""
    tools_key: str | None = "tools"
    """Column with a conversation's tools (list of descriptions, or its JSON text) for the chat
    template. May be absent; other content of the default column is ignored. None: no tools."""
    shuffle: bool = True
    """Reshuffle each source in every epoch (by ``seed``). False: file order."""
    mix: Literal["weight", "size"] = "weight"
    """weight: each draw chooses a source by ``weight``, so rows of small sources repeat more often.
    size: all rows are shuffled together, each once per epoch."""
    overlong: Overlong = "error"
    """Row over the length limit: stop with an error, truncate its left or right end (right:
    demonstrations and preferences), or drop it. The last three are counted."""
    validate: Validate = "all"  # type: ignore[assignment]  # pydantic's deprecated method
    """Rows checked before a model is loaded, with the run's own tokenizer: all (cached until a file
    or a setting changes), head (the first 1,000 of each source) or off."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """A row that cannot be read or converted: stop with an error, or skip it. Skipped rows are
    counted (metric ``data/<unit>s_skipped``)."""

    @property
    def length_limit(self) -> int:
        """Maximum tokens of a row, or of a prompt."""
        return int(dict(self)[self.length_key])

    @property
    def all_files(self) -> list[str]:
        """Path of each source of files, or of the first of its files if it has several."""
        return [file for source in self.sources if (file := source.first_file) is not None]

    @property
    def files(self) -> list[str]:
        """Paths of the sources that are files and whose rows are read by columns."""
        return [path for path in self.all_files if self._is_by_columns(path)]

    @property
    def streamed(self) -> list[SourceConfig]:
        """The sources that are streamed."""
        return [source for source in self.sources if source.is_streamed]

    @property
    def shortenings(self) -> tuple[Overlong, ...]:
        """Settings of ``overlong`` that this data accepts in place of an error."""
        return shortenings(can_lose_start=self.can_lose_start, can_lose_end=self.can_lose_end)

    @property
    def may_lose_rows(self) -> bool:
        """Return whether rows can be left out: unusable ones, or those over the length limit."""
        return self.on_bad_row == "skip" or self.overlong != "error"

    @property
    def nested_keys(self) -> list[str]:
        """Dotted paths that the recipe sets as columns."""
        one = (value for name, value in self if name.endswith("_key"))
        several = (key for name, value in self if name.endswith("_keys") for key in value or ())
        return [key for key in (*one, *several) if isinstance(key, str) and "." in key]

    @property
    def row_keys(self) -> Keys:
        """Columns that the form of a row depends on."""
        return Keys("steps", self.form, self.prompt_key, is_customized=True)

    @property
    def content_keys(self) -> Mapping[str, str]:
        """Field -> column of each text or conversation that the job reads besides the prompt."""
        return {}

    @property
    def needed_keys(self) -> Mapping[str, str]:
        """Field -> column of each other value that a row must have."""
        return {}

    @property
    def conversation_key(self) -> str | None:
        """Column to which public forms convert a conversation. None: it becomes a prompt, with the
        last message as its answer."""
        return None

    @property
    def answer_key(self) -> str | None:
        """Column of the response, to which public forms convert an answer. None: rows have none, or
        two."""
        return None

    @property
    def pair_keys(self) -> tuple[str, ...]:
        """Columns of the better and the worse response; empty if rows are not pairs."""
        return ()

    @property
    def reference_key(self) -> str | None:
        """Column to which public forms convert the label of a prompt. None: labels are not read."""
        return None

    @property
    def reference_pattern(self) -> str | None:
        """Pattern that reads the label from its column; None: the column is the label."""
        return None

    @property
    def replaced_keys(self) -> tuple[str, ...]:
        """Columns that a converted row does not keep, because they would be read first."""
        return (self.prompt_key,)

    def reading_of(self, row: Mapping[str, Any]) -> Reading:
        """Return the form of a source whose first row is ``row``. Raises FormError."""
        return form_of(row, self.row_keys)

    def readings(self) -> Iterator[tuple[str, Reading]]:
        """Yield (path, form) of each file with a readable first row and one form."""
        for path in self.all_files:
            row = first_row(path)
            if row is not None:
                with suppress(FormError):
                    yield path, self.reading_of(row)

    def form_lines(self) -> list[tuple[str, str, str]]:
        """Return lines (name, value, origin) of the batch table with the form of each file that is
        not read by columns, and of the sources."""
        return [line for source in self.sources for line in source.lines()] + [
            (
                "data form",
                NAMES[reading.form],
                f"{path}: {len(reading.columns)} column{'s' * (len(reading.columns) > 1)} mapped "
                f"({', '.join(reading.columns)})",
            )
            for path, reading in self.readings()
            if reading.form != "columns"
        ]

    def _is_by_columns(self, path: str) -> bool:
        row = first_row(path)
        try:
            return row is None or self.reading_of(row).form == "columns"
        except FormError:
            return False

    def rules(self) -> Iterator[str]:
        yield from overlong_rules(self.overlong, self.shortenings)
        for source in self.sources:
            try:
                _ = source.files
            except FilesError as error:
                yield str(error)
        for path in self.all_files:
            row = first_row(path)
            try:
                if row is not None:
                    self.reading_of(row)
            except FormError as error:
                yield f"{path}: {error}"
        weighted = [source.weight for source in self.sources if source.weight != 1.0]
        if self.reads_in_order and weighted:
            yield (
                f"weight={weighted[0]:g} of a source has no effect, because all rows are read in "
                "their order; remove it"
            )
        elif self.mix == "size" and weighted:
            yield (
                "mix=size draws all rows equally often, but a source has "
                f"weight={weighted[0]:g}; remove the weights, or use mix=weight"
            )
        if self.mix == "size" and self.streamed:
            yield (
                f"mix=size shuffles all rows together, but {self.streamed[0].place} is streamed in "
                "order; use mix=weight, or remove streaming"
            )
        if self.is_own("tools_key"):
            yield from missing_columns(self.files, {"tools_key": self.tools_key})


class RewardData(ABC):
    """Facts of a kind of rows from which a reward model learns (job ``rm``). Its losses are in
    ``jobs/reward_model.py``."""

    losses: ClassVar[tuple[str, ...]]
    """Values of ``loss``; the first is the default."""
    rows_per_unit: ClassVar[int] = 1
    """Rows of one item: 2 for a pair."""
    weighs_outputs: ClassVar[bool] = False
    """True if the reward is a weighted sum of the model's outputs."""

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the model's outputs. Empty: one output without a name, or unknown."""
        return ()

    @property
    def default_weights(self) -> tuple[float, ...] | None:
        """Weights of the outputs if the recipe has none. None: it needs them."""
        return None

    @abstractmethod
    def metrics(self, *, weighted: bool) -> Iterable[str]:
        """Return the names after ``eval/`` of the metrics of an evaluation. ``weighted``: the
        weights of the outputs are known."""

    def loss_problem(self, loss: str) -> str | None:
        """Return why ``loss``, which is none of ``losses``, cannot be used; None for the sentence
        that names the kind of its rows."""
        return None

    def model_rules(
        self, held_out: Mapping[str, Any], loss: str | None, weights: Mapping[str, float] | None
    ) -> Iterator[str]:
        """Yield an error for each setting of the model that does not fit the rows. ``held_out``:
        evaluation sections of the same kind by their place in the recipe."""
        yield from ()
