"""Check the house rules that a machine can check: documentation, types, prose, no getattr, no
unbounded search of a model's text, two levels of folders, no import cycle, no use of another
module's private names.

``python tools/house.py [FILE ...]`` prints ``file:line: message`` for each break and exits with 1.
Without files it reads burnish/, tools/, benchmarks/ and tests/. ``# house: ok <reason>`` at the end
of the line concerned (for a function: anywhere in its signature; for a file: on its first line) is
an exception. Sizes are warnings, which ``--sizes`` prints: prompts to look for a second concept.
Reading order: main, check_file, warn_sizes, then one function per rule."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from imports import find_cycle, nodes, own_modules, parse, private_names

MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 500
MAX_NESTING = 3
MAX_PARAMETERS = 8
MAX_POSITIONAL = 4  # the published loss signature: logprobs, old_logprobs, advantages, mask
MAX_LINES_WITHOUT_DOCSTRING = 8
ROOTS = ("burnish", "tools", "benchmarks", "tests")
READS_MODEL_TEXT = ("rewards", "episodes", "environments", "agents", "serve")

Finding = tuple[int, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef
_MARK = re.compile(r"#\s*house:\s*ok\b\s*(.*)")
_CODE = re.compile(r"``?[^`]*``?")
_RAISES_WHERE = re.compile(r"\bRaises\s[^.;]*?\bwhere\b")
_OPENING = re.compile(r"(?:What|Of|Nothing|Whether)\b")
_REPLACED = re.compile(r"\b(?:mended|anew|all the same|in line with)\b", re.IGNORECASE)
_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def check_file(path: Path, text: str) -> list[Finding]:
    """Return every broken rule of one file as (line, message), sorted. ``path`` is relative to the
    repository."""
    tree = parse(text)
    marks = _exceptions(text)
    findings = [
        (line, "a house exception needs a reason") for line, why in marks.items() if not why
    ]
    is_test, in_package = path.parts[0] == "tests", path.parts[0] == "burnish"
    if in_package and len(path.parts) > 4:
        findings.append((1, "folders go two deep below the package"))
    if not is_test:
        findings += _documentation(tree, marks)
        findings += [f for f in private_names(tree) if not marks.get(f[0])]
        findings += [*_prose(tree), *_words_of_comments(text)]
    if in_package:
        findings += _getattr(tree, marks)
        findings += _searches(tree, path, marks)
        findings += _untyped_configs(tree)
    return sorted(set(findings))


def warn_sizes(text: str) -> list[Finding]:
    """Return the sizes of one file that ask for a second look, as (line, message), sorted."""
    tree = parse(text)
    marks = _exceptions(text)
    findings = []
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES and not marks.get(1):
        findings.append((1, f"file has {num_lines} lines, over {MAX_FILE_LINES}"))
    for node in nodes(tree):
        if isinstance(node, Function):
            signature = range(node.lineno, node.body[0].lineno + 1)
            if not any(marks.get(line) for line in signature):
                findings += _sizes(node)
    return sorted(findings)


def _untyped_configs(tree: ast.Module) -> Iterator[Finding]:
    """Yield parameters, variables and fields named ``config`` of type ``Any``."""
    for node in nodes(tree):
        match node:
            case (
                ast.arg(arg="config", annotation=ast.Name(id="Any"))
                | ast.AnnAssign(target=ast.Name(id="config"), annotation=ast.Name(id="Any"))
            ):
                yield node.lineno, "config: Any; name its class (transformers: PretrainedConfig)"


def _exceptions(text: str) -> dict[int, str]:
    """Return line -> reason of every exception comment. Strings that look like one do not count."""
    comments = _comments(text) if _MARK.search(text) else []
    matches = ((line, _MARK.match(comment)) for line, comment in comments)
    return {line: match[1].strip() for line, match in matches if match}


def _comments(text: str) -> list[tuple[int, str]]:
    """Return the comments of a file as (line, comment)."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [(t.start[0], t.string) for t in tokens if t.type == tokenize.COMMENT]


def _sizes(node: Function) -> Iterator[Finding]:
    num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if num_lines > MAX_FUNCTION_LINES:
        yield node.lineno, f"{node.name} has {num_lines} lines, over {MAX_FUNCTION_LINES}"
    depth = _depth(node.body)
    if depth > MAX_NESTING:
        yield node.lineno, f"{node.name} nests {depth} deep, over {MAX_NESTING}"
    arguments = [a.arg for a in node.args.posonlyargs + node.args.args]
    positional = len(arguments) - (arguments[:1] in (["self"], ["cls"]))
    total = positional + len(node.args.kwonlyargs)
    if total > MAX_PARAMETERS:
        yield node.lineno, f"{node.name} takes {total} parameters, over {MAX_PARAMETERS}"


def _depth(body: list[ast.stmt]) -> int:
    """Return the nesting depth of blocks. ``elif`` is not deeper than its ``if``; inner functions
    start at 0."""
    deepest = 0
    for node in body:
        if isinstance(node, _BLOCKS):
            deepest = max(deepest, _depth_of_block(node))
    return deepest


def _depth_of_block(node: ast.stmt) -> int:
    deepest = 0
    for name, value in ast.iter_fields(node):
        if not isinstance(value, list):
            continue
        if name in ("handlers", "cases"):
            deepest = max([deepest, *(_depth(part.body) for part in value)])
        elif name == "orelse" and len(value) == 1 and isinstance(value[0], ast.If):
            deepest = max(deepest, _depth_of_block(value[0]) - 1)
        elif name in ("body", "orelse", "finalbody"):
            deepest = max(deepest, _depth(value))
    return deepest + 1


