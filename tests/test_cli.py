"""The command line: what it prints, where, and with which exit code."""

import json
import re
import signal
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

import burnish
from burnish.cli import app
from burnish.config import load_config
from burnish.driver.errors import Interrupted

RECIPE = """
job: rl
model: {scratch: {}}
max_steps: 3
data: {sources: [prompts.jsonl]}
rollout: {rollout_batch_size: 8, n_samples_per_prompt: 8}
train: {train_batch_size: 64, micro_train_batch_size: 16}
"""

TABLE = """\
# train_batch_size (B)                 64  samples per optimizer step
# data-parallel ranks (D)               1
# micro_train_batch_size (b)           16  samples per rank and backward pass
# gradient_accumulation_steps           4  B / (b x D)
# rollout_batch_size (P)                8  prompts per rollout
# n_samples_per_prompt (n)              8
# samples per rollout                  64  P x n
# epochs_per_rollout                    1  passes over the buffer
# optimizer steps per rollout           1  epochs x P x n / B
# rows of data (N)                     32
# rows drawn                           24  3 steps: 0.75 passes; 8 rows are never drawn
# loss_aggregation               token_mean  the default
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe whose data has 32 prompts, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n' * 32)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Calls of ``burnish.run``, which is replaced."""
    made: list[dict[str, Any]] = []

    class Result:
        run_dir = Path("runs/x")
        metrics: dict[str, float] = {}

    def run(config, *, resume=None, replay=None, rewards=None, force=False):
        made.append({"config": config, "resume": resume, "force": force})
        return Result()

    monkeypatch.setattr("burnish.jobs.run.run_checked", run)
    return made


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(config, **_):
        raise error

    monkeypatch.setattr("burnish.jobs.run.run_checked", run)


def call(*arguments: object, env: dict[str, str] | None = None):
    return CliRunner().invoke(app, [str(a) for a in arguments], env=env)


def test_dry_run_prints_the_batch_table_and_a_recipe_that_loads_again(recipe, calls):
    result = call("rl", recipe, "train.lr=1e-7", "--dry-run")
    assert result.exit_code == 0 and calls == []
    assert result.stdout.startswith(TABLE)
    again = load_config(yaml.safe_load(result.stdout))
    assert again == load_config(recipe, ["train.lr=1e-7"])


def test_dry_run_prints_the_loss_aggregation_and_its_reason(recipe, calls):
    table = call("rl", recipe, "algorithm.policy_loss=gspo", "--dry-run").stdout
    assert "# loss_aggregation               sequence_mean  of policy_loss=gspo\n" in table
    words = ["algorithm.advantage=dr_grpo", "algorithm.loss_aggregation=token_mean"]
    table = call("rl", recipe, *words, "--dry-run").stdout
    assert "# loss_aggregation               token_mean  as set\n" in table


def test_dry_run_of_a_job_without_batches_prints_the_recipe_alone(recipe, tmp_path):
    path = tmp_path / "e.yaml"
    data = "{data: {sources: [prompts.jsonl]}, generate_max_len: 4}"
    path.write_text(f"model: {{scratch: {{}}}}\neval: {data}\n")
    result = call("evaluate", path, "--dry-run")
    assert result.exit_code == 0 and result.stdout.startswith("job: evaluate\n")


def test_a_dry_run_names_the_missing_package_of_a_tracker_below_the_recipe(
    recipe, calls, monkeypatch
):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    result = call("rl", recipe, "observe.wandb.project=sums", "--dry-run")
    assert result.exit_code == 2 and result.stdout.startswith(TABLE)
    assert "observe.wandb needs the package wandb" in result.stderr
    assert "pip install 'burnish[wandb]'" in result.stderr
    assert call("rl", recipe, "observe.wandb.project=a/b", "--dry-run").exit_code == 2


def test_a_job_runs_its_recipe_with_the_overrides(recipe, calls):
    result = call("rl", recipe, "max_steps=7", "run_dir=runs/x")
    assert result.exit_code == 0 and result.stdout == "run folder: runs/x\n"
    (made,) = calls
    assert made["config"].max_steps == 7 and made["resume"] is None


