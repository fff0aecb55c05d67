"""Command line. Every command is a thin wrapper of the Python API; heavy modules are imported
inside the commands.

Exit codes are in ``cli_errors.py``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from burnish import __version__, cli_init, cli_runs, cli_serve
from burnish.cli_arguments import (
    Arguments,
    DryRun,
    Dtype,
    Force,
    LoraForm,
    RayAddress,
    Recipe,
    Replay,
    Resume,
    check_export,
    check_push_options,
    on_ray,
    split,
)
from burnish.cli_errors import CommandGroup, printing_on_first_rank
from burnish.config import JOBS, ConfigError, JobConfig, dump_yaml, load_config
from burnish.config.docs import FieldRow, class_text, config_markdown, fields_table, job_markdown
from burnish.config.explain import nearest
from burnish.config.paths import folder_problem
from burnish.config.placement import placement_text
from burnish.config.registry import REGISTRY, JobEntry
from burnish.messages import quiet_libraries
from burnish.preflight.families import check_families
from burnish.preflight.inputs import preflight, recorded_run, with_input_errors
from burnish.user_calls import exit_despite_abandoned_calls

app = typer.Typer(
    cls=CommandGroup,
    help="Align language models with reinforcement learning: one recipe and one command per job.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command ``burnish``. Exits the process."""
    quiet_libraries()
    code = 0
    try:
        app(prog_name="burnish")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    finally:
        exit_despite_abandoned_calls(code)


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"burnish {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", envvar="BURNISH_DEBUG", help="Print a traceback for every error."),
    ] = False,
) -> None:
    """Options before the command."""


def _add_job(job: str, entry: JobEntry) -> None:
    """Add the command of a job."""

    def resumable(  # house: ok typer makes the options from the signature
        arguments: Arguments = None,
        dry_run: DryRun = False,
        resume: Resume = None,
        ray_address: RayAddress = None,
        force: Force = False,
    ) -> None:
        _run_job(job, on_ray(arguments, ray_address), dry_run, resume=resume, force=force)

    def replayable(  # house: ok typer makes the options from the signature
        arguments: Arguments = None,
        dry_run: DryRun = False,
        resume: Resume = None,
        replay: Replay = None,
        ray_address: RayAddress = None,
        force: Force = False,
    ) -> None:
        overrides = on_ray(arguments, ray_address)
        _run_job(job, overrides, dry_run, resume=resume, replay=replay, force=force)

    def in_one_go(
        arguments: Recipe = None,
        dry_run: DryRun = False,
        ray_address: RayAddress = None,
        force: Force = False,
    ) -> None:
        _run_job(job, on_ray(arguments, ray_address), dry_run, resume=None, force=force)

    command = replayable if entry.replayable else resumable if entry.resumable else in_one_go
    app.command(job, help=entry.help)(command)


app.command()(cli_init.init)
for _name, _entry in REGISTRY.items():
    _add_job(_name, _entry)


@printing_on_first_rank()
def _run_job(
    job: str,
    arguments: list[str],
    dry_run: bool,
    *,
    resume: Path | None,
    force: bool,
    replay: Path | None = None,
) -> None:
    recipe, overrides = split(job, arguments, resume=resume, replay=replay)
    resumed = resume is not None and recipe == resume / "config.yaml"
    replays = bool(replay or (resume and recorded_run(resume)))
    try:
        config = load_config(recipe, overrides, job=job, resumed=resumed)
    except ConfigError as error:
        raise with_input_errors(error, resumed=resume is not None, replays=replays) from None
    try:
        notes = preflight(config, resumed=resume is not None, replays=replays, download=not dry_run)
    except (ValueError, RuntimeError):
        if dry_run:  # the recipe itself is valid
            typer.echo(_dry_run_text(config))
        raise
    if dry_run:
        typer.echo("\n".join([*(f"# {note}" for note in notes), _dry_run_text(config)]))
        return
    from burnish.jobs.run import run_checked

    result = run_checked(config, resume=resume, replay=replay, force=force)
    typer.echo(f"run folder: {result.run_dir}")