def _documentation(tree: ast.Module, marks: dict[int, str]) -> Iterator[Finding]:
    """Check that public modules, classes and module-level functions have docstrings, unless they
    are a few lines that say it themselves, and that public functions are typed."""
    if tree.body and ast.get_docstring(tree) is None:
        yield 1, "the module has no docstring"
    for node in tree.body:
        if not isinstance(node, (Function, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if any(marks.get(line) for line in range(node.lineno, node.body[0].lineno + 1)):
            continue
        num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if ast.get_docstring(node) is None and num_lines > MAX_LINES_WITHOUT_DOCSTRING:
            yield node.lineno, f"{node.name} is public and has no docstring"
        for function in _public_functions(node):
            if not any(marks.get(n) for n in range(function.lineno, function.body[0].lineno + 1)):
                yield from _typed_and_keyword_only(function)


def _public_functions(node: Function | ast.ClassDef) -> list[Function]:
    if isinstance(node, Function):
        return [node]
    methods = [m for m in node.body if isinstance(m, Function)]
    return [m for m in methods if not m.name.startswith("_") or m.name in ("__init__", "__call__")]


def _typed_and_keyword_only(node: Function) -> Iterator[Finding]:
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    arguments = node.args.posonlyargs + node.args.args
    if arguments and arguments[0].arg in ("self", "cls") and not static:
        arguments = arguments[1:]
    every = arguments + node.args.kwonlyargs
    every += [a for a in (node.args.vararg, node.args.kwarg) if a is not None]
    untyped = [a.arg for a in every if a.annotation is None]
    if untyped or node.returns is None:
        what = ", ".join(untyped) or "the return value"
        yield node.lineno, f"{node.name} is public and not typed: {what}"
    if len(arguments) > MAX_POSITIONAL:
        yield (
            node.lineno,
            f"{node.name} takes {len(arguments)} positional parameters; keyword-only after "
            f"{MAX_POSITIONAL}",
        )


def _prose(tree: ast.Module) -> Iterator[Finding]:
    """Check that docstrings open with a verb or a noun, state conditions with "if", and use none of
    the listed words. Strings below fields count as docstrings, except for their opening."""
    for node in nodes(tree):
        if not isinstance(node, (Function, ast.ClassDef, ast.Module)):
            continue
        body = node.body[:1] if isinstance(node, Function) else node.body
        for place, statement in enumerate(body):
            value = statement.value if isinstance(statement, ast.Expr) else None
            if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
                continue
            text = " ".join(_CODE.sub("", value.value).split())
            if place == 0 and (opening := _OPENING.match(text)):
                yield value.lineno, f"a docstring opens with {opening[0]!r}: use a verb or a noun"
            if _RAISES_WHERE.search(text):
                yield value.lineno, "'Raises ... where' in a docstring: write 'if'"
            for word in _REPLACED.findall(text):
                yield value.lineno, f"{word!r} in a docstring: use the technical word"


def _words_of_comments(text: str) -> Iterator[Finding]:
    for line, comment in _comments(text) if _REPLACED.search(text) else ():
        for word in _REPLACED.findall(comment):
            yield line, f"{word!r} in a comment: use the technical word"


def _searches(tree: ast.Module, path: Path, marks: dict[int, str]) -> Iterator[Finding]:
    """Check that modules that read text of a model search it with bounds."""
    if path.parts[1] not in READS_MODEL_TEXT:
        return
    for node in nodes(tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        names = [alias.name for alias in node.names]
        modules = {node.module} if isinstance(node, ast.ImportFrom) else set(names)
        if {"re", "regex"} & modules and not marks.get(node.lineno):
            yield node.lineno, "text of a model is searched with burnish.model_text, not with re"


def _getattr(tree: ast.Module, marks: dict[int, str]) -> Iterator[Finding]:
    for node in nodes(tree):
        called = (
            node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        )
        if isinstance(node, ast.Call) and called in ("getattr", "hasattr"):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if not any(marks.get(line) for line in lines):
                yield node.lineno, f"{called}: attributes of our own objects are known"


def main(arguments: list[str]) -> int:
    """Check the given files, or all files. Return the exit code."""
    root = Path(__file__).resolve().parent.parent
    paths = [Path(a).resolve() for a in arguments if a.endswith(".py")]
    paths_given = any(not argument.startswith("-") for argument in arguments)
    if not paths_given:
        paths = sorted(p for folder in ROOTS for p in (root / folder).rglob("*.py"))
    num_findings = num_warnings = 0
    for path in paths:
        name, text = path.relative_to(root), path.read_text(encoding="utf-8")
        for line, message in check_file(name, text):
            print(f"{name}:{line}: {message}")
            num_findings += 1
        for line, message in warn_sizes(text):
            num_warnings += 1
            if "--sizes" in arguments:
                print(f"{name}:{line}: warning: {message}")
    if num_warnings and "--sizes" not in arguments:
        print(f"{num_warnings} sizes ask for a second look: python tools/house.py --sizes")
    cycle = [] if paths_given else find_cycle(own_modules(root))
    if cycle:
        print(f"modules import each other: {' -> '.join(cycle)}")
    return 1 if num_findings or cycle else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
