"""Config of models: source, adapters, and number formats."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from burnish.config.adapters import adapter_settings, has_tokenizer
from burnish.config.base import Node, OlderKeys, PathText, on_off, switched_by

TEMPLATE_INPUTS = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
)
"""Variables of chat templates that every rendering sets."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ScratchConfig(Node):
    """A small Llama-style model with random weights and a character tokenizer, made at load."""

    alphabet: str = "0123456789+-*/= abcdefghijklmnopqrstuvwxyz?:.,\n"
    """Characters of the tokenizer; any other one becomes the unknown token."""
    hidden_size: int = Field(64, ge=8)
    """Width of the residual stream."""
    num_layers: int = Field(2, ge=1)
    """Number of decoder layers."""
    num_heads: int = Field(4, ge=1)
    """Attention heads; must divide ``hidden_size``."""
    num_kv_heads: int = Field(2, ge=1)
    """Key/value heads (grouped-query attention); must divide ``num_heads``."""
    max_position_embeddings: int = Field(512, ge=8)
    """Maximum sequence length in tokens."""
    tie_word_embeddings: bool = True
    """Use the input embedding as the output projection."""
    seed: int = Field(0, ge=-(1 << 63), lt=1 << 63)
    """Seed of the random weights."""

    def rules(self) -> Iterator[str]:
        if self.hidden_size % self.num_heads:
            yield (
                f"num_heads={self.num_heads} does not divide hidden_size={self.hidden_size}; use a "
                "divisor"
            )
        if self.num_heads % self.num_kv_heads:
            yield (
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; "
                "use a divisor"
            )


class Nf4Config(Node):
    """4-bit NormalFloat codes in blocks of 64 weights with a scale each."""

    short_key = "kind"

    kind: Literal["nf4"] = "nf4"
    double: bool = True
    """Also quantize the scales, to 8 bits."""


class LoraConfig(Node):
    """Low-rank adapters (arXiv 2106.09685) through peft. The base weights stay frozen."""

    older_keys = (
        OlderKeys(
            "quantization",
            "quantization",
            switched_by("kind"),
            {"double_quantization": ("double", True)},
        ),
    )

    lora_rank: int = Field(16, ge=1)
    """Rank r of the adapters."""
    lora_alpha: float = Field(32.0, gt=0)
    """The adapter's output is multiplied by alpha / rank."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapter's input in training passes. With 0 the policy ratio is exactly 1 at
    the first update. (rl and preference disable dropout of the model's own config.)"""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Modules that get an adapter, or ``all-linear``: every linear layer except the output head.
    Embeddings and the output head can be named if they are not tied."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained completely, in a copy next to the frozen original, such as
    ``[embed_tokens, lm_head]``. They must not be tied."""
    use_rslora: bool = False
    """Multiply the adapter's output by alpha / sqrt(rank) (rank-stabilized LoRA, arXiv
    2312.03732)."""
    use_dora: bool = False
    """Also train the norm of each output's weights (DoRA, arXiv 2402.09353)."""
    path: PathText | None = None
    """Folder of a peft adapter to start from. Its adapter_config.json sets rank, alpha, targets,
    ``modules_to_save``, ``use_rslora`` and ``use_dora``. A tokenizer in the folder, or a chat
    template alone, is used instead of the base's."""
    quantization: Nf4Config | None = None
    """Keep the frozen linear weights in 4 bits (QLoRA, arXiv 2305.14314; extra ``quant``): ``nf4``,
    or a mapping. The policy, its reference and the sampler all use the dequantized weights."""

    @model_validator(mode="before")
    @classmethod
    def _from_adapter(cls, data: Any) -> Any:
        """Fill fields from the adapter's own config. Raises ValueError if the recipe contradicts
        it. A missing folder is reported when the model is loaded."""
        if not isinstance(data, dict) or not isinstance(data.get("path"), str):
            return data
        settings = adapter_settings(Path(data["path"]).expanduser())
        for name, value in settings.items():
            if name in data and _plain(data[name]) != _plain(value):
                raise ValueError(
                    f"{name}={_shown(data[name])} contradicts the adapter {data['path']}, which "
                    f"has {_shown(value)}; remove {name} (the adapter's own is used)"
                )
        return {**data, **settings}

    @property
    def scaling(self) -> str:
        """The factor of the adapter's output, as text."""
        return "alpha / sqrt(rank)" if self.use_rslora else "alpha / rank"

    @property
    def needs_whole_weights(self) -> bool:
        """Return whether every rank loads all weights before they are sharded: codes and norms are
        computed from them, and saved modules and adapters are copied."""
        return bool(self.plain_only)

    @property
    def plain_only(self) -> list[str]:
        """Settings, as written in a recipe, that only replicas and FSDP2 support. (Engines check
        the embeddings and heads that patterns match when they get the model.)"""
        settings = []
        if self.quantization:
            settings.append(f"model.lora.quantization={self.quantization.kind}")
        if self.use_dora:
            settings.append("model.lora.use_dora=true")
        if self.modules_to_save:
            settings.append("model.lora.modules_to_save")
        if self.path:
            settings.append("model.lora.path")
        if names := self.ends_named:
            settings.append(f"model.lora.target_modules={names}")
        return settings

    @property
    def ends_named(self) -> list[str]:
        """Usual names of embeddings and output heads among listed targets; a pattern has none."""
        if isinstance(self.target_modules, str):
            return []
        return [t for t in self.target_modules if t.rpartition(".")[2] in END_NAMES]

    def rules(self) -> Iterator[str]:
        if self.use_dora and self.ends_named:
            yield (
                f"use_dora with target_modules={self.ends_named}: the magnitude of an embedding or "
                "head is not supported; name them in modules_to_save, or use use_dora=false"
            )
        if isinstance(self.target_modules, tuple):
            for name in sorted({*self.target_modules} & {*self.modules_to_save}):
                yield (
                    f"{name} is in target_modules and in modules_to_save; it gets an adapter or is "
                    "trained completely, so remove it from one of them"
                )


