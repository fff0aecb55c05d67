"""docs/compare.md is up to date, names keys that exist, and has the flags of the installed TRL."""

import dataclasses
import sys
from pathlib import Path

import pytest

from burnish.config.equivalents import equivalents, has_key

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import compare

FRAMEWORKS = equivalents()
COMMANDS = [(name, command) for name, known in FRAMEWORKS.items() for command in known.commands]


def test_the_page_is_up_to_date(capsys):
    assert compare.main([]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(("framework", "command"), COMMANDS)
def test_every_key_exists(framework, command):
    known = FRAMEWORKS[framework]
    unknown = [
        (flag, key)
        for flag, row in known.flags(command).items()
        for key in row.keys
        if not has_key(known.commands[command].job, key.partition("=")[0])
    ]
    assert not unknown


@pytest.mark.parametrize(("framework", "command"), COMMANDS)
def test_a_row_has_a_key_or_a_text_and_is_not_also_missing(framework, command):
    rows = FRAMEWORKS[framework].flags(command).values()
    assert not [row.flags for row in rows if not (row.keys or row.note or row.missing)]
    assert not [row.flags for row in rows if row.missing and (row.keys or row.note)]


def test_a_key_of_another_job_or_below_a_plain_value_does_not_exist():
    assert not has_key("sft", "rollout.top_p")
    assert not has_key("sft", "train.lr.peak")
    assert has_key("rl", "eval.data.sources.0.split") and not has_key("rl", "rewards.weight")


@pytest.mark.parametrize("name", ["GRPOConfig", "SFTConfig", "DPOConfig"])
def test_every_field_of_trl_has_a_row_or_a_reason(name):
    trl = pytest.importorskip("trl")
    fields = {field.name for field in dataclasses.fields(getattr(trl, name))}
    known = FRAMEWORKS["TRL"]
    rows = set(known.flags(name))
    assert fields - rows == set(known.left_out)
    assert rows <= fields
