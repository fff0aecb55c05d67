"""Export one model of a checkpoint as a HuggingFace folder, on the CPU and without the training
run.

The folder loads with plain ``AutoModelForCausalLM.from_pretrained`` (policies) or
``AutoModelForSequenceClassification.from_pretrained`` (critics and reward models), with the same
outputs. Critics and reward models of families without such a classifier have the form of
``models/scalar_model.py``, which Burnish loads.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from burnish.checkpoint.errors import CheckpointError
from burnish.checkpoint.manifest import verify
from burnish.checkpoint.save import CheckpointStore
from burnish.checkpoint.state import EXPORT_METADATA, load_state, saved_weights
from burnish.checkpoint.untrusted import check_files, check_sizes, copy_tokenizer, reading
from burnish.config.base import LOCK_FILE, lock_of
from burnish.config.model import Dtype, ModelConfig
from burnish.file_lock import locked_output
from burnish.models.auto_class import language_model_class
from burnish.models.buffers import BUFFERS, load_buffers, persistent_buffers, replace_buffers
from burnish.models.digest import present_weights_digest, weights_changed
from burnish.models.islands import cast_parameters, fp32_names
from burnish.models.load import DTYPES, ModelError, describe, load_causal_lm
from burnish.models.lora import ADAPTER_FILE, adapter_tensors, peft_config
from burnish.models.lora_layers import merged_weights
from burnish.models.scalar_model import (
    SCORES_AT,
    ScalarModel,
    check_names,
    empty_scalar,
    reset_head,
    save_own,
)
from burnish.models.scalar_support import classifier_weights, require_scalar
from burnish.models.tensor_files import tensor_sets
from burnish.models.tied_ends import untie_as_stored
from burnish.models.untrusted import refuse_kernels
from burnish.models.value_head import load_scalar_model
from burnish.small_files import read_small
from burnish.special_tokens import padding_id

log = logging.getLogger("burnish")

LoraForm = Literal["merge", "adapter"]


def export(  # house: ok options of one command
    checkpoint: Path | str,
    out: Path | str,
    *,
    model: str = "policy",
    dtype: Dtype | None = None,
    lora: LoraForm = "merge",
    max_shard_size: str = "5GB",
    base: str | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Write ``model`` of ``checkpoint`` to the HuggingFace folder ``out`` and return its path.

    * ``checkpoint``: a checkpoint folder, or a run folder (its newest good checkpoint).
    * ``model``: ``policy``, ``critic`` or ``reward``; with ``-ema`` for its moving average.
    * ``dtype``: dtype of the weights. None: fp32, the dtype of the master weights.
    * ``lora``: merge adapters into the base, or write the adapter alone (peft's format).
    * ``base``: folder or hub name of the adapters' base model. None: the checkpoint's base.
    * ``trust_remote_code``: run Python code of the base or of the checkpoint's model. The
      checkpoint's own setting is ignored.

    Raises CheckpointError if the checkpoint or its model does not exist, if it is corrupted or
    contains symbolic links to the outside, if it needs code without ``trust_remote_code``, or if
    ``out`` is not empty or another process writes it.
    """
    lock = lock_of(Path(out))
    with locked_output(
        lock,
        CheckpointError,
        unwritable=f"the export folder {out} cannot be written, because {lock} cannot",
        in_use=f"another process writes the export folder {out}",
        other="another folder",
    ):
        return _export(
            Path(checkpoint),
            Path(out),
            model=model,
            dtype=dtype,
            lora=lora,
            max_shard_size=max_shard_size,
            base=base,
            trust_remote_code=trust_remote_code,
        )