def test_resume_uses_the_runs_recipe_with_overrides(tmp_path, recipe, calls):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(RECIPE)
    result = call("rl", "--resume", run_dir, "max_steps=9")
    assert result.exit_code == 0
    (made,) = calls
    assert made["config"].max_steps == 9 and made["resume"] == run_dir


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rl"], "no recipe given"),
        (["rl", "train.lr=1"], "no recipe given"),
        (["rl", "nowhere.yaml"], "nowhere.yaml"),
        (["rl", "a.yaml", "b.yaml"], "'b.yaml'"),
        (["rl", "--resume", "nowhere"], "config.yaml"),
        (["config", "rll"], "unknown"),
        (["config"], "give a job ("),
        (["config", "rl", "--all"], "job (rl)"),
        (["report", "nowhere"], "nowhere"),
        (["export", "nowhere", "--out", "o"], "checkpoint"),
        (["serve-reward", "./nowhere"], "the model folder ./nowhere does not exist"),
        (["doctor", "./nowhere"], "the model folder ./nowhere does not exist"),
        (["doctor", "owner/name", "--calibrate"], "(owner/name)"),
        (["demo", "--model", "./nowhere"], "--model"),
        (["evaluate", "r.yaml", "--ray-address", ""], "--ray-address is empty"),
    ],
)
def test_an_argument_error_is_one_line_and_exit_code_2(arguments, said):
    result = call(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and said in result.stderr
    assert "Traceback" not in result.stderr


JOB_COMMANDS = ["sft", "rm", "preference", "distill", "rl", "generate", "evaluate", "plan"]


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A folder with files that are no recipes, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("folder.yaml").mkdir()
    Path("binary.yaml").write_bytes(bytes(range(256)))
    for name, text in (
        ("empty", ""),
        ("text", "abc"),
        ("list", "[1]"),
        ("torn", "a: [b"),
        ("job", "job: 3"),
    ):
        Path(f"{name}.yaml").write_text(text)


@pytest.mark.parametrize("command", JOB_COMMANDS)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", "missing.yaml"),
        ("folder", "folder.yaml"),
        ("binary", "binary.yaml"),
        ("empty", "empty"),
        ("text", "a str"),
        ("list", "list"),
        ("torn", "torn.yaml"),
        ("job", "unknown job '3'; jobs: sft"),
    ],
)
def test_invalid_recipe_files_are_rejected_by_name(command, name, said, hostile):
    result = call(command, f"{name}.yaml")
    assert result.exit_code == 2 and said in result.stderr
    assert result.stderr.startswith("error: ") and result.stdout == ""


@pytest.mark.parametrize("command", ["sft", "rm", "preference", "distill", "generate", "evaluate"])
def test_every_job_rejects_the_recipe_of_another(command, recipe):
    result = call(command, recipe)
    assert result.exit_code == 2 and f"run 'burnish rl {recipe}'" in result.stderr


def test_a_missing_model_is_reported_before_any_import(recipe, calls):
    result = call("rl", recipe, "model.scratch=null", "model.path=./no", "model.tokenizer_path=/no")
    assert result.exit_code == 2 and calls == []
    assert "model.path" in result.stderr
    assert "model.tokenizer_path" in result.stderr
    dry = call("rl", recipe, "model.scratch=null", "model.path=./no", "--dry-run")
    assert dry.exit_code == 2 and "job: rl" in dry.stdout and "./no does not exist" in dry.stderr


def test_a_seed_beyond_torchs_range_is_rejected(recipe):
    result = call("rl", recipe, "seed=99999999999999999999", "--dry-run")
    assert result.exit_code == 2 and "seed: must be less than 9.22337e+18, got 999" in result.stderr


def test_unreadable_config_error_has_the_reason(tmp_path):
    """Doctor and the reward server, which need no weights to find out."""
    (tmp_path / "config.json").write_text('{"model_type": ')
    for command in (["doctor", tmp_path], ["serve-reward", tmp_path, "--port", "0"]):
        result = call(*command)
        assert result.exit_code == 2 and "config.json" in result.stderr


def test_a_recipe_error_has_no_traceback(recipe, calls):
    result = call("rl", recipe, "trian.lr=1", "train.lr=fast")
    assert result.exit_code == 2 and calls == []
    assert result.stderr == (
        f"error: {recipe}: 2 problems\n"
        "  - train.lr: must be a number, got 'fast' (lr: Peak learning rate.)\n"
        "  - trian: unknown key 'trian' (nearest: train)\n"
    )


def test_recipe_for_another_job_error_gives_the_command(recipe):
    result = call("sft", recipe)
    assert result.exit_code == 2 and f"run 'burnish rl {recipe}'" in result.stderr


@pytest.mark.parametrize("how", ["--debug", "BURNISH_DEBUG"])
def test_debug_shows_where_an_error_came_from(recipe, how):
    options, env = (["--debug"], {}) if how == "--debug" else ([], {how: "1"})
    result = call(*options, "rl", recipe, "trian.lr=1", env=env)
    assert type(result.exception).__name__ == "ConfigError"  # left to Python's traceback


