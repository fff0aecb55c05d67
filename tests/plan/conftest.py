"""Fixtures of the tests of plans."""

import pytest

from burnish.plan.work import PassWork, Work


@pytest.fixture
def only_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all passes of a time estimate consist of large products: one of forward, and two or,
    with adapters (whose base has no gradient), one of backward."""

    def work_of(setup, work):
        backward = 1.0 if work.lora is not None else 2.0
        times = 1.0 + backward if work.train else 1.0
        return PassWork(body=Work(matmul_flops=1e18 * work.tokens * times))

    monkeypatch.setattr("burnish.plan.time.work_of", work_of)
