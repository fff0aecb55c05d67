"""Config of prompts with a response each, for the job ``score``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from burnish.config.columns import missing_columns
from burnish.config.forms import Keys
from burnish.data.prompts.config import PromptDataConfig


class ResponseDataConfig(PromptDataConfig):
    """Prompts with a response each, such as the rows written by ``generate``."""

    can_lose_start: ClassVar[bool] = False
    reads_in_order: ClassVar[bool] = True

    response_key: str = "response"
    """Column with the response, a string."""
    finish_reason_key: str | None = "finish_reason"
    """Column with ``stop``, ``length``, ``aborted`` or an engine's word. Default column absent:
    ``stop``."""

    @property
    def answer_key(self) -> str:
        return self.response_key

    @property
    def row_keys(self) -> Keys:
        """Columns that the form of a row depends on."""
        is_customized = super().row_keys.is_customized or self.is_own("response_key")
        complete = ((self.prompt_key, self.response_key),)
        return Keys("responses", self.form, self.prompt_key, is_customized, complete)

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        columns: dict[str, str | None] = {"response_key": self.response_key}
        if self.is_own("finish_reason_key"):
            columns["finish_reason_key"] = self.finish_reason_key
        yield from missing_columns(self.files, columns)
