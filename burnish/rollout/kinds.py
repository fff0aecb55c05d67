"""The registry of rollout engines."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from burnish.config.base import named_kind
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.servers.config import VllmServers
from burnish.rollout.vllm.config import VllmEngine

RolloutEngineConfig = Annotated[
    Annotated[LocalEngine | VllmEngine | VllmServers, Field(discriminator="kind")],
    named_kind("local"),
]
