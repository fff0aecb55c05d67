"""Config of data: sources of rows, and their conversion to token ids."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, ClassVar, Literal

import regex
from pydantic import Field

from burnish.config.base import Node
from burnish.config.columns import (
    columns_of,
    first_row,
    missing_columns,
    nested_value,
)
from burnish.config.forms import (
    NAMES,
    SHAREGPT,
    FormChoice,
    FormError,
    Keys,
    Purpose,
    Reading,
    form_of,
)
from burnish.config.overlong import Overlong, overlong_rules, shortenings
from burnish.config.sources import SourceConfig
from burnish.config.split_files import FilesError
from burnish.config.templates import template_rules

SHAREGPT_KEY = SHAREGPT
"""Column of ShareGPT rows that replaces ``messages``."""


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
        keys = (value for name, value in self if name.endswith("_key") and isinstance(value, str))
        return [key for key in keys if "." in key]

    @property
    def row_keys(self) -> Keys:
        """Columns that the form of a row depends on."""
        return Keys("steps", self.form, self.prompt_key, own=True)

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
            ("data form", NAMES[found.form], f"{path}: {_mapped(found)}")
            for path, found in self.readings()
            if found.form != "columns"
        ]

    def _is_by_columns(self, path: str) -> bool:
        row = first_row(path)
        try:
            return row is None or self.reading_of(row).form == "columns"
        except FormError:
            return False

    def _form_rules(self) -> Iterator[str]:
        for path in self.all_files:
            row = first_row(path)
            try:
                if row is not None:
                    self.reading_of(row)
            except FormError as error:
                yield f"{path}: {error}"

    def _files_rules(self) -> Iterator[str]:
        for source in self.sources:
            try:
                _ = source.files
            except FilesError as error:
                yield str(error)

    def rules(self) -> Iterator[str]:
        yield from overlong_rules(self.overlong, self.shortenings)
        yield from self._files_rules()
        yield from self._form_rules()
        weighted = [source.weight for source in self.sources if source.weight != 1.0]
        if self.mix == "size" and weighted:
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


def _mapped(reading: Reading) -> str:
    num = len(reading.columns)
    return f"{num} column{'s' * (num > 1)} mapped ({', '.join(reading.columns)})"


def held_out_advice(data: DataConfig, held_out: DataConfig | None, name: str) -> Iterator[str]:
    """Yield one sentence if evaluation prompts are built differently from training prompts and the
    recipe does not set this explicitly. ``name``: the held-out data's key in the recipe."""
    if held_out is None:
        return
    now, then = data.model_dump(), held_out.model_dump()
    for key in ("system_prompt", "prompt_template", "apply_chat_template"):
        set_here = key in data.model_fields_set and key in then
        if set_here and key not in held_out.model_fields_set and now[key] != then[key]:
            yield (
                f"data.{key} is set but {name}.{key} is not, so evaluation would use another "
                f"prompt than training; set {name}.{key} to the same value (or to null, if this "
                "is intended)"
            )


def _pattern_rules(pattern: str) -> Iterator[str]:
    try:
        groups = regex.compile(pattern).groups
    except regex.error as error:
        yield f"label_pattern={pattern!r} is not a regular expression: {error}; correct it"
        return
    if groups != 1:
        yield (
            f"label_pattern={pattern!r} has {groups} groups, but needs one around the label, such "
            "as '#### (.+)'; write other parentheses as (?:...)"
        )


class PromptDataConfig(DataConfig):
    """Prompts for rollouts and evaluation."""

    length_key: ClassVar[str] = "prompt_max_len"

    label_key: str = "label"
    """Column with the reference answer; may be absent. Environments fill ``label``."""
    label_pattern: str | None = None
    """Regular expression with one group that reads the label from ``label_key``, such as
    ``"#### (.+)"``; the last match counts. None: the column itself."""
    prompt_max_len: int = Field(1024, ge=1)
    """Maximum prompt tokens; see ``overlong``."""

    @property
    def row_keys(self) -> Keys:
        """Columns that the form of a row depends on."""
        own = self.prompt_template is not None or self.is_own("prompt_key")
        return Keys("prompts", self.form, self.prompt_key, own, ((self.prompt_key,),))

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        wanted = {"prompt_key": self.prompt_key if self.prompt_template is None else None}
        if self.label_pattern is not None:
            yield from _pattern_rules(self.label_pattern)
            wanted["label_key"] = self.label_key
        yield from missing_columns(self.files, wanted)
        yield from template_rules(self.prompt_template, self.files)


