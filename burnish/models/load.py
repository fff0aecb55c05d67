"""Load models and tokenizers from a folder, a hub name, a GGUF file, or from scratch.

Models are ordinary HuggingFace models with the attention of their family and weights in the
requested dtype. LoRA adapters are injected if the config requests them. Scalar models (critics,
reward models) are in ``value_head.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from jinja2 import TemplateError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from burnish.config.explain import nearest
from burnish.config.model import TEMPLATE_INPUTS, Dtype, LoraConfig, ModelConfig
from burnish.models.attn_implementation import (
    check_attention,
    require_flash_attention,
    use_attention,
)
from burnish.models.auto_class import is_composite, language_model_class
from burnish.models.checks import check_head, check_language_model, check_unquantized, check_weights
from burnish.models.composite import check_class, other_model
from burnish.models.empty import empty_model, weight_files
from burnish.models.end_tokens import configured_end_tokens, gguf_entry
from burnish.models.family import ModelSupport
from burnish.models.half_linear import use_fp32_products
from burnish.models.islands import cast_parameters
from burnish.models.lora import adapted_ends, inject_lora
from burnish.models.lora_base import other_base
from burnish.models.nf4 import quantize, require_bitsandbytes
from burnish.models.paths import ModelError as ModelError
from burnish.models.paths import check_path, check_tokenizer_path
from burnish.models.scratch import scratch_model, scratch_tokenizer
from burnish.models.support import model_support, row_limit, runs_own_code
from burnish.models.tied_ends import untie_as_loaded, untie_as_stored
from burnish.models.untrusted import (
    UNREADABLE,
    check_folder,
    check_kinds,
    refuse_kernels,
    unloadable,
)
from burnish.oom import is_out_of_memory
from burnish.small_files import read_small
from burnish.special_tokens import set_configured_ends, special_tokens
from burnish.templates import variables, with_defaults
from burnish.vocabulary import set_embeddings

log = logging.getLogger("burnish")

DTYPES: dict[Dtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def resolve_device(name: str) -> torch.device:
    """Return the device ``name``; ``auto`` is CUDA if available, else the CPU.

    Raises ModelError if the device does not exist.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(
            f"device={name!r} is not a PyTorch device; use auto, cpu, cuda, or cuda:1 and so on"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            f"device={name!r} requires CUDA, but this PyTorch ({torch.__version__}) "
            "sees no CUDA device; use device=cpu (for training, train.engine.device=cpu), or "
            "install a CUDA build of torch"
        )
    return device


def load_causal_lm(
    config: ModelConfig,
    *,
    dtype: Dtype = "fp32",
    device: torch.device | str = "cpu",
    empty: bool = False,
    random: PretrainedConfig | None = None,
) -> PreTrainedModel:
    """Load a causal LM with ``dtype`` weights on ``device``, and LoRA adapters if configured.

    ``empty`` leaves the weights on the meta device, for an engine that reads its own shard of them.
    If they cannot be read in parts (see ``empty.py``), the whole model is loaded. ``random``: the
    config of the model, which then gets random weights, and no file of it is read. Raises
    ModelError if the folder, file or hub name cannot be loaded.
    """
    if random is None:
        check_support(config)
    pretrained_config = random or hf_config(config)
    auto_class = language_model_class(pretrained_config)
    if random is None and pretrained_config is not None:
        check_language_model(pretrained_config, describe(config))
    model: Any = without_weights(auto_class, config, dtype) if empty else None
    if model is None:
        if random is not None:
            with torch.device(device):
                model = auto_class.from_config(random)
        elif config.scratch is not None:
            model = scratch_model(config.scratch, torch.float32)
        else:
            model = from_pretrained(auto_class, config, DTYPES[dtype])
        model = place(model, dtype=dtype, device=device, lora=config.lora)
    choose_attention(model, describe(config))
    in_parts = any(p.is_meta or not p.numel() for p in model.parameters())
    if not in_parts:  # the engine checks a sharded model
        check_weights(model.named_parameters(), describe(config))
        check_head(model, describe(config))
    if config.lora is not None:
        random_state = torch.get_rng_state()
        inject_adapters(model, config)
        if in_parts and adapted_ends(model):  # adapters of embeddings and heads are copied
            torch.set_rng_state(random_state)
            return load_causal_lm(config, dtype=dtype, device=device)
    else:
        _check_all_trained(model, config)
    use_fp32_products(model)
    use_attention(model, config.attn_implementation, describe(config))
    return cast(PreTrainedModel, model)


