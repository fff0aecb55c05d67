"""Help texts and the shell completion of the command line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from burnish.cli import app

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = sorted(get_command(app).commands)
VERBS = {
    *(
        "Check",
        "Compare",
        "Compute",
        "Fine-tune",
        "List",
        "Measure",
        "Predict",
        "Print",
        "Sample",
        "Show",
    ),
    *("Serve", "Talk", "Train", "Write"),
}


def shown(*words: str) -> str:
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    return result.stdout


def test_the_list_of_commands_is_complete_at_80_columns_and_each_line_begins_with_a_verb():
    """A line that is too long for click ends in "..."; one that wraps has no name."""
    text = shown()
    assert max(map(len, text.splitlines())) <= 80 and "..." not in text.replace("[ARGS]...", "")
    rows = re.findall(r"^  ([a-z-]+)  +(\S+) .*\.$", text.partition("Commands:\n")[2], re.MULTILINE)
    assert sorted(name for name, _ in rows) == COMMANDS
    assert {verb for _, verb in rows} <= VERBS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_begins_with_its_verb_and_every_option_has_a_sentence(command):
    text = shown(command)
    assert max(map(len, text.splitlines())) <= 80
    _, _, first, *_ = text.splitlines()
    assert first.split()[0] in VERBS
    cut = text.replace("...]...", "").replace(" RUN ...", "").replace("}...", "")
    assert not re.search(r"\w\.\.\.$", cut, re.MULTILINE)
    parameters = get_command(app).commands[command].params
    assert [p.name for p in parameters if not (p.help or "").endswith(".")] == []


def complete(*words: str) -> list[str]:
    """The completions of the last word, by the protocol of bash."""
    environment = {
        "_BURNISH_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(["burnish", *words]),
        "COMP_CWORD": str(len(words)),
    }
    result = CliRunner().invoke(app, [], env=environment, prog_name="burnish")
    assert result.exit_code == 0, result.output
    return result.stdout.split()


def test_keys_of_the_recipe_are_completed_one_level_at_a_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text("# a comment\njob: sft\n")
    rl = ("rl", "recipe.yaml")
    assert {"max_steps=", "train.", "rewards=", "rewards.0."} <= set(complete(*rl, ""))
    assert complete("rl", "--re") == ["--resume", "--replay"]
    assert complete(*rl, "max_s") == ["max_steps="]
    assert complete(*rl, "train.l") == [
        *("train.lr_scheduler=", "train.lr_scheduler.", "train.lr_warmup_ratio="),
        *("train.lr_warmup_steps=", "train.layout=", "train.lr=", "train.logprob_chunk_tokens="),
    ]
    # of all kinds of a list's items, and of a section that another one has too
    assert {"rewards.0.function=", "rewards.0.urls="} <= set(complete(*rl, "rewards.0."))
    assert complete("rl", "--resume", "runs/x", "eval.data.prompt_m") == [
        "eval.data.prompt_max_len="
    ]
    # check and plan complete the keys of the recipe's job
    assert complete("check", "recipe.yaml", "max_ep") == ["max_epochs="]
    assert complete("check", "recipe.yaml", "rollout.") == []


@pytest.mark.parametrize(
    "words",
    [
        ("rl", ""),
        ("rl", "reci"),
        ("rl", "recipe.yaml", "train.lr=1"),
        ("rl", "recipe.yaml", "rewards."),
        ("rl", "recipe.yaml", "nothing.here."),
        ("check", "nowhere.yaml", ""),
        ("export", "runs/"),
        ("rl", "--pretrain", "x", ""),
    ],
)
def test_files_are_left_to_the_shell(words):
    """Without completions, ``complete -o default`` completes files. Flags of other frameworks,
    which are errors in a command, are not reported in the middle of a line."""
    assert complete(*words) == []


def test_bash_completes_commands_and_keys_with_the_installed_script(tmp_path):
    """In a real bash with the script of ``--show-completion bash``."""
    program = tmp_path / "burnish"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m burnish "$@"\n')
    program.chmod(0o755)
    script = """
        source <(burnish --show-completion bash)
        try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
                _burnish_completion burnish; echo "${COMPREPLY[*]}"; }
        try burnish ev; try burnish rl recipe.yaml max_s
    """
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["evaluate", "max_steps="]