HEAD_NAMES = ("lm_head", "embed_out", "output_layer")
"""Usual names of output projections."""
END_NAMES = ("embed_tokens", "embed_in", "wte", *HEAD_NAMES)
"""Usual names of embeddings and output projections."""


def _plain(value: Any) -> Any:
    """Return a setting in a form that is equal for equal settings."""
    if isinstance(value, list | tuple):
        return sorted(map(str, value))
    if isinstance(value, str):
        lowered = value.strip().lower()
        if lowered in ("true", "false"):
            return lowered == "true"
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


class ModelConfig(Node):
    """A causal language model: from a folder, a hub name, a GGUF file, or from scratch."""

    path: PathText | None = None
    """Folder or HuggingFace hub name. Set either this or ``scratch``."""
    gguf_file: str | None = None
    """Name of a .gguf file inside ``path``; its weights are dequantized at load."""
    scratch: ScratchConfig | None = None
    """Create a small random model instead of loading one."""
    tokenizer_path: PathText | None = None
    """Folder or hub name of the tokenizer. None: that of the adapter (``lora.path``) if its folder
    has one, else the model's own."""
    eos_token: str | None = None
    """Token of the vocabulary that ends rows and responses. It becomes a special token, also in
    exports. None: the tokenizer's own."""
    revision: str | None = None
    """Hub revision (branch, tag or commit). None: the default branch."""
    trust_remote_code: bool = False
    """Run Python code shipped with the model. False: such a model is refused."""
    chat_template: str | None = None
    """Jinja chat template, or a path to one. None: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Values of variables that the chat template reads, such as ``{enable_thinking: false}``. They
    hold wherever messages are rendered, and become defaults in the template of an exported model.
    A name that the template does not read is refused."""
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """Attention of training passes. auto: Burnish's own over packed rows. The others: the
    implementation of transformers with this name, over padded rows."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights. None: full fine-tuning."""

    def __hash__(self) -> int:  # a mapping has none; equal models have equal names
        return hash((self.path, self.tokenizer_path, self.revision, self.chat_template))

    def with_absolute_paths(self) -> ModelConfig:
        """Return a copy with absolute paths of files that exist on this machine, for processes in
        another working directory. Hub names are unchanged."""
        names = {
            "path": self.path,
            "tokenizer_path": self.tokenizer_path,
            "chat_template": self.chat_template,
        }
        absolute = {
            n: os.path.abspath(v) for n, v in names.items() if v is not None and os.path.exists(v)
        }
        if self.lora is not None and self.lora.path and os.path.exists(self.lora.path):
            adapter = os.path.abspath(self.lora.path)
            return self.model_copy(
                update=absolute | {"lora": self.lora.model_copy(update={"path": adapter})}
            )
        return self.model_copy(update=absolute)

    @property
    def tokenizer_override(self) -> str | None:
        """Folder or hub name of the tokenizer if it is not the one in the files of the model: of
        ``tokenizer_path``, else of the adapter that was trained with another."""
        adapter = None if self.lora is None else self.lora.path
        if self.tokenizer_path is not None or adapter is None:
            return self.tokenizer_path
        return adapter if has_tokenizer(Path(adapter)) else None

    @property
    def template_file(self) -> Path | None:
        """File of the chat template if it is not that of the tokenizer's files: of
        ``chat_template``, else of an adapter whose folder has no tokenizer. None: there is none, or
        ``chat_template`` is the template itself."""
        text = self.chat_template
        adapter = None if self.lora is None else self.lora.path
        if text is None and adapter is not None and self.tokenizer_override is None:
            file = Path(adapter) / "chat_template.jinja"
            return file if file.is_file() else None
        is_path = text is not None and len(text) < 256 and Path(text).is_file()
        return Path(text) if text is not None and is_path else None

    def without_adapter_path(self) -> ModelConfig:
        """Return a copy without ``lora.path``, for checkpoints, which contain the adapter. Its
        settings are kept."""
        if self.lora is None or self.lora.path is None:
            return self
        return self.model_copy(update={"lora": self.lora.model_copy(update={"path": None})})

    def rules(self) -> Iterator[str]:
        if (self.path is None) == (self.scratch is None):
            yield (
                "set exactly one of path (a folder or hub name) and scratch (a small random model)"
            )
        if self.gguf_file and not self.path:
            yield "gguf_file is a file inside path, but path is not set; set both"
        if self.revision and not self.path:
            yield "revision is a version of path on the hub, but path is not set; set both"
        for name, value in self.chat_template_kwargs.items():
            if not (value is None or isinstance(value, bool | int | float | str)) or (
                isinstance(value, float) and not math.isfinite(value)
            ):
                yield (
                    f"chat_template_kwargs.{name}={value!r:.60} is not a text, a finite number, "
                    "true, false or null; templates get only these from a recipe"
                )
            if name in TEMPLATE_INPUTS:
                yield f"chat_template_kwargs.{name} is set by every rendering itself; remove it"
            elif not _VARIABLE.fullmatch(name):
                yield (
                    f"chat_template_kwargs has the name {name!r}, which is no variable of a "
                    "template; use letters, digits and underscores"
                )


