"""Config of demonstrations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from burnish.config.columns import missing_columns
from burnish.config.forms import SHAREGPT, Keys
from burnish.config.templates import template_rules
from burnish.data.config import DataConfig
from burnish.data_files.reading import columns_of, first_row, nested_value

SHAREGPT_KEY = SHAREGPT
"""Column of ShareGPT rows that replaces ``messages``."""


class SFTDataConfig(DataConfig):
    """Demonstrations: ``messages`` (chat), a prompt and a response, or plain text."""

    can_lose_end: ClassVar[bool] = True
    has_reader: ClassVar[bool] = True

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
    """Train on a response's sampled token ids if the row has them (``response_tokens``, or
    ``tokens`` of an episode, from generate) and they are those of its text, or of its messages and
    tools. Its end is the sampled one; a truncated response gets no end token."""
    max_len: int = Field(2048, ge=2)
    """Maximum row tokens; see ``overlong``. An answer that lost its beginning or entire prompt is
    not trained on; rows without another answer are dropped."""

    @property
    def conversation_key(self) -> str:
        return self.messages_key

    @property
    def answer_key(self) -> str:
        return self.response_key

    @property
    def replaced_keys(self) -> tuple[str, ...]:
        return (self.prompt_key, self.messages_key, self.response_key, self.text_key)

    @property
    def row_keys(self) -> Keys:
        """Columns that the form of a row depends on."""
        is_customized = (
            self.prompt_template is not None
            or self.is_own("prompt_key")
            or bool(self._named_keys())
        )
        exchange = (self.prompt_key, self.response_key)
        complete = ((self.messages_key,), exchange, (self.text_key,))
        return Keys(
            "demonstrations",
            self.form,
            self.prompt_key,
            is_customized,
            complete,
        )

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        key = self.response_key
        files = [path for path in self.files if key in (columns_of(path, [key]) or ())]
        yield from template_rules(self.prompt_template, files)
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
