"""The reference is made of the config classes, and every field says what it is."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from burnish.config import JOBS
from burnish.config.base import Node
from burnish.config.docs import default_text, field_text, fields_table, job_markdown
from burnish.config.reference import config_markdown, sections
from burnish.config.schema import kinds_of, nodes_in

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[[^]]+\]\(#([^)]+)\)")


class Printed(NamedTuple):
    """One section of the page."""

    title: str
    rows: dict[str, list[str]]
    """Key -> the other cells of its row."""
    includes: list[str]
    """Anchors of the sections whose keys it includes."""


def printed_sections() -> dict[str, Printed]:
    """Anchor -> section."""
    found = {}
    for text in re.split(r"^### ", config_markdown(), flags=re.MULTILINE)[1:]:
        lines = text.splitlines()
        rows = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in lines if line.startswith("| `")]
        includes = [line for line in lines if line.startswith("Includes ")]
        anchor = re.sub(r"[^\w\- ]", "", lines[0].lower()).replace(" ", "-")
        assert anchor not in found, f"{lines[0]} is printed twice"
        assert len({row[0] for row in rows}) == len(rows)
        found[anchor] = Printed(
            lines[0],
            {row[0].strip("`"): row[1:] for row in rows},
            LINK.findall("".join(includes)),
        )
    return found


PAGE = printed_sections()


def row_of(anchor: str, key: str) -> list[str] | None:
    """The row of a key in a section, or in those that it includes."""
    if key in PAGE[anchor].rows:
        return PAGE[anchor].rows[key]
    found = (row_of(included, key) for included in PAGE[anchor].includes)
    return next((row for row in found if row is not None), None)


def check_keys(node: type[Node], anchor: str, seen: dict[type[Node], str]) -> None:
    """Follow the links from a section to every key at and below its node."""
    if node in seen:
        assert seen[node] == anchor, f"{node.__name__} has two sections"
        return
    seen[node] = anchor
    for key, field in node.model_fields.items():
        if key in ("kind", "job"):
            continue
        row = row_of(anchor, key)
        assert row is not None, f"{PAGE[anchor].title}: no {key}"
        assert row[1:] == [escaped(default_text(field), "`"), escaped(field_text(field))]
        nodes = nodes_in(field.annotation)
        links = LINK.findall(row[0])
        assert len(links) == len(nodes), f"{PAGE[anchor].title}: {key}"
        for below, link in zip(nodes, links, strict=True):
            check_keys(below, link, seen)


def escaped(text: str, quote: str = "") -> str:
    return f"{quote}{text}{quote}".replace("|", "\\|") if text else ""


def test_docs_config_md_is_up_to_date():
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == config_markdown(), "run 'make docs'"


def test_every_key_is_reachable_from_its_job_and_every_node_is_printed_once():
    """With its default and its text; each section is reached."""
    seen: dict[type[Node], str] = {}
    for name, job in JOBS.items():
        check_keys(job, name, seen)
    included = {anchor for section in PAGE.values() for anchor in section.includes}
    assert sorted(set(seen.values()) | included) == sorted(PAGE)
    assert len(set(seen.values())) == len(seen)


def test_title_of_a_variant_contains_its_kind():
    for node, section in sections().items():
        if kinds_of(node):
            assert section.title.split("`")[1].split(": ")[1] == " | ".join(kinds_of(node))


def test_links_resolve_and_a_section_repeats_an_included_key_only_if_it_differs():
    links = LINK.findall(config_markdown())
    assert len(links) > 100 and set(links) <= set(PAGE)
    for section in PAGE.values():
        for key, row in section.rows.items():
            assert all(row_of(anchor, key) != row for anchor in section.includes), section.title


def test_a_job_that_differs_has_its_own_row():
    """evaluate has other defaults and another node than the jobs that share the key."""
    assert PAGE["every-job"].rows["run_dir"][1] == "`runs/{job}`"
    assert PAGE["evaluate"].rows["run_dir"][1] == "`runs/{job}-{time}`"
    assert "run_dir" not in PAGE["generate"].rows
    assert PAGE["rl"].rows["train"] != PAGE["supervised-jobs"].rows["train"]


def test_the_page_is_short():
    assert len(config_markdown().encode()) < 70 * 1024


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


def test_rows_name_the_kinds_that_have_a_key():
    gammas = [row.text for row in fields_table("rl") if row.path == "algorithm.advantage.gamma"]
    assert [text.split("]")[0] for text in gammas] == [
        "[grpo | dr_grpo | rloo | opo",
        "[gae",
        "[reinforce_pp | reinforce_pp_baseline",
    ]


def test_a_group_of_keys_is_printed_once():
    paths = [row.path for row in fields_table("rl")]
    assert "model.lora.lora_rank" in paths and "critic.model.lora.lora_rank" not in paths
    critic = next(row for row in fields_table("rl") if row.path == "critic.model")
    assert critic.text.endswith("Keys as under `model`.")


def test_a_table_row_stays_on_one_line():
    lines = job_markdown("rl").splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == len(fields_table("rl"))
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)