def lora_advice(model: ModelConfig, *, holds_reference: bool = False) -> Iterator[str]:
    """Warn about adapter dropout with a loss that compares two policies, and about a reference
    (``holds_reference``: the base of the policy) that is not the initial policy."""
    if holds_reference and model.lora is not None and model.lora.path is not None:
        yield (
            f"the reference is the base without the adapter model.lora.path={model.lora.path}, not "
            "the policy at the start; to measure against the adapter, set reference.model to the "
            "same path and lora.path, which loads the base a second time"
        )
    if model.lora is not None and model.lora.lora_dropout:
        yield (
            f"model.lora.lora_dropout={model.lora.lora_dropout:g} applies to training passes but "
            "not to old and reference log-probs, so ratios are not 1 before the first update and "
            "clip fractions are above 0; use lora_dropout=0, unless this is intended"
        )


def new_adapter_rules(model: ModelConfig, job: str) -> Iterator[str]:
    """Yield an error for new adapters in a job that does not train them."""
    if model.lora is not None and model.lora.path is None:
        yield (
            f"model.lora has no effect in the job {job}, which trains no adapter; remove it, or "
            "set model.lora.path to a trained one"
        )


class MovingReferenceConfig(Node):
    """Updates of the reference with the policy's weights."""

    every_n_steps: int = Field(ge=1)
    """Steps between updates."""
    mixup_alpha: float = Field(0.6, gt=0, le=1)
    """Weight alpha of the policy in an update: reference = alpha x policy + (1 - alpha) x reference
    (arXiv 2404.09656). 1: a copy of the policy."""


class ReferenceConfig(Node):
    """Model that the KL term measures the distance from."""

    older_keys = (
        OlderKeys(
            "moving",
            "sync_every_n_steps",
            switched_by("every_n_steps", 0),
            {"mixup_alpha": ("mixup_alpha", 0.6)},
        ),
    )

    model: ModelConfig | None = None
    """Reference model, with the policy's tokens. None: the policy at the start of the run (with
    LoRA: its base)."""
    moving: MovingReferenceConfig | None = None
    """Update it with the policy's weights (``{every_n_steps: 512}`` is TRL's default). None: it is
    frozen."""


Dtype = Literal["fp32", "bf16", "fp16"]


_DYNAMIC = (
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "min_loss_scale",
    "consecutive_hysteresis",
)


