"""Public out-of-memory reports, planned: the verdicts that docs/memory.md lists."""

from pathlib import Path

import pytest
import yaml

from burnish.config import load_config
from burnish.plan.hardware import parse_cluster
from burnish.plan.predict import make_plan

ROOT = Path(__file__).parents[2]
CASES = yaml.safe_load((Path(__file__).parent / "field_cases.yaml").read_text("utf-8"))


def plan_of(case):
    base = {"job": "rl", "max_steps": 1} if "job" not in case.get("recipe", {"job": 0}) else {}
    recipe = ROOT / case["recipe_file"] if "recipe_file" in case else {**base, **case["recipe"]}
    config = load_config(recipe, case.get("overrides", ()))
    hardware = parse_cluster(case["cluster"], host_gb=case.get("host_gb"))
    return make_plan(config, hardware, assume=case.get("assume", ()))


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['report']} {c['fits']}")
def test_the_verdict_on_a_reported_run_matches_the_documentation(case):
    assert plan_of(case).fits == case["fits"]


def test_at_least_eight_reports_are_planned():
    assert len({case["report"] for case in CASES}) >= 8
    text = (ROOT / "docs" / "memory.md").read_text("utf-8")
    assert all(case["report"] in text for case in CASES)
