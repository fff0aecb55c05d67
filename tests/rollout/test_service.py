"""The rollout service: one engine thread, and futures for the callers of all other threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from burnish.rollout.asynchronous.service import RolloutService
from burnish.rollout.base import Completion, Request, Sampling, VersionSpan, generate
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import LocalRolloutEngine
from burnish.rollout.requests import OpenRequests

WAIT_S = 60.0


class GatedEngine:
    """Finishes a request per permit, and records the threads that touch it."""

    version, max_len = 0, None

    def __init__(self) -> None:
        self.open, self.permits = OpenRequests(), threading.Semaphore(0)
        self.threads: set[int] = set()
        self.log: list[str] = []
        self.error: Exception | None = None

    @property
    def busy(self) -> bool:
        return bool(self.open)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        self.threads.add(threading.get_ident())
        if any(r.request_id == "odd" for r in requests):
            raise ValueError("odd cannot run")
        self.open.add(requests)

    def poll(self) -> list[Completion]:
        self.threads.add(threading.get_ident())
        if self.error is not None:
            raise self.error
        if not self.permits.acquire(timeout=0.01):
            return []
        name = next(iter(self.open.ids))
        self.open.finish(name)
        return [Completion(name, 0, (1,), (-1.0,), "stop", "", (VersionSpan(0, 0, 1),))]

    def cancel(self, request_ids: Iterable[str]) -> None:
        self.threads.add(threading.get_ident())
        self.log += sorted(self.open.drop(request_ids))

    def release(self, conversations: Iterable[str]) -> None:
        self.log += [f"release {name}" for name in conversations]

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        return generate(self, requests, sampling)

    def load_weights(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, keep_cache: bool = False
    ) -> None:
        self.version = version

    def sleep(self, *, new_weights_follow: bool = False) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def engine() -> GatedEngine:
    return GatedEngine()


@pytest.fixture
def service(engine: GatedEngine) -> Iterator[RolloutService]:
    made = RolloutService(engine)
    yield made
    made.close()


def ask(service: RolloutService, name: str) -> Future[Completion]:
    return service.submit(Request(name, (1,)), Sampling(4))


def test_every_future_gets_its_own_completion(service: RolloutService, engine: GatedEngine) -> None:
    futures = {name: ask(service, name) for name in "abc"}
    assert not any(f.done() for f in futures.values())
    engine.permits.release(3)
    for name, future in futures.items():
        assert future.result(WAIT_S).request_id == name
    service.drain(WAIT_S)
    assert len(engine.threads) == 1 and threading.get_ident() not in engine.threads


def test_a_refused_request_fails_alone(service: RolloutService, engine: GatedEngine) -> None:
    good, odd = ask(service, "a"), ask(service, "odd")
    with pytest.raises(ValueError, match="odd cannot run"):
        odd.result(WAIT_S)
    engine.permits.release()
    assert good.result(WAIT_S).request_id == "a"
    with pytest.raises(ValueError, match="n=2"):
        service.submit(Request("b", (1,), n=2), Sampling(4))


def test_canceling_the_future_or_the_id_drops_the_request(
    service: RolloutService, engine: GatedEngine
) -> None:
    a, b, c = (ask(service, name) for name in "abc")
    service.call(lambda e: None).result(WAIT_S)  # the engine has them
    with pytest.raises(ValueError, match="a is already open"):
        ask(service, "a")
    assert a.cancel()
    service.cancel("b")
    service.cancel("unknown")
    again = ask(service, "a")
    service.call(lambda e: None).result(WAIT_S)
    assert b.cancelled() and engine.log == ["a", "b"]
    assert not wait([a, b], WAIT_S).not_done
    engine.permits.release(2)
    assert {f.result(WAIT_S).request_id for f in (c, again)} == {"a", "c"}


def stop_in_a_poll(engine: GatedEngine) -> threading.Event:
    """Return once the engine is in a poll, which goes on when the event is set."""
    polling, go_on, poll = threading.Event(), threading.Event(), engine.poll

    def slow_poll() -> list[Completion]:
        engine.poll = poll  # type: ignore[method-assign]
        polling.set()
        assert go_on.wait(WAIT_S)
        return poll()

    engine.poll = slow_poll  # type: ignore[method-assign]
    assert polling.wait(WAIT_S)
    return go_on


def test_a_completion_of_a_canceled_request_is_not_that_of_the_next_with_its_id(
    service: RolloutService, engine: GatedEngine
) -> None:
    """The first one finishes in the poll during which it is canceled and submitted again."""
    first = ask(service, "a")
    service.call(lambda e: None).result(WAIT_S)
    go_on = stop_in_a_poll(engine)
    assert first.cancel()
    again = ask(service, "a")
    engine.permits.release()
    go_on.set()
    service.call(lambda e: None).result(WAIT_S)
    assert not again.done()
    engine.permits.release()
    assert again.result(WAIT_S).request_id == "a"


def test_waiting_for_training_ends_with_a_request_that_was_canceled_during_its_last_poll(
    service: RolloutService, engine: GatedEngine
) -> None:
    one = ask(service, "a")
    service.call(lambda e: None).result(WAIT_S)
    service.hold()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(service.wait_for_training)
        while not service._changed._waiters:  # type: ignore[attr-defined]
            pass
        go_on = stop_in_a_poll(engine)
        assert one.cancel()
        engine.permits.release()
        go_on.set()
        waiting.result(WAIT_S)


def test_the_time_of_pauses_and_of_held_requests_is_counted(service: RolloutService) -> None:
    assert service.stopped_s() == 0
    service.hold()
    service.pause()
    service.release_held()
    before = service.stopped_s()
    while service.stopped_s() == before:
        pass
    service.resume()
    ended = service.stopped_s()
    assert ended > before > 0 and service.stopped_s() == ended


@pytest.mark.parametrize("canceled", [False, True])
def test_the_id_of_a_finished_or_canceled_request_is_free_at_once(
    canceled: bool,
    service: RolloutService,
    engine: GatedEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that waits for the result may continue before the callbacks of the future ran."""
    go_on, answered = threading.Event(), service._answered

    def late(name: str, future: Future[Completion]) -> None:
        assert go_on.wait(WAIT_S)
        answered(name, future)

    monkeypatch.setattr(service, "_answered", late)
    first = ask(service, "a")
    with ThreadPoolExecutor(1) as pool:
        if canceled:
            service.call(lambda e: None).result(WAIT_S)  # the engine has it
            pool.submit(first.cancel)
            with pytest.raises(CancelledError):
                first.result(WAIT_S)
        else:
            engine.permits.release()
            assert first.result(WAIT_S).request_id == "a"
        again = ask(service, "a")
        go_on.set()
    service.call(lambda e: None).result(WAIT_S)  # the engine has dropped the first one
    engine.permits.release()
    assert again.result(WAIT_S).request_id == "a"
    service.drain(WAIT_S)


