"""Server settings and errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from burnish.config.model import Dtype
from burnish.errors import BurnishError


class ServeError(BurnishError, RuntimeError):
    """The server cannot start. The message says what is wrong and what to do."""


@dataclass(frozen=True)
class ListenOptions:
    """Settings of every server."""

    host: str = "127.0.0.1"
    """Address to listen on. Any address other than a loopback address needs a token."""
    port: int = 0
    """Port to listen on. 0 chooses a free port."""
    allowed_hosts: tuple[str, ...] = ()
    """Additional host names under which clients may address the server."""
    token_env: str | None = None
    """Environment variable with the bearer token that requests must contain. None: no token."""
    device: str = "auto"
    """A torch device, or ``auto``: CUDA if available, else CPU."""
    shutdown_s: float = 30.0
    """Seconds that requests in flight have to finish after SIGTERM."""

    def check(self) -> None:
        """Raise one ServeError that lists all problems."""
        problems = list(self.problems())
        if problems:
            raise ServeError("\n".join(problems))

    def problems(self) -> Iterator[str]:
        """Yield each setting that is wrong, with the reason."""
        if not 0 <= self.port <= 65535:
            yield f"port={self.port} must be between 0 and 65535"


def _below_one(**values: int) -> Iterator[str]:
    """Yield a problem for each value that is not positive."""
    for name, value in values.items():
        if value < 1:
            yield f"{name}={value} must be at least 1"


@dataclass(frozen=True)
class ServeOptions(ListenOptions):
    """Settings of a reward model server. The defaults are those of ``burnish serve-reward``."""

    port: int = 5000
    dtype: Dtype = "fp32"
    """Data type of the model."""
    max_batch_tokens: int = 16384
    """Most tokens in one forward pass. A text cannot be longer than this."""
    max_wait_ms: float = 5.0
    """Longest time that a text waits for others to fill its forward pass."""
    max_len: int | None = None
    """Longest text in tokens. None: the model's positions, at most ``max_batch_tokens``."""
    max_chars: int | None = None
    """Longest text in characters, checked before tokenization. None: 32 times the longest text in
    tokens."""
    overlong: Literal["error", "truncate_left"] = "error"
    """Handling of longer texts: refuse the request, or truncate the text on the left. Truncated
    texts are marked in ``extra_logs``."""
    append_eos: bool = False
    """Append the EOS token to every text that does not end with it. False: leave texts unchanged.
    """
    max_items: int = 1024
    """Most texts in one request."""
    max_request_bytes: int = 16 << 20
    """Largest size of a request."""
    max_queue: int = 4096
    """Most waiting texts. A request that would exceed this is refused with status 429."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from _below_one(
            max_batch_tokens=self.max_batch_tokens,
            max_items=self.max_items,
            max_request_bytes=self.max_request_bytes,
            max_queue=self.max_queue,
        )
        if self.max_len is not None and not 1 <= self.max_len <= self.max_batch_tokens:
            yield (
                f"max_len={self.max_len} must be between 1 and max_batch_tokens="
                f"{self.max_batch_tokens}: a text is scored in one forward pass"
            )
        if self.max_items > self.max_queue:
            yield (
                f"max_items={self.max_items} is more than max_queue={self.max_queue}, so a full "
                "request would never fit; lower max_items or raise max_queue"
            )
        if self.max_chars is not None and self.max_chars < 1:
            yield f"max_chars={self.max_chars} must be at least 1"
        if not 0 <= self.max_wait_ms <= 10_000:
            yield f"max_wait_ms={self.max_wait_ms:g} must be between 0 and 10000"


@dataclass(frozen=True)
class ModelOptions(ListenOptions):
    """Settings of a server of a language model. The defaults are those of ``burnish serve``."""

    port: int = 8000
    engine: Literal["local", "vllm"] = "local"
    """Rollout engine."""
    dtype: Dtype | None = None
    """Compute format. None: bf16 on CUDA, else fp32."""
    max_len: int | None = None
    """Most tokens of prompt and response. None: the model's limit, for the local engine at most
    8,192."""
    max_batch_size: int = 128
    """Most responses that are sampled at once."""
    max_queue: int = 512
    """Most responses that are sampled or wait. Requests beyond it are refused with status 429."""
    tensor_parallel_size: int = 1
    """vLLM: GPUs (on CPU: processes) of the model."""
    gpu_memory_utilization: float | None = None
    """vLLM on CUDA: share of the GPU's memory for weights and cache. None: 0.9."""
    chat_template: str | None = None
    """Jinja chat template, or a path to one. None: the model's own."""
    trust_remote_code: bool = False
    """Run Python code that the model contains."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from _below_one(
            max_batch_size=self.max_batch_size,
            max_queue=self.max_queue,
            tensor_parallel_size=self.tensor_parallel_size,
        )
        if self.max_len is not None and self.max_len < 2:
            yield f"max_len={self.max_len} must be at least 2: a prompt and a response token"
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            yield f"gpu_memory_utilization={share:g} must be above 0 and at most 1"
        if self.engine == "vllm" and self.device != "auto":
            yield (
                f"device={self.device} has no effect with engine=vllm, which uses the GPUs in "
                "CUDA_VISIBLE_DEVICES, or the CPU if its build is for CPUs; omit --device"
            )
        if self.engine == "local" and self.tensor_parallel_size > 1:
            yield (
                f"tensor_parallel_size={self.tensor_parallel_size}: the local engine uses one "
                "device; use --engine vllm"
            )
        if self.engine == "local" and share is not None:
            yield "gpu_memory_utilization is an option of vLLM; use --engine vllm, or omit it"
