"""Checks of one model: unquantized weights by its config, and, once it is loaded, its output
projection, compute dtype and finite weights.

The check of the model family needs no weights; see ``support.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from burnish.models.logit_scaling import logit_scaling
from burnish.models.paths import ModelError


@torch.no_grad()
def check_head(model: Any, name: str) -> None:
    """Raise ModelError if the model's logits differ from those that log-probs are computed from.

    The latter are the output projection of the last hidden state, scaled and capped according to
    the config. ``name`` is the model's name in messages. The check of the model family
    (``models/support.py``) is far stricter; this one uses the real weights in their dtype.
    """
    ids = torch.arange(1, 5, device=model.device)[None]
    projection = model.get_output_embeddings()
    scaling = logit_scaling(model.config)
    try:
        whole = model(ids).logits.float()
        hidden = model.get_decoder()(ids).last_hidden_state
        ours = scaling.apply_(projection(hidden.to(projection.weight.dtype)).float())
    except (NotImplementedError, RuntimeError) as error:
        raise_if_lacking(error, model, name)
        raise_if_mixed(error, model.dtype, name)
        if isinstance(error, NotImplementedError):
            raise ModelError(f"{name}: {error}") from error
        raise
    if not (bool(whole.isfinite().all()) and bool(ours.isfinite().all())):
        check_weights(model.named_parameters(), name)
        raise_overflow(model.dtype, name)
    if not torch.allclose(whole, ours, rtol=0.02, atol=0.02 * float(whole.abs().max())):
        raise ModelError(
            f"{name} ({type(model).__name__}) changes its logits after the output projection in a "
            "way that its config does not describe, so log-probs would be wrong; use another model"
        )


def check_compute_dtype(body: Any, name: str, *, backward: bool) -> None:
    """Raise ModelError if ``body`` uses an operation that its device does not support in its dtype.

    Computes two tokens forward and, if ``backward``, the gradient of their embeddings. Also raises
    ModelError if the hidden states are not finite. Skipped for fp32.
    """
    embedding = body.get_input_embeddings()
    if embedding.weight.dtype == torch.float32:
        return
    ids = torch.tensor([[1, 2]], device=body.device)
    embeds: list[Tensor] = []

    def cut(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        embeds.append(output.detach().requires_grad_(backward))
        return embeds[-1].clone()  # some models change it in place, which a leaf does not allow

    handle = embedding.register_forward_hook(cut)
    try:
        with torch.set_grad_enabled(backward):
            hidden = body(input_ids=ids, use_cache=False).last_hidden_state
        if backward:
            torch.autograd.grad(hidden.float().sum(), embeds)
    except (NotImplementedError, RuntimeError) as error:
        raise_if_lacking(error, body, name)
        raise_if_mixed(error, embedding.weight.dtype, name)
        raise
    finally:
        handle.remove()
    if not bool(hidden.isfinite().all()):
        raise_overflow(embedding.weight.dtype, name)


@torch.no_grad()
def check_weights(weights: Iterable[tuple[str, Tensor]], name: str) -> None:
    """Raise ModelError if a weight of the model ``name`` is not finite: corrupt in the source, or
    out of range for its dtype."""
    for parameter_name, parameter in weights:
        if parameter.device.type != "meta" and not bool(parameter.isfinite().all()):
            raise ModelError(
                f"{name}: the weight {parameter_name} is not finite in {parameter.dtype} (fp16 "
                f"ends at {torch.finfo(torch.float16).max:g}); if it is finite with "
                "precision.dtype=fp32, use bf16 or fp32, else the model is corrupt"
            )


def check_language_model(config: PretrainedConfig, name: str) -> None:
    """Raise ModelError if a folder contains a reward model or classifier. With tied ends its body
    would load as a language model, although it was trained to score."""
    kind = next(iter(config.architectures or ()), "")
    if re.search(r"(For\w*Classification|ForQuestionAnswering|RewardModel|ScoreModel)$", kind):
        raise ModelError(
            f"{name} is a {kind} (architectures in its config.json), not a language model: its "
            "body was trained to score, so its texts and log-probs would mean nothing; use the "
            "language model that it was trained from"
        )


def raise_overflow(dtype: torch.dtype, name: str) -> None:
    """Raise the ModelError for activations that are not finite in ``dtype``."""
    raise ModelError(
        f"{name}: its activations are not finite in {dtype} for a few tokens, although its weights "
        "are: they overflow; use precision.dtype=bf16 or fp32"
    )


def raise_if_mixed(error: Exception, dtype: torch.dtype, name: str) -> None:
    """Raise ModelError if ``error`` is PyTorch's for operands of different dtypes: transformers'
    own code of the model does not run in ``dtype``."""
    first_line = str(error).splitlines()[0] if str(error) else ""
    if dtype == torch.float32 or not re.search(
        r"same dtype|mixed dtype|expected scalar type|(input|bias) type", first_line, re.IGNORECASE
    ):
        return
    raise ModelError(
        f"{name} cannot be computed in {dtype}: transformers' code of this model mixes it with "
        f"fp32 ({first_line}); use precision.dtype=fp32"
    ) from error


def raise_if_lacking(error: Exception, model: Any, name: str) -> None:
    """Raise ModelError if ``error`` is PyTorch's for an operation not implemented in this dtype."""
    first_line = str(error).splitlines()[0] if str(error) else ""
    formats = {"Half": "fp16", "BFloat16": "bf16"}
    dtype_name = re.search(r"\b(Half|BFloat16)\b", first_line)
    lacking = re.search(r"not implemented|not supported|unsupported", first_line, re.IGNORECASE)
    if dtype_name is None or lacking is None:
        return
    quoted = re.search(r'"(\w+)"', first_line)
    operation = quoted.group(1) if quoted else first_line.partition(":")[0]
    dtype = formats[dtype_name.group(1)]
    raise ModelError(
        f"{name} cannot be computed in {dtype} on {model.device.type}: PyTorch {torch.__version__} "
        f"has no {dtype} form of {operation} there ({first_line}); use another precision.dtype "
        "(fp32 always works), or another device"
    ) from error


def check_unquantized(config: PretrainedConfig, name: str) -> None:
    """Raise ModelError if the weights of a model folder are quantized (GPTQ, AWQ, FP8,
    compressed-tensors, bitsandbytes): they have no gradient and no full-precision masters."""
    quantization = vars(config).get("quantization_config")
    if not quantization:
        return
    fields = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = str(fields.get("quant_method") or "an unknown method").rpartition(".")[2].lower()
    tools = {
        "fp8": "transformers' FineGrainedFP8Config(dequantize=True) and save_pretrained",
        "bitsandbytes": "transformers' model.dequantize() and save_pretrained",
        "compressed-tensors": "transformers' CompressedTensorsConfig(run_compressed=False) and "
        "save_pretrained",
    }
    tool = tools.get(method, "the tool that quantized it")
    raise ModelError(
        f"{name} has quantized weights (quantization_config of its config.json: {method}), and "
        "Burnish trains and samples from full-precision weights only; use the original checkpoint, "
        f"or dequantize this one to bf16 ({tool}). For 4-bit base weights, train adapters on that "
        "with model.lora.quantization=nf4"
    )