class SFTDataConfig(DataConfig):
    """Demonstrations: ``messages`` (chat), a prompt and a response, or plain text."""

    can_lose_end: ClassVar[bool] = True

    messages_key: str = "messages"
    """Column with chat messages; the loss is on every assistant turn. The default also accepts
    ``conversations`` (ShareGPT: ``from``, ``value``)."""
    prompt_key: str = "prompt"
    """Column with the prompt if a row has no messages."""
    response_key: str = "response"
    """Column with the response if a row has no messages."""
    text_key: str = "text"
    """Column with plain text (loss on all of it) if a row has no response."""
    train_on_prompt: bool = False
    """Also compute the loss on prompt tokens."""
    train_on_turns: Literal["all", "last"] = "all"
    """Assistant messages of a conversation that are trained on: all, or only the last. Messages
    with ``train: false`` or ``weight: 0`` never are."""
    use_tokens: bool = True
    """Train on a response's sampled token ids if the row has them (``response_tokens``, from
    generate) and they decode to its text. Its end is the sampled one; a truncated response gets no
    end token."""
    max_len: int = Field(2048, ge=2)
    """Maximum row tokens; see ``overlong``. An answer that lost its beginning or entire prompt is
    not trained on; rows without another answer are dropped."""

    @property
    def row_keys(self) -> Keys:
        """Columns that the form of a row depends on."""
        own = self.prompt_template is not None or self.is_own("prompt_key")
        own = own or bool(self._named_keys())
        exchange = (self.prompt_key, self.response_key)
        complete = ((self.messages_key,), exchange, (self.text_key,))
        return Keys(
            "demonstrations", self.form, self.prompt_key, own or bool(self._named_keys()), complete
        )

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        yield from template_rules(self.prompt_template, self._files_with(self.response_key))
        if self.train_on_prompt and self.train_on_turns == "last":
            yield (
                "train_on_turns=last has no effect with train_on_prompt=true, which trains on all "
                "tokens before the last answer; remove one of them"
            )
        named = self._named_keys()
        have = {path: columns_of(path, named.values()) for path in self.files}
        for field, key in named.items():
            known = [columns for columns in have.values() if columns is not None]
            if len(known) == len(have) and not any(key in columns for columns in known):
                yield from list(missing_columns(self.files, {field: key}))[:1]
        for path, columns in have.items():
            if columns is not None and named and not set(named.values()) & set(columns):
                yield from list(missing_columns([path], named))[:1]
        yield from self._without_effect()

    def _named_keys(self) -> dict[str, str]:
        """Return the columns to learn from that the recipe sets itself."""
        keys = {
            "messages_key": self.messages_key,
            "response_key": self.response_key,
            "text_key": self.text_key,
        }
        return {field: key for field, key in keys.items() if self.is_own(field)}

    def _files_with(self, key: str) -> list[str]:
        return [path for path in self.files if key in (columns_of(path, [key]) or ())]

    def _without_effect(self) -> Iterator[str]:
        """Yield an error for each setting that no row of the files uses, if the first rows of all
        files are of the same kind."""
        if not self.files or len(self.files) < len(self.sources):
            return
        kinds = {self._kind_of(path) for path in self.files}
        if kinds == {"text"} and self.apply_chat_template:
            yield (
                "apply_chat_template=true has no effect on plain text (column "
                f"{self.text_key!r}), which is used unchanged; remove it, or use a prompt and a "
                "response, or messages"
            )
        if len(kinds) == 1 and kinds <= {"text", "messages"} and self.prompt_template is not None:
            yield (
                f"prompt_template has no effect on rows of {' '.join(map(str, kinds))}: it "
                "builds the prompt of rows with a prompt and a response; remove it"
            )

    def _kind_of(self, path: str) -> str | None:
        """Return the kind of example that the first row of a file becomes."""
        row = first_row(path) or {}
        kinds = {self.messages_key: "messages", self.response_key: "response"}
        if not self.is_own("messages_key"):
            kinds[SHAREGPT_KEY] = "messages"
        kinds[self.text_key] = "text"
        return next((k for key, k in kinds.items() if nested_value(row, key) is not None), None)


