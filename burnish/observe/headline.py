"""The name of a run's model and the metrics that summarize it, for reports and tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_UNNAMED = frozenset({"export", "model", "hf", "final", "policy", "checkpoint", "merged"})
"""Names of folders that do not tell one model from another."""


@dataclass(frozen=True)
class Headline:
    """A metric that summarizes a run."""

    metric: str
    label: str
    is_fraction: bool = False
    unless: tuple[str, ...] = ()
    """Metrics whose presence hides it."""

    def shown(self, value: float) -> str:
        """Return a value as text.

        >>> Headline("eval/pass@1", "Held-out pass@1", True).shown(0.5)
        '50.0%'
        """
        if self.is_fraction:
            return f"{value:.1%}"
        if abs(value) >= 1e9:
            return f"{value:.3g}"
        return f"{value:,.3f}" if abs(value) < 1000 else f"{value:,.0f}"


_HEADLINES = (
    Headline("eval/pass@1", "Held-out pass@1", is_fraction=True),
    Headline("reward/mean", "Mean reward"),
    Headline("generate/kept_reward", "Mean reward of the rows"),
    Headline("generate/margin", "Mean margin"),
    Headline("eval/accuracy", "Held-out accuracy", is_fraction=True),
    Headline("eval/loss", "Held-out loss"),
    Headline("train/loss", "Training loss", unless=("reward/mean", "eval/pass@1")),
)

HEADLINES = tuple(headline.metric for headline in _HEADLINES)
"""Metrics that summarize runs, the most important one first."""


def headlines(metrics: Collection[str]) -> list[Headline]:
    """Return the headlines among the metrics of a run, the most important one first."""
    return [
        headline
        for headline in _HEADLINES
        if headline.metric in metrics and not any(other in metrics for other in headline.unless)
    ]


def model_title(recipe: Mapping[str, Any], run_dir: Path) -> str:
    """Return the name of a run's model: the last part of its path, with the part before it if that
    tells more (runs/sft/export)."""
    model = recipe.get("model")
    if not isinstance(model, Mapping):
        return run_dir.resolve().name
    if model.get("path"):
        parts = [part for part in Path(str(model["path"])).parts if part != "/"]
        is_unnamed = (
            parts[-1:] and parts[-1].lower() in _UNNAMED and parts[-2:-1] not in ([], [".."])
        )
        return "/".join(parts[-2:] if is_unnamed else parts[-1:]) or str(model["path"])
    scratch = model.get("scratch")
    if isinstance(scratch, Mapping):
        layers, width = scratch.get("num_layers", "?"), scratch.get("hidden_size", "?")
        return f"From-scratch model, {layers} layers of width {width}"
    return run_dir.resolve().name
