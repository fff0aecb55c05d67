"""Config of single responses with scores or a class: the data of regression and classification
reward models (job ``rm``)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from burnish.config.columns import finite_number, missing_columns, without_fraction
from burnish.config.forms import Keys
from burnish.config.templates import template_rules
from burnish.data.config import DataConfig, RewardData
from burnish.data_files.reading import columns_of, first_row

ATTRIBUTES = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
"""Scores of HelpSteer; those that a row has are read together."""
SCORES = ("score", "rating")
LABELS = ("label", "class", "passed", "correct")
PASS = "pass"
"""Name of the output of a binary classifier, and of its second class."""
FAIL = "fail"

RatedKind = Literal["scores", "classes"]
_MEANING: Mapping[str, str] = {"scores": "regression", "classes": "classification"}
_KEY: Mapping[str, str] = {"scores": "score_keys", "classes": "label_key"}
_ANSWERS = ("response", "output", "completion", "messages", "conversations", "conversation")


@dataclass(frozen=True)
class Target:
    """Columns of a row from which a reward model can learn a score or a class."""

    kind: RatedKind
    columns: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} ({', '.join(self.columns)})"


def targets_of(row: Mapping[str, Any]) -> list[Target]:
    """Return the targets that a row of a file may have, by the names and types of its columns.

    >>> [str(t) for t in targets_of({"prompt": "Hi", "score": 0.5, "label": "good"})]
    ['scores (score)', 'classes (label)']
    """
    attributes = tuple(name for name in ATTRIBUTES if _is_number(row.get(name)))
    targets = [Target("scores", attributes)] if attributes else []
    targets += [Target("scores", (name,)) for name in SCORES if _is_number(row.get(name))]
    if _is_number(row.get("label")):
        targets.append(Target("scores", ("label",)))
    targets += [Target("classes", (name,)) for name in LABELS if _is_class(row.get(name))]
    return targets


def recognized_kind(data: Mapping[str, Any]) -> str:
    """Return the kind of a data section without ``kind``: by its keys, else by the first row of its
    files. Rows that are not recognized are pairs. Raises ValueError if the rows have several
    kinds."""
    if "score_keys" in data or "classes" in data:
        return "scores" if "score_keys" in data else "classes"
    if {"chosen_key", "rejected_key", "label_key"} & set(data):
        return "pairs"
    sources = data.get("sources")
    for source in sources if isinstance(sources, list | tuple) else ():
        path = source.get("path") if isinstance(source, Mapping) else source
        row = first_row(path) if isinstance(path, str) else None
        if row is None:
            continue
        answers = (data.get("response_key", "response"), *_ANSWERS)
        if "chosen" in row or not any(row.get(name) is not None for name in answers):
            return "pairs"
        targets = targets_of(row)
        if len({target.kind for target in targets}) > 1:
            raise ValueError(f"{path}: {_several(targets)}")
        return targets[0].kind if targets else "pairs"
    return "pairs"


def _several(targets: list[Target]) -> str:
    settings = dict.fromkeys(
        f"kind={t.kind} and {_KEY[t.kind]}={_value(t)} for {_MEANING[t.kind]}" for t in targets
    )
    return (
        f"the rows have several readings: {' or '.join(map(str, targets))}; set "
        f"{', or '.join(settings)}"
    )


def _value(target: Target) -> str:
    joined = ", ".join(target.columns)
    return joined if target.kind == "classes" else f"[{joined}]"


class RatedDataConfig(DataConfig, RewardData):
    """Prompts with one response each, which has scores or a class."""

    has_reader: ClassVar[bool] = True
    weighs_outputs: ClassVar[bool] = True
    own_metrics: ClassVar[tuple[str, ...]]
    """Metrics of all outputs together."""

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
        return {"response_key": self.response_key}

    @property
    def answer_key(self) -> str:
        return self.response_key

    @property
    def row_keys(self) -> Keys:
        """Columns that the form of a row depends on."""
        is_customized = self.prompt_template is not None or self.is_own("prompt_key")
        is_customized = is_customized or self.is_own("response_key")
        complete = ((self.prompt_key, self.response_key),)
        return Keys("responses", self.form, self.prompt_key, is_customized, complete)

    @property
    @abstractmethod
    def kind_of_rows(self) -> RatedKind:
        """Kind of the target."""

    @property
    @abstractmethod
    def own_columns(self) -> tuple[str, ...]:
        """Columns of the target that the recipe sets; empty: recognized by the first row."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of the model's outputs, in order: attributes or classes. Empty: unknown."""

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.names

    @property
    def default_weights(self) -> tuple[float, ...] | None:
        return (1 / len(self.names),) * len(self.names) if self.names else None

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the target; empty if they are neither set nor recognized."""
        targets = self._found()
        return self.own_columns or (targets[0].columns if len(targets) == 1 else ())

    def form_lines(self) -> list[tuple[str, str, str]]:
        """Return lines (name, value, origin) of the batch table: the form of each file, and the
        columns of the target."""
        num, listed = len(self.columns), ", ".join(self.columns)
        mapped = f"{num} column{'s' * (num > 1)} mapped ({listed}); outputs: " + ", ".join(
            self.names
        )
        name = f"{self.kind_of_rows} ({_MEANING[self.kind_of_rows]})"
        lines = [("data form", name, f"{path}: {mapped}") for path in self.all_files]
        return [*super().form_lines(), *lines]

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        yield from template_rules(self.prompt_template, self.files)
        columns = {
            "prompt_key": self.prompt_key if self.prompt_template is None else None,
            "response_key": self.response_key,
        }
        yield from missing_columns(self.files, columns)
        yield from self._target_rules()

    def metrics(self, *, weighted: bool) -> Iterator[str]:
        yield from self.own_metrics
        if weighted:
            yield from ("score_mean", "score_std")
        yield from self._metrics_of_outputs()

    def _metrics_of_outputs(self) -> Iterable[str]:
        if len(self.names) < 2:
            return ()
        return (f"{metric}_{name}" for metric in self.own_metrics[1:] for name in self.names)

    def model_rules(
        self, held_out: Mapping[str, Any], loss: str | None, weights: Mapping[str, float] | None
    ) -> Iterator[str]:
        yield from rated_rules(self, held_out, weights)

    def _target_rules(self) -> Iterator[str]:
        key = _KEY[self.kind_of_rows]
        targets = self._found()
        for column in self.own_columns:
            yield from missing_columns(self.all_files, {key: column})
        if self.own_columns:
            return
        if len(targets) > 1:
            yield _several(targets)
            return
        if not targets:
            known = (*ATTRIBUTES, *SCORES) if self.kind_of_rows == "scores" else LABELS
            have = next((columns_of(p) for p in self.all_files if columns_of(p)), None)
            listed = "" if have is None else f" (its columns are {', '.join(have)})"
            row = next(filter(None, map(first_row, self.all_files)), {})
            if unusable := [f"{name}={row[name]!r:.40}" for name in known if name in row]:
                kind = "a number" if self.kind_of_rows == "scores" else "a class"
                yield (
                    f"{key} is not set, and the first row has {', '.join(unusable)}, which is not "
                    f"{kind}; correct or drop such rows, or set {key}"
                )
                return
            yield (
                f"{key} is not set, and no readable file has one of the columns "
                f"{', '.join(known)}{listed}; set {key} to the column of the "
                + ("label" if key == "label_key" else "score, or a list of columns")
            )
            return
        for column in targets[0].columns:
            yield from missing_columns(self.all_files, {key: column})

    def _found(self) -> list[Target]:
        """Return the targets of this kind in the first row of the first readable file."""
        for path in self.all_files:
            row = first_row(path)
            if row is not None:
                return [t for t in targets_of(row) if t.kind == self.kind_of_rows]
        return []


class ScoresDataConfig(RatedDataConfig):
    """Responses with one or more numeric scores, as in HelpSteer."""

    losses: ClassVar[tuple[str, ...]] = ("mse", "huber")
    own_metrics: ClassVar[tuple[str, ...]] = ("loss", "mse", "mae", "pearson", "spearman")

    kind: Literal["scores"]
    """Trains a regression reward model."""
    score_keys: tuple[str, ...] | None = None
    """Columns with numbers, one output of the model each. None: the attributes of HelpSteer that
    the first row has, else ``score`` or ``rating``."""

    @property
    def kind_of_rows(self) -> RatedKind:
        return "scores"

    @property
    def own_columns(self) -> tuple[str, ...]:
        return self.score_keys or ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.columns

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        keys = self.score_keys
        if keys is not None and (not keys or len(set(keys)) < len(keys)):
            yield (
                f"score_keys={list(keys)} must name one or more different columns, one for each "
                "output of the model"
            )


def _without_booleans(names: Any) -> Any:
    if isinstance(names, list | tuple) and any(isinstance(name, bool) for name in names):
        raise ValueError(
            "has true or false, as YAML reads yes, no, on and off; write names in quotes: "
            '["yes", "no"]'
        )
    return names


class ClassesDataConfig(RatedDataConfig):
    """Responses with a class, or with pass or fail."""

    losses: ClassVar[tuple[str, ...]] = ("cross_entropy",)
    own_metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy")

    kind: Literal["classes"]
    """Trains a classification reward model."""
    label_key: str | None = None
    """Column with the class. None: ``label``, ``class``, ``passed`` or ``correct``, whichever the
    first row has."""
    classes: Annotated[tuple[str | int, ...] | None, BeforeValidator(_without_booleans)] = None
    """Names of the classes in the order of the outputs. An integer label is a name, or the index if
    no name is an integer. None: pass or fail (true/false, 1/0, pass/fail, yes/no, good/bad), one
    output, whose logit is the reward."""

    @property
    def kind_of_rows(self) -> RatedKind:
        return "classes"

    @property
    def own_columns(self) -> tuple[str, ...]:
        return () if self.label_key is None else (self.label_key,)

    @property
    def default_weights(self) -> tuple[float, ...] | None:
        return super().default_weights if len(self.names) == 1 else None

    @property
    def names(self) -> tuple[str, ...]:
        return (PASS,) if self.classes is None else tuple(map(str, self.classes))

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        num = len(set(self.names))
        if self.classes is not None and (num < 2 or num < len(self.names)):
            yield (
                f"classes={list(self.names)} must contain two or more different names; remove it "
                "for labels that are true or false"
            )

    def _metrics_of_outputs(self) -> Iterable[str]:
        return (f"accuracy_{name}" for name in class_names(self))


def class_names(data: ClassesDataConfig) -> tuple[str, ...]:
    """Return the names of the classes in metrics, in the order of the labels: ``fail`` and ``pass``
    for a binary classifier."""
    return (FAIL, PASS) if data.classes is None else data.names


def rated_rules(
    data: RatedDataConfig,
    held_out: Mapping[str, RatedDataConfig],
    weights: Mapping[str, float] | None,
) -> Iterator[str]:
    """Yield an error for each setting of the outputs that does not fit the rows. ``held_out``:
    evaluation sections by their place in the recipe."""
    for name, rows in held_out.items():
        if data.names and rows.names != data.names:
            yield (
                f"{name} has the outputs {', '.join(rows.names) or '(unknown)'}, but data has "
                f"{', '.join(data.names)}; set the same {_KEY[data.kind_of_rows]} and classes in "
                "both"
            )
    if weights is None or not data.names:
        return
    unknown = [name for name in weights if name not in data.names]
    if unknown:
        yield (
            f"reward_weights has a weight for {unknown[0]!r}, but the outputs of the model are "
            f"{', '.join(data.names)}; use these names"
        )
    if not any(weights.values()):
        yield "reward_weights gives every output the weight 0, so rewards would all be 0; set one"


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and finite_number(value) is not None


def _is_class(value: Any) -> bool:
    value = without_fraction(value)
    return isinstance(value, bool | int | str) and (
        not isinstance(value, str) or not _is_number(value) or float(value).is_integer()
    )
