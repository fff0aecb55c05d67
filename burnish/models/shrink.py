"""Shrink a model's config to a few small layers with the same behavior, and build it with random
weights.

Checking behavior (which tokens attend to which, how logits are transformed) does not require the
real model. A model of the same family with one layer of each type gives the same answers in
milliseconds, for 135M parameters and for 70B. :func:`shrink` reduces sizes and preserves behavior.
It works on groups of field names rather than on models. ``_EXCEPTIONS`` lists the model types whose
fields have dependencies that their names do not show.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from burnish.models.auto_class import language_model_class
from burnish.models.layers import keep_layers

VOCAB = 128
"""Largest vocabulary of a shrunk model. Special tokens from id :data:`SPECIAL` up get consecutive
ids from :data:`SPECIAL`."""
SPECIAL = 100
HIDDEN, HEADS, HEAD_DIM = 64, 4, 16
POSITIONS = 64
"""Largest number of positions of a shrunk model (tables of learned positions)."""
ORIGINAL_POSITIONS = 8
"""``original_max_position_embeddings`` of a shrunk model, if its own rows can be several times as
long. Longer rows exceed the length at which RoPE variants change."""
FEWEST_POSITIONS = 32
"""Smallest number of positions of a shrunk model, so that the rows of an experiment fit. With
scaled RoPE the original positions keep their ratio to it."""
WINDOW = 4
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_GROUPS = 8, 2, 4

Fields = dict[str, Any]


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_HIDDEN = _names("hidden_size d_model n_embd emb_dim embedding_dim")
_HEADS = _names(
    "num_attention_heads n_head n_heads attention_heads decoder_attention_heads num_heads"
)
_KV_HEADS = _names("num_key_value_heads num_kv_heads num_key_value_groups num_query_groups")

_KINDS: dict[str, tuple[str, ...]] = {
    "hidden": (
        *_HIDDEN,
        *_names("attention_hidden_size lru_width word_embed_proj_dim embedding_size width"),
        *_names("input_embedding_size output_embedding_size pronunciation_embed_dim"),
        *_names("shape_embed_dim cross_attention_hidden_size mamba_d_ssm embed_dim"),
    ),
    "heads": (
        *_HEADS,
        *_names("encoder_attention_heads num_encoder_attention_heads swa_num_attention_heads"),
        *_names("num_decoder_attention_heads linear_num_heads num_attention_heads_per_layer"),
    ),
    "kv_heads": (*_KV_HEADS, *_names("swa_num_key_value_heads kv_n_heads indexer_kv_heads")),
    "head_dim": (
        *_names("head_dim swa_head_dim global_head_dim attention_head_dim kv_channels d_head"),
        *_names("dim_head attention_head_size"),
        *_names("d_kv v_head_dim_swa"),
    ),
    "mla": _names("qk_nope_head_dim qk_rope_head_dim v_head_dim qk_head_dim"),
    "inner": _names(
        "intermediate_size ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim dff d_inner dim_ff "
        "ffn_hidden_size moe_intermediate_size shared_expert_intermediate_size feed_forward_size "
        "shared_experts_intermediate_size expert_ffn_hidden_size intermediate_size_mlp "
        "shared_intermediate_size dense_intermediate_size prefix_dense_intermediate_size "
        "moe_shared_expert_intermediate_size moe_latent_size expert_intermediate_size"
    ),
    "vocabulary": _names(
        "vocab_size decoder_vocab_size vocab_size_per_layer_input audio_vocab_size "
        "pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab "
        "ngram_vocab_size_base"
    ),
    "positions": _names(
        "max_position_embeddings n_positions n_ctx max_seq_len context_length seq_length "
        "model_max_length max_sequence_length max_target_positions max_source_positions "
        "position_bias_max_distance"
    ),
    "window": _names(
        "sliding_window window_size local_attention attention_window_size sliding_window_size "
        "keep_window_size attention_chunk_size index_topk index_block_size block_size rel_extent "
        "floor_scale log_scaling_n_floor local_attention_window_len indexer_budget chunk_size "
        "mamba_chunk_size"
    ),
    "experts": _names(
        "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num"
    ),
    "experts_per_token": _names(
        "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts moe_top_k"
    ),
    "groups": _names("n_group num_expert_group"),
    "groups_per_token": _names("topk_group"),
    "width_8": _names(
        "q_lora_rank kv_lora_rank o_lora_rank laurel_rank hidden_size_per_layer_input "
        "hc_lowrank gated_norm_rank adapter_rank router_hidden_size d_rel mamba_d_state "
        "state_size ssm_state_size linear_key_head_dim prompt_mid_dim cross_attention_dim"
    ),
    "width_16": _names(
        "ple_embed_dim mamba_d_head mamba_head_dim linear_value_head_dim linear_head_dim "
        "index_head_dim indexer_head_dim"
    ),
    "at_most_2": _names(
        "o_groups n_groups mamba_n_groups mamba_ngroups index_topk_blocks num_random_blocks "
        "n_shared_experts num_shared_experts moe_num_shared_experts rescale_every "
        "n_layers_per_attn_res_block"
    ),
    # Up to 16: with few heads, ReLU scores are often all zero, and ties between keys have no order.
    "index_heads": _names("indexer_n_heads index_n_heads index_num_attention_heads"),
    "at_most_4": _names("split_ngram_parts heads_per_ngram time_step_rank mamba_dt_rank"),
}
_LIMITS = {
    "heads": HEADS,
    "vocabulary": VOCAB,
    "experts": EXPERTS,
    "experts_per_token": EXPERTS_PER_TOKEN,
    "groups": EXPERT_GROUPS,
    "width_8": 8,
    "width_16": 16,
    "at_most_2": 2,
    "index_heads": 16,
    "at_most_4": 4,
}
"""Kind -> largest value, for kinds of sizes that do not depend on other sizes."""
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
_SPECIAL_ENDINGS = ("token_id", "token_ids", "token_index", "_index")


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """Return a small copy of the ``config`` of a causal language model of any size.

    The copy has one layer of each type (at least two layers), small sizes, and small windows. It
    preserves behavior: activations, norms, softcaps, scales, dropout, rotary variants, routers,
    biases and unknown fields. For a composite config, the part that ``AutoModelForCausalLM`` builds
    is used. ``config`` is not modified.
    """
    source = causal_lm_config(config)
    fields = _shrunk(source.to_dict())
    return type(source).from_dict(fields)


def causal_lm_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config from which ``AutoModelForCausalLM`` builds a model.

    This is the text config of a composite config whose language model can be built alone, else
    ``config`` itself.
    """
    mapping: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        return config
    config_class = mapping[type(config)].config_class
    parts = [value for value in vars(config).values() if type(value) is config_class]
    if isinstance(config, config_class) or len(parts) != 1 or config_class not in mapping:
        return config
    return cast(PretrainedConfig, parts[0])