def _export(  # house: ok options of one command
    checkpoint: Path,
    target: Path,
    *,
    model: str,
    dtype: Dtype | None,
    lora: LoraForm,
    max_shard_size: str,
    base: str | None,
    trust_remote_code: bool,
) -> Path:
    folder = _checkpoint_folder(checkpoint)
    role, dash, kind = model.partition("-")
    if dash and kind != "ema":
        raise CheckpointError(
            f"model={model!r} cannot be exported; use {role} or {role}-ema (its moving average)"
        )
    source = _engine_folder(folder, role)
    if target.exists() and any(path.name != LOCK_FILE for path in target.iterdir()):
        raise CheckpointError(f"the export folder {target} is not empty; choose a new one")
    with reading(source):
        weights = _weights(source, kind or "master")
    saved_role, config, computes_in = _read_engine(source, base, trust=trust_remote_code)
    scalar = saved_role in ("critic", "reward")
    outputs = weights["score.weight"].shape[0] if scalar else None
    if lora == "adapter":
        _check_adapter(config, saved_role)
    torch_dtype = DTYPES[dtype or "fp32"]
    if config.lora is not None:  # the checkpoint only contains the adapter, and the base's path
        _check_base(source, config, is_chosen=base is not None)
        network = _adapted_model(config, computes_in, outputs=outputs)
        with reading(source):
            _load_weights(network, weights, source)
            load_buffers(network, source)
            weights = dict(merged_weights(network))
    _check_range(weights, torch_dtype)
    target.mkdir(parents=True, exist_ok=True)
    if lora == "adapter":
        _save_adapter(network, config, target, torch_dtype)
    else:
        with reading(source):
            check_sizes(source, weights)
            model_config = _config(
                source, outputs=outputs, averaged=kind == "ema", trust=trust_remote_code
            )
            shell, body = _shell(
                model_config, torch_dtype, weights, source=source, trust=trust_remote_code
            )
            if config.lora is None:
                weights |= _buffers(shell, source, config, scalar=scalar)
            if scalar and not isinstance(shell, ScalarModel):
                weights = _renamed(shell, weights, body, source)
            wide = fp32_names(shell, torch_dtype)
            written = {n: t if n in wide else _cast(t, torch_dtype) for n, t in weights.items()}
            if isinstance(shell, ScalarModel):
                _save_scalar(shell, written, (source, target), shard=max_shard_size)
            else:
                _save_merged(shell, written, (source, target), shard=max_shard_size)
    with reading(source):
        copy_tokenizer(source / "hf", target, trust=trust_remote_code)
        if scalar:
            _set_pad_token(target, trust=trust_remote_code)
    return target


def _checkpoint_folder(path: Path) -> Path:
    if (path / "checkpoints").is_dir():
        newest = CheckpointStore(path / "checkpoints", keep_last=1, best_mode="max").latest()
        if newest is None:
            raise CheckpointError(
                f"the run {path} has no good checkpoint; resume it (--resume {path}) until it "
                "saves one, or use another run"
            )
        check_files(newest)
        return newest
    if not path.is_dir():
        raise CheckpointError(
            f"the checkpoint {path} does not exist; give a run folder, or one of its checkpoints"
        )
    check_files(path)
    problems = verify(path)
    if problems:
        raise CheckpointError(f"the checkpoint {path} is damaged: {problems[0]}; use another one")
    return path


