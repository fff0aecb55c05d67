"""The vLLM servers of a run: connection, checks of their settings, and loads of weights.

Reading order: ``ServerGroup.connect`` -> ``_inspect`` -> ``server_problems``; ``ServerGroup.load``
-> ``_begin``, ``_report``, ``_commit``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential,
)
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from burnish import shm
from burnish.config.model import Dtype
from burnish.config.vllm_arguments import REFUSED
from burnish.loop_thread import LoopThread
from burnish.models.load import DTYPES, ModelError
from burnish.rollout.servers.client import (
    ABORT,
    Server,
    ServerClient,
    ServerError,
    TransientServerError,
    least_busy,
)
from burnish.rollout.vllm.weights import (
    FILE_BYTES,
    PROTOCOL,
    WeightStream,
    shapes_of,
    shared_folder,
    weight_files,
)
from burnish.rollout.weights import StaleWeightsError

log = logging.getLogger("burnish")

_LOADING = "loading"
"""Label of weights that are not verified."""
EXTENSION = "burnish.rollout.vllm.PatchedWorker"
"""Value of ``--worker-extension-cls``."""
_UNUSED: Mapping[str, Any] = {
    "quantization": None,
    "kv_offloading_size": None,
    "speculative_config": False,
    "watermark_config": False,
    "enable_lora": False,
    "kv_transfer_config": False,
    "logits_processors": [],
    "use_fp64_gumbel": False,
    "pipeline_parallel_size": 1,
    "enable_expert_parallel": False,
    "cpu_offload_gb": 0.0,
}
"""Arguments of vLLM that are refused, with the values that have no effect."""
_NOT_COMPUTED = frozenset(
    {
        # places, versions and formats, which are compared by themselves
        "_name_or_path", "transformers_version", "dtype", "torch_dtype", "tokenizer_class",
        # token ids that the requests state
        "bos_token_id", "eos_token_id", "pad_token_id",
        # settings of training, of transformers' own code, and of initial weights
        "use_cache", "attention_dropout", "initializer_range", "pretraining_tp",
        "output_attentions", "output_hidden_states", "return_dict", "_attn_implementation",
        "attn_implementation", "id2label", "label2id", "problem_type", "chunk_size_feed_forward",
    }
)  # fmt: skip
"""Keys of a model's config that do not change the log-probs of vLLM."""

T = TypeVar("T")


