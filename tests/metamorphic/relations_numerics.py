"""Relations of numerics: adapters of peft, experts of mixtures, half precision, odd configs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from metamorphic.base import Broken, Draw, Refused, close, equal, relation
from metamorphic.draw_models import TOLERANCE, families, row_logprobs
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from burnish.config.model import Dtype, LoraConfig, ModelConfig
from burnish.models.load import DTYPES, ModelError, load_causal_lm
from burnish.models.lora_layers import merged_weights
from burnish.models.scratch import scratch_tokenizer
from burnish.models.shrink import build, shrink
from burnish.models.support import below_rope_border
from burnish.rollout.base import Request, Sampling
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import make_engine as make_local_engine
from burnish.types import rows_to_batch

_FILE = Path(__file__).resolve().parents[2] / "tools" / "family_experts.py"
_SPEC = importlib.util.spec_from_file_location("experts_of_tools", _FILE)
assert _SPEC is not None and _SPEC.loader is not None
experts: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(experts)

TOKENS = torch.tensor([[7, 8, 9, 10, 11, 7, 20, 31]])
PLAIN = ("llama", "qwen3", "gemma3_text", "gpt2")
MIXTURES = (
    "mixtral",
    "hy_v3",
    "minimax_m2",
    "deepseek_v3",
    "deepseek_v4",
    "gpt_oss",
    "beam",
    "dbrx",
)
HALF = ("llama", "mamba", "zamba", "flint", "ernie4_5_moe", "hy_v4", "hunyuan_v1_moe", "gemma2")


def _saved(draw: Draw, model: Any) -> ModelConfig:
    model.generation_config.eos_token_id = None
    model.save_pretrained(draw.folder / "model")
    return ModelConfig(path=str(draw.folder / "model"))


@relation
def peft_setting(draw: Draw) -> None:
    """An adapter that peft saved gives peft's logits, merged too, or is refused.

    1e-4: fp32 sums of merged weights in another order."""
    family = draw.one(family=PLAIN)
    rng = draw.rng
    inner = "c_attn" if family == "gpt2" else "q_proj"
    options: dict[str, Any] = {
        "r": rng.randint(1, 6),
        "lora_alpha": rng.choice([1, 8, 2.5]),
        "use_rslora": rng.random() < 0.3,
        "use_dora": rng.random() < 0.2,
        "lora_dropout": rng.choice([0.0, 0.4]),
        "init_lora_weights": rng.choice([True] * 4 + ["gaussian", "pissa", "olora", False]),
        "bias": rng.choice(["none"] * 6 + ["all"]),
        "rank_pattern": rng.choice([{}] * 6 + [{inner: 2}]),
        "target_modules": rng.choice(["all-linear", [inner], f".*{inner}", [inner, "lm_head"]]),
    }
    draw.note(**options)
    config = _saved(draw, build(shrink(CONFIG_MAPPING[family]())))
    torch.manual_seed(rng.randrange(1000))
    try:
        theirs: Any = get_peft_model(load_causal_lm(config), PeftConfig(**options)).eval()
        theirs(input_ids=TOKENS, use_cache=False)
    except (ValueError, RuntimeError, TypeError) as error:
        raise Refused from error
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape)
        theirs.save_pretrained(draw.folder / "adapter")
        wanted = theirs(input_ids=TOKENS, use_cache=False).logits
    try:
        lora = LoraConfig(path=str(draw.folder / "adapter"))
        model = load_causal_lm(config.model_copy(update={"lora": lora}))
    except ValueError as error:
        raise Refused from error
    with torch.no_grad():
        close(model(TOKENS, use_cache=False).logits, wanted, TOLERANCE, "logits")
        merged = load_causal_lm(config)
        merged.load_state_dict(dict(merged_weights(model)), strict=False)
        close(merged(TOKENS, use_cache=False).logits, wanted, TOLERANCE, "merged logits")


@relation
def counted_experts(draw: Draw) -> None:
    """The experts counted for each token are those whose weights compute it. Exact."""
    name = draw.one(family=MIXTURES)
    model = build(shrink(families.config_of(name)), seed=draw.rng.randrange(1000))
    ids = torch.tensor([draw.rng.choices(range(5, 90), k=draw.rng.randint(2, 20))])
    routing = experts.record(model, ids)
    equal(experts.wrong_layers(model, ids, routing), [], "layers with other experts")


@relation
def half_precision(draw: Draw) -> None:
    """In bf16 and fp16, weights have transformers' dtypes and bits (exact), and the sampler's
    log-probs are the trainer's within the rounding of transformers' own pass, at least 1e-2."""
    name = draw.one(family=HALF)
    dtype: Dtype = draw.one(dtype=["bf16", "fp16"])
    config = _saved(draw, build(shrink(families.config_of(name)), seed=draw.rng.randrange(1000)))
    try:
        loaded = load_causal_lm(config, dtype=dtype)
    except ModelError as error:
        raise Refused from error
    plain = AutoModelForCausalLM.from_pretrained(config.path, dtype=DTYPES[dtype]).eval()
    wide = AutoModelForCausalLM.from_pretrained(config.path, dtype=torch.float32).eval()
    own = dict(loaded.named_parameters())
    for parameter_name, parameter in plain.named_parameters():
        equal(own[parameter_name].dtype, parameter.dtype, f"dtype of {parameter_name}")
        equal(torch.equal(own[parameter_name], parameter), True, parameter_name)
    engine = make_local_engine(loaded, scratch_tokenizer("abc"), LocalEngine(), name=name)
    prompt = tuple(draw.rng.choices(range(5, 90), k=5))
    (done,) = engine.generate([Request("a", prompt, seed=1)], Sampling(max_tokens=6))
    ids = [*prompt, *done.token_ids]
    mask = [False] * 5 + [True] * len(done.token_ids)
    batch = rows_to_batch([ids], [mask], prompt_lens=[5])
    with torch.no_grad():
        half, full = (row_logprobs(model, batch, 1.0)[5:] for model in (plain, wide))
    rounding = float((half - full).abs().mean())
    gap = float((torch.tensor(done.logprobs) - full).abs().mean())
    close(torch.tensor(max(0.0, gap - 2 * rounding)), torch.zeros(()), 1e-2, "mean error")


ROPES: list[dict[str, Any]] = [
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "default"},
]


@relation
def odd_config(draw: Draw) -> None:
    """Models with scaled rotary embeddings at any ratio of their maximum to the original, with tied
    heads and short windows, are trained and sampled like transformers' own, and none is refused.

    1e-4: see TOLERANCE."""
    family = draw.one(family=["llama", "qwen2", "qwen3", "mistral"])
    rope = {**draw.one(rope=ROPES), "rope_theta": 1e4}
    original = draw.one(original=[4096, 8192, 32768])
    longest = int(original * draw.one(ratio=[0.5, 1, 1.25, 2, 3, 16]))
    if rope["rope_type"] in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = original
    fields = {"max_position_embeddings": longest, "rope_parameters": rope}
    fields |= {"tie_word_embeddings": draw.one(tied=[True, False])}
    if family != "llama":
        fields |= {"sliding_window": draw.one(window=[3, 4096])}
    if family in ("qwen2", "qwen3"):
        fields |= {"use_sliding_window": True, "max_window_layers": 1}
    tiny = below_rope_border(shrink(CONFIG_MAPPING[family](**fields)))
    model: Any = build(tiny, seed=draw.rng.randrange(1000))
    config = _saved(draw, model)
    prompt = tuple(draw.rng.choices(range(5, 90), k=9))
    try:
        network = load_causal_lm(config)
        engine = make_local_engine(network, scratch_tokenizer("abc"), LocalEngine(), name=family)
    except ModelError as error:
        raise Broken(f"refused: {error}") from error
    (done,) = engine.generate([Request("a", prompt, seed=1)], Sampling(max_tokens=7))
    mask = [False] * 9 + [True] * len(done.token_ids)
    batch = rows_to_batch([[*prompt, *done.token_ids]], [mask], prompt_lens=[9])
    with torch.no_grad():
        wanted = row_logprobs(model, batch, 1.0)
    close(torch.tensor(done.logprobs), wanted[9:], TOLERANCE, "sampler's log-probs")