def build(config: PretrainedConfig, seed: int = 0, *, trust: bool = False) -> PreTrainedModel:
    """Return the causal language model of ``config`` on the CPU in fp32, in evaluation mode.

    Weights are random and large enough that every part of the model affects its outputs, including
    gates, offsets and router biases that are initialized to zero. The same ``seed`` gives the same
    weights; the global random state does not change. ``trust`` allows running the model's own code,
    if its config refers to some (``auto_map``).
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # (torch.manual_seed would also seed GPUs)
        model = language_model_class(config).from_config(
            config, dtype=torch.float32, trust_remote_code=trust
        )
        model.float()
        _randomize(model)
        _widen_logits(model)
    return cast(PreTrainedModel, model.eval())


def _shrunk(fields: Fields) -> Fields:
    """Shrink the fields of a config and of its nested configs."""
    old = dict(fields)
    new = {
        name: _shrunk(value) if isinstance(value, dict) and "model_type" in value else value
        for name, value in keep_layers(fields).items()
    }
    sizes = _Sizes(old)
    new = {name: sizes.small(name, value) for name, value in new.items()}
    for overrides in (new.get("per_layer_config") or {}).values():
        sizes.heads = overrides.get("num_attention_heads", _first(old, _HEADS))
        overrides.update({name: sizes.small(name, value) for name, value in overrides.items()})
    new.pop("quantization_config", None)
    _shrink_mamba(new)
    _shrink_rope(new, old, sizes)
    for model_type, repair in _EXCEPTIONS.items():
        if old.get("model_type") == model_type:
            repair(new, old)
    return new


class _Sizes:
    """Computes the small value of each size field of a config with the fields ``old``."""

    def __init__(self, old: Fields) -> None:
        self.old = old
        self.hidden = _first(old, _HIDDEN) or HIDDEN
        self.heads = _first(old, _HEADS) or HEADS
        self.own_head_dim = old.get("head_dim") or self.hidden // self.heads or 1
        self.special: dict[int, int] = {}
        self._rules: dict[str, Callable[[str, int], int]] = {
            "hidden": self._hidden,
            "kv_heads": self._kv_heads,
            "head_dim": self._head_dim,
            "mla": self._mla,
            "inner": self._inner,
            "groups_per_token": self._groups_per_token,
            "window": self._window,
            "positions": self._positions,
        }

    def small(self, name: str, value: Any) -> Any:
        """Return the shrunk value of a field; unchanged if it is not a size or already small."""
        if isinstance(value, list) and (name in _KIND_OF or name.endswith(_SPECIAL_ENDINGS)):
            return [self.small(name, item) for item in value]
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if name.endswith(_SPECIAL_ENDINGS):
            if value < SPECIAL:
                return value
            return self.special.setdefault(value, SPECIAL + len(self.special))
        if value <= 0 or name not in _KIND_OF:
            return value
        kind = _KIND_OF[name]
        return self._rules[kind](name, value) if kind in self._rules else min(value, _LIMITS[kind])

    def _hidden(self, name: str, value: int) -> int:
        return max(8, round(HIDDEN * value / self.hidden / 8) * 8)

    def _kv_heads(self, name: str, value: int) -> int:
        heads = self.old.get("swa_num_attention_heads") if name.startswith("swa_") else self.heads
        small = min(heads or self.heads, HEADS)
        return value if value == 1 else small if value >= (heads or self.heads) else small // 2

    def _head_dim(self, name: str, value: int) -> int:
        if name == "head_dim" and value == self.old.get("qk_rope_head_dim"):
            return self._mla(name, value)
        return max(2, round(HEAD_DIM * value / self.own_head_dim / 2) * 2)

    def _mla(self, name: str, value: int) -> int:
        nope, rope = self.old.get("qk_nope_head_dim"), self.old.get("qk_rope_head_dim")
        if name == "qk_head_dim":
            return HEAD_DIM if nope and rope else value
        return 16 if name == "v_head_dim" and value != nope else 8

    def _inner(self, name: str, value: int) -> int:
        return 96 if value >= self.hidden else 32

    def _positions(self, name: str, value: int) -> int:
        return min(max(value, FEWEST_POSITIONS), POSITIONS)  # rows of the experiments fit

    def _window(self, name: str, value: int) -> int:
        longest = _first(self.old, _KINDS["positions"])
        idle = name == "sliding_window" and 0 < longest <= value  # no row exceeds the window
        return POSITIONS if idle else min(value, WINDOW)

    def _groups_per_token(self, name: str, value: int) -> int:
        groups = _first(self.old, _KINDS["groups"]) or 1
        return min(groups, EXPERT_GROUPS) if value >= groups else min(value, EXPERT_GROUPS // 2)


def _first(fields: Fields, names: Sequence[str]) -> int:
    """Return the value of the first of ``names`` that is an integer; 0 if there is none."""
    return next((v for n in names if isinstance(v := fields.get(n), int)), 0)


def _shrink_mamba(new: Fields) -> None:
    """Set number and width of state space heads so that they fill the layers' inner width."""
    for count, width in _MAMBA_HEADS:
        expand = new.get("mamba_expand") or new.get("expand")
        if not expand or not isinstance(new.get(count), int) or width not in new:
            continue
        inner = expand * HIDDEN
        if new.get("mamba_d_ssm"):
            new["mamba_d_ssm"] = inner = HIDDEN
        new[count], new[width] = int(inner) // HEAD_DIM, HEAD_DIM