def _dry_run_text(config: JobConfig) -> str:
    """Return the resolved recipe below the batch table as comments, so the output is a valid
    recipe."""
    lines = [
        f"# {n:<30} {value:>8}  {origin}".rstrip() for n, value, origin in config.launch_table()
    ]
    lines += [""] * bool(lines)
    placement = placement_text(config)
    lines += [f"# {line}" for line in placement.splitlines()] + [""] * bool(placement)
    return "\n".join([*lines, dump_yaml(config).rstrip()])


@app.command()
def check(arguments: Recipe = None) -> None:
    """Check all rows and rewards of a recipe before its launch. Lengths are compared with the
    model's positions, and rewards are called on one row. No weights are loaded."""
    recipe, overrides = split("check", arguments or [], resume=None)
    try:
        config = load_config(recipe, overrides)
    except ConfigError as error:
        raise with_input_errors(error) from None
    for note in preflight(config):
        typer.echo(note)
    from burnish.preflight.launch import check_launch

    check_launch(config, say=typer.echo)
    typer.echo("ready: no problems found")


@app.command()
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder or hub name: check only how this model runs here, from its config.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    self_test: Annotated[
        bool, typer.Option(help="Run every installed engine on a tiny model.")
    ] = True,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Only measure the speeds of this machine that burnish plan assumes.",
        ),
    ] = False,
) -> None:
    """Check versions and engines of this machine, or one model. Also checks devices, links and
    known-bad combinations. Every installed engine runs a self-test."""
    if model is not None and calibrate:
        raise ConfigError(f"give a model ({model}) or --calibrate, not both")
    if model is not None and (problem := folder_problem(model)):
        raise ConfigError(problem)
    from burnish.doctor.command import DoctorOptions, doctor_command, model_command

    if model is not None:
        raise typer.Exit(model_command(model, as_json=as_json, say=typer.echo))
    options = DoctorOptions(as_json=as_json, self_test=self_test, calibrate=calibrate)
    raise typer.Exit(doctor_command(__version__, options, say=typer.echo))


@app.command()
def config(
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help=f"One of {', '.join(JOBS)}.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Print the keys of all jobs.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown; with --all: docs/config.md.")
    ] = False,
) -> None:
    """Print all keys of a job's recipe, with types and defaults."""
    if job is not None and job not in JOBS:
        raise ConfigError(f"unknown job {job!r}{nearest(job, JOBS)}; jobs: {', '.join(JOBS)}")
    if job is not None and every:
        raise ConfigError(f"give a job ({job}) or --all, not both")
    if job is None and not every:
        raise ConfigError(f"give a job ({', '.join(JOBS)}), or --all")
    jobs = list(JOBS) if job is None else [job]
    if markdown:
        typer.echo(config_markdown() if job is None else job_markdown(job), nl=False)
        return
    for name in jobs:
        _print_fields(name, fields_table(name))


def _print_fields(job: str, rows: list[FieldRow]) -> None:
    if not sys.stdout.isatty():
        for row in rows:
            typer.echo(f"{row.path}  ({row.type}; {row.default})".replace("; )", ")"))
            typer.echo(f"    {row.text}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("key", "type", "default", "meaning", title=class_text(JOBS[job]), show_lines=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


@app.command()
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]) -> None:
    """Write report.html of a run, which is readable offline. It has curves, the time split and
    every kept sample."""
    import burnish

    typer.echo(f"wrote {burnish.build_report(run)}")


