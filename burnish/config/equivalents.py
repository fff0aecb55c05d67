"""Flags of OpenRLHF and TRL, and the keys of Burnish that replace them. Features that Burnish does
not have, and what to use instead."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import yaml

from burnish.config.registry import JOBS
from burnish.config.schema import is_list, item_of, nodes_in, value_of


class Equivalent(NamedTuple):
    """One row: flags of another framework with the same replacement."""

    flags: tuple[str, ...]
    keys: tuple[str, ...] = ()
    """Dotted keys of a recipe, some with ``=value``."""
    note: str = ""
    missing: str = ""
    """Advice if there is no replacement, else empty."""
    new: tuple[str, ...] = ()
    """Later names of the flags, if they were renamed."""


class Command(NamedTuple):
    """A command or config class of another framework."""

    job: str
    blocks: tuple[str, ...]
    own: tuple[Equivalent, ...]


class Framework(NamedTuple):
    """All flags of one framework."""

    about: str
    blocks: Mapping[str, tuple[Equivalent, ...]]
    commands: Mapping[str, Command]
    left_out: Mapping[str, str]
    """Reason by flag, for flags without a row."""

    def flags(self, command: str) -> dict[str, Equivalent]:
        """Return the row of each flag of a command, by all names of the flag. Its own rows replace
        those of its blocks."""
        chosen = self.commands[command]
        tables = [*(self.blocks[name] for name in chosen.blocks), chosen.own]
        return {flag: row for table in tables for row in table for flag in (*row.flags, *row.new)}


@cache
def equivalents() -> dict[str, Framework]:
    """Return the flags of every framework, from the package's ``equivalents.yaml``."""
    file = importlib.resources.files("burnish.config") / "equivalents.yaml"
    frameworks = {}
    for framework, content in yaml.safe_load(file.read_text("utf-8")).items():
        renamed, left_out = content.get("renamed", {}), content.get("left_out", {})
        commands = {}
        for name, command in content["commands"].items():
            own = _rows(command["flags"], renamed)
            commands[name] = Command(command["job"], tuple(command["blocks"]), own)
        frameworks[framework] = Framework(
            about=content["about"],
            blocks={name: _rows(rows, renamed) for name, rows in content["blocks"].items()},
            commands=commands,
            left_out={flag: why for flags, why in left_out.items() for flag in _names(flags)},
        )
    return frameworks


def _rows(content: Mapping[str, Any], renamed: Mapping[str, str]) -> tuple[Equivalent, ...]:
    rows = []
    for flags, row in content.items():
        fields = dict(row) if isinstance(row, dict) else {"key": row}
        keys = fields.pop("key", [])
        listed, names = (keys,) if isinstance(keys, str) else tuple(keys), _names(flags)
        later = (fields.pop("new", ""), *(renamed.get(name, "") for name in names))
        new = tuple(dict.fromkeys(name for text in later if text for name in _names(text)))
        rows.append(Equivalent(names, listed, **fields, new=new))
    return tuple(rows)


NOT_BUILT = {
    "sglang": "SGLang is not built, because each engine needs its own tested weight transfer. Use "
    "rollout.engine.kind=vllm.",
    **dict.fromkeys(
        ("hf", "transformers"),
        "Sampling with transformers' generate is not built, because the local engine "
        "samples from the same models. Use rollout.engine.kind=local.",
    ),
    "megatron": "Megatron is not built. Use train.engine.kind=torch with sharding=full (FSDP2) or "
    "kind=deepspeed.",
    "accelerate": "accelerate launch starts the ranks of every engine. Use train.engine.kind=torch "
    "or kind=deepspeed.",
    **{
        f"deepspeed.{key}": "With DeepSpeed each rank computes its own rows: tensor and "
        "sequence parallelism are built for the torch engine alone. Use train.engine.kind=torch, "
        "with sharding=full (FSDP2) for sharded weights."
        for key in ("tensor_parallel_size", "sequence_parallel_size")
    },
    **dict.fromkeys(
        ("pipeline_parallel_size", "pp_size", "num_pipeline_stages"),
        "Pipeline parallelism is not built, because its stages idle for parts of a step. Shard all "
        "layers with train.engine.sharding=full (FSDP2), and split them with "
        "train.engine.tensor_parallel_size.",
    ),
    **dict.fromkeys(
        ("context_parallel_size", "cp_size"),
        "Attention in a ring is not built. Use train.engine.sequence_parallel_size, which must "
        "divide the attention heads.",
    ),
    **dict.fromkeys(
        ("expert_parallel_size", "expert_model_parallel_size", "ep_size"),
        "Expert parallelism is not built, because it needs kernels that send tokens to other "
        "ranks. Shard the experts with train.engine.sharding=full (FSDP2).",
    ),
    **dict.fromkeys(
        ("hsdp_size", "data_parallel_replicate_size", "dp_replicate_size"),
        "Hybrid sharding is not built. Shard over all ranks with train.engine.sharding=full, or "
        "use train.engine.kind=deepspeed with zero_hpz_partition_size.",
    ),
    **dict.fromkeys(
        ("load_universal", "universal_checkpoint", "use_universal_checkpoint"),
        "DeepSpeed's universal format is not built, because checkpoints of every engine already "
        "load on another number of ranks. Continue with --resume.",
    ),
    **dict.fromkeys(
        ("uld", "use_uld_loss", "use_gold_loss"),
        "Distillation between different tokenizers is not built, because their distributions are "
        "over different tokens. Sample the teacher with the job generate, and train on its output "
        "with the job sft.",
    ),
}
"""What to do instead of features that Burnish does not have, by their usual names."""

