"""The reference is made of the config classes, and every field says what it is."""

from pathlib import Path

import pytest

from burnish.config import JOBS
from burnish.config.docs import config_markdown, fields_table, job_markdown

ROOT = Path(__file__).resolve().parents[2]


def test_docs_config_md_is_up_to_date():
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == config_markdown(), "run 'make docs'"


@pytest.mark.parametrize("job", JOBS)
def test_every_field_of_every_job_has_a_text(job):
    silent = [row.path for row in fields_table(job) if not row.text.strip()]
    assert silent == []


def test_rows_give_path_type_default_and_text():
    rows = {row.path: row for row in fields_table("rl")}
    assert rows["train.lr"] == ("train.lr", "number", "1e-06", "Peak learning rate.")
    assert rows["max_steps"].default == "required"
    assert rows["rollout.stop"].type == "list (text each)"
    assert rows["precision.rollout_dtype"].type == "fp32 | bf16 | fp16, or null"


def test_variants_say_for_which_kind_a_key_exists():
    gammas = [row.text for row in fields_table("rl") if row.path == "algorithm.advantage.gamma"]
    assert [text.split("]")[0] for text in gammas] == [
        "[grpo | dr_grpo | rloo | opo",
        "[gae",
        "[reinforce_pp | reinforce_pp_baseline",
    ]


def test_a_group_of_keys_is_spelt_out_once():
    paths = [row.path for row in fields_table("rl")]
    assert "model.lora.lora_rank" in paths and "critic.model.lora.lora_rank" not in paths
    critic = next(row for row in fields_table("rl") if row.path == "critic.model")
    assert critic.text.endswith("Keys as under `model`.")


def test_a_table_row_stays_on_one_line():
    lines = job_markdown("rl").splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == len(fields_table("rl"))
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)