def test_an_unexpected_error_keeps_its_traceback(recipe, monkeypatch):
    fail_with(monkeypatch, ZeroDivisionError("a bug"))
    result = call("rl", recipe)
    assert isinstance(result.exception, ZeroDivisionError) and result.exit_code == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_exits_with_128_plus_the_signal_and_a_resume_command(
    recipe, monkeypatch, number
):
    fail_with(monkeypatch, Interrupted(Path("runs/x"), number))
    result = call("rl", recipe)
    assert result.exit_code == 128 + number
    assert result.stderr == (
        f"stopped by {number.name}; the run is saved. Resume with: burnish rl --resume runs/x\n"
    )


def test_ctrl_c_before_a_run_has_begun_exits_with_130(recipe, monkeypatch):
    fail_with(monkeypatch, KeyboardInterrupt())
    assert call("rl", recipe).exit_code == 130


def test_config_lists_every_key_with_its_text_in_plain_lines():
    result = call("config", "rl")
    assert result.exit_code == 0
    assert "\ntrain.lr  (number; 1e-06)\n    Peak learning rate.\n" in result.stdout
    assert "\nmax_steps  (whole number, or null; null)\n" in result.stdout
    assert "\x1b" not in result.stdout


def test_config_all_as_markdown_is_the_reference_page():
    from burnish.config.docs import config_markdown

    assert call("config", "--all", "--markdown").stdout == config_markdown()
    assert call("config", "rm", "--markdown").stdout.startswith("## rm\n")


def test_export_and_demo_pass_on_their_options(monkeypatch, tmp_path):
    import burnish.demo

    made = []
    monkeypatch.setitem(vars(burnish), "export", lambda *a, **k: made.append((a, k)) or a[1])
    monkeypatch.chdir(tmp_path)  # the model card is written to "o"
    monkeypatch.setattr(burnish.demo, "run_demo", lambda *a: made.append(a))
    assert (
        call("export", tmp_path, "--out", "o", "--dtype", "bf16", "--lora", "adapter").exit_code
        == 0
    )
    assert call("demo", "--model", "m", "--steps", 3, "--seed", 1, "--out", "d").exit_code == 0
    trust = {"base": None, "trust_remote_code": False}
    assert made == [
        ((tmp_path, Path("o")), {"model": "policy", "dtype": "bf16", "lora": "adapter", **trust}),
        ("m", 3, 1, Path("d")),
    ]


def test_export_defaults_match_its_help(monkeypatch, tmp_path):
    """fp32 whatever the run computed in, since that is the format of the masters."""
    made = []
    monkeypatch.setitem(vars(burnish), "export", lambda *a, **k: made.append(k) or a[1])
    monkeypatch.chdir(tmp_path)  # the model card is written to "o"
    assert call("export", tmp_path, "--out", "o").exit_code == 0
    assert made[0]["dtype"] == "fp32"
    assert "[default: fp32]" in call("export", "--help").stdout


@pytest.mark.parametrize(
    "command", [c.name or c.callback.__name__ for c in app.registered_commands]
)
def test_help_names_only_options_that_the_command_has(command):
    shown = call(command, "--help").stdout
    params = get_command(app).commands[command].params
    has = {name for param in params for name in [*param.opts, *param.secondary_opts]}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", " ".join(shown.split())))
    assert named - {"--help"} <= has


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--cluster", "8xA100-80GB"], "--cluster"),
        (["--json", "--fit", "--host-gb", "3"], "--host-gb"),
    ],
)
def test_probe_rejects_options_without_effect(recipe, options, named):
    result = call("plan", recipe, "--probe", *options)
    assert result.exit_code == 2 and named in result.stderr


def test_calibrate_as_json_is_json(monkeypatch, tmp_path):
    import burnish.doctor.command as doctor

    monkeypatch.setattr(doctor, "USER_FILE", tmp_path / "gpus.yaml")
    monkeypatch.setattr(doctor, "calibrate", lambda tables: {"efficiency": {"matmul": 0.5}})
    result = call("doctor", "--calibrate", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "file": str(tmp_path / "gpus.yaml"),
        "measured": {"efficiency": {"matmul": 0.5}},
    }
    assert "measurements written to" in call("doctor", "--calibrate").stdout


def test_an_unknown_option_value_is_rejected():
    assert call("export", "ck", "--out", "o", "--dtype", "int3").exit_code == 2
    assert call("demo", "--steps", "0").exit_code == 2


def test_version():
    result = call("--version")
    assert result.exit_code == 0 and result.stdout == f"burnish {burnish.__version__}\n"