OTHER_VALUES = {
    "sigmoid": "TRL's sigmoid is dpo here.",
    "sigmoid_norm": "TRL's sigmoid_norm is loss={kind: dpo, mean_logprobs: true} here.",
    "apo": "Use apo_zero if chosen responses are better than the model's own, else apo_down.",
    "sft": "TRL's sft is nll_coef here, the weight of the chosen response's likelihood.",
    "js_divergence": "TRL's js_divergence is js here.",
    "alpha_divergence": "TRL's alpha_divergence is {kind: alpha, alpha: 1 - its coefficient} here.",
    "keep_start": "TRL's keep_start is truncate_right here.",
    "keep_end": "TRL's keep_end is truncate_left here.",
}
"""Replacements of values from other frameworks, in addition to the notes of their flags."""

_RENAMED_VALUE = re.compile(r"`(\w+)` is `([^`]+)`")
"""Form in which the note of a flag gives a value and the value that replaces it."""

OTHER_COMMANDS = {
    **dict.fromkeys(("train_ppo", "ppo", "grpo", "rloo", "online_dpo"), "rl"),
    **dict.fromkeys(("train_kto", "kto", "dpo", "orpo", "cpo", "simpo"), "preference"),
    **dict.fromkeys(("train_prm", "reward", "train_reward"), "rm"),
    **dict.fromkeys(("train_kd", "gkd"), "distill"),
    **dict.fromkeys(("batch_inference", "interactive_chat"), "generate"),
    "serve_rm": "serve-reward",
    "lora_combiner": "export",
    "train": "rl",
    "eval": "evaluate",
}
"""Commands of other frameworks without a table of their flags, and the command that replaces
each."""


def advice_on(name: str, job: str) -> str:
    """Return what a recipe of ``job`` uses instead of a flag or feature of another framework, or of
    a value (``name`` begins with =); empty if no framework has it."""
    if name.startswith("="):
        return OTHER_VALUES.get(name[1:]) or _renamed_value(name[1:], job)
    if name in NOT_BUILT:
        return NOT_BUILT[name]
    for framework, content in equivalents().items():
        for command, chosen in content.commands.items():
            row = content.flags(command).get(name) if chosen.job == job else None
            if row is None:
                continue
            flag = f"{framework}'s {name}"
            if row.missing:
                why = row.missing.removeprefix("Remove the flag: ")
                end = "." if why == row.missing else ":"
                return f"{flag} has no equivalent; remove it{end} {why}"
            keys = f"is {', '.join(row.keys)} here." if row.keys else "is not needed here."
            return f"{flag} {keys} {row.note}".strip()
    return ""


def _renamed_value(value: str, job: str) -> str:
    """Return the sentence on a value of another framework that the note of a flag translates,
    preferably a flag of ``job``."""
    tables = [
        (chosen.job != job, framework, content.flags(command))
        for framework, content in equivalents().items()
        for command, chosen in content.commands.items()
    ]
    for _, framework, flags in sorted(tables, key=lambda table: table[0]):
        for row in flags.values():
            if new := dict(_RENAMED_VALUE.findall(row.note)).get(value):
                return f"{framework}'s {value} ({row.flags[0]}) is {new} here."
    return ""


def command_of(name: str) -> str:
    """Return the command that replaces a command of another framework, or an empty string.

    >>> command_of("train_ppo_ray"), command_of("openrlhf.cli.train_sft"), command_of("frob")
    ('rl', 'sft', '')
    """
    last = name.rpartition(".")[2].replace("-", "_").lower()
    jobs = {
        command.lower(): chosen.job
        for content in equivalents().values()
        for command, chosen in content.commands.items()
    }
    return {**OTHER_COMMANDS, **jobs}.get(last, "")


def key_types(job: str, dotted: str) -> list[Any]:
    """Return the annotations of a job's key, one per kind that has it; empty if there is no such
    key. A number in the key is an item of a list.

    >>> key_types("rl", "rewards.0.weight")[0], key_types("sft", "rewards.0.weight")
    (<class 'float'>, [])
    """
    below: list[Any] = [JOBS[job]]
    for name in dotted.split("."):
        if name.isdigit():
            below = [item_of(annotation) for annotation in below if is_list(annotation)]
            continue
        plain = [annotation for annotation in below if not is_list(annotation)]
        fields = [node.model_fields for annotation in plain for node in nodes_in(annotation)]
        values = [value_of(annotation) for annotation in plain]
        below = [known[name].annotation for known in fields if name in known]
        below += [value for value in values if value is not None]
    return below


def _names(flags: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in flags.split(","))
