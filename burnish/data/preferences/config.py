"""Config of pairs of responses, and of single responses with a label."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from burnish.config.columns import missing_columns
from burnish.config.forms import Keys, Purpose
from burnish.config.templates import template_rules
from burnish.data.config import DataConfig, RewardData
from burnish.data_files.reading import columns_of


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
    """Train on sampled token ids (``response_tokens``, ``chosen_tokens``, ``rejected_tokens``, from
    generate) if they decode to its text; job rm: if rewards read them."""
    max_len: int = Field(2048, ge=2)
    """Maximum tokens of prompt + response; see ``overlong``."""

    @property
    def content_keys(self) -> Mapping[str, str]:
        if self.label_key is not None:
            return {"response_key": self.response_key}
        return {"chosen_key": self.chosen_key, "rejected_key": self.rejected_key}

    @property
    def answer_key(self) -> str | None:
        return None if self.label_key is None else self.response_key

    @property
    def pair_keys(self) -> tuple[str, ...]:
        return (self.chosen_key, self.rejected_key) if self.label_key is None else ()

    @property
    def row_keys(self) -> Keys:
        """Columns that the form of a row depends on."""
        purpose: Purpose = "pairs" if self.label_key is None else "labeled"
        is_customized = self.prompt_template is not None or self.is_own("prompt_key")
        pair = (self.chosen_key, self.rejected_key)
        complete: tuple[tuple[str, ...], ...] = ((self.prompt_key,),)
        if self.label_key is not None:
            is_customized = is_customized or self.is_own("response_key")
            return Keys(
                purpose,
                self.form,
                self.prompt_key,
                is_customized,
                (complete[0] + (self.response_key,),),
            )
        return Keys(purpose, self.form, self.prompt_key, is_customized, complete, pair)

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        yield from template_rules(self.prompt_template, self.files)
        if self.chosen_key == self.rejected_key:
            yield (
                f"chosen_key and rejected_key are both {self.chosen_key!r}; a pair needs two "
                "columns; set one of them to another column"
            )
        columns = {
            "prompt_key": self.prompt_key if self.prompt_template is None else None,
            "margin_key": self.margin_key,
            "label_key": self.label_key,
            "response_key": self.response_key if self.label_key is not None else None,
        }
        yield from missing_columns(self.files, columns)
        for key in ("response_key",) if self.label_key is None else ("chosen_key", "rejected_key"):
            if self.is_own(key):
                rows = "pairs" if self.label_key is None else "single responses with a label"
                yield (
                    f"{key}={self.value_of(key)!r} has no effect, because the rows are {rows} "
                    f"(label_key={'null' if self.label_key is None else self.label_key}); remove "
                    "it, or change label_key"
                )

    def missing_pairs(self, name: str) -> Iterator[str]:
        """Yield an error for each file without the columns of pairs, for readers that accept only
        pairs. ``name``: the data's key in the recipe."""
        columns = {f"{name}.chosen_key": self.chosen_key, f"{name}.rejected_key": self.rejected_key}
        yield from missing_columns(self.files, columns)

    def files_without_pairs(self) -> Iterator[str]:
        """Yield the paths of file sources that exist and have no two responses in a row."""
        for path in self.files:
            have = columns_of(path, (self.chosen_key, self.rejected_key))
            if have is not None and not {self.chosen_key, self.rejected_key} <= set(have):
                yield path


class PairsDataConfig(PreferenceDataConfig, RewardData):
    """Pairs of a chosen and a rejected response to one prompt."""

    losses: ClassVar[tuple[str, ...]] = ("bradley_terry", "log_exp")
    rows_per_unit: ClassVar[int] = 2

    kind: Literal["pairs"] = "pairs"
    """Trains a reward model that scores entire responses."""

    def metrics(self, *, weighted: bool) -> Iterable[str]:
        return ("loss", "accuracy", "score_margin", "score_mean", "score_std")

    def loss_problem(self, loss: str) -> str | None:
        if loss != "process":
            return None
        return (
            "loss=process needs a label for every step, which data.kind=pairs does not have; use "
            "data.kind=steps"
        )

    def model_rules(
        self, held_out: Mapping[str, Any], loss: str | None, weights: Mapping[str, float] | None
    ) -> Iterator[str]:
        for name, rows in {"data": self, **held_out}.items():
            yield from rows.section_rules(name, loss)

    def section_rules(self, name: str, loss: str | None) -> Iterator[str]:
        """Yield an error for each setting of the section at ``name`` that does not fit ``loss``."""
        yield from self.missing_pairs(name)
        if self.label_key is not None:
            yield (
                f"{name}.label_key={self.label_key} means that rows are single responses, but a "
                "reward model learns from pairs unless data.kind says otherwise; remove it, or set "
                "data.kind=classes to train a classifier of pass and fail"
            )
        if loss == "log_exp" and self.margin_key is not None:
            yield (
                f"{name}.margin_key={self.margin_key} has no effect with loss=log_exp, which has "
                "no margin; remove it, or use bradley_terry"
            )