class ServerGroup:
    """The servers of one engine. ``client`` and ``servers`` are used on the event loop of ``loop``
    alone."""

    def __init__(
        self,
        client: ServerClient,
        skeleton: PreTrainedModel,
        loop: LoopThread,
        *,
        dtype: Dtype,
        max_len: int,
    ) -> None:
        """``skeleton``: the model without weights."""
        self.client, self.config, self._loop = client, client.config, loop
        self._skeleton, self._format, self._max_len = skeleton, dtype, max_len
        self.vocab_size: int = skeleton.config.vocab_size
        self.max_recorded = self.vocab_size
        """Maximum log-probs per position that every server returns (``--max-logprobs``)."""
        self.name = secrets.token_hex(8)
        """Prefix of the labels of this engine's weights."""
        self.servers = client.servers
        self._loading: list[Server] = []
        """Servers of the load in progress."""

    async def connect(self) -> None:
        """Wait until all servers respond, and check them. Raises ModelError."""
        try:
            await all_respond(self.client)
            await _all_pass(self.servers, self._inspect)
        except BaseException:
            await self.client.close()
            raise

    def load(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights into all servers in one pass over ``tensors``, and verify them. Raises
        as ``VllmServerEngine.load_weights``."""
        dtype = DTYPES[self._format]
        self._loading = list(self.servers)
        self._on_all(self._begin)
        stream = WeightStream(tensors, self._skeleton, dtype)
        folder = self._new_folder()
        try:
            for file in weight_files(stream, folder, dtype):
                self._on_all(self.client.rpc, "burnish_load", str(file), self._format)
                file.unlink()
            stream.finish()
            reports = self._on_all(self._report, " ".join(stream.transposed))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for server, report in reports.items():
            if problems := stream.compare(report):
                raise StaleWeightsError(
                    f"vLLM at {server.url} does not sample from the weights of version {version} "
                    f"({len(problems)} findings): {'; '.join(problems[:3])}. It is no longer used; "
                    "rollout.engine.kind=local samples from the trainer's own weights"
                )
        self._on_all(self._commit, version)

    # ---- weights, on the event loop ----------------------------------------------------------

    def _on_all(self, step: Callable[..., Awaitable[T]], *args: object) -> dict[Server, T]:
        """Call ``step`` with each server that loads weights. A server that fails is lost. Return
        the results; raises ServerError if all are lost."""

        async def run() -> list[T | BaseException]:
            steps = [step(server, *args) for server in self._loading]
            return await asyncio.gather(*steps, return_exceptions=True)

        results = self._loop.run(run)
        done: dict[Server, T] = {}
        for server, result in zip(self._loading, results, strict=True):
            if isinstance(result, ServerError):
                server.lose(str(result))
            elif isinstance(result, BaseException):
                raise result
            else:
                done[server] = result
        self._loading = list(done)
        if not done:
            least_busy(self.servers)  # raises
        return done

    async def _begin(self, server: Server) -> None:
        """Pause a server for a load, after a check of its settings. A server that is lost is asked
        once, others are retried."""
        tries = 1 if server.lost is not None else self.config.retries + 1
        retrying = AsyncRetrying(
            stop=stop_after_attempt(tries),
            wait=wait_exponential(self.config.backoff_s, max=self.config.max_backoff_s),
            retry=retry_if_exception_type(TransientServerError),
            reraise=True,
        )
        await retrying(self._inspect, server)
        await self._post(server, "/pause", mode="keep")
        await self._label(server, _LOADING)
        await self.client.rpc(server, "burnish_begin")

    async def _report(self, server: Server, transposed: str) -> list[dict[str, Any]]:
        """Return the reports of a server's workers. Raises ServerError if it read no weights."""
        reports: list[dict[str, Any]] = await self.client.rpc(
            server, "burnish_report", self._format, transposed
        )
        for finding in reports[0]["findings"]:
            if "FileNotFoundError" in finding or "PermissionError" in finding:
                raise ServerError(
                    f"{server.url} cannot read the files of new weights ({finding}); run it on "
                    "this machine and as this user, or set rollout.engine.weights_folder to a "
                    "folder that both can read at the same path"
                )
        return reports

    async def _commit(self, server: Server, version: int) -> None:
        """Discard what a server computed from older weights, and let it continue."""
        reset = await self._post(server, "/reset_prefix_cache", reset_running_requests="true")
        if not reset["success"]:
            raise ServerError(f"the prefix cache of {server.url} could not be reset")
        await self._label(server, f"{version}")
        await self._post(server, "/resume")
        server.restore()

    async def _label(self, server: Server, version: str) -> None:
        """Label the tokens that are sampled from now on."""
        label = {"new_version": f"{self.name}-{version}"}
        await self._post(server, "/update_weight_version", label)

    async def _post(self, server: Server, path: str, body: Any = None, **query: str) -> Any:
        limit = self.config.load_timeout_s
        return await self.client.post(server, path, body, timeout_s=limit, **query)

    def _new_folder(self) -> Path:
        """Return a new folder for files of weights."""
        if self.config.weights_folder is None:
            largest = max(shape.numel() for shape in shapes_of(self._skeleton).values())
            return shared_folder(FILE_BYTES + largest * DTYPES[self._format].itemsize)
        parent = Path(self.config.weights_folder).absolute()
        parent.mkdir(parents=True, exist_ok=True)
        shm.sweep("weights", parent)
        return Path(tempfile.mkdtemp(prefix=shm.prefix("weights"), dir=parent))

    async def _inspect(self, server: Server) -> None:
        """Raise ServerError if a server has no worker extension or other settings than required,
        or does not accept requests for token ids."""
        try:
            described = (await self.client.rpc(server, "burnish_describe"))[0]
        except TransientServerError as error:
            if "burnish_describe" not in str(error):
                raise
            raise ServerError(
                f"{server.url} has no worker extension of Burnish; start it with "
                f"--worker-extension-cls {EXTENSION}"
            ) from error
        # accepted without effect; else the token is wrong, or --enable-scale-out is missing
        await self._post(server, ABORT, {"request_ids": []})
        dtype, config = DTYPES[self._format], self._skeleton.config
        problems = list(server_problems(described, config, dtype=dtype, max_len=self._max_len))
        if problems:
            raise ServerError(f"{server.url} cannot be used: {'; '.join(problems)}")
        if described["max_logprobs"] >= 0:
            self.max_recorded = min(self.max_recorded, described["max_logprobs"])


async def all_respond(client: ServerClient) -> None:
    """Wait until all servers respond, or raise ModelError after ``start_timeout_s``."""
    limit = client.config.start_timeout_s

    async def respond(server: Server) -> None:
        def tell(state: RetryCallState) -> None:
            if state.attempt_number == 1:
                log.warning("%s does not respond yet; waiting up to %g s", server.url, limit)

        retrying = AsyncRetrying(
            stop=stop_after_delay(limit),
            wait=wait_exponential(0.25, max=5),
            retry=retry_if_exception_type(TransientServerError),
            before_sleep=tell,
            reraise=True,
        )
        await retrying(client.health, server)

    await _all_pass(client.servers, respond)


async def _all_pass(servers: Sequence[Server], check: Callable[[Server], Awaitable[None]]) -> None:
    """Raise ModelError with all problems that ``check`` finds as ServerError."""
    results = await asyncio.gather(*(check(s) for s in servers), return_exceptions=True)
    problems = [result for result in results if isinstance(result, ServerError)]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ModelError(
            f"rollout engine vllm_server: {len(problems)} of {len(servers)} servers cannot be "
            f"used:\n{listed}\n  docs/engines.md has the command that starts a server"
        )
    for result in results:
        if result is not None:
            raise result


def server_problems(
    described: Mapping[str, Any], config: PretrainedConfig, *, dtype: torch.dtype, max_len: int
) -> Iterator[str]:
    """Yield a clause with a fix for each setting of a server that does not fit.

    ``config``, ``dtype``: of the trainer's model for sampling. ``max_len``: maximum tokens of
    prompt and response.
    """
    if described["protocol"] != PROTOCOL:
        yield (
            f"its worker extension has the protocol {described['protocol']}, the trainer's "
            f"{PROTOCOL}; install the same version of Burnish for both"
        )
        return
    name = str(dtype).removeprefix("torch.")
    if described["dtype"] != name:
        yield (
            f"it computes in {described['dtype']}, the recipe in {name}; start it with --dtype "
            f"{name}"
        )
    if described["max_model_len"] < max_len:
        yield (
            f"its max_model_len={described['max_model_len']} is below the {max_len} tokens of "
            f"prompt and response that the recipe allows; start it with --max-model-len {max_len} "
            "or more"
        )
    if described["logprobs_mode"] != "processed_logprobs":
        yield (
            f"its logprobs_mode={described['logprobs_mode']} ignores the temperature; start it "
            "with --logprobs-mode processed_logprobs"
        )
    if not described["v1_sampler"]:
        yield (
            "it runs the model runner V2, whose log-probs are those after top-k and top-p; start "
            "it with VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if described["device"] == "cpu" and described["enable_chunked_prefill"]:
        yield (
            "on a CPU, prompts that are prefilled in parts get wrong random numbers; start it with "
            f"--no-enable-chunked-prefill --max-num-batched-tokens {max(2048, max_len)}"
        )
    if described["data_parallel_size"] != 1:
        yield (
            f"it has data_parallel_size={described['data_parallel_size']}, whose parts cannot be "
            "verified one by one; start one server for each part, and list all in urls"
        )
    if described["kv_cache_dtype"] not in ("auto", name):
        yield (
            f"it has kv_cache_dtype={described['kv_cache_dtype']}: {REFUSED['kv_cache_dtype']}; "
            "start it without"
        )
    for argument, unused in _UNUSED.items():
        if described[argument] != unused:
            yield f"it has {argument}={described[argument]}: {REFUSED[argument]}; start it without"
    theirs, ours = described["hf_config"], json.loads(config.to_json_string(use_diff=False))
    # keys that only one of the configs has are defaults of another version of transformers
    keys = sorted(ours.keys() & theirs.keys() - _NOT_COMPUTED)
    other = [key for key in keys if ours[key] != theirs[key]]
    if other:
        shown = ", ".join(f"{key}={theirs[key]} (trainer: {ours[key]})" for key in other[:3])
        yield f"it has another model: {shown}; start it with the folder or name of model.path"
