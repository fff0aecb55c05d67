"""Hooks of mkdocs for the documentation site (``mkdocs.yml``).

The pages of docs/ are written for a git forge. Three things differ on the site: anchors of
headings, words after the language of a code block, and links out of docs/. A linked file of the
project becomes a page below ``project/``: Markdown as it is, any other file as highlighted code."""

from __future__ import annotations

import re
import string
from collections import Counter
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)\s#]+)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash"}
"""The language of a file's code, by suffix; others are text."""


class SourceFile(File):
    """A file of the project that is no Markdown, as a page with its code."""

    def is_documentation_page(self) -> bool:
        return True


class ForgeElements(Treeprocessor):
    """Correct headings, and code in cells of tables."""

    def run(self, root: Element) -> None:
        used: Counter[str] = Counter()
        for heading in root.iter():
            if re.fullmatch("h[1-6]", str(heading.tag)):
                set_anchor(heading, used)
        for cell in root.iter("td"):
            for code in cell.iter("code"):
                break_words(code)


def set_anchor(heading: Element, used: Counter[str]) -> None:
    """Set the anchor that the links of docs/ use: ``limits-1`` for the second ``Limits``."""
    title = "".join(heading.itertext()).strip().lower()
    anchor = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
    heading.set("id", f"{anchor}-{used[anchor]}" if used[anchor] else anchor)
    used[anchor] += 1


def break_words(code: Element) -> None:
    """Allow a line break after the signs of a word of 24 or more letters, such as the path of a
    function. The sign ``|`` is escaped in tables, and shown without."""
    parts = []
    for word in re.split(r"(?<=\s)", str(code.text).replace("\\|", "|")):
        parts += re.split(r"(?<=[./=:,_])(?=\w)", word) if len(word) >= 24 else [word]
    code.text = AtomicString(parts[0])
    for part in parts[1:]:
        SubElement(code, "wbr").tail = AtomicString(part)


class ForgeMarkdown(Extension):
    """Markdown as a git forge reads it: every sign can be escaped. ``ForgeElements`` runs between
    the processing of inline text (20) and ``toc`` (5)."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.ESCAPED_CHARS = list(string.punctuation)
        md.treeprocessors.register(ForgeElements(md), "forge_elements", 10)


def project_file(name: str, config: MkDocsConfig) -> File:
    """Return the page of a file, by its path from the root of the project. Its source path starts
    with ``../``, so that the links of docs/ find it."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".md"):
        file = File.generated(config, f"../{name}", content=text)
    else:
        language = LANGUAGES.get(Path(name).suffix, "text")
        page = f"# `{name}`\n\nA file of the project.\n\n````{language}\n{text}````\n"
        file = SourceFile.generated(config, f"../{name}", content=page)
    file.inclusion = InclusionLevel.NOT_IN_NAV  # mkdocs excludes sources that start with a dot
    file.dest_uri = f"project/{name.removesuffix('.md')}.html"
    return file


def title_of(file: File) -> str:
    """Return the title of a page of docs/, its first line."""
    return file.content_string.splitlines()[0].removeprefix("# ")


def linked(text: str, folder: str) -> set[str]:
    """Return the files of the project out of docs/ that a page links to, by their paths from the
    root. ``folder`` is that of the page, from the root."""
    paths = {(ROOT / folder / target).resolve() for target in LINK.findall(text)}
    return {
        str(path.relative_to(ROOT))
        for path in paths
        if path.is_file() and path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "docs")
    }


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.markdown_extensions.append(ForgeMarkdown())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files out of docs/ that the navigation or a page names."""
    todo = set(re.findall(r"'\.\./([^']+)'", repr(config.nav)))
    for file in files.documentation_pages():
        todo |= linked(file.content_string, "docs")
    while todo:
        name = todo.pop()
        if f"../{name}" not in files.src_uris:
            file = project_file(name, config)
            files.append(file)
            if name.endswith(".md"):
                todo |= linked(file.content_string, str(Path(name).parent))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove the words after a language, with which tests find their blocks. Links of a page out of
    docs/ begin at the root of the site. A link whose text is the name of a page gets its title."""
    markdown = re.sub(r"^( *```\w+) .*$", r"\1", markdown, flags=re.MULTILINE)
    if page.file.src_uri.startswith("../"):
        markdown = markdown.replace("](docs/", "](/")

    def titled(link: re.Match[str]) -> str:
        file = files.get_file_from_path(link[1])
        return link[0] if file is None else f"[{title_of(file)}"

    return re.sub(r"\[(?:docs/)?([\w-]+\.md)(?=\]\()", titled, markdown)
