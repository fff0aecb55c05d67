"""Where rows come from and how they become token ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from burnish.config.base import Node, PathText
from burnish.config.columns import columns_of, first_row, missing_columns
from burnish.config.templates import template_rules

SHAREGPT_KEY = "conversations"
"""The column that ShareGPT rows have in place of ``messages``."""


class FileSource(Node):
    """Rows of one file: .jsonl, .json (a list of objects), .csv or .parquet."""

    kind: Literal["file"] = "file"
    path: PathText
    """Path of the file. Relative paths are taken from the working directory."""
    name: str | None = None
    """Name in prompt ids and metrics. None: the file's stem."""
    weight: float = Field(1.0, gt=0)
    """Relative probability of drawing from this source when there are several."""


class HubSource(Node):
    """A HuggingFace dataset, by hub name or as a folder written by ``save_to_disk``."""

    kind: Literal["dataset"] = "dataset"
    path: PathText
    """Hub name, or folder."""
    subset: str | None = None
    """Configuration name of the dataset. None: the default."""
    split: str = "train"
    """Split to read."""
    name: str | None = None
    """Name in prompt ids and metrics. None: the last part of ``path``."""
    weight: float = Field(1.0, gt=0)
    """Relative probability of drawing from this source when there are several."""


class EnvironmentSource(Node):
    """Prompts made by an environment, which also scores the answers (reward kind
    ``environment``)."""

    kind: Literal["environment"] = "environment"
    environment: str = "reasoning_gym"
    """``reasoning_gym``, or ``module:Class`` of your own environment."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment: for reasoning_gym, ``dataset`` (the task's name) and its
    parameters."""
    size: int = Field(1000, ge=1)
    """Number of distinct items."""
    seed: int = 0
    """Seed of the items. Use another one for evaluation."""
    name: str | None = None
    """Name in prompt ids and metrics. None: the environment's name for itself."""
    weight: float = Field(1.0, gt=0)
    """Relative probability of drawing from this source when there are several."""


def _path_to_file_source(value: Any) -> Any:
    if isinstance(value, str):
        return {"kind": "file", "path": value}
    if isinstance(value, dict) and "kind" not in value:
        return {"kind": "file", **value}
    return value


SourceConfig = Annotated[
    Annotated[FileSource | HubSource | EnvironmentSource, Field(discriminator="kind")],
    BeforeValidator(_path_to_file_source),
]
"""A source of rows. A plain string is the path of a file."""

Overlong = Literal["error", "truncate_left", "drop"]


class DataConfig(Node):
    """Fields that every kind of data has."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    """One or more sources; several are mixed by their weights."""
    system_prompt: str | None = None
    """System message put before every conversation. None: none."""
    tools_key: str | None = "tools"
    """Column with the tools of a conversation (a list of descriptions, or its JSON text), which the
    chat template renders. May be absent; a default column that holds something else is left alone.
    None: no tools."""
    shuffle: bool = True
    """Reshuffle each source in every epoch (by ``seed``). Off: file order."""
    mix: Literal["weight", "size"] = "weight"
    """Several sources. weight: each draw chooses a source by its ``weight``, so rows of a small
    source come more often. size: the rows of all sources are shuffled together, and each comes once
    per epoch."""
    overlong: Overlong = "error"
    """What happens to a row over the length limit: stop, cut tokens off its left end, or leave it
    out (both counted and reported)."""

    @property
    def files(self) -> list[str]:
        """Paths of the sources that are files."""
        return [source.path for source in self.sources if isinstance(source, FileSource)]

    def rules(self) -> Iterator[str]:
        weighted = [source.weight for source in self.sources if source.weight != 1.0]
        if self.mix == "size" and weighted:
            yield (
                f"mix=size draws all rows equally often, and a source has weight={weighted[0]:g}; "
                "remove the weights, or use mix=weight"
            )
        if self.is_own("tools_key"):
            yield from missing_columns(self.files, {"tools_key": self.tools_key})


def held_out_advice(data: DataConfig, held_out: DataConfig | None, name: str) -> Iterator[str]:
    """One sentence if prompts are made in another way for evaluation than for training, and the
    recipe does not say so. ``name``: of the held-out data in the recipe."""
    if held_out is None:
        return
    now, then = data.model_dump(), held_out.model_dump()
    for key in ("system_prompt", "prompt_template", "apply_chat_template"):
        set_here = key in data.model_fields_set and key in then
        if set_here and key not in held_out.model_fields_set and now[key] != then[key]:
            yield (
                f"data.{key} is set and {name}.{key} is not, so evaluation measures another prompt "
                f"than training uses; set {name}.{key} to the same (or to null, if it is meant)"
            )


class PromptDataConfig(DataConfig):
    """Prompts for rollouts and for evaluation."""

    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages. Environments fill
    ``prompt``."""
    label_key: str = "label"
    """Column with the reference answer; may be absent. Environments fill ``label``."""
    prompt_template: str | None = None
    """Python format string over the row's columns, e.g. ``"Question: {prompt}\\nAnswer:"``. None:
    the column as it is."""
    apply_chat_template: bool = False
    """Wrap a string prompt as a user message in the chat template (lists of messages always
    are)."""
    prompt_max_len: int = Field(1024, ge=1)
    """Longest prompt in tokens; ``overlong`` says what happens beyond."""

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        wanted = {"prompt_key": self.prompt_key if self.prompt_template is None else None}
        yield from missing_columns(self.files, wanted)
        yield from template_rules(self.prompt_template, self.files)


