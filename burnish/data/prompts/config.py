"""Config of prompts: for rollouts and evaluation, and for the job ``generate``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import regex
from pydantic import Field

from burnish.config.columns import missing_columns
from burnish.config.forms import Keys
from burnish.config.templates import template_rules
from burnish.data.config import DataConfig, Overlong


class PromptDataConfig(DataConfig):
    """Prompts for rollouts and evaluation."""

    length_key: ClassVar[str] = "prompt_max_len"
    is_trained: ClassVar[bool] = False

    label_key: str = "label"
    """Column with the reference answer; may be absent. Environments fill ``label``."""
    label_pattern: str | None = None
    """Regular expression with one group that reads the label from ``label_key``, such as
    ``"#### (.+)"``; the last match counts. None: the column itself."""
    prompt_max_len: int = Field(1024, ge=1)
    """Maximum prompt tokens; see ``overlong``."""

    @property
    def reference_key(self) -> str:
        return self.label_key

    @property
    def reference_pattern(self) -> str | None:
        return self.label_pattern

    @property
    def row_keys(self) -> Keys:
        """Columns that the form of a row depends on."""
        is_customized = self.prompt_template is not None or self.is_own("prompt_key")
        return Keys("prompts", self.form, self.prompt_key, is_customized, ((self.prompt_key,),))

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        columns = {"prompt_key": self.prompt_key if self.prompt_template is None else None}
        if self.label_pattern is not None:
            pattern = self.label_pattern
            try:
                groups = regex.compile(pattern).groups
            except regex.error as error:
                yield f"label_pattern={pattern!r} is not a regular expression: {error}; correct it"
            else:
                if groups != 1:
                    yield (
                        f"label_pattern={pattern!r} has {groups} groups, but needs one around the "
                        "label, such as '#### (.+)'; write other parentheses as (?:...)"
                    )
            columns["label_key"] = self.label_key
        yield from missing_columns(self.files, columns)
        yield from template_rules(self.prompt_template, self.files)


class GenerationDataConfig(PromptDataConfig):
    """Prompts that are copied to the output."""

    can_lose_start: ClassVar[bool] = False
    reads_in_order: ClassVar[bool] = True

    overlong: Overlong = "error"
    """Prompt over the length limit: stop with an error, or drop it (counted). The output contains
    the prompts, so they are not truncated."""