def check_support(config: ModelConfig) -> ModelSupport | None:
    """Return how the model's family runs, from its config alone.

    Returns None if the config cannot be read without the weights (GGUF files) or the model is built
    from scratch. Raises ModelError if the model cannot be trained or sampled. Reads no weights;
    takes up to three seconds the first time (``models/support.py``).
    """
    if config.lora is not None and config.lora.quantization is not None:
        require_bitsandbytes()
    if config.attn_implementation == "flash_attention_2":
        require_flash_attention()
    pretrained_config = hf_config(config)
    if pretrained_config is None:
        return None
    check_unquantized(pretrained_config, describe(config))
    check_class(pretrained_config, describe(config))
    check_attention(pretrained_config, config.attn_implementation)
    return require_support(pretrained_config, describe(config), trust=config.trust_remote_code)


def require_support(config: PretrainedConfig, name: str, *, trust: bool) -> ModelSupport:
    """Return how models with this ``config`` run. ``name`` is the model's name in messages. Raises
    ModelError if they cannot be trained or sampled."""
    support = model_support(config, trust=trust)
    if support.refusal and is_composite(config):
        raise ModelError(
            f"{name}, a composite model, cannot be used: "
            f"{support.refusal.removesuffix('; use another model')}; {other_model(config)}"
        )
    if support.refusal:
        raise ModelError(support.refusal_of(name))
    return support


def choose_attention(
    model: PreTrainedModel, name: str, config: PretrainedConfig | None = None
) -> None:
    """Set the attention of a model: packed rows if they are exact, else transformers' own attention
    on padded rows.

    The choice is logged once per family. ``name`` is the model's name in messages. ``config``: that
    of the language model, if ``model`` is only its body.
    """
    support = require_support(config or model.config, name, trust=runs_own_code(model))
    if support.model_type not in _SAID:
        _SAID.add(support.model_type)
        level = logging.INFO if support.packed else logging.WARNING
        log.log(level, "%s: %s", name, support.sentence())
    model.set_attn_implementation(support.attention)
    model.config.use_cache = False


_SAID: set[str] = set()


def require_packing(config: PretrainedConfig, setting: str, *, trust: bool = False) -> None:
    """Raise ModelError if models with this ``config`` cannot compute packed rows, which ``setting``
    needs."""
    support = model_support(config, trust=trust)
    if not support.packed:
        raise ModelError(
            f"{setting}: {support.sentence()}, but ranks can only share attention over packed "
            "rows; use 1"
        )


def _check_all_trained(model: Any, config: ModelConfig) -> None:
    """Raise ModelError if transformers freezes a parameter (the initial state of HRM).

    Checkpoints of full fine-tuning only contain trained parameters.
    """
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if frozen:
        raise ModelError(
            f"{describe(config)} ({type(model).__name__}) has a parameter that is never trained "
            f"({frozen[0]}), which a checkpoint of trained weights would not contain; train "
            "adapters instead (model.lora)"
        )


def inject_adapters(model: Any, config: ModelConfig) -> None:
    """Inject the adapters of ``config`` into ``model``. Raises ModelError if they do not fit. Log
    once if the adapter names another base, of which one with the same shapes would fit."""
    assert config.lora is not None
    if (base := other_base(config)) and base not in _SAID:
        _SAID.add(base)
        log.warning(
            "the adapter %s names the base %s, but model.path is %s: if these are other weights, "
            "such as those of an instruct model, the result is another model than that which was "
            "trained. Set model.path to the base of the adapter",
            *(config.lora.path, base, describe(config)),
        )
    try:
        inject_lora(model, config.lora)
    except ValueError as error:  # peft's, for targets that match nothing or cannot be adapted
        raise ModelError(f"{describe(config)}: {error}") from error


