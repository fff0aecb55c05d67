"""Weight transfers between real processes: a trainer and two rollout workers, over gloo on
loopback, shared memory and disk; and everything that can go wrong. The three processes are started
once (``sync_processes.py``) and report what they saw."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("sync_processes.py")
RunTogether = Callable[..., list[int]]
_SPEC = importlib.util.spec_from_file_location("sync_processes", SCRIPT)
assert _SPEC is not None and _SPEC.loader is not None
sync_processes: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["sync_processes"] = sync_processes  # its dataclasses look their module up
_SPEC.loader.exec_module(sync_processes)

Reports = list[dict[str, Any]]

LINKS = ("collective", "ipc")
BYTES = {"fp32": 137_088, "bf16": 137_088 // 2}
"""34,272 parameters: embedding and head 2 x 53 x 32, two layers of 15,424 (q, o 2 x 32 x 32, k, v
2 x 16 x 32, gate, up, down 3 x 128 x 32, two norms of 32), a norm of 32; 4 or 2 bytes each."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, run_together: RunTogether) -> Reports:
    folder = tmp_path_factory.mktemp("sync")
    arguments = [[str(folder), str(rank)] for rank in range(3)]
    run_together(SCRIPT, arguments, folder, timeout_s=240)
    texts = [(folder / f"rank{rank}.json").read_text(encoding="utf-8") for rank in range(3)]
    return [json.loads(text) for text in texts]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", sync_processes.KINDS)
def test_after_every_push_workers_sample_from_the_trainers_weights(
    kind: str, dtype: str, reports: Reports
) -> None:
    trainer, *workers = (found[f"several {kind} {dtype}"] for found in reports)
    assert len({json.dumps(push["tokens"]) for push in trainer}) == 3, "training changed them"
    for worker in workers:
        assert worker[0]["type"] == "InvalidWeightsError"
        assert "has not received weights yet" in worker[0]["error"]
        assert [push["tokens"] for push in worker[1:]] == [push["tokens"] for push in trainer]
    for version, pushes in enumerate(zip(trainer, *(w[1:] for w in workers), strict=True)):
        for push in pushes:
            metrics = push["metrics"]
            assert metrics["sync/version"] == version
            assert metrics["sync/bytes"] == BYTES[dtype], "16-bit weights travel as 16 bits"
            least = BYTES[dtype] / (20_000 if kind == "disk" else sync_processes.BUCKET)
            assert metrics["sync/buckets"] >= least
            assert metrics["sync/seconds"] > 0 and metrics["sync/bytes_per_s"] > 0


TOLD = {
    "corrupt": "bucket 3 of version 1 is corrupted: its checksum should be xxh3:",
    "drop": "bucket 4 of version 2 was received instead of bucket 3: one was lost",
    "duplicate": "bucket 3 of version 3 was received instead of bucket 4: it was received twice",
    "swap": "bucket 4 of version 4 was received instead of bucket 3: one was lost or is out of",
    "truncate": "bucket 3 of version 5 should have 4096 bytes, but 4080 were received",
    "name": "bucket 3 of version 6: weight model.extra is not one of the 21 weights",
    "shape": "v_proj.weight has shape [16, 32, 1], but the rollout model has [16, 32]",
    "twice": "weight model.embed_tokens.weight was received twice",
    "version": "expected bucket 3 of version 9 (push 17), but received bucket 3 of version 10",
    "lost tensors": "announces 36 buckets with 22 tensors and 137088 bytes, but of version 10 (push"
    " 19) 36 buckets with 21 tensors",
    "corrupt the first": "bucket 0 of version 11 is corrupted",
}


