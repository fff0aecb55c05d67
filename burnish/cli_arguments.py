"""Arguments and options shared by several commands, and argument checks without heavy imports."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from burnish.cli_completion import complete_key
from burnish.config import ConfigError

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE [KEY=VALUE]...",
        help="A recipe (YAML), and keys to change in it, such as train.lr=1e-6. 'burnish config "
        "JOB' lists the keys. With --resume the recipe is optional.",
        show_default=False,
        autocompletion=complete_key,
    ),
]
Recipe = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE [KEY=VALUE]...",
        help="A recipe (YAML), and keys to change in it, such as model.path=my-model. "
        "'burnish config JOB' lists the keys.",
        show_default=False,
        autocompletion=complete_key,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the resolved recipe and the batch table; load nothing."),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume", metavar="RUN", help="Resume the run in this folder.", show_default=False
    ),
]
Replay = Annotated[
    Path | None,
    typer.Option(
        "--replay",
        metavar="RUN",
        help="Train again from the groups that a run recorded (observe.record_rollouts), without "
        "sampling. Default recipe: the run's, with run_dir=RUN-replay.",
        show_default=False,
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="ADDRESS",
        help="Run on this Ray cluster (auto, or host:port): cluster.runtime=ray with that address.",
        show_default=False,
    ),
]

Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Run even if the memory plan says that it does not fit; resume even if the rows of a "
        "data file changed.",
    ),
]


class Dtype(StrEnum):
    """Number formats of exported weights."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class LoraForm(StrEnum):
    """Export format of low-rank adapters."""

    merge = "merge"
    adapter = "adapter"


class ServedOverlong(StrEnum):
    """Treatment of a text that is too long for a reward server."""

    error = "error"
    truncate_left = "truncate_left"


class Engine(StrEnum):
    """Rollout engines of a served model."""

    local = "local"
    vllm = "vllm"


ServedModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A checkpoint, a run folder (its newest checkpoint), a model folder or a hub name.",
    ),
]
ServerHost = Annotated[
    str,
    typer.Option(
        help="Address to listen on; addresses reachable from other machines need a token."
    ),
]
ServerPort = Annotated[
    int, typer.Option(min=0, max=65535, help="Port to listen on. 0: a free one.")
]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Another name of this server. May be repeated."),
]
ServerTokenEnv = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Environment variable with the token that requests must have."
    ),
]
EngineOption = Annotated[Engine, typer.Option(help="The engine that samples.")]
ServedDtype = Annotated[
    Dtype | None,
    typer.Option(help="Number format of the model. Default: bf16 on CUDA, else fp32."),
]
ServedDevice = Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")]


def on_ray(arguments: list[str] | None, address: str | None) -> list[str]:
    """Return the arguments with the overrides set by ``--ray-address``."""
    if address is not None and not address.strip():
        raise ConfigError(
            "--ray-address is empty; give auto, or host:port of the cluster's head node"
        )
    more = [] if address is None else ["cluster.runtime=ray", f"cluster.ray_address={address}"]
    return [*(arguments or []), *more]


def split(
    job: str, arguments: list[str], *, resume: Path | None, replay: Path | None = None
) -> tuple[Path, list[str]]:
    """Split the arguments into the recipe and the overrides. Without a recipe, it is that of the
    run to ``resume`` or to ``replay``. Raises ConfigError if they are ambiguous."""
    recipe = Path(arguments[0]) if arguments and "=" not in arguments[0] else None
    overrides = arguments[1:] if recipe is not None else arguments
    for override in overrides:
        if "=" not in override:
            raise ConfigError(
                f"{override!r} is neither the recipe (the first argument) nor of the form key=value"
            )
    if recipe is not None:
        return recipe, overrides
    run = resume or replay
    if run is None:
        raise ConfigError(f"no recipe given; run 'burnish {job} RECIPE.yaml [key=value ...]'")
    if not (run / "config.yaml").is_file():
        option = "--replay" if resume is None else "--resume"
        raise ConfigError(f"{option} {run}: there is no config.yaml, so this is not a run folder")
    if resume is None:
        new = json.dumps(f"{run.resolve()}-replay")  # quoted, as a value in YAML
        overrides = [f"run_dir={new}", *overrides]
    return run / "config.yaml", overrides


def check_export(checkpoint: Path, out: Path) -> None:
    """Raise ConfigError for invalid folders, before heavy modules are imported."""
    if not checkpoint.is_dir():
        problem = "is a file, not a folder" if checkpoint.exists() else "does not exist"
        raise ConfigError(
            f"the checkpoint {checkpoint} {problem}; give a run folder, or one of its "
            "checkpoints/step_* folders"
        )
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; give a new folder")


def check_push_options(
    push: str | None, *, private: bool, revision: str | None, message: str | None
) -> None:
    """Raise ConfigError if an option of a push is given without ``--push``."""
    options = {"--private": private, "--revision": revision, "--commit-message": message}
    used = [name for name, value in options.items() if value not in (None, False)]
    if push is None and used:
        raise ConfigError(f"{used[0]} has no effect without --push OWNER/NAME; add it, or omit it")
