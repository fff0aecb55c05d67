"""Config of the local rollout engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from burnish.rollout.config import RolloutEngineSettings


class LocalEngine(RolloutEngineSettings):
    """Burnish's own engine, on CPU or one GPU: in the trainer's process, or on Ray in each rollout
    worker."""

    kind: Literal["local"] = "local"
    max_batch_size: int = Field(128, ge=1)
    """Maximum responses decoded at once; others wait for a free slot."""
    max_prefill_tokens: int = Field(8192, ge=1)
    """Maximum prompt tokens per prefill pass."""
    cuda_graphs: bool = True
    """CUDA: replay decode steps, with sampling, as graphs; read up to eight tokens at once."""
    compile: Literal["off", "layers"] = "off"
    """layers: the layers of recorded decode steps are compiled, as by ``train.compile``."""
    batch_invariant: bool | None = None
    """CPU: log-probs have the same bits in any batch. None: in fp32 and fp16, if possible. true: an
    error if it is not; in bf16, linear layers are computed in fp32 (4 more bytes per parameter)."""
    sleep_between_rollouts: bool = False
    """Free cache and graphs after every rollout: less memory in training; both are made again."""
    own_weights: bool = False
    """runtime=inline: sample from a copy of the policy's weights, so that sampling can overlap with
    training (``rollout.asynchronous``). On Ray every worker has one."""

    uses_transformers: ClassVar[bool] = True

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        if self.compile == "layers" and not self.cuda_graphs:
            yield (
                "compile=layers with cuda_graphs=false: compiled layers are for recorded decode "
                "steps; use cuda_graphs=true, or compile=off"
            )

    @property
    def slots(self) -> int:
        """Maximum number of responses that a worker decodes at once."""
        return self.max_batch_size

    @property
    def may_share_weights(self) -> bool:
        """Return whether it uses the policy's tensors if it is in the same process."""
        return not self.own_weights

    @property
    def sleeps(self) -> bool:
        return self.sleep_between_rollouts
