"""Planned times beside recorded and published ones: the tables of docs/benchmarks.md.

    python benchmarks/planned_speeds.py           # print them
    python benchmarks/planned_speeds.py --write   # into docs/benchmarks.md

Recorded speeds are in tests/plan/recorded_speeds.yaml, measured with log-probs by PyTorch's
operations. Rows of prime-rl are one micro-batch each, with checkpointing; those of RL count one
pass of log-probs, and forward and backward with entropies. LoRA is of rank 16 on all linear layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from common import markdown_table

from burnish.config.model import LoraConfig, ModelConfig
from burnish.models.attention_kernel import AttentionRate
from burnish.models.sdpa import Kernels
from burnish.plan.activations import Pass, key_of, measure
from burnish.plan.hardware import parse_cluster
from burnish.plan.shapes import shape_of
from burnish.plan.speeds import Speeds
from burnish.plan.work import attention_work
from burnish.train.row_layout import Layout, RowSize

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- planned_speeds -->", "<!-- end of planned_speeds -->"
RECORDED = yaml.safe_load((ROOT / "tests/plan/recorded_speeds.yaml").read_text("utf-8"))
SHAPE = shape_of(ModelConfig(path="Qwen/Qwen3-0.6B"))
NAMES = {
    "rl_short": "RL, 8 rows of 1.5k to 3.3k",
    "rl_long": "RL, 4 rows of 4k to 16k, checkpointing",
    "sft_ragged": "SFT, 2k to 8k",
    "sft_equal": "SFT, 2 rows of 8k",
    "sft_recomputed": "SFT, 2 rows of 8k, checkpointing",
}
PUBLISHED = [
    ("SFT, 8k", 8192, 2, None, 26.0),
    ("SFT, 16k", 16384, 1, None, 25.5),
    ("RL, 16k", 16384, 1, None, 11.9),
    ("RL, 65k", 65536, 1, None, 10.1),
    ("RL with LoRA, 16k", 16384, 1, LoraConfig(lora_rank=16), 13.3),
]
"""(rows, tokens of a row, rows of a micro-batch, adapters, thousand tokens/s on one H100)"""

BETWEEN = """\
Before, plans of these cases were 2.3 to 8.6 times too fast, and those of sampling 4 to 10 times.
The seven measured decode steps are planned within 18%.

Beside rates that prime-rl publishes for Qwen3-0.6B on one H100 (checkpointing, compiled layers,
FlashAttention 3), in thousand tokens per second. Planned: without compiled layers. The RL rows
assume that the published rate is of the whole update: one pass of log-probs, forward and backward.
LoRA: rank 16, as published, on all linear layers (assumed), base weights in bf16; without compiled
layers, the memory traffic of the adapters takes longer than the weight gradients that they save.
"""


def training_pass(rows: tuple[RowSize, ...], layout: Layout, **settings: Any) -> Pass:
    """Return a training pass in bf16 on an H100 or H200."""
    return Pass(
        rows=rows,
        layout=layout,
        dtype="bf16",
        accumulates=True,
        chunk_tokens=2048,
        kernels=Kernels((2, 11), (9, 0)),
        **settings,
    )


def recorded_pass(name: str, *, flash: bool) -> Pass:
    """Return the pass of recorded rows."""
    recorded = RECORDED["rows"][name]
    rows = tuple(
        RowSize(prompt + response, prompt, group)
        for group, (prompt, responses) in enumerate(recorded["groups"])
        for response in responses
    )
    checkpointing, entropy = recorded.get("checkpointing", False), recorded.get("entropy", False)
    return training_pass(
        rows, recorded["layout"], flash=flash, checkpointing=checkpointing, with_entropy=entropy
    )


def kernel_seconds(card: str, work: Pass, rate: AttentionRate = "attention") -> dict[str, float]:
    """Return the planned seconds of a pass by what limits them."""
    counted = measure(key_of(SHAPE), work).work
    assert counted is not None
    attention = attention_work(SHAPE, work.rows, work.layout, flash=work.flash)
    attention *= 3.5 + (work.checkpointing is True) if work.train else 1.0
    speeds = Speeds(parse_cluster(card))
    return speeds.kernel_seconds(counted.body + counted.head, attention, half=True, rate=rate)


def recorded_rows() -> Iterator[list[str]]:
    """Yield the rows of the table of recorded times."""
    for case in RECORDED["training"]:
        work = recorded_pass(case["rows"], flash=case["attention"] == "flash")
        parts = kernel_seconds(case["card"], work)
        planned, measured = sum(parts.values()), case["seconds"]
        card, rows = case["card"].partition("-")[0], NAMES[case["rows"]]
        numbers = [f"{measured:.3f}", f"{planned:.3f}", f"{planned / measured:.2f}"]
        shares = [f"{part / planned:.0%}" for part in parts.values()]
        yield [card, rows, case["attention"], *numbers, *shares]


def published_rows() -> Iterator[list[str]]:
    """Yield the rows of the table of published rates."""
    for name, tokens, count, lora, published in PUBLISHED:
        rows, rl = tuple(RowSize(tokens, 1, i) for i in range(count)), name.startswith("RL")
        options = {"checkpointing": True, "with_entropy": rl, "lora": lora}
        work = training_pass(rows, "packed", flash=True, **options)
        logprobs = replace(
            work, train=False, accumulates=False, checkpointing=False, with_entropy=False
        )
        cells = []
        rates: tuple[AttentionRate, ...] = ("attention", "newer_attention")
        for rate in rates:
            passes = [work, logprobs] if rl else [work]
            seconds = sum(sum(kernel_seconds("H100-80GB", w, rate).values()) for w in passes)
            cells.append(f"{tokens * count / seconds / 1e3:.1f}")
        yield [name, *cells, f"{published:.1f}"]


def tables() -> str:
    """Return both tables, and the text between them."""
    shares = ("matrices", "attention", "memory")
    heads = ("card", "rows", "kernel", "measured", "planned", "ratio", *shares)
    planned = ("rows", "planned", "planned, FlashAttention 3 (not run)", "published")
    first = markdown_table(heads, recorded_rows())
    second = markdown_table(planned, published_rows())
    return "\n".join([*first, "", BETWEEN, *second])


def written(text: str) -> str:
    """Return the page ``text`` with the tables between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{PAGE} has no marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(tables())


if __name__ == "__main__":
    main()
