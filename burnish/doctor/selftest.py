"""Self-tests: run every installed engine on a tiny model, each in a separate process.

``python -m burnish.doctor.selftest NAME`` runs one. A train engine takes five steps and must reduce
its loss. A rollout engine samples greedily and must return the tokens of a plain forward pass,
before and after a weight update.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from burnish.config import load_config
from burnish.doctor.facts import Facts
from burnish.messages import library_text

TIMEOUT_S = 300.0
TRAIN: dict[str, dict[str, Any]] = {
    "torch fp32": {},
    "torch bf16": {"precision": {"dtype": "bf16"}},
    "torch fp16": {"precision": {"dtype": "fp16"}},
    "deepspeed ZeRO-2": {"train": {"engine": {"kind": "deepspeed", "zero_stage": 2}}},
    "deepspeed ZeRO-3": {"train": {"engine": {"kind": "deepspeed", "zero_stage": 3}}},
    "ray, 2 ranks": {"cluster": {"runtime": "ray", "policy_ranks": 2}},
    "ray, 2 ranks, FSDP2": {
        "cluster": {"runtime": "ray", "policy_ranks": 2},
        "train": {"engine": {"kind": "torch", "sharding": "full"}},
    },
}
ROLLOUT = {"local": {"kind": "local"}, "vllm": {"kind": "vllm"}}
NEEDS = {"deepspeed": "deepspeed", "ray": "ray", "vllm": "vllm"}


@dataclass(frozen=True)
class SelfTestOutcome:
    """Outcome of one self-test."""

    name: str
    passed: bool
    seconds: float
    text: str
    """Result of the test, or the error message."""


def names(facts: Facts) -> list[str]:
    """Return the names of the self-tests of installed engines."""
    tests = []
    for name in (*TRAIN, *(f"rollout {kind}" for kind in ROLLOUT)):
        needs = next((d for word, d in NEEDS.items() if word in name), None)
        if needs is None or facts.version(needs) is not None:
            tests.append(name)
    return tests


def run(name: str) -> SelfTestOutcome:
    """Run one self-test in a new process, with a timeout of :data:`TIMEOUT_S`."""
    started = time.monotonic()
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory(prefix="burnish-doctor-") as folder:
        command = [sys.executable, "-m", "burnish.doctor.selftest", name]
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True,
                timeout=TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return SelfTestOutcome(name, False, TIMEOUT_S, f"timed out after {TIMEOUT_S:g} s")
    passed = done.returncode == 0
    text = done.stdout.strip().rpartition("\n")[2] if passed else _exception_text(done.stderr)
    return SelfTestOutcome(name, passed, time.monotonic() - started, text or "no output")


def _exception_text(stderr: str) -> str:
    """Return the exception message at the end of a traceback: the lines after the last indented
    one."""
    lines = stderr.rstrip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith(" ")]
    return library_text("\n".join(lines[frames[-1] + 1 if frames else -1 :]))


def _train(name: str) -> str:
    """Run five steps of supervised fine-tuning and check that the loss falls."""
    from burnish.jobs.run import run as run_job
    from burnish.observe.metrics import read_metrics

    rows = [{"prompt": f"{a}+1=", "response": str(a + 1)} for a in range(8)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = {"train_batch_size": 8, "micro_train_batch_size": 4, "lr": 1e-2}
    asked = TRAIN[name]
    tree = {
        "job": "sft",
        "run_dir": "run",
        "max_epochs": 5,
        "model": {"scratch": {"hidden_size": 32}},
        "data": {"sources": ["rows.jsonl"]},
        **asked,
        "train": train | asked.get("train", {}),
        "checkpoint": {"every_n_steps": 0},
    }
    result = run_job(load_config(tree))
    losses = [line["train/loss"] for line in read_metrics(result.run_dir) if "train/loss" in line]
    if not losses[-1] < losses[0] - 0.1:  # rounding alone changes it by less
        raise AssertionError(f"the loss did not decrease in 5 steps: {losses}")
    return f"loss {losses[0]:.2f} -> {losses[-1]:.2f}"


def _rollout(kind: str) -> str:
    """Compare greedy tokens with a plain forward pass, before and after a weight update."""
    import torch

    from burnish.config.model import ModelConfig, PrecisionConfig, ScratchConfig
    from burnish.models.load import load_causal_lm, load_tokenizer
    from burnish.observe.timeline import Timeline
    from burnish.rollout.base import Request, Sampling
    from burnish.rollout.local.config import LocalEngine
    from burnish.rollout.vllm.config import VllmEngine
    from burnish.runtime.inline import InlineRuntime

    shape: dict[str, Any] = {"hidden_size": 128, "num_heads": 4, "tie_word_embeddings": False}
    initial, updated = (ModelConfig(scratch=ScratchConfig(seed=seed, **shape)) for seed in (0, 1))
    tokenizer = load_tokenizer(initial)
    runtime = InlineRuntime(
        tokenizer, precision=PrecisionConfig(), device="auto", timeline=Timeline()
    )
    config = VllmEngine(kind="vllm") if kind == "vllm" else LocalEngine()
    engine = runtime.standalone_rollout(initial, config, max_len=32)
    prompt = (7, 8, 9)
    for version, model in enumerate((initial, updated)):
        network = load_causal_lm(model)
        if version:
            engine.load_weights(version, network.named_parameters())
        (done,) = engine.generate([Request("a", prompt)], Sampling(8, 0.0))
        row = torch.tensor([[*prompt, *done.token_ids]])
        with torch.no_grad():
            expected = network(row).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        if list(done.token_ids) != expected:
            raise AssertionError(
                f"with weights {version} it sampled {list(done.token_ids)}, but the model's most "
                f"probable tokens are {expected}"
            )
    engine.close()
    return "greedy tokens match the model's, also after new weights"


def main(arguments: Sequence[str]) -> None:
    """Run the self-test with the given name. The last line of the output is its result."""
    (name,) = arguments
    kind = name.removeprefix("rollout ")
    test: Callable[[], str] = partial(_rollout, kind) if kind in ROLLOUT else partial(_train, name)
    print(test())


if __name__ == "__main__":
    main(sys.argv[1:])
