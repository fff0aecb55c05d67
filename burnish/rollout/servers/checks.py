"""Checks that a running vLLM server has the trainer's model and computes as the contract requires.

The server's settings come from ``vllm_weights.WorkerExtension.burnish_describe``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from burnish.config.vllm_arguments import REFUSED
from burnish.rollout.vllm.weights import PROTOCOL

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
    yield from _other_model(described["hf_config"], config)


def _other_model(theirs: Mapping[str, Any], config: PretrainedConfig) -> Iterator[str]:
    """Yield a clause if the server has another model. Keys that only one of the configs has are
    defaults of another version of transformers."""
    ours = json.loads(config.to_json_string(use_diff=False))
    keys = sorted(ours.keys() & theirs.keys() - _NOT_COMPUTED)
    other = [key for key in keys if ours[key] != theirs[key]]
    if other:
        shown = ", ".join(f"{key}={theirs[key]} (trainer: {ours[key]})" for key in other[:3])
        yield f"it has another model: {shown}; start it with the folder or name of model.path"
