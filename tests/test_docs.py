"""Every page of docs/ says what it is for, its links resolve, and the lab notebook has its form."""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from prose import docstrings  # noqa: E402

sys.path.pop(0)
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + DOCS
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> list[str]:
    """The anchors of a page's headings, as GitHub makes them, and those written as HTML."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        seen = sum(re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", a) is not None for a in found)
        found.append(f"{anchor}-{seen}" if seen else anchor)
    return found + re.findall(r'<a id="([^"]+)"></a>', text)


def broken_links(page: Path) -> list[str]:
    """The links of a page whose file or anchor is missing. Links out of the project are not
    opened."""
    broken = []
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_inside_of_the_project_resolve(page):
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "other.md").write_text("# A `key`: two\n\n## Same\n\n## Same\n")
    page = tmp_path / "page.md"
    good = ["other.md", "other.md#a-key-two", "other.md#same-1", "https://example.org/x"]
    bad = ["none.md", "other.md#same-2", "#nowhere"]
    page.write_text("\n".join(f"[x]({target})" for target in good + bad))
    assert broken_links(page) == bad


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_examples_import_names_that_exist(page):
    text = page.read_text(encoding="utf-8")
    for code in re.findall(r"^```python[^\n]*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
        for node in (node for node in imports if str(node.module).startswith("burnish")):
            module = importlib.import_module(str(node.module))
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("page", DOCS, ids=lambda p: p.name)
def test_a_page_begins_with_its_purpose(page):
    """A title, then a paragraph: neither a heading nor a table, a list or code."""
    title, purpose = page.read_text(encoding="utf-8").split("\n\n", 2)[:2]
    assert title.startswith("# ") and "\n" not in title
    assert purpose[0].isupper() or purpose[0] in "`["
    assert not purpose.startswith("```") and len(purpose.split()) >= 8


def missing_files(text: str) -> list[str]:
    """The files and folders in backquotes that are neither below burnish/ nor in the project. A
    bare name such as `rule.py` may be in any folder of burnish."""
    names = re.findall(r"`([\w./-]+(?:\.(?:py|yaml|md)|/))`", FENCE.sub("", text))
    tops = (ROOT / "burnish", ROOT)
    return [
        name
        for name in names
        if not any((top / name).exists() for top in tops)
        and ("/" in name or not list((ROOT / "burnish").rglob(name)))
    ]


def test_the_page_of_the_architecture_names_files_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert missing_files(text.replace("`~/.config/burnish/gpus.yaml`", "")) == []
    assert len(re.findall(r"`[\w/]+\.py`", text)) > 100
    bad = ["rollout/none.py", "nothing.py", "none/"]
    assert missing_files("`steps/rl.py` `rule.py` `train/` `" + "` `".join(bad) + "`") == bad


def test_docstrings_name_modules_that_exist():
    """``name.py`` is a module of the same folder or the one above; ``folder/name.py`` is a path
    below these, burnish or the project. Files of users and of other packages are listed here."""
    elsewhere = {
        *("path/to/file.py", "file.py", "a.py", "rewards.py", "program.py", "tools/server.py"),
        *("stage_1_and_2.py", "stage3.py"),  # of DeepSpeed
        # of each kind:
        *("config.py", "rule.py", "engine.py", "memory.py", "encode.py", "read.py", "reward.py"),
        "worker.py",  # copied into the sandbox next to function_program.py
    }
    package = ROOT / "burnish"
    missing, count = [], 0
    for path in package.rglob("*.py"):
        for text in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            for name in re.findall(r"(?<![\w/.~*-])((?:[\w-]+/)*\w+\.py)\b", text):
                near = [path.parent, path.parent.parent]
                tops = [*near, package, ROOT] if "/" in name else near
                count += 1
                if name not in elsewhere and not any((top / name).is_file() for top in tops):
                    missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == [] and count > 100


def test_the_lab_notebook_has_dated_entries_in_order_with_question_and_conclusion():
    text = (ROOT / "docs" / "lab-notebook.md").read_text(encoding="utf-8")
    entries = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    dates = [re.match(r"\d{4}-\d\d-\d\d(?=: )", entry) for entry in entries]
    assert len(entries) >= 21 and None not in dates
    assert dates == sorted(dates, key=lambda match: match[0])
    for entry in entries:
        question, conclusion = entry.find("**Question.** "), entry.find("**Conclusion.** ")
        assert 0 < question < conclusion, entry.splitlines()[0]