def _read_engine(source: Path, base: str | None, *, trust: bool) -> tuple[str, ModelConfig, Dtype]:
    """Return role, model and compute dtype of ``engine.json``; the model only has the fields that
    determine the weights.

    Tokenizer and template paths are dropped, because ``hf/`` contains both. The checkpoint's
    ``trust_remote_code`` is ignored: its author must not decide which code runs here.
    """
    try:
        state = json.loads(read_small(source / "engine.json"))
        saved, role = ModelConfig.model_validate(state["model"]), str(state["role"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{source / 'engine.json'} cannot be read ({error}); use another checkpoint"
        ) from error
    config = ModelConfig(
        path=saved.path,
        gguf_file=saved.gguf_file,
        revision=saved.revision,
        scratch=saved.scratch,
        lora=saved.lora,
        trust_remote_code=trust,
    )
    if base is not None:
        if config.lora is None:
            raise CheckpointError(
                f"base={base!r} is a base for adapters, but {source} contains full weights; omit "
                "base"
            )
        config = ModelConfig(path=base, lora=config.lora, trust_remote_code=trust)
    return role, config, state.get("dtype", "fp32")


def _check_base(source: Path, config: ModelConfig, *, is_chosen: bool) -> None:
    """Raise CheckpointError if the base has other weights than that of the run; log a warning if
    the user chose it (``is_chosen``)."""
    if not (source.parent / "session.json").is_file():
        return
    then = saved_weights(source.parent).get(source.name, {})
    now = present_weights_digest(config.without_adapter_path())
    if not weights_changed(then.get("digest"), now):
        return
    change = (
        f"weights or config of {describe(config)} are not those that the adapters of {source} were"
    )
    if not is_chosen:
        raise CheckpointError(
            f"{change} trained on: they changed since the run was started. Restore them, or give "
            "the folder of the original base to burnish export with --base DIR"
        )
    log.warning("%s trained on (%s)", change, then.get("model"))


def _adapted_model(
    config: ModelConfig, computes_in: Dtype, *, outputs: int | None
) -> torch.nn.Module:
    """Return the base model with newly initialized adapters. ``outputs``: number of outputs of a
    scalar model; None: a language model.

    4-bit weights are those of the run: quantized from, and dequantized to, its compute dtype.
    """
    log.info("adapters are added to %s", describe(config))
    quantized = config.lora is not None and config.lora.quantization is not None
    dtype: Dtype = computes_in if quantized else "fp32"
    try:
        if outputs is not None:
            return load_scalar_model(config, dtype=dtype, new_head="random", num_outputs=outputs)
        return load_causal_lm(config, dtype=dtype)
    except ModelError as error:
        raise CheckpointError(
            f"the base of the adapters cannot be loaded: {error}. The checkpoint contains its "
            "path; --base sets another folder or hub name, and --trust-remote-code runs its Python "
            "code"
        ) from error


def _engine_folder(folder: Path, role: str) -> Path:
    have = sorted(p.parent.name for p in folder.glob("*/engine.json"))
    if role not in have:
        raise CheckpointError(
            f"{folder} contains no {role!r}; "
            + (f"use --model with one of: {', '.join(have)}" if have else "use another checkpoint")
        )
    return folder / role


def _weights(source: Path, kind: str) -> dict[str, Tensor]:
    """Read the unsharded tensors of one set, however many ranks wrote it."""
    try:
        files = tensor_sets(source).get(kind)
    except ValueError as error:
        raise CheckpointError(f"{error}; use another checkpoint") from error
    if files is None:
        raise CheckpointError(
            f"{source.parent} has no {kind} weights of {source.name}; "
            + (
                f"use --model {source.name}, or train with train.ema_decay"
                if kind == "ema"
                else "use another checkpoint"
            )
        )
    return {name: files.read(name) for name in files}


def _buffers(
    shell: torch.nn.Module, source: Path, config: ModelConfig, *, scalar: bool
) -> dict[str, Tensor]:
    """Return the persistent buffers of a model without adapters.

    Checkpoints of older versions contain no buffers; for these, the buffers of the run's initial
    model are used.
    """
    path = source / BUFFERS
    if path.is_file():
        return {name: torch.nn.Buffer(tensor) for name, tensor in load_file(path).items()}
    if not any(persistent_buffers(shell)):
        return {}
    log.info(
        "%s has no buffers (it was written by an older version); those of the initial model are "
        "used",
        source,
    )
    try:
        base = load_scalar_model(config, new_head="random") if scalar else load_causal_lm(config)
    except ModelError as error:
        raise CheckpointError(
            f"{source} has no buffers (it was written by an older version), and the run's initial "
            f"model, which has them, cannot be loaded: {error}. Restore that model at its path"
        ) from error
    return dict(persistent_buffers(base))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight in ``dtype``; buffers keep their dtype."""
    return tensor if isinstance(tensor, torch.nn.Buffer) else tensor.to(dtype)


def _check_range(weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Raise CheckpointError if a finite weight would become infinite in ``dtype``."""
    if dtype != torch.float16:  # bf16 has the range of fp32, except for its largest numbers
        return
    for name, weight in weights.items():
        beyond = weight.isfinite() & ~weight.to(dtype).isfinite()
        if beyond.any():
            largest = float(weight[beyond].abs().max())
            raise CheckpointError(
                f"fp16 ends at {torch.finfo(dtype).max:g}, but {name} contains {largest:g}, which "
                "would become infinite; use --dtype bf16 or fp32"
            )


def _load_weights(network: torch.nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    parameters = dict(network.named_parameters())
    unknown = sorted(set(tensors) - set(parameters))
    if unknown:
        raise CheckpointError(
            f"{source} has weights that the model lacks, e.g. {unknown[0]}; use --base with the "
            "model that the run was trained on"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def _config(source: Path, *, outputs: int | None, averaged: bool, trust: bool) -> PretrainedConfig:
    """Return the config of the exported model. ``outputs``: as in :func:`_adapted_model`."""
    with _explained(source):
        config: PretrainedConfig = AutoConfig.from_pretrained(
            source / "hf", trust_remote_code=trust
        )
    if not trust:
        refuse_kernels(config, str(source))
    config.use_cache = True
    if outputs is not None:
        reset_head(config, outputs)
        config.update({SCORES_AT: "end_token"})
        is_reward = source.name == "reward"
        if is_reward and (source.parent / f"{EXPORT_METADATA}.json").is_file():
            config.update(load_state(source.parent, EXPORT_METADATA))  # such as a step separator
        if not averaged:  # held-out rows were scored with the current weights
            config.update(_score_stats(source))
    return config


@contextmanager
def _explained(source: Path) -> Iterator[None]:
    """Raise CheckpointError if the model of ``source`` needs code that is not trusted."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise CheckpointError(
            f"the model of {source} contains Python code, which runs only with --trust-remote-code;"
            f" read the code first ({source / 'hf'})"
        ) from error


def _shell(
    config: PretrainedConfig,
    dtype: torch.dtype,
    weights: Mapping[str, Tensor],
    *,
    source: Path,
    trust: bool,
) -> tuple[PreTrainedModel | ScalarModel, str]:
    """Return a model with random or no weights, to be replaced by ``weights``, and the name of its
    body. A reward model or critic is transformers' classifier, or, if its family has none with the
    same scores, a :class:`ScalarModel`."""
    bias = "score.bias" in weights
    with _explained(source):
        auto = language_model_class(config)
        body_path = "model"
        if "score.weight" in weights:
            try:
                support = require_scalar(config, str(source), trust=trust)
            except ModelError as error:
                raise CheckpointError(str(error)) from error
            if support.form == "own" or bias:
                config.dtype = dtype
                outputs = weights["score.weight"].shape[0]
                return empty_scalar(config, outputs, bias=bias, trust=trust), "model"
            auto, body_path = AutoModelForSequenceClassification, support.body_path
        untie_as_stored(config, auto, weights, weights.__getitem__, name=str(source))
        shell = auto.from_config(config, dtype=dtype, trust_remote_code=trust)
    cast_parameters(shell, dtype)
    return cast(PreTrainedModel, shell), body_path


def _save_scalar(
    shell: ScalarModel, weights: dict[str, Tensor], folders: tuple[Path, Path], *, shard: str
) -> None:
    source, target = folders
    try:
        check_names(shell, weights)
    except ValueError as error:
        raise _misfit(source, shell, str(error)) from error
    save_own(weights, shell.config, target, shard=shard)


def _renamed(
    shell: PreTrainedModel, weights: dict[str, Tensor], body: str, source: Path
) -> dict[str, Tensor]:
    """Return the weights of a scalar model under their names in a classifier."""
    try:
        return classifier_weights(weights, body, shell)
    except ValueError as error:
        raise _misfit(source, shell, str(error)) from error


def _save_merged(
    shell: PreTrainedModel,
    weights: dict[str, Tensor],
    folders: tuple[Path, Path],
    *,
    shard: str,
) -> None:
    source, target = folders
    missing, unexpected = shell.load_state_dict(weights, strict=False)
    tied = set(shell.all_tied_weights_keys)
    replace_buffers(shell, {n: t for n, t in weights.items() if isinstance(t, torch.nn.Buffer)})
    if unexpected or set(missing) - tied:
        raise _misfit(source, shell, (list(unexpected) + sorted(set(missing) - tied))[0])
    shell.save_pretrained(target, max_shard_size=shard)


def _misfit(source: Path, shell: torch.nn.Module, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the weights of {source} do not fit {type(shell).__name__}, the model of its "
        f"hf/config.json: {reason}; use another checkpoint"
    )


def _score_stats(source: Path) -> dict[str, Any]:
    """Return mean and standard deviation of a reward model's scores on the run's held-out rows.

    A process reward model has them for each aggregation of step scores. Empty, with a warning, if
    these weights were not evaluated.
    """
    if source.name != "reward" or not (source.parent / "session.json").is_file():
        return {}
    session = load_state(source.parent, "session")
    last = session["last"]
    if session.get("evaluated_step") != session["step"]:
        reason = f"held-out rows were not evaluated at step {session['step']} of the run"
        remedy = (
            "save at steps that are evaluated (checkpoint.every_n_steps a multiple of "
            "eval.every_n_steps) or export the run's last checkpoint"
        )
        if session.get("evaluated_step", -1) < 0:
            reason = "the run had not evaluated any held-out rows by then"
            remedy = "train it with eval.data"
        log.warning(
            "this reward model is exported without mean and standard deviation of its scores: %s; "
            "its rewards cannot use normalize=true. To get them, %s",
            *(reason, remedy),
        )
        return {}
    named = {"reward_mean": "eval/score_mean", "reward_std": "eval/score_std"}
    stats: dict[str, Any] = {k: float(last[name]) for k, name in named.items() if name in last}
    steps = re.compile(r"eval/score_(min|product|last|mean)_mean")
    ways = [match[1] for name in sorted(last) if (match := steps.fullmatch(name))]
    if ways:
        stats["process_reward_stats"] = {
            way: [float(last[f"eval/score_{way}_{statistic}"]) for statistic in ("mean", "std")]
            for way in ways
        }
    return stats


def _check_adapter(config: ModelConfig, role: str) -> None:
    if config.lora is None:
        raise CheckpointError(
            "lora=adapter exports an adapter, but this model was fully fine-tuned; use lora=merge"
        )
    if role != "policy":
        raise CheckpointError(
            f"lora=adapter: an adapter does not contain the head of a {role}; "
            "export it with lora=merge"
        )


def _save_adapter(
    network: torch.nn.Module, config: ModelConfig, target: Path, dtype: torch.dtype
) -> None:
    assert config.lora is not None
    settings = peft_config(config.lora, network)
    settings.base_model_name_or_path = config.path
    settings.revision = config.revision
    settings.inference_mode = True
    settings.save_pretrained(str(target))
    state = adapter_tensors(network)
    named = {f"base_model.model.{name}": t.to(dtype).contiguous() for name, t in state.items()}
    save_file(named, target / ADAPTER_FILE, metadata={"format": "pt"})


def _set_pad_token(target: Path, *, trust: bool) -> None:
    """Set a classifier's pad token to one that ends no row.

    transformers scores the last token that is not padding. If rows end with the pad token, it would
    score the token before the end. Without another special token, the pad token is unset and only
    single rows can be scored. A token without an embedding is none.
    """
    code = {"trust_remote_code": trust}
    tokenizer = AutoTokenizer.from_pretrained(target, **code)
    config = AutoConfig.from_pretrained(target, **code)
    text = config.get_text_config().to_dict()
    pad = padding_id(tokenizer, text.get("eos_token_id"), size=text.get("vocab_size"))
    config.pad_token_id = pad
    config.save_pretrained(target)
    if pad is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
        tokenizer.save_pretrained(target)