_MAMBA_HEADS = (
    ("mamba_n_heads", "mamba_d_head"),
    ("n_mamba_heads", "mamba_headdim"),
    ("num_heads", "head_dim"),
)
"""Fields for the number and width of heads in state space layers. Number times width is ``expand``
times the model's hidden size."""


def _shrink_rope(new: Fields, old: Fields, sizes: _Sizes) -> None:
    """Make rotary parameters fit the small heads, with length limits that short rows exceed."""
    head_dim = new.get("qk_rope_head_dim") or new.get("head_dim") or HEAD_DIM
    rope = old.get("rope_parameters") or old.get("rope_scaling") or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]  # one per layer type
    ropes = [old, *(nested or [rope])]
    origins = [r["original_max_position_embeddings"] for r in ropes if _has_origin(r)]
    original, longest = _small_positions(old, origins)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(new.get(name), dict):
            new[name] = _small_rope(new[name], int(head_dim), original)
    if new.get("partial_rotary_factor"):
        new["partial_rotary_factor"] = _even(new["partial_rotary_factor"], int(head_dim))
    if isinstance(new.get("rotary_dim"), int):
        new["rotary_dim"] = int(head_dim * _even(old["rotary_dim"] / sizes.own_head_dim, head_dim))
    if origins:
        new["max_position_embeddings"] = longest
        if _has_origin(old):
            new["original_max_position_embeddings"] = original
    elif any(r.get("rope_type", r.get("type")) == "dynamic" for r in ropes):
        new["max_position_embeddings"] = ORIGINAL_POSITIONS


def _small_positions(old: Fields, origins: Sequence[int]) -> tuple[int, int]:
    """Return (original, maximum) positions of the copy, whose ratio is that of the config ``old``:
    RoPE variants may compute their factor from it. A ratio above 64 is reduced to 64."""
    longest = old.get("max_position_embeddings") or 0
    if not origins or longest <= 0 or origins[0] <= 0:
        return ORIGINAL_POSITIONS, FEWEST_POSITIONS
    ratio = min(longest / origins[0], 64)
    original = max(ORIGINAL_POSITIONS, round(FEWEST_POSITIONS / ratio))
    return original, round(original * ratio)