@app.command()
def export(  # house: ok typer makes the options from the signature
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A checkpoint, or a run folder (its newest checkpoint)."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new folder.")],
    model: Annotated[
        str,
        typer.Option(
            help="Model to write: policy, critic or reward, or its moving average (policy-ema)."
        ),
    ] = "policy",
    dtype: Annotated[
        Dtype,
        typer.Option(help="Number format of the weights. Checkpoints keep fp32 masters."),
    ] = Dtype.fp32,
    lora: Annotated[LoraForm, typer.Option(help="Merge adapters, or keep them.")] = LoraForm.merge,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Base model of adapters, if it has moved since the checkpoint."
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model contains.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="Upload it to a new repository of the hub."),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="With --push: a private repository.")
    ] = False,
    revision: Annotated[
        str | None,
        typer.Option(
            metavar="BRANCH", help="With --push: commit to this branch; the repository may exist."
        ),
    ] = None,
    commit_message: Annotated[
        str | None, typer.Option(metavar="TEXT", help="With --push: message of the commit.")
    ] = None,
) -> None:
    """Write a model of a checkpoint as a HuggingFace folder. The folder has a model card. --push
    uploads it."""
    check_export(checkpoint, out)
    check_push_options(push, private=private, revision=revision, message=commit_message)
    import burnish
    from burnish.publish import hub, model_card

    destination = None
    if push is not None:
        message = {} if commit_message is None else {"message": commit_message}
        destination = hub.Destination(push, private=private, revision=revision, **message)
        hub.check_destination(destination)
    options: dict[str, Any] = {"base": base, "trust_remote_code": trust_remote_code}
    written = burnish.export(
        checkpoint, out, model=model, dtype=dtype.value, lora=lora.value, **options
    )
    model_card.write_card(
        written, checkpoint, model=model, lora=lora.value, title=(push or out.name).split("/")[-1]
    )
    typer.echo(f"wrote {written}")
    if destination is not None:
        typer.echo(f"pushed to {hub.push(written, destination)}")


@app.command()
def plan(  # house: ok typer makes the options from the signature
    arguments: Recipe = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NODESxGPUSxNAME",
            help="E.g. 4x8xA800-80GB. Default: cluster.hardware of the recipe, else this machine.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    fit: Annotated[
        bool, typer.Option("--fit", help="Search for settings that fit, fastest first.")
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --fit: write the first proposal as a recipe."),
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Print every number with its calculation.")
    ] = False,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            help="Also count unreleased-gathers (DeepSpeed 0.16.0 to 0.16.7) or kept-cache."
        ),
    ] = None,
    gpus: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="More GPUs, in addition to ~/.config/burnish/gpus.yaml."),
    ] = None,
    host_gb: Annotated[
        float | None, typer.Option(min=0.1, help="Host memory of a node, in GB.")
    ] = None,
    network_gbs: Annotated[
        float | None, typer.Option(min=0.01, help="GB/s from a GPU to other nodes.")
    ] = None,
    rates: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR", help="Estimate times from those measured in a run on this hardware."
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help=(
                "Measure on this machine, in stages up to the recipe's size. Takes no other "
                "options."
            ),
        ),
    ] = False,
) -> None:
    """Predict memory and step time of a recipe on a cluster. Needs neither weights nor a GPU. Exit
    code 4: it does not fit."""
    from burnish.plan.command import PlanOptions, check_probe_options, plan_text

    recipe, overrides = split("plan", arguments or [], resume=None)
    options = PlanOptions(
        cluster=cluster,
        gpus=gpus,
        host_gb=host_gb,
        network_gbs=network_gbs,
        assume=tuple(assume or ()),
        as_json=as_json,
        details=details,
        fit=fit,
        write=write,
        rates=rates,
    )
    if probe:
        from burnish.plan.probe_command import probe_recipe

        check_probe_options(options)
        if not probe_recipe(load_config(recipe, overrides), typer.echo).completed:
            raise typer.Exit(4)
        return
    config = load_config(recipe, overrides)
    text, fits = plan_text(config, options, check_families(config, download=False))
    typer.echo(text)
    if not fits:
        raise typer.Exit(4)


app.command()(cli_runs.runs)
app.command()(cli_runs.compare)
app.command()(cli_runs.watch)
app.command("serve-reward")(cli_serve.serve_reward)
app.command()(cli_serve.serve)
app.command()(cli_serve.chat)


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH_OR_HUB", help="Another model than SmolLM2-135M-Instruct."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="RL steps.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run folder.", show_default=False)
    ] = None,
) -> None:
    """Train a small model on sums and print its accuracy. Shows accuracy before and after, times
    and answers, and writes a report."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from burnish.demo import run_demo

    run_demo(model, steps, seed, out)
