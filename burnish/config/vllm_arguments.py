"""Arguments of vLLM that a recipe may pass through (``rollout.engine.engine_args``).

Burnish sets some of vLLM's arguments itself, and others would change the samples or the weights.
Only arguments that leave both unchanged, except for the rounding of another kernel or another split
of the batch, are passed. The local engine takes all sampling parameters, vLLM not.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from burnish.config.explain import nearest

PASSED = frozenset(
    {
        # scheduling
        "block_size", "enable_chunked_prefill", "long_prefill_token_threshold",
        "max_num_batched_tokens", "prefix_caching_hash_algo", "scheduler_reserve_full_isl",
        # kernels, compilation, graphs
        "attention_backend", "attention_config", "compilation_config", "cudagraph_capture_sizes",
        "disable_cascade_attn", "disable_custom_all_reduce", "enable_flashinfer_autotune",
        "kernel_config", "linear_backend", "mamba_backend", "max_cudagraph_capture_size",
        "moe_backend", "optimization_level",
        # processes
        "cpu_distributed_timeout_seconds", "distributed_timeout_seconds", "numa_bind",
        "numa_bind_cpus", "numa_bind_nodes", "shutdown_timeout",
        # logs and profiles
        "enable_layerwise_nvtx_tracing", "enable_logging_iteration_details", "log_level",
        "profiler_config",
    }
)  # fmt: skip

OWN = {
    "model": "model.path",
    "tokenizer": "model.tokenizer_path",
    "revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "precision.rollout_dtype",
    "tensor_parallel_size": "rollout.engine.tensor_parallel_size",
    "max_num_seqs": "rollout.engine.max_num_seqs",
    "max_model_len": "rollout.engine.max_model_len",
    "gpu_memory_utilization": "rollout.engine.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.engine.kv_cache_bytes",
    "num_gpu_blocks_override": "rollout.engine.kv_cache_bytes",
    "enable_prefix_caching": "rollout.engine.prefix_caching",
    "enforce_eager": "rollout.engine.enforce_eager",
    "enable_sleep_mode": "rollout.engine.sleep_between_rollouts",
    "seed": "seed (each request has its own random numbers)",
    "data_parallel_size": "cluster.rollout_workers (each worker is an engine)",
}
"""Arguments that a Burnish key sets."""

_INTERNAL = "Burnish sets it for token ids, log-probs or the transfer of weights"
_NUMBERS = "it computes in another number format than the trainer's weights, which vLLM must store "
_NUMBERS += "unchanged after every update"
REFUSED = {
    **dict.fromkeys(
        (
            "load_format", "skip_tokenizer_init", "generation_config", "logprobs_mode",
            "override_generation_config", "distributed_executor_backend", "worker_cls",
            "worker_extension_cls", "disable_log_stats", "weight_transfer_config", "hf_overrides",
        ),
        _INTERNAL,
    ),
    **dict.fromkeys(("quantization", "quantization_config", "kv_cache_dtype"), _NUMBERS),
    **dict.fromkeys(
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
        "its draft model is not updated with the policy, and accepted tokens use other random "
        "numbers, so a resumed run would sample other responses",
    ),
    **dict.fromkeys(
        ("logits_processors", "use_fp64_gumbel", "watermark_config"),
        "it changes the distribution or the random numbers of the samples",
    ),
    "enable_lora": "adapters are merged into the weights that are sent to vLLM",
    **dict.fromkeys(
        ("kv_offloading_size", "kv_offloading_backend", "kv_transfer_config"),
        "keys and values that are stored outside of vLLM's cache are not discarded when the "
        "weights change",
    ),
    **dict.fromkeys(
        ("pipeline_parallel_size", "enable_expert_parallel", "cpu_offload_gb"),
        "the check that every weight was stored reads only unsplit or tensor-parallel weights",
    ),
}  # fmt: skip
"""Arguments that are refused, with the reason."""
INSTEAD = {
    **dict.fromkeys(
        ("pipeline_parallel_size", "enable_expert_parallel", "cpu_offload_gb"),
        ", or use rollout.engine.tensor_parallel_size",
    ),
    **dict.fromkeys(
        ("quantization", "quantization_config"), ", or use precision.rollout_dtype=bf16"
    ),
}
"""Closest settings of refused arguments."""


def problems(names: Iterable[str], *, path: str) -> Iterator[str]:
    """Yield an error for each argument that is not passed to vLLM. ``path``: key of the
    arguments."""
    for name in names:
        if name in PASSED:
            continue
        if name in OWN:
            yield f"{path}.{name} is set by {OWN[name]}; use that key"
        elif name in REFUSED:
            instead = INSTEAD.get(name, "")
            yield f"{path}.{name} cannot be passed to vLLM: {REFUSED[name]}; remove it{instead}"
        elif name in vllm_names():
            yield (
                f"{path}.{name} is an argument of vLLM that is not known to leave samples and "
                f"weights unchanged; remove it. Accepted: {', '.join(sorted(PASSED))}"
            )
        else:
            known = {*PASSED, *OWN, *REFUSED, *vllm_names()}
            yield f"{path}.{name} is not an argument of vLLM{nearest(name, known)}"


@cache
def vllm_names() -> frozenset[str]:
    """Return the arguments of the installed vLLM; empty if it is not installed.

    The source of its ``EngineArgs`` is parsed, because importing vLLM takes many seconds.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    source = Path(spec.origin).parent / "engine" / "arg_utils.py"
    if not source.is_file():
        return frozenset()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            fields = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
            return frozenset(target.id for target in fields if isinstance(target, ast.Name))
    return frozenset()


MIN_TEMPERATURE = 0.01
"""vLLM samples at this temperature instead of a lower one above 0."""
MAX_TEMPERATURE = 2.0


def vllm_sampling_problems(
    temperature: float, *, num_recorded: int = 0, max_recorded: int | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for each sampling parameter that vLLM rounds silently, or refuses at the
    first request. All others are used exactly.

    ``num_recorded``: kept tokens that are recorded per position (``top_k`` with a sampling mask).
    ``max_recorded``: tokens of the vocabulary or, for a server with ``--max-logprobs``, fewer.
    None: unknown.
    """
    if 0 < temperature < MIN_TEMPERATURE:
        yield (
            "temperature",
            f"temperature={temperature:g}: vLLM samples at {MIN_TEMPERATURE:g} instead of a lower "
            f"temperature above 0; use 0 (greedy), {MIN_TEMPERATURE:g} or more, or the local "
            "engine (kind=local)",
        )
    if temperature > MAX_TEMPERATURE:
        yield (
            "temperature",
            f"temperature={temperature:g}: vLLM takes at most {MAX_TEMPERATURE:g}; use "
            f"{MAX_TEMPERATURE:g} or less, or the local engine (kind=local)",
        )
    if max_recorded is not None and num_recorded > max_recorded:
        yield (
            "top_k",
            f"top_k={num_recorded} with sampling_mask: vLLM records at most {max_recorded} tokens "
            "per position (the vocabulary or, on a server, --max-logprobs); use "
            f"top_k={max_recorded} or less, or the local engine (kind=local)",
        )