class SFTDataConfig(DataConfig):
    """Demonstrations: ``messages`` (chat), or a prompt and a response, or plain text."""

    messages_key: str = "messages"
    """Column with a list of chat messages; the loss is on every assistant turn. Unless it is set,
    a column ``conversations`` (ShareGPT: ``from``, ``value``) is taken as well."""
    prompt_key: str = "prompt"
    """Column with the prompt where there are no messages."""
    response_key: str = "response"
    """Column with the response where there are no messages."""
    text_key: str = "text"
    """Column with plain text (loss on all of it) where there is no response."""
    prompt_template: str | None = None
    """Python format string over the row's columns that makes the prompt. None: the column as it
    is."""
    apply_chat_template: bool = False
    """Wrap prompt and response as a user and an assistant message (``messages`` always are)."""
    train_on_prompt: bool = False
    """Take the loss on prompt tokens too."""
    use_tokens: bool = True
    """Learn the token ids that were sampled for a response, if the row has them (column
    ``response_tokens``: rows of the job generate) and they decode to its text. Its end is then the
    sampled one; a response that was cut off gets no end token."""
    max_len: int = Field(2048, ge=2)
    """Longest row in tokens; ``overlong`` says what happens beyond. An answer that loses its
    beginning or all of its prompt is not trained on; a row without another answer is left out."""

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        yield from template_rules(self.prompt_template, self._files_with(self.response_key))
        named = self._named_keys()
        have = {path: columns_of(path) for path in self.files}
        for field, key in named.items():
            known = [columns for columns in have.values() if columns is not None]
            if len(known) == len(have) and not any(key in columns for columns in known):
                yield from list(missing_columns(self.files, {field: key}))[:1]
        for path, columns in have.items():
            if columns is not None and named and not set(named.values()) & set(columns):
                yield from list(missing_columns([path], named))[:1]
        yield from self._without_effect()

    def _named_keys(self) -> dict[str, str]:
        """The columns to learn from that the recipe names itself."""
        keys = {
            "messages_key": self.messages_key,
            "response_key": self.response_key,
            "text_key": self.text_key,
        }
        return {field: key for field, key in keys.items() if self.is_own(field)}

    def _files_with(self, key: str) -> list[str]:
        return [path for path in self.files if key in (columns_of(path) or ())]

    def _without_effect(self) -> Iterator[str]:
        """Settings that no row of the files reads, if their first rows are all of one kind."""
        if not self.files or len(self.files) < len(self.sources):
            return
        kinds = {self._kind_of(path) for path in self.files}
        if kinds == {"text"} and self.apply_chat_template:
            yield (
                f"apply_chat_template=true with plain text (column {self.text_key!r}), which is "
                "learned as it is: the setting has no effect; remove it, or give a prompt and a "
                "response, or messages"
            )
        if len(kinds) == 1 and kinds <= {"text", "messages"} and self.prompt_template is not None:
            yield (
                f"prompt_template makes the prompt of rows with a prompt and a response, and these "
                f"rows are {' '.join(map(str, kinds))}: the setting has no effect; remove it"
            )

    def _kind_of(self, path: str) -> str | None:
        """Return the kind of example that the first row of a file becomes."""
        row = first_row(path) or {}
        kinds = {self.messages_key: "messages", self.response_key: "response"}
        if not self.is_own("messages_key"):
            kinds[SHAREGPT_KEY] = "messages"
        kinds[self.text_key] = "text"
        return next((kind for key, kind in kinds.items() if row.get(key) is not None), None)


class PreferenceDataConfig(DataConfig):
    """Pairs: a chosen and a rejected response to one prompt."""

    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    chosen_key: str = "chosen"
    """Column with the better response (a string, or chat messages that follow the prompt)."""
    rejected_key: str = "rejected"
    """Column with the worse response."""
    margin_key: str | None = None
    """Column with a number that says by how much (reward models). None: no margins."""
    label_key: str | None = None
    """Single responses instead of pairs (job preference with loss kto): column that is true where
    somebody liked the response, false where not. None: pairs."""
    response_key: str = "response"
    """Column with the response where there is a ``label_key``."""
    prompt_template: str | None = None
    """Python format string over the row's columns that makes the prompt. None: the column as it
    is."""
    apply_chat_template: bool = False
    """Wrap prompt and responses as user and assistant messages."""
    repeated_prompt: Literal["auto", "strip", "keep"] = "auto"
    """Responses (text) that begin with the whole prompt. strip: take it off. keep: it belongs to
    the response. auto: strip, if all of a source's first 100 rows repeat it; the log says so."""
    use_tokens: bool = True
    """Learn the token ids that were sampled for a response, if the row has them (columns
    ``chosen_tokens``, ``rejected_tokens``, ``response_tokens``: rows of the job generate) and they
    decode to its text."""
    max_len: int = Field(2048, ge=2)
    """Longest prompt + response in tokens; ``overlong`` says what happens beyond."""

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        yield from template_rules(self.prompt_template, self.files)
        if self.chosen_key == self.rejected_key:
            yield (
                f"chosen_key and rejected_key are both {self.chosen_key!r}; a pair needs two "
                "columns"
            )
        wanted = {
            "prompt_key": self.prompt_key if self.prompt_template is None else None,
            "margin_key": self.margin_key,
            "label_key": self.label_key,
            "response_key": self.response_key if self.label_key is not None else None,
        }
        yield from missing_columns(self.files, wanted)

    def missing_pairs(self, name: str) -> Iterator[str]:
        """One sentence for each file without a column of pairs, for what reads nothing else.
        ``name``: what the recipe calls these data."""
        wanted = {f"{name}.chosen_key": self.chosen_key, f"{name}.rejected_key": self.rejected_key}
        yield from missing_columns(self.files, wanted)

    def files_without_pairs(self) -> Iterator[str]:
        """Paths of the sources that are files, are there, and have no two responses in a row."""
        for path in self.files:
            have = columns_of(path)
            if have is not None and not {self.chosen_key, self.rejected_key} <= set(have):
                yield path
