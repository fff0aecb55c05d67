"""Small groups to score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from burnish.types import Group, Prompt, Sample


@pytest.fixture
def make_group() -> Callable[..., Group]:
    """``make_group(3, ["a", "b"], label=...)``: prompt ``q:3`` with these responses."""

    def make(i: int, responses: list[str], *, finish: str = "stop", **prompt: Any) -> Group:
        prompt_id = f"q:{i}"
        made = Prompt(id=prompt_id, token_ids=(1,), text=f"question {i}", **prompt)
        samples = tuple(
            Sample(
                sample_id=f"{prompt_id}/{k}",
                prompt_id=prompt_id,
                group_id=i,
                prompt_ids=(1,),
                response_ids=(2, 3),
                sampler_logprobs=(0.0, 0.0),
                action_mask=(True, True),
                versions=(0, 0),
                text=text,
                finish_reason=finish,  # type: ignore[arg-type]
            )
            for k, text in enumerate(responses)
        )
        return Group(group_id=i, prompt=made, samples=samples)

    return make