def place(
    model: Any, *, dtype: Dtype, device: torch.device | str, lora: LoraConfig | None = None
) -> Any:
    """Cast the parameters of ``model`` to ``dtype`` (some stay in fp32: ``islands.py``), move it to
    ``device``, and return it. With 4-bit base weights in ``lora``, only their codes are moved.

    Buffers keep their dtype. Rotary frequencies are multiplied by the position, so rounding them to
    bf16 rotates token 4000 by tenths of a radian. (``model.to(dtype)`` would round them;
    transformers' loading does not.)
    """
    cast_parameters(model, DTYPES[dtype])
    if lora is not None and lora.quantization is not None:
        check_weights(model.named_parameters(), type(model).__name__)
        quantize(model, double=lora.quantization.double, device=device)
    return model.to(device)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, or that of its adapter if the adapter's folder has one.

    ``model.chat_template`` replaces its chat template if set, else a chat template in the folder of
    an adapter that has no tokenizer. In the template,
    ``model.chat_template_kwargs`` are defaults. :mod:`burnish.special_tokens` then knows the end
    tokens of the model.

    If it has no pad token, the end-of-sequence token is used. Raises ModelError if there is no
    tokenizer, if it has no end-of-sequence token, or if the template does not read one of
    ``model.chat_template_kwargs``.
    """
    tokenizer: Any
    if config.scratch is not None and config.tokenizer_override is None:
        tokenizer = scratch_tokenizer(config.scratch.alphabet)
    else:
        tokenizer = _tokenizer_from_pretrained(config)
    file = config.template_file
    if config.chat_template is not None:
        if file is None and "{" not in config.chat_template:
            raise ModelError(
                f"model.chat_template={config.chat_template!r} is not a file (working directory: "
                f"{Path.cwd()}) and not a Jinja template either (it contains no braces); give the "
                "path of a template file, or the template itself"
            )
        tokenizer.chat_template = config.chat_template if file is None else file.read_text()
    elif file is not None:
        tokenizer.chat_template = read_small(file).decode("utf-8")
        if str(file) not in _SAID:
            _SAID.add(str(file))
            log.info(
                "the chat template is that in the adapter's folder, %s; model.tokenizer_path=%s "
                "uses the base's",
                *(file, describe(config)),
            )
    if config.chat_template_kwargs:
        _set_template_defaults(tokenizer, config)
    if config.eos_token is not None:
        _set_end_token(tokenizer, config.eos_token, config)
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {describe(config)} has no end-of-sequence token, so responses "
            "could not end; set model.eos_token to a token of its vocabulary, or "
            "model.tokenizer_path to a tokenizer that has one"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    pretrained_config = hf_config(config)
    _check_vocabulary(tokenizer, config, pretrained_config)
    set_configured_ends(tokenizer, configured_end_tokens(config, pretrained_config))
    return cast(PreTrainedTokenizerBase, tokenizer)


def _set_end_token(tokenizer: Any, token: str, config: ModelConfig) -> None:
    """Make ``token`` the end token, as a special token: an exported tokenizer has it as one, and
    would otherwise split and decode texts differently than the run. Raises ModelError if it is not
    one token of the vocabulary."""
    if token not in tokenizer.get_vocab():
        special = sorted(special_tokens(tokenizer).values())
        candidates = {*special, *map(str, tokenizer.get_added_vocab())}
        raise ModelError(
            f"model.eos_token={token!r} is not a token of the tokenizer of {describe(config)}"
            f"{nearest(token, candidates)}; use a token of its vocabulary (its special tokens are "
            f"{', '.join(special[:20])}{', ...' * (len(special) > 20)})"
        )
    tokenizer.add_special_tokens({"eos_token": token})


def _set_template_defaults(tokenizer: Any, config: ModelConfig) -> None:
    """Make ``chat_template_kwargs`` defaults of the chat template, or of each of several named
    ones. Raises ModelError if none of them reads a name."""
    defaults, template = config.chat_template_kwargs, tokenizer.chat_template
    texts = template if isinstance(template, dict) else {"default": template or ""}
    try:
        read = set[str]().union(*(variables(text) for text in texts.values()))
    except TemplateError as error:
        raise ModelError(f"the chat template of {describe(config)} is invalid: {error}") from error
    read -= {*TEMPLATE_INPUTS, *tokenizer.special_tokens_map}
    for name in defaults:
        if name not in read:
            names = f"it reads {', '.join(sorted(read))}" if read else "it reads no such variables"
            raise ModelError(
                f"model.chat_template_kwargs.{name}: the chat template of {describe(config)} does "
                f"not read {name}{nearest(name, read)}, so the value would have no effect; remove "
                f"it: {names}"
            )
    texts = {key: with_defaults(text, defaults) for key, text in texts.items()}
    tokenizer.chat_template = texts if isinstance(template, dict) else texts["default"]


def _check_vocabulary(
    tokenizer: Any, config: ModelConfig, pretrained_config: PretrainedConfig | None
) -> None:
    """Log a warning if tokens have no embedding; raise ModelError if the end token is one of them.

    More embeddings than tokens are normal, because vocabularies are padded.
    """
    size = (
        pretrained_config.get_text_config().to_dict().get("vocab_size")
        if pretrained_config is not None
        else None
    )
    if size is None or len(tokenizer) <= size:
        return
    if tokenizer.eos_token_id >= size:
        raise ModelError(
            f"the tokenizer's end token {tokenizer.eos_token!r} ({tokenizer.eos_token_id}) is not "
            f"in the vocabulary of {describe(config)}, which has {size} tokens; use the model's "
            "own tokenizer (model.tokenizer_path), or resize the model's embeddings"
        )
    set_embeddings(tokenizer, size)
    log.warning(
        "the tokenizer has %d tokens, but %s has embeddings for %d: rows with one of the others "
        "are refused",
        *(len(tokenizer), describe(config), size),
    )


def hf_config(config: ModelConfig) -> PretrainedConfig | None:
    """Return the model's HuggingFace config without reading its weights.

    Returns None if it cannot be read alone: for GGUF files, models built from scratch, and models
    that cannot be loaded (loading them raises the reason). Raises ModelError for a folder or config
    that is not safe to load (``untrusted.py``).
    """
    if config.path is None or config.gguf_file is not None:
        return None
    if Path(config.path).is_dir():
        check_folder(Path(config.path))
    try:
        pretrained_config: PretrainedConfig = AutoConfig.from_pretrained(
            config.path,
            revision=config.revision or "main",
            trust_remote_code=config.trust_remote_code,
        )
    except UNREADABLE:
        return None
    if not config.trust_remote_code:
        refuse_kernels(pretrained_config, describe(config))
    return pretrained_config


def without_weights(auto_class: Any, config: ModelConfig, dtype: Dtype) -> Any | None:
    """Return the model of :func:`empty.empty_model`; None if its weights cannot be read in
    parts."""
    pretrained_config = hf_config(config)
    if pretrained_config is None:  # a GGUF file, or built from scratch
        return None
    try:
        return empty_model(auto_class, config, pretrained_config, dtype=DTYPES[dtype])
    except UNREADABLE as error:
        if isinstance(error, ModelError) or is_out_of_memory(error):
            raise
        raise unloadable("model", describe(config), error) from error


def num_positions(config: ModelConfig) -> int | None:
    """Return the longest row in tokens, from the model's config alone; None if it has no limit."""
    if config.scratch is not None:
        return config.scratch.max_position_embeddings
    pretrained_config = hf_config(config)
    if pretrained_config is None:
        return None
    return row_limit(pretrained_config)