class PreferenceDataConfig(DataConfig):
    """Pairs of a chosen and a rejected response to one prompt."""

    can_lose_end: ClassVar[bool] = True

    chosen_key: str = "chosen"
    """Column with the better response (text, or chat messages that follow the prompt)."""
    rejected_key: str = "rejected"
    """Column with the worse response."""
    margin_key: str | None = None
    """Column with the strength of the preference, a number (job rm only). None: no margins."""
    label_key: str | None = None
    """Single responses instead of pairs (loss kto only): column with true for liked responses, else
    false. None: pairs."""
    response_key: str = "response"
    """Column with a single response, text or messages (pairs: only if ``label_key`` is set)."""
    repeated_prompt: Literal["auto", "strip", "keep"] = "auto"
    """Responses (text) that begin with the entire prompt. strip: remove it. keep: part of the
    response. auto: strip if all of a source's first 100 rows repeat it (logged)."""
    use_tokens: bool = True
    """Train on sampled token ids if the row has them (``chosen_tokens``, ``rejected_tokens``,
    ``response_tokens``, from generate) and they decode to its text."""
    max_len: int = Field(2048, ge=2)
    """Maximum tokens of prompt + response; see ``overlong``."""

    @property
    def row_keys(self) -> Keys:
        """Columns that the form of a row depends on."""
        purpose: Purpose = "pairs" if self.label_key is None else "labeled"
        own = self.prompt_template is not None or self.is_own("prompt_key")
        pair = (self.chosen_key, self.rejected_key)
        complete: tuple[tuple[str, ...], ...] = ((self.prompt_key,),)
        if self.label_key is not None:
            own = own or self.is_own("response_key")
            return Keys(
                purpose, self.form, self.prompt_key, own, (complete[0] + (self.response_key,),)
            )
        return Keys(purpose, self.form, self.prompt_key, own, complete, pair)

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        yield from template_rules(self.prompt_template, self.files)
        if self.chosen_key == self.rejected_key:
            yield (
                f"chosen_key and rejected_key are both {self.chosen_key!r}; a pair needs two "
                "columns; set one of them to another column"
            )
        wanted = {
            "prompt_key": self.prompt_key if self.prompt_template is None else None,
            "margin_key": self.margin_key,
            "label_key": self.label_key,
            "response_key": self.response_key if self.label_key is not None else None,
        }
        yield from missing_columns(self.files, wanted)
        for key in ("response_key",) if self.label_key is None else ("chosen_key", "rejected_key"):
            if self.is_own(key):
                rows = "pairs" if self.label_key is None else "single responses with a label"
                yield (
                    f"{key}={vars(self)[key]!r} has no effect, because the rows are {rows} "
                    f"(label_key={'null' if self.label_key is None else self.label_key}); remove "
                    "it, or change label_key"
                )

    def missing_pairs(self, name: str) -> Iterator[str]:
        """Yield an error for each file without the columns of pairs, for readers that accept only
        pairs. ``name``: the data's key in the recipe."""
        wanted = {f"{name}.chosen_key": self.chosen_key, f"{name}.rejected_key": self.rejected_key}
        yield from missing_columns(self.files, wanted)

    def files_without_pairs(self) -> Iterator[str]:
        """Yield the paths of file sources that exist and have no two responses in a row."""
        for path in self.files:
            have = columns_of(path, (self.chosen_key, self.rejected_key))
            if have is not None and not {self.chosen_key, self.rejected_key} <= set(have):
                yield path
