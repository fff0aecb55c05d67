"""Write docs/figures/architecture.svg: the parts of a run, and the data of one RL step.

``python tools/architecture_svg.py`` checks the picture (exit 1 if it is out of date); ``--write``
writes it. Every file that it names is a path below burnish/.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

PICTURE = Path("docs", "figures", "architecture.svg")
WIDTH, HEIGHT = 900, 704
LINE = 13
"""Distance of two lines of text, in pixels."""
MONO, SANS, BOLD, HEAD = 6.05, 5.3, 6.0, 6.05
"""Pixels per character of file names, texts, titles and titles of frames; the last three are
averages."""


class Box(NamedTuple):
    """A rectangle with a title and lines below it. A line that ends in ``.py`` is a file name."""

    x: int
    y: int
    width: int
    height: int
    group: str
    """Class of its color: control, sample, score, train, move; frame for a part of the picture."""
    title: str
    lines: tuple[str, ...] = ()


class Arrow(NamedTuple):
    """A line with a head, along the commands of a path, and its label."""

    path: str
    label: str = ""
    x: int = 0
    y: int = 0
    anchor: str = "start"
    double: bool = False
    """Heads at both ends."""


FRAMES = (
    Box(12, 12, 876, 106, "frame", "Controller: checks a recipe, builds its parts, runs the steps"),
    Box(12, 130, 354, 476, "frame", "Sampling: prompts in, scored groups out"),
    Box(396, 130, 228, 476, "frame", "One RL step: rl_step, in steps/rl.py"),
    Box(684, 130, 204, 476, "frame", "Train engines: a model in a role"),
    Box(12, 626, 876, 66, "frame", "Weight transfer: new weights of the policy"),
)
CONTROLLER = (
    Box(
        20, 38, 154, 70, "control", "validate",
        ("config/load.py", "config/registry.py", "config/roles.py"),
    ),
    Box(
        196, 38, 154, 70, "control", "check inputs",
        ("preflight/inputs.py", "preflight/launch.py", "plan/launch.py"),
    ),
    Box(
        372, 38, 154, 70, "control", "place engines",
        ("runtime/inline.py", "runtime/ray/runtime.py", "runtime/spmd/runtime.py"),
    ),
    Box(
        548, 38, 154, 70, "control", "build the parts",
        ("jobs/run.py", "jobs/rl.py", "jobs/build.py"),
    ),
    Box(
        724, 38, 156, 70, "control", "run steps",
        ("driver/trainer.py", "driver/checkpointing.py", "observe/metrics.py"),
    ),
)  # fmt: skip
SAMPLING = (
    Box(20, 156, 338, 124, "sample", "RolloutSource: prompts of data/prompts"),
    Box(
        26, 178, 114, 96, "inner", "synchronous",
        ("SyncSource:", "rollout/source.py", "samples when a", "step asks"),
    ),
    Box(
        148, 178, 204, 96, "inner", "asynchronous",
        (
            "AsyncSource: always; age is bounded", "rollout/asynchronous/source.py",
            "rollout/asynchronous/schedule.py", "rollout/asynchronous/service.py",
        ),
    ),
    Box(
        20, 322, 166, 88, "sample", "Runner",
        (
            "Sample of one response:", "rollout/runner.py",
            "Sample of several turns:", "episodes/runner.py",
        ),
    ),
    Box(
        218, 322, 140, 88, "score", "RewardSet",
        (
            "rewards/base.py", "rewards/reward_set.py", "functions, models,",
            "servers, tests of code",
        ),
    ),
    Box(
        20, 460, 166, 138, "sample", "Rollout engines",
        (
            "rollout/base.py", "in this process:", "rollout/local/engine.py",
            "vLLM in a worker:", "rollout/vllm/engine.py", "vLLM servers:",
            "rollout/servers/engine.py",
        ),
    ),
    Box(
        218, 460, 140, 138, "score", "Environments, agents",
        (
            "the turns of an episode:", "episodes/loop.py", "environments/pool.py",
            "environments/tools.py", "agents/episodes.py", "agents/session.py",
            "sandbox/base.py",
        ),
    ),
)  # fmt: skip
STEPS = (
    ("1 get the groups of the step", ("source.next(step) returns a Rollout",)),
    ("2 groups to one Batch", ("batches.py", "types.py")),
    ("3 log-probs of the reference", ("with_reference: ref_logprobs",)),
    ("4 log-probs of the teacher", ("teacher_logprobs", "steps/teacher.py")),
    ("5 before the update", ("with_old_policy: old_logprobs, values",)),
    ("6 advantages", ("steps/credit.py", "algorithms/advantages.py")),
    ("7 loss of a minibatch, gradients", ("steps/objectives.py", "algorithms/policy_losses.py")),
    ("8 optimizer step", ("steps/updates.py",)),
    ("9 announce the weights", ("source.update_weights()",)),
)
"""The lines of ``rl_step``: (what, names)."""
STEP_Y, PITCH, STEP_HEIGHT = 156, 49.5, 46
TRAINING = (
    Box(
        692, 156, 188, 88, "train", "TrainEngine: train/base.py",
        (
            "one template: train/engine.py", "train/torch/engine.py",
            "train/fsdp/engine.py", "train/deepspeed/engine.py",
        ),
    ),
    Box(
        692, 255, 188, 46, "train", "reference",
        ("frozen, or follows the policy:", "steps/moving_reference.py"),
    ),
    Box(692, 304, 188, 46, "train", "teacher", ("frozen", "models/teacher.py")),
    Box(
        692, 354, 188, 194, "train", "policy and critic",
        (
            "trained, each by its own engine", "rows to micro-batches:", "train/batching.py",
            "forward pass of a micro-batch:", "train/forward.py", "models/attention.py",
            "models/logprobs.py", "masters, clipping, schedule:", "train/optim.py",
            "update rules, a folder each:", "optimizers/rule.py",
        ),
    ),
)  # fmt: skip
TRANSFER = tuple(
    Box(20 + 173 * k, 648, 168, 38, "move", title, (file,))
    for k, (title, file) in enumerate(
        (
            ("in one process", "sync/inproc.py"),
            ("shared memory", "sync/ipc.py"),
            ("broadcast", "sync/collective.py"),
            ("a folder", "sync/disk.py"),
            ("between Ray workers", "runtime/ray/weight_sync.py"),
        )
    )
)
ARROWS = (
    *(Arrow(f"M{x},73 h22") for x in (174, 350, 526, 702)),
    Arrow("M84,280 v42", "Prompt", 90, 298),
    Arrow("M288,322 v-42", "scored Group", 282, 306, "end"),
    Arrow("M186,366 h32", "Group", 188, 360),
    Arrow("M64,410 v50", "Request", 58, 440, "end"),
    Arrow("M140,460 v-50", "Completion", 134, 440, "end"),
    Arrow("M166,410 v26 h122 v24", "messages", 226, 430, double=True),
    Arrow("M358,178 h46", "Rollout", 361, 172),
    Arrow("M616,268 h76", "Batch", 630, 264),
    Arrow("M692,286 h-76", "log-probs", 629, 299),
    Arrow("M616,317 h76", "Batch", 630, 313),
    Arrow("M692,335 h-76", "log-probs", 629, 348),
    Arrow("M616,367 h76", "Batch", 630, 363),
    Arrow("M692,385 h-76", "log-probs,", 629, 398),
    Arrow("M692,385 h-76", "values", 632, 410),
    Arrow("M616,466 h76", "Batch, loss", 629, 462),
    Arrow("M692,484 h-76", "Stats", 632, 497),
    Arrow("M692,525 h-76", "StepStats", 629, 521),
    Arrow("M510,598 v28", "push", 516, 618),
    Arrow("M786,548 v78", "weights", 792, 590),
    Arrow("M104,626 v-28", "load_weights", 110, 618),
)
STYLE = """
.page{fill:#ffffff} .frame{fill:#f6f8fa;stroke:#d0d7de} .inner{fill:#ffffff;stroke:#8fc79a}
.control{fill:#ddf0ff;stroke:#6cb0ea} .sample{fill:#dff5e3;stroke:#6fbf7f}
.score{fill:#f2e5ff;stroke:#b98ce6} .step{fill:#ffffff;stroke:#8c959f}
.train{fill:#ffedd8;stroke:#e2a458} .move{fill:#ffffff;stroke:#8c959f}
text{fill:#1f2328;font:10px Helvetica,Arial,'DejaVu Sans Condensed',sans-serif}
.title{font-weight:bold;font-size:11px} .head{font-weight:bold;font-size:12px}
.file{font:10px 'DejaVu Sans Mono',Menlo,Consolas,monospace} .label{font-style:italic}
.arrow{fill:none;stroke:#57606a;stroke-width:1.3} .tip{fill:#57606a}
@media (prefers-color-scheme:dark){
.page{fill:#0d1117} .frame{fill:#161b22;stroke:#30363d} .inner{fill:#0d1117;stroke:#2f7d45}
.control{fill:#12304d;stroke:#2f6ea8} .sample{fill:#12351f;stroke:#2f7d45}
.score{fill:#2f2050;stroke:#7d55b3} .step,.move{fill:#0d1117;stroke:#6e7681}
.train{fill:#45290d;stroke:#a8702a} text{fill:#e6edf3} .arrow{stroke:#9da7b3} .tip{fill:#9da7b3}}
"""


def boxes() -> list[Box]:
    """Return all boxes, those behind others first."""
    steps = (
        Box(404, round(STEP_Y + PITCH * k), 212, STEP_HEIGHT, "step", title, names)
        for k, (title, names) in enumerate(STEPS)
    )
    return [*FRAMES, *CONTROLLER, *SAMPLING, *steps, *TRAINING, *TRANSFER]


def files() -> list[str]:
    """Return the file names in the picture, below burnish/, each once."""
    words = (word for box in boxes() for text in (box.title, *box.lines) for word in text.split())
    return list(dict.fromkeys(word for word in words if word.endswith(".py")))


def too_wide() -> list[str]:
    """Return the texts that do not fit into their boxes."""
    texts = [(box, text, MONO if _is_file(text) else SANS) for box in boxes() for text in box.lines]
    texts += [(box, box.title, HEAD if box.group == "frame" else BOLD) for box in boxes()]
    return [text for box, text, size in texts if len(text) * size > box.width - 8]


def picture() -> str:
    """Return the SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>The parts of Burnish, and the data of one RL step</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
        'markerHeight="6" orient="auto-start-reverse"><path class="tip" d="M0,0 L8,4 L0,8 z"/>'
        "</marker></defs>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        *(line for box in boxes() for line in _box(box)),
        *(line for arrow in ARROWS for line in _arrow(arrow)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _is_file(text: str) -> bool:
    return text.endswith(".py") and " " not in text


def _box(box: Box) -> Iterator[str]:
    size = f'x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}"'
    yield f'<rect class="{box.group}" {size} rx="5"/>'
    title = "head" if box.group == "frame" else "title"
    yield _text(box.title, box.x + 6, box.y + 15, title)
    for number, line in enumerate(box.lines, start=1):
        yield _text(line, box.x + 6, box.y + 15 + LINE * number, "file" if _is_file(line) else "")


def _arrow(arrow: Arrow) -> Iterator[str]:
    start = ' marker-start="url(#tip)"' if arrow.double else ""
    yield f'<path class="arrow" d="{arrow.path}" marker-end="url(#tip)"{start}/>'
    if arrow.label:
        yield _text(arrow.label, arrow.x, arrow.y, "label", arrow.anchor)


def _text(text: str, x: int, y: int, style: str, anchor: str = "start") -> str:
    shown = f' class="{style}"' if style else ""
    placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}"{shown}{placed}>{escape(text)}</text>'


def main(arguments: list[str]) -> int:
    """Check or write the picture. Return the exit code."""
    path = Path(__file__).resolve().parent.parent / PICTURE
    if "--write" in arguments:
        path.write_text(picture(), encoding="utf-8")
    elif not path.is_file() or path.read_text(encoding="utf-8") != picture():
        print(f"{PICTURE} is not up to date: run 'make docs'")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
