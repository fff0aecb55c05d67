"""Run folders of earlier versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def save_with_older_keys(run_dir: Path) -> None:
    """Rewrite the saved recipe of a run as a version without sections for the keys that act only
    with another one would have saved it: with all of these keys, at their defaults."""
    path = run_dir / "config.yaml"
    recipe: dict[str, Any] = yaml.safe_load(path.read_text())
    _side_by_side(recipe.get("rollout"), "asynchronous", max_staleness=None, run_ahead=1,
                  oversample=1.0, in_flight="recompute", partial=False)  # fmt: skip
    _side_by_side(recipe.get("shaping"), "overlong", overlong_buffer_len=0, overlong_penalty=1.0)
    _side_by_side(recipe.get("train"), "lr_scheduler", lr_scheduler="constant", min_lr_ratio=0.1,
                  lr_power=1.0, lr_decay_ratio=0.1, lr_decay_shape="linear")  # fmt: skip
    for source in (recipe.get("data") or {}).get("sources", ()):
        _side_by_side(source, "streaming", streaming=False, shuffle_buffer=1000)
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))


def _side_by_side(section: dict[str, Any] | None, name: str, **older: Any) -> None:
    if section is not None and name in section:
        del section[name]
        section |= older
