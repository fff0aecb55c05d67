"""Where rows come from and how they become token ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from burnish.config.base import Node, PathText
from burnish.config.columns import columns_of, missing_columns


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
    shuffle: bool = True
    """Shuffle each source anew in every epoch (by ``seed``). Off: file order."""
    overlong: Overlong = "error"
    """What happens to a row over the length limit: stop, cut tokens off its left end, or leave it
    out (both counted and reported)."""

    @property
    def files(self) -> list[str]:
        """Paths of the sources that are files."""
        return [source.path for source in self.sources if isinstance(source, FileSource)]


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
        wanted = {"prompt_key": self.prompt_key if self.prompt_template is None else None}
        yield from missing_columns(self.files, wanted)


class SFTDataConfig(DataConfig):
    """Demonstrations: ``messages`` (chat), or a prompt and a response, or plain text."""

    messages_key: str = "messages"
    """Column with a list of chat messages; the loss is on every assistant turn."""
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
    max_len: int = Field(2048, ge=2)
    """Longest row in tokens; ``overlong`` says what happens beyond."""


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
    max_len: int = Field(2048, ge=2)
    """Longest prompt + response in tokens; ``overlong`` says what happens beyond."""

    def rules(self) -> Iterator[str]:
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
