"""The files that a repository host and git read: CI, issue forms, citation, the commit-msg hook."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import burnish

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
HOOK = ROOT / "tools" / "commit_message.py"


def read_yaml(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def check(message: str, folder: Path) -> tuple[int, list[str]]:
    """The hook's exit code and lines for a message."""
    file = folder / "COMMIT_EDITMSG"
    file.write_text(message, encoding="utf-8")
    done = subprocess.run([sys.executable, HOOK, file], capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


def jobs() -> list[dict]:
    return [job for path in WORKFLOWS for job in read_yaml(path)["jobs"].values()]


def test_ci_calls_targets_that_exist():
    """Directly, or through a script of the repository."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
    commands = [step["run"] for job in jobs() for step in job["steps"] if "run" in step]
    scripts = [match[1] for c in commands if (match := re.fullmatch(r"bash (\S+)", c))]
    texts = commands + [(ROOT / script).read_text(encoding="utf-8") for script in scripts]
    called = re.findall(r"^make ([a-z-]+)", "\n".join(texts), flags=re.MULTILINE)
    assert sorted(called) == ["test", "test-fast"] and set(called) <= set(targets)
    assert all(job["timeout-minutes"] > 0 for job in jobs())


def test_ci_runs_the_oldest_python_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = [s["with"]["python-version"] for j in jobs() for s in j["steps"] if "with" in s]
    assert len(versions) == len(jobs()) == 2
    assert project["requires-python"] == f">={min(versions)}"


def test_issue_forms_have_the_parts_that_a_host_asks_for():
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    for form in (read_yaml(path) for path in forms if path.name != "config.yml"):
        assert form["name"] and form["description"]
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields) >= 3
        assert all(field["attributes"]["label"] for field in form["body"] if "id" in field)


def test_the_citation_has_the_version_and_license_of_the_package():
    citation = read_yaml(ROOT / "CITATION.cff")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == burnish.__version__
    assert citation["license"] == project["license"]
    assert citation["abstract"] == project["description"]


def test_the_hook_is_run_on_messages_and_the_others_on_files():
    config = read_yaml(ROOT / ".pre-commit-config.yaml")
    hooks = {hook["id"]: hook for repo in config["repos"] for hook in repo["hooks"]}
    assert hooks["commit-message"]["stages"] == ["commit-msg"]
    assert hooks["commit-message"]["entry"].endswith("tools/commit_message.py")
    assert config["default_stages"] == ["pre-commit"]
    assert config["default_install_hook_types"] == ["pre-commit", "commit-msg"]
    assert [name for name, hook in hooks.items() if "stages" in hook] == ["commit-message"]


@pytest.mark.parametrize(
    "message",
    [
        "x" * 72,
        "Fix it\n\nA body with a period. And a line of more than 72 characters" + " x" * 40,
        "\n# a comment of more than 72 characters" + " x" * 40 + "\nFix it\n# below\n",
        "Fix it\n# ------------------------ >8 ------------------------\ndiff --git a b\n",
        "Merge branch " + "x" * 80,
        'Revert "' + "x" * 72 + '"',
        "fixup! " + "x" * 72,
    ],
)
def test_a_good_message_passes(message, tmp_path):
    assert check(message, tmp_path) == (0, [])


def test_a_bad_message_is_rejected_with_every_problem(tmp_path):
    code, lines = check("x" * 73 + ".\nand more", tmp_path)
    assert code == 1 and len(lines) == 3
    assert lines[0].startswith("the subject has 74 characters, over 72")
    assert lines[1] == "the subject ends with a period: remove it"
    assert lines[2].startswith("the second line is not empty")
    assert check("# only a comment\n", tmp_path) == (1, ["the message is empty"])
