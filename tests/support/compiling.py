"""A fixture for tests of torch.compile: it forgets what other tests of the process compiled."""

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo import reset, utils


@pytest.fixture(autouse=True)
def compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what other tests compiled, and enable torch.compile, which vLLM on a CPU disables."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    reset()
    before = utils.counters["stats"]["unique_graphs"]
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert utils.counters["stats"]["unique_graphs"] > before, "torch.compile is disabled here"
    reset()
    yield
