"""Python code of a response, scored by the tests in the label, in a sandbox.

The tests run in ``judge.py``, whose processes are separated so that the code cannot forge a
result. Its lines begin with a random nonce, which the code does not know.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from burnish.loop_thread import LoopThread
from burnish.rewards.base import RewardError, RewardInput, SampleError
from burnish.rewards.build import RewardInputs
from burnish.rewards.labels import LabelError
from burnish.rewards.python_code.config import PythonCodeReward
from burnish.rewards.python_code.tests import read_code, read_tests
from burnish.rewards.texts import prompt_end
from burnish.sandbox.base import PYTHON, Program, Result, SandboxError
from burnish.sandbox.make import make_sandbox
from burnish.types import Prompt

log = logging.getLogger("burnish")

_JUDGE = Path(__file__).with_name("judge.py")
_COMPILED = "judge.pyc"
_COMPILE = f"""
import py_compile, sys
py_compile.compile("{_JUDGE.name}", "{_COMPILED}", doraise=True)
sys.stdout.buffer.write(open("{_COMPILED}", "rb").read())
"""


@dataclass(frozen=True)
class Verdict:
    """Results of the tests of one response."""

    count: int
    passed: int
    timed_out: bool


class PythonCodeScorer:
    """A reward that runs the response's code against the tests in the label.

    A label without usable tests is an error in the data: SampleError. ``no_code`` counts responses
    without code, ``timeouts`` those with a test that exceeded a time limit. ``tests_passed_frac``
    is the mean share of tests that passed (with ``score: all`` up to the first failure).

    Raises RewardError if the sandbox cannot be used.
    """

    takes_label = True

    def __init__(
        self,
        config: PythonCodeReward,
        *,
        name: str = "python_code",
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """``tokenizer``: the policy's, as in :func:`burnish.rewards.texts.prompt_end`."""
        self.name, self._config, self._tokenizer = name, config, tokenizer
        self._counts: Counter[str] = Counter()
        self._passed = (0.0, 0.0)
        self._compiled = (b"", b"")
        """Source of the judge and its bytecode; the latter is empty if it cannot be used."""
        self._loop = LoopThread(f"reward-{name}")
        try:
            self._sandbox = make_sandbox(config.sandbox)
            self._loop.run(self._sandbox.check)
        except SandboxError as error:
            self._loop.close()
            raise RewardError(f"reward {name!r}: {error}") from error
        except BaseException:
            self._loop.close()
            raise

    def score(self, items: Sequence[RewardInput]) -> list[float | SampleError]:
        """Return one score or SampleError per item. Raises RewardError if the sandbox fails."""
        try:
            return self._loop.run(self._score_all, items)
        except SandboxError as error:
            raise RewardError(f"reward {self.name!r}: {error}") from error

    def take_counts(self) -> Mapping[str, int]:
        counts, self._counts = self._counts, Counter()
        return {"no_code": counts["no_code"], "timeouts": counts["timeouts"]}

    def take_means(self) -> Mapping[str, tuple[float, float]]:
        """Return (sum, count) of the share of passed tests since the last call and reset it."""
        passed, self._passed = self._passed, (0.0, 0.0)
        return {"tests_passed_frac": passed} if passed[1] else {}

    def close(self) -> None:
        self._loop.run(self._sandbox.close)
        self._loop.close()

    async def _score_all(self, items: Sequence[RewardInput]) -> list[float | SampleError]:
        async def result_of(item: RewardInput) -> float | SampleError | SandboxError:
            try:
                return await self._score(item)
            except (SampleError, SandboxError) as error:  # becomes data; the other items continue
                return error

        await self._compile_judge()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(result_of(item)) for item in items]
        results = [task.result() for task in tasks]
        for result in results:
            if isinstance(result, SandboxError):
                raise result
        return [result for result in results if not isinstance(result, SandboxError)]

    async def _compile_judge(self) -> None:
        """Have the sandbox's interpreter compile the judge, which takes half of the time of a short
        judgment."""
        source = _JUDGE.read_bytes()
        if source == self._compiled[0]:
            return
        result = await self._sandbox.run(
            Program(
                (PYTHON, "-I", "-c", _COMPILE),
                files={_JUDGE.name: source},
                wall_s=self._config.timeout_s,
            )
        )
        succeeded = result.ended == "exit" and result.exit_code == 0
        self._compiled = source, result.stdout if succeeded else b""

    async def _judge(self, task: bytes, nonce: str) -> Result:
        """Run the judge: its bytecode, or the source if that does not begin (the interpreters of a
        service may differ in their version)."""
        source, bytecode = self._compiled
        for name, judge in ((_COMPILED, bytecode), (_JUDGE.name, source)):
            if not judge:
                continue
            result = await self._sandbox.run(
                Program(
                    (PYTHON, "-I", name),
                    stdin=task,
                    files={name: judge},
                    wall_s=self._config.timeout_s,
                )
            )
            if nonce.encode() in result.stdout:
                break
            self._compiled = source, b""
        return result

    async def _score(self, item: RewardInput) -> float:
        """Return the score of one response. Raises SampleError and SandboxError."""
        try:
            tests = read_tests(item.prompt.label, item.prompt.metadata.get("entry_point"))
        except LabelError as error:
            raise self._bad_label(item, str(error)) from error
        before = prompt_end(item, self._tokenizer)
        code = read_code(item.sample.text, self._config.code, before)
        if code is None:
            self._counts["no_code"] += 1
            self._note(0.0)
            return 0.0
        nonce = secrets.token_hex(16)
        task = {
            "nonce": nonce,
            "code": code,
            "tests": tests,
            "test_s": self._config.test_timeout_s,
            "stop": self._config.score == "all",
        }
        result = await self._judge(json.dumps(task).encode(), nonce)
        verdict = self._verdict(item, result, nonce)
        self._counts["timeouts"] += verdict.timed_out
        share = verdict.passed / verdict.count
        self._note(share)
        return float(share == 1) if self._config.score == "all" else share

    def _note(self, share: float) -> None:
        self._passed = (self._passed[0] + share, self._passed[1] + 1)

    def _verdict(self, item: RewardInput, result: Result, nonce: str) -> Verdict:
        """Return the results that the judge wrote. Raises SampleError if the tests cannot be used,
        SandboxError if the judge did not begin."""
        count, reasons = 0, {}
        for line in result.stdout.decode(errors="replace").splitlines():
            mark, _, content = line.partition(" ")
            if mark != nonce:
                continue
            report = json.loads(content)
            if "bad_tests" in report:
                raise self._bad_label(item, f"cannot be used: {report['bad_tests']}")
            count = report.get("count", count)
            if "test" in report:
                reasons[report["test"]] = report["why"]
        if not count:
            stderr = result.stderr.decode(errors="replace").strip()[-1000:]
            raise SandboxError(
                f"the tests of sample {item.sample.sample_id!r} did not begin: {result.ended} "
                f"{result.exit_code} after {result.seconds:.1f} s: {stderr}; the judge needs "
                "Python 3.10+ with ctypes, and the limits of `sandbox` must leave it room"
            )
        log.debug("reward %s, sample %s: %s", self.name, item.sample.sample_id, reasons)
        timed_out = result.ended != "exit" or "timeout" in reasons.values()
        return Verdict(count, sum(reason is None for reason in reasons.values()), timed_out)

    def _bad_label(self, item: RewardInput, problem: str) -> SampleError:
        advice = "correct the label in the data, or set data.label_key to the column with the tests"
        return SampleError(self, item, f"cannot use the label: it {problem}", advice=advice)


def make_reward(config: PythonCodeReward, inputs: RewardInputs) -> PythonCodeScorer:
    return PythonCodeScorer(config, name=inputs.name, tokenizer=inputs.tokenizer)


def check_label(prompt: Prompt) -> None:
    read_tests(prompt.label, prompt.metadata.get("entry_point"))
