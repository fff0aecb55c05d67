"""Refuse checkpoints with quantized weights."""

from __future__ import annotations

from transformers import PretrainedConfig

from burnish.models.paths import ModelError


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