def describe(config: ModelConfig) -> str:
    """Return a short name of the model for messages."""
    if config.scratch is not None:
        return "the model made from scratch"
    return f"{config.path}/{config.gguf_file}" if config.gguf_file else str(config.path)


def from_pretrained(auto_class: Any, config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Load the folder, file or hub name in ``config`` with transformers' ``auto_class``, in
    ``dtype``.

    Raises ModelError if it cannot be loaded or weights are missing.
    """
    check_path(config, warn=True)
    options: dict[str, Any] = {"gguf_file": config.gguf_file} if config.gguf_file else {}
    if not config.gguf_file:
        options["use_safetensors"] = True
        if (untied := _untied_config(auto_class, config)) is not None:
            options["config"] = untied
    try:
        model, info = auto_class.from_pretrained(
            config.path,
            dtype=dtype,
            revision=config.revision or "main",
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            **options,
        )
    except UNREADABLE as error:
        if is_out_of_memory(error):
            raise
        raise unloadable("model", describe(config), error) from error
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{describe(config)} has no weights for {len(missing)} parameters of a "
            f"{type(model).__name__}, e.g. {missing[0]}: they would be random; check that "
            "model.path is a model of this kind, and complete"
        )
    untie_as_loaded(model, describe(config))
    if config.gguf_file:
        # The weights are dequantized. With its marks, transformers would refuse to save the model.
        model.hf_quantizer = None
        model.is_quantized = False
        if "quantization_config" in model.config.__dict__:
            del model.config.quantization_config
    return model


def _untied_config(auto_class: Any, config: ModelConfig) -> PretrainedConfig | None:
    """Return the config with which the folder is loaded if its files have other ends than its
    config says; None: its own."""
    pretrained_config, files = hf_config(config), weight_files(config)
    if pretrained_config is None or files is None:
        return None
    changed = untie_as_stored(
        pretrained_config, auto_class, files, files.read, name=describe(config)
    )
    return pretrained_config if changed else None


def _tokenizer_from_pretrained(config: ModelConfig) -> PreTrainedTokenizerBase:
    override = config.tokenizer_override
    source = override or config.path
    gguf = config.gguf_file if override is None else None
    check_tokenizer_path(config)
    if override is None:
        check_path(config, warn=True)
    elif config.tokenizer_path is None and override not in _SAID:
        _SAID.add(override)
        log.info(
            "tokenizer, chat template and end token are those in the adapter's folder %s; "
            "model.tokenizer_path sets another tokenizer (the base's: %s)",
            *(override, describe(config)),
        )
    if Path(str(source)).is_dir():
        check_kinds(Path(str(source)))
    options = {"gguf_file": gguf} if gguf else {}
    if override is None and config.revision:
        options["revision"] = config.revision
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, trust_remote_code=config.trust_remote_code, **options
        )
    except Exception as error:  # tokenizers raises plain Exceptions
        problem = unloadable("tokenizer", str(source), error)
        if override is not None and config.tokenizer_path is None:
            raise ModelError(
                f"{problem}. The folder of the adapter has this tokenizer; "
                f"model.tokenizer_path={config.path} uses that of the base"
            ) from error
        raise problem from error
    if not isinstance(tokenizer.added_tokens_decoder, Mapping):  # (a method of mistral-common's)
        raise ModelError(
            f"the tokenizer of {source} is a {type(tokenizer).__name__} (of tekken.json alone, "
            "where mistral-common is installed), which has neither texts of tokens nor a Jinja "
            "template; set model.tokenizer_path to a folder with tokenizer.json of the same model"
        )
    if gguf:
        from tokenizers import pre_tokenizers

        if gguf_entry(Path(str(config.path)) / gguf, "tokenizer.ggml.pre") in _SPLIT_DIGITS:
            backend = tokenizer.backend_tokenizer
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    return tokenizer


# Pre-tokenizers (GGUF key tokenizer.ggml.pre) that split every digit. The tokenizer rebuilt by
# transformers does not.
_SPLIT_DIGITS = frozenset({"smollm"})