def _has_origin(rope: Fields) -> bool:
    return isinstance(rope.get("original_max_position_embeddings"), int)


def _small_rope(rope: Fields, head_dim: int, original: int) -> Fields:
    if any(isinstance(value, dict) for value in rope.values()):
        return {
            name: _small_rope(value, head_dim, original) if isinstance(value, dict) else value
            for name, value in rope.items()
        }
    small = dict(rope)
    if factor := rope.get("partial_rotary_factor"):
        small["partial_rotary_factor"] = _even(factor, head_dim)
    pairs = int(head_dim * small.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if isinstance(values := rope.get(name), list):
            small[name] = [values[i * len(values) // pairs] for i in range(pairs)]
    if isinstance(sections := rope.get("mrope_section"), list):
        # Divide the pairs in the proportions of the sections.
        total, sizes = sum(sections), range(len(sections) + 1)
        borders = [round(pairs * sum(sections[:i]) / total) for i in sizes]
        small["mrope_section"] = [end - start for start, end in itertools.pairwise(borders)]
    if _has_origin(rope):
        small["original_max_position_embeddings"] = original
    return small


def _even(factor: float, head_dim: int) -> float:
    """Return the rotated fraction of ``head_dim``, adjusted so that its size is even and
    positive."""
    if int(head_dim * factor) % 2 == 0 and int(head_dim * factor) > 0:
        return factor
    return max(2, 2 * round(head_dim * factor / 2)) / head_dim


def _zamba(new: Fields, old: Fields) -> None:
    """Keep two hybrid layers, because a shared attention block needs two layers that share it."""
    new["layers_block_type"] = ["linear_attention", "hybrid", "hybrid"]
    new["num_hidden_layers"] = 3
    if "hybrid_layer_ids" in new:
        new["hybrid_layer_ids"] = [1, 2]


def _hrm(new: Fields, old: Fields) -> None:
    """Set the number of layers to that of the caches: each cycle has its own."""
    new["num_layers_per_stack"] = 1
    new["num_hidden_layers"] = new["H_cycles"] * (new["L_cycles"] + 1)


def _blt(new: Fields, old: Fields) -> None:
    """Shrink ``hidden_size_global``, the width of another part of the model."""
    if "hidden_size_global" in new:
        new["hidden_size_global"] = HIDDEN


def _deepseek_v4(new: Fields, old: Fields) -> None:
    """Reduce the compression rates so that short rows contain compressed blocks of both kinds."""
    rates = sorted(set(old["compress_rates"].values()))
    new["compress_rates"] = {
        kind: min(rate, 2 * (1 + rates.index(rate))) for kind, rate in old["compress_rates"].items()
    }


_EXCEPTIONS: dict[str, Callable[[Fields, Fields], None]] = {
    "deepseek_v4": _deepseek_v4,
    "blt_local_decoder": _blt,
    "blt_local_encoder": _blt,
    "hrm_text": _hrm,
    "zamba": _zamba,
    "zamba2": _zamba,
}


@torch.no_grad()
def _randomize(model: nn.Module) -> None:
    """Randomize trained parameters and constant persistent buffers, so that each affects the
    outputs."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for parameter in model.parameters():
        if not parameter.requires_grad or not parameter.is_floating_point():
            continue
        noise = torch.randn_like(parameter)
        spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
        is_centered = abs(float(parameter.mean())) <= 0.25 * spread  # at 0, or all 0
        if parameter.ndim < 2 or not is_centered:
            parameter.add_(0.2 * noise)  # norms, biases, gates, decays: near their values
        elif id(parameter) in embeddings:
            parameter.copy_(noise * (2 / math.sqrt(parameter.shape[-1])))
        else:
            parameter.copy_(noise / math.sqrt(_fan_in(parameter)))
    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in persistent and buffer.is_floating_point() and buffer.numel():
            first = buffer.flatten()[0]
            if bool(first.isfinite()) and bool((buffer == first).all()):
                buffer.add_(0.2 * torch.randn_like(buffer))


@torch.no_grad()
def _widen_logits(model: PreTrainedModel) -> None:
    """Scale up the output projection if the standard deviation of the logits is below 0.5."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return
    tokens = torch.randint(4, min(SPECIAL, head.weight.shape[0]), (1, 12))
    spread = float(model.eval()(input_ids=tokens, use_cache=False).logits.std())
    if 0 < spread < 0.5:
        head.weight.mul_(min(1 / spread, 100.0))


def _fan_in(weight: Tensor) -> int:
    """Return the fan-in of a matrix, a convolution or stacked expert matrices."""
    if weight.ndim > 2 and weight.shape[1] == 1:
        return math.prod(weight.shape[2:])
    return weight.shape[-1]
