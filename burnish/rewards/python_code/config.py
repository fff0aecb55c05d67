"""Config of tests of Python code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from burnish.config.sandbox import BubblewrapSandbox, SandboxConfig
from burnish.rewards.config import RewardSettings


class PythonCodeReward(RewardSettings):
    """Run the response's Python code against the tests in the label, in a sandbox.

    Tests are asserts, pairs of stdin and stdout, or unit tests (docs/rewards.md lists the forms). A
    response without code scores 0."""

    reads_label: ClassVar[bool] = True

    kind: Literal["python_code"] = "python_code"
    code: Literal["last_block", "all"] = "last_block"
    """Code in the response. last_block: the last fenced block of Python, else of no language,
    after the last closing tag of reasoning; a block that is not closed ends with the response.
    all: all text after that tag."""
    score: Literal["all", "share"] = "all"
    """all: 1 if every test passes, else 0; the first failure ends the tests. share: the share of
    tests that pass."""
    test_timeout_s: float = Field(5.0, gt=0)
    """Maximum seconds of CPU time of one test, and a third of its maximum total time. A longer test
    fails."""
    timeout_s: float = Field(60.0, gt=0)
    """Maximum seconds of all tests of a response. Tests that have not run by then fail."""
    sandbox: SandboxConfig = Field(default_factory=BubblewrapSandbox)
    """Sandbox in which code and tests run."""

    def rules(self) -> Iterator[str]:
        if self.test_timeout_s > self.timeout_s:
            yield (
                f"test_timeout_s={self.test_timeout_s:g} exceeds timeout_s={self.timeout_s:g}, "
                "the limit of all tests; lower test_timeout_s, or raise timeout_s"
            )
