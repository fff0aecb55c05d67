"""Mathematical equality (math-verify) in worker processes.

Why processes: a comparison can hang inside sympy, and a huge integer power can be stopped only by
killing its process. Why not multiprocessing: its workers import the user's main module, which
imports torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from burnish.rewards.base import RewardError, RewardInput, SampleError
from burnish.rewards.build import RewardInputs
from burnish.rewards.labels import LabelError
from burnish.rewards.math.config import MathReward
from burnish.rewards.math.text import Ask, Label, judge, read_label
from burnish.rewards.texts import prompt_end
from burnish.types import Prompt

log = logging.getLogger("burnish")

_WORKER = Path(__file__).with_name("worker.py")


class MathScorer:
    """A reward that is 1.0 if the last answer of the response equals the label mathematically, else
    0.0.

    The last answer is searched after the last ``</think>``: the last box, the line after ``####``,
    or the quantity after "answer is". If nothing is marked, it is the last formula or number.

    A number with its base as a subscript (``1010_2``) equals numbers with the same digits and base.
    An answer may leave out the base of a label, but a label without a base equals no other base.

    A label is an answer, not a sentence: ``1/2``, ``$\\frac{1}{2}$``, ``6,000``, ``1e5``,
    ``5 cm``, ``x^2+1``, or the text after ``####``. Words and dates are compared as text; word
    labels are logged once. A label that is missing, has several values, is a sentence, or cannot
    be parsed is an error in the data and raises SampleError. A response scores 0 if the comparison
    takes longer than ``timeout_s`` CPU seconds or math-verify raises. Both cases are counted, as
    ``timeouts`` and ``errors``.

    Worker processes start with the first comparison. ``num_workers`` comparisons run in parallel.
    """

    def __init__(
        self,
        *,
        name: str = "math",
        timeout_s: float = 5.0,
        num_workers: int = 1,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """``tokenizer``: the policy's, as in :func:`burnish.rewards.texts.prompt_end`."""
        self.name, self._tokenizer = name, tokenizer
        self._timeout_s = timeout_s
        self._num_workers = num_workers
        self._idle: queue.SimpleQueue[_Worker] | None = None
        self._counts: Counter[str] = Counter()
        self._warned_words = False

    def score(self, items: Sequence[RewardInput]) -> list[float]:
        """Return one score per item.

        Raises SampleError if a label is missing, is not an answer, or cannot be parsed.
        """
        labels = [self._label(item) for item in items]
        verdicts = [
            judge(label, item.sample.text, prompt_end(item, self._tokenizer))
            for label, item in zip(labels, items, strict=True)
        ]
        asked = {i: verdict for i, verdict in enumerate(verdicts) if isinstance(verdict, Ask)}
        answers = dict(zip(asked, self._ask(list(asked.values())), strict=True))
        words = [label.text for label in labels if label.kind == "words"]
        if words and not self._warned_words:
            self._warned_words = True
            log.warning(
                "reward %r: %d labels of this call are words, not mathematics, such as %r; they "
                "are compared as text, ignoring case, articles and punctuation (logged once)",
                *(self.name, len(words), words[0]),
            )
        for i, answer in answers.items():
            if "bad_label" in answer:
                problem = "cannot parse the label as mathematics"
                raise SampleError(self, items[i], problem, advice="correct the label in the data")
        return [
            float(answers[i].get("score", 0)) if i in answers else float(verdicts[i] is True)
            for i in range(len(items))
        ]

    def _ask(self, requests: Sequence[Ask]) -> list[dict[str, Any]]:
        """Return math-verify's reply to each request. Without requests no process is started."""
        if not requests:
            return []
        if self._idle is None:
            self._idle = queue.SimpleQueue()
            for _ in range(self._num_workers):
                self._idle.put(_Worker(self._timeout_s))
        idle = self._idle

        def compare(request: Ask) -> dict[str, Any]:
            worker = idle.get()
            try:
                return worker.ask(asdict(request))
            finally:
                idle.put(worker)

        with ThreadPoolExecutor(self._num_workers, thread_name_prefix="math") as threads:
            answers = list(threads.map(compare, requests))
        self._counts.update(timeouts=sum("timeout" in a for a in answers))
        self._counts.update(errors=sum("error" in a for a in answers))
        return answers

    def take_counts(self) -> Mapping[str, int]:
        counts, self._counts = self._counts, Counter()
        return {"timeouts": counts["timeouts"], "errors": counts["errors"]}

    def close(self) -> None:
        if self._idle is not None:
            while not self._idle.empty():
                self._idle.get().close()
            self._idle = None

    def _label(self, item: RewardInput) -> Label:
        if item.prompt.label is None:
            advice = "set data.label_key to the column with the answers"
            raise SampleError(self, item, "found no label", advice=advice)
        try:
            return read_label(item.prompt.label)
        except LabelError as error:
            problem = f"cannot use the label: it {error}"
            raise SampleError(
                self, item, problem, advice="correct the label in the data"
            ) from error


class _Worker:
    """One process of ``worker.py``. It is restarted when it dies."""

    def __init__(self, timeout_s: float) -> None:
        # -P keeps the script's folder off sys.path.
        self._command = [sys.executable, "-P", str(_WORKER), str(timeout_s)]
        self._process = self._start()
        self._ready = False

    def ask(self, request: Mapping[str, str]) -> dict[str, Any]:
        """Return the worker's reply. If it died: ``{"timeout": True}`` or ``{"error": ...}``."""
        if not self._ready and self._read() is None:
            raise RewardError(
                f"a math worker exited with code {self._process.wait()} before it was ready; "
                "see its message above. Is math-verify installed? Try: "
                f"{sys.executable} -c 'import math_verify'"
            )
        self._ready = True
        with contextlib.suppress(BrokenPipeError):  # it died
            print(json.dumps(request), file=self._process.stdin, flush=True)
            if (answer := self._read()) is not None:
                return answer
        code = self._process.wait()
        self._process = self._start()
        self._ready = False
        if code == -signal.SIGPROF:
            return {"timeout": True}
        return {"error": f"worker exited with {code}"}

    def close(self) -> None:
        """Stop the process by closing its stdin. Kill it if it does not exit within 2 seconds."""
        self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def _read(self) -> dict[str, Any] | None:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        return cast("dict[str, Any]", json.loads(line)) if line else None


def make_reward(config: MathReward, inputs: RewardInputs) -> MathScorer:
    return MathScorer(
        name=inputs.name,
        timeout_s=config.timeout_s,
        num_workers=config.num_workers,
        tokenizer=inputs.tokenizer,
    )


def check_label(prompt: Prompt) -> None:
    if prompt.label is None:
        raise LabelError("is missing; set data.label_key to the column with the answers")
    read_label(prompt.label)