@pytest.mark.parametrize("fault", sync_processes.FAULTS)
@pytest.mark.parametrize("kind", LINKS)
def test_a_transfer_fault_stops_sampling_until_a_successful_push(
    kind: str, fault: str, reports: Reports
) -> None:
    trainer, *workers = (found[f"faults {kind}"][fault] for found in reports)
    assert trainer["push"]["error"].count(TOLD[fault]) == 2, "the sender hears it from both"
    assert "2 of 2 receivers rejected version" in trainer["push"]["error"]
    assert "receiver 0: " in trainer["push"]["error"] and "receiver 1: " in trainer["push"]["error"]
    assert trainer["again"]["result"]["sync/bytes"] == BYTES["fp32"]
    before = sync_processes.FAULTS.index(fault)
    for worker in workers:
        assert TOLD[fault] in worker["receive"]["error"]
        assert worker["generate"]["type"] == "InvalidWeightsError"
        assert TOLD[fault] in worker["generate"]["error"]
        if fault == "corrupt the first":  # nothing was written: the old weights are intact
            assert (
                f"before it changed the weights of version {before}" in worker["generate"]["error"]
            )
            good = reports[0][f"faults {kind}"][sync_processes.FAULTS[before - 1]]["tokens"]
            assert worker["old"]["result"] == good
        else:
            assert "two versions are mixed" in worker["generate"]["error"]
        assert worker["again"]["result"]["sync/version"] == before + 1
        assert worker["tokens"] == trainer["tokens"], "valid again"


@pytest.mark.parametrize("kind", LINKS)
def test_one_failed_receiver_is_named_and_the_others_have_the_new_weights(
    kind: str, reports: Reports
) -> None:
    trainer, good, bad = (found[f"one receiver {kind}"] for found in reports)
    assert "1 of 2 receivers rejected" in trainer["push"]["error"]
    assert "receiver 1: bucket 2 of version 0 is corrupted" in trainer["push"]["error"]
    assert "receiver 0" not in trainer["push"]["error"]
    assert good["generate"]["result"] == trainer["tokens"]
    assert "bucket 2 of version 0 is corrupted" in bad["receive"]["error"]
    assert bad["generate"]["type"] == "InvalidWeightsError"
    assert bad["tokens"] == good["tokens"] == trainer["tokens"]


@pytest.mark.parametrize("kind", LINKS)
def test_a_trainer_that_fails_during_a_push_notifies_its_receivers(
    kind: str, reports: Reports
) -> None:
    trainer, *workers = (found[f"giving up {kind}"] for found in reports)
    assert trainer["error"] == "gathering failed on purpose", "the first error, not one of the link"
    for worker in workers:
        message = "the sender aborted version 4: RuntimeError: gathering failed on purpose"
        assert message in worker["receive"]["error"]
        assert worker["again"]["result"]["sync/version"] == 0, "the link can still be used"


@pytest.mark.parametrize("kind", LINKS)
def test_timeouts_name_the_missing_process(kind: str, reports: Reports) -> None:
    trainer, first, second = (found[f"silence {kind}"] for found in reports)
    for waiting in (trainer, first):
        assert waiting["nobody"]["type"] == "LinkError"
        assert waiting["nobody"]["error"].startswith("receiver 1 did not join within 1.5 s")
    for worker in (first, second):
        message = "after 2 buckets of version 0: the sender sent nothing more within 1.5 s"
        assert message in worker["silent sender"]["error"]
        assert worker["generate"]["type"] == "InvalidWeightsError"
    # both wait equally long; if the sender is first, it ends the connection
    ended = kind == "collective" and "has ended: a bucket did not reach receiver 1"
    said = first["silent receiver"]["error"]
    assert "sent nothing more within 1.5 s" in said or (ended and ended in said)
    assert "receiver 1" in trainer["silent receiver"]["error"]
    assert "within 1.5 s" in trainer["silent receiver"]["error"]
    for one in (trainer, first, second):
        message = one["closed"]["error"]
        assert (
            "was closed in this process; make a new one" in message or "broadcast failed" in message
        )
        assert one["again"]["sync/version"] == 0, "a new connection between the same processes"
    assert first["tokens"] == second["tokens"] == trainer["tokens"]


@pytest.mark.parametrize("kind", LINKS)
def test_all_trainer_ranks_gather_while_one_sends_even_if_the_link_breaks(
    kind: str, reports: Reports
) -> None:
    sender, other, worker = (found[f"two trainer ranks {kind}"] for found in reports)
    assert sender["push"]["result"]["sync/bytes"] == BYTES["fp32"]
    assert sender["broken"]["error"] == "silent on purpose"
    assert "the sender aborted version 7" in worker["broken"]["error"]
    assert [other[k] for k in ("push", "broken", "again")] == [{"result": {}}] * 3
    assert sender["again"]["result"]["sync/version"] == 7
    expected = {name: [7, *tokens[1:]] for name, tokens in sender["tokens"].items()}
    assert worker["tokens"] == expected
