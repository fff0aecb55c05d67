"""Settings of adapter folders that peft saved."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_FIELDS = {
    "r": "lora_rank",
    "lora_alpha": "lora_alpha",
    "target_modules": "target_modules",
    "modules_to_save": "modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
_ADAPTER_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
    "fan_in_fan_out": (False, True, None),
}
"""Settings of peft with the values that Burnish supports."""
_ADAPTER_INERT = frozenset(
    [
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "qalora_group_size",
    ]
)
"""Settings of peft that do not change the function of a trained adapter: descriptions, dropout, and
parameters of settings that must be off."""
_OFF: tuple[Any, ...] = (None, False, {}, [])
"""Values of a setting that is not used, in JSON."""
_CHANGES_BASE = {
    "pissa": "PiSSA",
    "olora": "OLoRA",
    "corda": "CorDA",
    "loftq": "LoftQ",
    "lora_ga": "LoRA-GA",
    "eva": "EVA",
    "mica": "MiCA",
}
"""Prefixes of ``init_lora_weights`` that replace base weights or draw from data, with the name of
the method."""


def outside_of(names: Sequence[str]) -> str:
    """Return a regular expression that matches names of modules outside of the modules ``names``,
    which are escaped. Adapters of composite models are saved with it as ``exclude_modules``."""
    return f"{_OUTSIDE[0]}{'|'.join(names)}{_OUTSIDE[1]}"


_OUTSIDE = ("(?!(?:", r")(?:\.|$)).*")


def saved_exclusion(folder: Path) -> str | None:
    """Return ``exclude_modules`` of the adapter in ``folder``; None without it or the file."""
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        return None
    return json.loads(file.read_text(encoding="utf-8")).get("exclude_modules") or None


def _is_outside(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(_OUTSIDE[0]) and value.endswith(_OUTSIDE[1])


def adapter_problem(settings: Mapping[str, Any]) -> str | None:
    """Return why Burnish cannot continue an adapter with peft's ``settings``; None if it can.

    Every setting that Burnish does not know must be off (null, false, empty) or have the default of
    the installed peft. Later versions of peft may write other settings.
    """
    for name, value in settings.items():
        if name in _ADAPTER_FIELDS or name in _ADAPTER_INERT:
            continue
        if name == "exclude_modules" and _is_outside(value):  # compared when the model is loaded
            continue
        if name in _ADAPTER_PLAIN:
            is_plain = _is_one_of(value, _ADAPTER_PLAIN[name])
        else:
            is_plain = _is_one_of(value, _OFF) or _is_one_of(value, (_peft_default(name),))
        if not is_plain:
            return _setting_text(name, value, settings.get("peft_version"))
    return None


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Return whether ``value`` equals one of ``values``, of the same type (1 is not True)."""
    return any(type(value) is type(v) and value == v for v in values)


def _setting_text(name: str, value: Any, version: Any) -> str:
    """Return the setting ``name`` as text, with the name of its method if it has one."""
    text = f"{name}={value!r:.80}"
    if name == "init_lora_weights":
        prefixes = (p for p in _CHANGES_BASE if str(value).lower().startswith(p))
        method = next((_CHANGES_BASE[p] for p in prefixes), None)
        return f"{text} ({method}, whose base is not the original model)" if method else text
    if name == "alora_invocation_tokens":
        return f"{text} (aLoRA, which acts only after these tokens)"
    return text if _peft_default(name) is not None or not version else f"{text} (of peft {version})"


def _peft_default(name: str) -> Any:
    """Return the default of a setting in the installed peft; None if it has no such setting."""
    from peft import LoraConfig as PeftLoraConfig

    defaults: dict[str, Any] = vars(PeftLoraConfig())
    return defaults.get(name)


def adapter_settings(folder: Path) -> dict[str, Any]:
    """Return the fields of :class:`LoraConfig` that peft's config in ``folder`` sets; empty if the
    file is missing. Raises ValueError if it is no LoRA adapter that Burnish can continue."""
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        return {}
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(saved, dict):
            raise ValueError("its content is no mapping")
        settings = {
            ours: saved[theirs] for theirs, ours in _ADAPTER_FIELDS.items() if theirs in saved
        }
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"path: {file} is not a peft config ({error}); give a folder that peft saved"
        ) from error
    if problem := adapter_problem(saved):
        raise ValueError(
            f"path: the adapter {folder} has {problem}, which Burnish does not train; merge it "
            "into its base (peft: merge_and_unload), and start new adapters on the result"
        )
    if missing := [n for n in ("lora_rank", "lora_alpha", "target_modules") if not settings.get(n)]:
        raise ValueError(
            f"path: {file} does not set {', '.join(missing)}; it is no LoRA adapter. Give the "
            "folder of one, or remove path to start new adapters"
        )
    settings["modules_to_save"] = settings.get("modules_to_save") or ()
    if isinstance(settings["target_modules"], list):
        settings["target_modules"] = tuple(sorted(map(str, settings["target_modules"])))
    settings["modules_to_save"] = tuple(sorted(map(str, settings["modules_to_save"])))
    return settings


def has_tokenizer(folder: Path) -> bool:
    """Return whether an adapter folder also contains the tokenizer that it was trained with."""
    return any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json"))