def test_an_engine_error_fails_all_open_requests_and_later_ones(
    service: RolloutService, engine: GatedEngine
) -> None:
    futures = [ask(service, name) for name in "ab"]
    engine.error = RuntimeError("the device is gone")
    for future in futures:
        with pytest.raises(RuntimeError, match="the device is gone"):
            future.result(WAIT_S)
    service._thread.join(WAIT_S)
    with pytest.raises(RuntimeError, match="the device is gone"):
        ask(service, "c")
    with pytest.raises(RuntimeError, match="the device is gone"):
        service.drain(WAIT_S)
    assert not engine.busy, "its owner may use it again, e.g. with other weights"


def test_a_restarted_service_serves_none_of_the_requests_from_before(
    service: RolloutService, engine: GatedEngine
) -> None:
    """``held`` was never in the engine; ``a`` was, and its id is free."""
    before = ask(service, "a")
    service.hold()
    held = ask(service, "held")
    service.pause()
    engine.error = RuntimeError("a rank is lost")
    service.resume()
    for future in (before, held):
        with pytest.raises(RuntimeError, match="a rank is lost"):
            future.result(WAIT_S)
    service.release_held()
    engine.error = None
    service.restart()
    again = ask(service, "a")
    engine.permits.release()
    assert again.result(WAIT_S).request_id == "a"
    service.drain(WAIT_S)
    assert not engine.busy and engine.log == ["a"], "held was not submitted"
    thread = service._thread
    service.restart()
    assert service._thread is thread, "without an error there is nothing to do"


def test_an_exit_in_a_call_answers_every_future(
    service: RolloutService, engine: GatedEngine
) -> None:
    open_request, canceled = ask(service, "a"), service.call(lambda e: engine.permits.acquire())
    exits = service.call(lambda e: sys.exit("the call exits"))
    later = service.call(lambda e: None)
    canceled_later = service.call(lambda e: None)
    assert canceled_later.cancel()
    engine.permits.release()
    assert canceled.result(WAIT_S)
    for future in (open_request, exits, later):
        with pytest.raises(SystemExit, match="the call exits"):
            future.result(WAIT_S)
    assert not wait([canceled_later], WAIT_S).not_done


