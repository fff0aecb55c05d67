"""A fixture for tests of torch.compile: it forgets what other tests of the process compiled."""

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo import config, reset, utils


@pytest.fixture(autouse=True)
def compiles() -> Iterator[None]:
    """Forget what other tests compiled; skip if a library has disabled torch.compile here."""
    reset()
    config.disable = False
    torch.compiler.set_stance("default")
    before = utils.counters["stats"]["unique_graphs"]
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    if utils.counters["stats"]["unique_graphs"] == before:
        pytest.skip("torch.compile is disabled in this process")
    reset()
    yield