class Fp16Config(Node):
    """Loss scaling. The keys are DeepSpeed's."""

    loss_scale: float | None = Field(None, ge=0, le=2.0**120)
    """Factor on the loss before backward, divided out of the gradients. 0 or None: dynamic. Other
    values: constant."""
    initial_scale_power: int = Field(16, ge=0, le=120)
    """Initial dynamic loss scale, as a power of 2."""
    loss_scale_window: int = Field(1000, ge=1)
    """Clean steps since the last overflow after which a dynamic loss scale doubles, at a clean
    step, and again per such period."""
    hysteresis: int = Field(2, ge=1)
    """Overflows since the last growth from which on each one halves the scale; earlier ones only
    skip their step. 1: every overflow halves it."""
    min_loss_scale: float = Field(1.0, gt=0)
    """Minimum of a dynamic loss scale. An overflow that would go below it stops the run."""
    consecutive_hysteresis: bool = False
    """Reset the overflow count at every clean step, not when the scale grows."""

    def rules(self) -> Iterator[str]:
        if not self.loss_scale and self.min_loss_scale > 2.0**self.initial_scale_power:
            yield (
                f"min_loss_scale={self.min_loss_scale:g} is above the initial loss scale, "
                f"2^{self.initial_scale_power} = {2.0**self.initial_scale_power:g}; lower it, or "
                "raise initial_scale_power"
            )

    def advice(self) -> Iterator[str]:
        if not self.loss_scale:
            return
        if math.frexp(self.loss_scale)[0] != 0.5:
            below = 2.0 ** (math.frexp(self.loss_scale)[1] - 1)
            yield (
                f"loss_scale={self.loss_scale:g} is not a power of two, so scaling rounds "
                f"every gradient; use {below:g} or {2 * below:g}"
            )
        for name in _DYNAMIC:
            if self.is_own(name):
                yield (
                    f"{name} applies only to a dynamic loss scale, but "
                    f"loss_scale={self.loss_scale:g} is constant; remove one of the two"
                )


class PrecisionConfig(Node):
    """Number formats of the trainer and of the rollout engine, and loss scaling."""

    older_keys = (
        OlderKeys(
            "fp16",
            "fp16",
            on_off,
            {
                "loss_scale": ("loss_scale", None),
                "initial_scale_power": ("initial_scale_power", 16),
                "loss_scale_window": ("loss_scale_window", 1000),
                "hysteresis": ("hysteresis", 2),
                "min_loss_scale": ("min_loss_scale", 1.0),
                "consecutive_hysteresis": ("consecutive_hysteresis", False),
            },
        ),
    )

    dtype: Dtype = "fp32"
    """Compute format of the trainer. Master weights, Adam's moments and the update are always
    fp32."""
    rollout_dtype: Dtype | None = None
    """Compute format of the rollout engine. None: ``dtype``, with shared weights instead of a
    copy."""
    grad_accum_dtype: Dtype = "fp32"
    """Format of gradient accumulation: fp32, or ``dtype`` (2 bytes per parameter less between
    steps, but small gradients are lost in large sums)."""
    fp16: Fp16Config = Fp16Config()
    """Loss scaling of ``dtype: fp16``."""

    @property
    def sampler_dtype(self) -> Dtype:
        """Return the compute format of the rollout engine."""
        return self.rollout_dtype or self.dtype

    def rules(self) -> Iterator[str]:
        if self.dtype != "fp16" and self.is_own("fp16"):
            yield (
                f"fp16 has no effect with dtype={self.dtype}, which needs no loss scaling (its "
                "smallest numbers are as small as fp32's); remove it (on a command line: "
                "precision.fp16={}), or use dtype=fp16"
            )
        if self.grad_accum_dtype not in ("fp32", self.dtype):
            yield (
                f"grad_accum_dtype={self.grad_accum_dtype} with dtype={self.dtype}: gradients "
                f"are accumulated in fp32 or in the compute format; use fp32 or {self.dtype}"
            )

    def overrides_for(self, dtype: Dtype) -> str:
        """Return the command-line overrides that continue in ``dtype``, which has no loss
        scaling."""
        undone = ["precision.fp16={}"] if self.is_own("fp16") else []
        if self.grad_accum_dtype == self.dtype:
            undone.append("precision.grad_accum_dtype=fp32")
        return " ".join([f"precision.dtype={dtype}", *undone])


def random_reference_advice(subject: str) -> str:
    """Return the advice for ``subject``, which needs a reference model, if none is given and the
    policy starts with random weights."""
    return (
        f"{subject} measures against a reference model, but none is set, and the initial policy "
        "(model.scratch) has random weights; set reference.model.path, or start from a trained "
        "model"
    )