def test_closing_cancels_what_is_open(service: RolloutService, engine: GatedEngine) -> None:
    future = ask(service, "a")
    service.call(lambda e: None).result(WAIT_S)
    service.close()
    service.close()
    with pytest.raises(CancelledError):
        future.result(WAIT_S)
    assert not engine.busy
    with pytest.raises(RuntimeError, match="is closed"):
        ask(service, "b")
    service.release("t")


def test_calls_run_between_polls_and_keep_their_errors(
    service: RolloutService, engine: GatedEngine
) -> None:
    future = ask(service, "a")
    service.release("t")
    service.call(lambda e: e.load_weights(3, ())).result(WAIT_S)
    assert service.version == 3 and engine.log == ["release t"]
    with pytest.raises(ZeroDivisionError):
        service.call(lambda e: 1 / 0).result(WAIT_S)
    engine.permits.release()
    assert future.result(WAIT_S).request_id == "a"


def test_draining_ends_after_its_time(service: RolloutService, engine: GatedEngine) -> None:
    ask(service, "a")
    with pytest.raises(TimeoutError, match=r"1 requests and 0 calls are still open after 0\.05 s"):
        service.drain(0.05)
    engine.permits.release()
    service.drain(WAIT_S)


def test_the_local_engine_gives_the_same_numbers_to_many_threads(
    lively_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """The engine thread has its own gradient mode, autocast and number of threads."""
    engine = LocalRolloutEngine(lively_model, tiny_tokenizer, LocalEngine(max_batch_size=3))
    requests = [Request(str(i), (7, 8 + i, 9), seed=i) for i in range(8)]
    alone = {c.request_id: c for r in requests for c in engine.generate([r], Sampling(16))}
    assert torch.is_grad_enabled()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        ThreadPoolExecutor(8) as pool,
    ):
        service = RolloutService(engine)
        asked = pool.map(lambda r: service.submit(r, Sampling(16)).result(WAIT_S), requests)
        found = {c.request_id: c for c in asked}
        service.close()
        inside = {c.request_id: c for c in engine.generate(requests, Sampling(16))}
    for together in (found, inside):
        assert {k: c.token_ids for k, c in together.items()} == {
            k: c.token_ids for k, c in alone.items()
        }
        for name, completion in together.items():
            assert completion.logprobs == pytest.approx(alone[name].logprobs, abs=1e-5)


def test_drained_releases_have_reached_the_engine() -> None:
    """The service is closed right after: a release that is still queued would be lost."""
    for _ in range(20):
        engine = GatedEngine()
        with closing(RolloutService(engine)) as service:
            for number in range(20):
                service.release(str(number))
            service.drain(WAIT_S)
        assert [entry for entry in engine.log if entry.startswith("release")] == [
            f"release {number}" for number in range(20)
        ]


def test_closing_a_service_whose_engine_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burnish.rollout.asynchronous.service._CLOSE_S", 0.05)
    begun, hangs = threading.Event(), threading.Event()
    service = RolloutService(GatedEngine())
    service.call(lambda _: (begun.set(), hangs.wait(WAIT_S)))
    assert begun.wait(WAIT_S)
    waiting = ask(service, "a")
    with pytest.raises(TimeoutError, match="did not return"):
        service.close()
    assert waiting.cancelled()
    hangs.set()
    service.close()


def test_idle_share_is_the_time_without_an_open_request(
    engine: GatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request from 0 to 4, one from 4 to 10, none from 10 to 12: 6 of 12 s. Then none until 16:
    4 of 4 s."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("burnish.rollout.asynchronous.service.time", clock)
    with closing(RolloutService(engine)) as service:

        def settle() -> None:
            for _ in range(2):  # the engine thread has been through all of its loop
                service.call(lambda engine: None).result(WAIT_S)

        settle()
        clock.now = 4.0
        future = service.submit(Request("a", (1,)), Sampling(4))
        settle()
        clock.now = 10.0
        engine.permits.release()
        future.result(WAIT_S)
        settle()
        clock.now = 12.0
        assert service.idle_frac() == 0.5
        clock.now = 16.0
        assert service.idle_frac() == 1.0
