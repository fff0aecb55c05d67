"""The reference is made of the config classes, and every field says what it is."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from burnish.config import JOBS
from burnish.config.base import Node
from burnish.config.docs import (
    TABLE_HEAD,
    config_markdown,
    default_text,
    field_text,
    fields_table,
    job_markdown,
    own_text,
)
from burnish.config.schema import kinds_of, nodes_in

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[[^]]+\]\(#([^)]+)\)")


class Part(NamedTuple):
    """Rows of one section: of the node or the common keys, or of one variant."""

    text: str
    rows: dict[str, list[str]]
    """Key -> the other cells of its row."""

    @property
    def includes(self) -> list[str]:
        """Anchors of the sections whose keys it includes."""
        return LINK.findall(self.text.partition(" Includes ")[2])


def printed_sections() -> dict[str, dict[str, Part]]:
    """Anchor -> kinds ("" for a section's first rows) -> part."""
    found = {}
    for text in re.split(r"^### ", config_markdown(), flags=re.MULTILINE)[1:]:
        title, *lines = text.splitlines()
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        assert anchor not in found, f"{title} is printed twice"
        parts = {"": Part(" ".join(lines[: lines.index(TABLE_HEAD[0])]), {})}
        part = parts[""]
        for key, *cells in (re.split(r"(?<!\\) \| ", line) for line in lines if " | " in line):
            if key.startswith("**"):
                part = parts[key.strip("*")] = Part(f" {cells[2]}", {})
            elif key.startswith("`"):
                assert key.strip("`") not in part.rows, f"{title}: {key} is printed twice"
                part.rows[key.strip("`")] = cells
        found[anchor] = parts
    return found


PAGE = printed_sections()


def row_of(anchor: str, kinds: str, key: str) -> list[str] | None:
    """The row of a key in a part, in the section's first rows, or in the included sections."""
    parts = [PAGE[anchor][kinds], PAGE[anchor][""]]
    for part in parts:
        if key in part.rows:
            return part.rows[key]
    found = (row_of(included, "", key) for part in parts for included in part.includes)
    return next((row for row in found if row is not None), None)


def check_keys(node: type[Node], anchor: str, seen: dict[type[Node], str]) -> None:
    """Follow the links from a section to every key at and below its node."""
    if node in seen:
        assert seen[node] == anchor, f"{node.__name__} has two sections"
        return
    seen[node] = anchor
    kinds = ", ".join(kinds_of(node))
    assert escaped(own_text(node)) in PAGE[anchor][kinds].text
    for key, field in node.model_fields.items():
        if key in ("kind", "job"):
            continue
        row = row_of(anchor, kinds, key)
        assert row is not None, f"{anchor}: no {key}"
        assert row[1:] == [escaped(default_text(field), "`"), escaped(field_text(field))]
        nodes = nodes_in(field.annotation)
        links = LINK.findall(row[0])
        assert len(links) == bool(nodes), f"{anchor}: {key}"
        for below in nodes:
            check_keys(below, links[0], seen)


def escaped(text: str, quote: str = "") -> str:
    return f"{quote}{text}{quote}".replace("|", "\\|") if text else ""


def test_docs_config_md_is_up_to_date():
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == config_markdown(), "run 'make docs'"


def test_every_key_is_reachable_from_its_job_and_every_node_is_printed_once():
    """With its default and its text; each section is reached, and each variant printed."""
    seen: dict[type[Node], str] = {}
    for name, job in JOBS.items():
        check_keys(job, name, seen)
    included = {
        link for parts in PAGE.values() for part in parts.values() for link in part.includes
    }
    assert sorted(set(seen.values()) | included) == sorted(PAGE)
    variants = sorted((seen[node], ", ".join(kinds_of(node))) for node in seen if kinds_of(node))
    assert variants == sorted((anchor, kind) for anchor in PAGE for kind in PAGE[anchor] if kind)
    assert len(variants) + len({seen[node] for node in seen if not kinds_of(node)}) == len(seen)


def test_links_resolve_and_a_section_repeats_an_included_key_only_if_it_differs():
    links = LINK.findall(config_markdown())
    assert len(links) > 60 and set(links) <= set(PAGE)
    for anchor, parts in PAGE.items():
        for part in parts.values():
            for key, row in part.rows.items():
                assert all(row_of(other, "", key) != row for other in part.includes), anchor


def test_a_job_that_differs_has_its_own_row():
    """evaluate has other defaults and another node than the jobs that share the key."""
    assert PAGE["every-job"][""].rows["run_dir"][1] == "`runs/{job}`"
    assert PAGE["evaluate"][""].rows["run_dir"][1] == "`runs/{job}-{time}`"
    assert "run_dir" not in PAGE["generate"][""].rows
    assert PAGE["rl"][""].rows["train"] != PAGE["supervised-jobs"][""].rows["train"]


def test_types_are_short():
    """The variants of a key are listed in their section, and null is named if it is not the
    default."""
    assert PAGE["rl"][""].rows["rewards"][0] == "list of [kind](#rewards)"
    train = PAGE["train-sft-rm-preference-distill"][""].rows
    assert train["max_grad_norm"][:2] == ["float, or null", "`1.0`"]
    assert train["ema_decay"][:2] == ["float", "`null`"]


def test_the_page_is_short():
    assert len(config_markdown().encode()) < 96 << 10


@pytest.mark.parametrize("job", JOBS)
def test_every_field_of_every_job_has_a_text(job):
    silent = [row.path for row in fields_table(job) if not row.text.strip()]
    assert silent == []


def test_rows_give_path_type_default_and_text():
    rows = {row.path: row for row in fields_table("rl")}
    assert rows["train.lr"] == ("train.lr", "number", "1e-06", "Peak learning rate.")
    assert rows["data.sources"].default == "required"
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
    rows = [line for line in lines if line.startswith("`") and " | " in line]
    assert len(rows) == len(fields_table("rl"))
    assert all(row.replace("\\|", "").count("|") == 3 for row in rows)
