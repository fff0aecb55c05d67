"""A rollout engine after failed transfers, and the contract of a synced engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from burnish.config.model import LoraConfig, ModelConfig
from burnish.models.load import load_causal_lm
from burnish.rollout.base import Completion, Request, Sampling, VersionSpan, generate
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import LocalRolloutEngine
from burnish.sync.base import Abort, InvalidWeightsError, LinkError, SyncError
from burnish.sync.engine import SyncedEngine, WeightSender


class Recorder:
    """A rollout engine that keeps what it is given."""

    def __init__(self, takes: int | None = None) -> None:
        self.version, self.held, self.log = 0, dict[str, Tensor](), list[str]()
        self.takes = takes
        """Stop reading after so many weights. None: read all."""
        self.max_len, self.keeps_cache_on_update = None, True
        self.left: list[Request] = []

    @property
    def busy(self) -> bool:
        return bool(self.left)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        self.left += requests

    def poll(self) -> list[Completion]:
        spans = (VersionSpan(self.version, 0, 1),)
        return [Completion(self.left.pop(0).request_id, 0, (1,), (0.0,), "stop", "", spans)]

    def cancel(self, request_ids: Iterable[str]) -> None:
        gone = set(request_ids)
        self.left = [r for r in self.left if r.request_id not in gone]

    def release(self, conversations: Iterable[str]) -> None:
        self.log += conversations

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        return generate(self, requests, sampling)

    def load_weights(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, keep_cache: bool = False
    ) -> None:
        for name, tensor in tensors:
            if name == "refused":
                raise ValueError("refused is not a parameter")
            self.held[name] = tensor.clone()
            if self.takes is not None and len(self.held) >= self.takes:
                break
        self.version = version
        self.log += ["caches kept"] * keep_cache

    def sleep(self, *, new_weights_follow: bool = False) -> None:
        self.log.append("sleep")

    def wake(self) -> None:
        self.log.append("wake")


WEIGHTS = {f"w{i}": torch.full((8,), float(i)) for i in range(6)}
REQUESTS = [Request("a", (1,)), Request("b", (1,))]


@pytest.fixture
def ends(memory_link_type: Any, weights_type: Any) -> Any:
    """(sender, synced engine, link) after one good transfer of version 3."""
    link = memory_link_type(64)
    sender = WeightSender(weights_type(dict(WEIGHTS)), link)
    synced = SyncedEngine(Recorder(), link.source())
    sender.push()
    synced.receive(3)
    return sender, synced, link


def sampled(synced: SyncedEngine) -> list[int]:
    return [c.version for c in synced.generate(REQUESTS, Sampling(4))]


def break_bucket(link: Any, index: int) -> None:
    link.sent[index][1][0] ^= 1


def test_nothing_is_sampled_before_the_first_weight_transfer(memory_link_type: Any) -> None:
    synced = SyncedEngine(Recorder(), memory_link_type(64).source())
    with pytest.raises(InvalidWeightsError, match=r"receive again$"):
        sampled(synced)
    with pytest.raises(LinkError, match="nothing more came"):
        synced.receive()
    with pytest.raises(InvalidWeightsError, match="has not received weights yet"):
        sampled(synced)
    assert sampled(SyncedEngine(Recorder(), memory_link_type(64).source(), ready=True))


def test_completions_have_the_version_of_the_last_transfer(ends: Any) -> None:
    sender, synced, link = ends
    assert sampled(synced) == [3, 3] and synced.version == 3
    assert synced.engine.log == [] and synced.keeps_cache_on_update
    assert all(torch.equal(synced.engine.held[n], t) for n, t in WEIGHTS.items())
    sender.policy.version = 9
    sent, received = sender.push(), synced.receive(keep_cache=True)
    assert sampled(synced) == [9, 9] and synced.engine.log == ["caches kept"]
    names = {"sync/version", "sync/bytes", "sync/buckets", "sync/seconds", "sync/bytes_per_s"}
    for metrics in (sent, received):
        assert metrics.keys() == names
        assert metrics["sync/version"] == 9 and metrics["sync/bytes"] == 6 * 32
        assert metrics["sync/buckets"] == 3
        rate = metrics["sync/bytes"] / metrics["sync/seconds"]
        assert metrics["sync/bytes_per_s"] == pytest.approx(rate)
    assert link.answers == [(0, None), (1, None)]


def test_a_corrupted_first_bucket_leaves_the_old_weights_unchanged(ends: Any) -> None:
    sender, synced, link = ends
    sender.push()
    break_bucket(link, 0)
    with pytest.raises(SyncError, match="corrupted"):
        synced.receive()
    with pytest.raises(InvalidWeightsError, match="version 3"):
        sampled(synced)
    assert all(torch.equal(synced.engine.held[n], t) for n, t in WEIGHTS.items())
    assert synced.engine.version == 3


def test_corruption_after_the_first_weight_stops_sampling_until_a_successful_transfer(
    ends: Any,
) -> None:
    sender, synced, link = ends
    sender.policy.version = 4
    sender.push()
    break_bucket(link, 1)
    with pytest.raises(SyncError, match="bucket 1 of version 4 is corrupted"):
        synced.receive()
    for _ in range(2):
        with pytest.raises(InvalidWeightsError, match="two versions are mixed"):
            sampled(synced)
        with pytest.raises(LinkError):  # a failure that writes nothing does not make it valid
            synced.receive()
    assert synced.version == 3, "the last good one"
    sender.push()
    synced.receive(4)
    assert sampled(synced) == [4, 4]


def test_load_weights_makes_the_engine_valid_again(ends: Any) -> None:
    sender, synced, link = ends
    sender.push()
    break_bucket(link, 1)
    with pytest.raises(SyncError):
        synced.receive()
    synced.load_weights(8, WEIGHTS.items())
    assert sampled(synced) == [8, 8]
    with pytest.raises(ValueError, match="refused"):
        synced.load_weights(9, [("w0", WEIGHTS["w0"]), ("refused", WEIGHTS["w1"])])
    with pytest.raises(InvalidWeightsError, match="two versions are mixed"):
        sampled(synced)


def test_a_running_generation_stops_if_its_weights_become_invalid(ends: Any) -> None:
    sender, synced, link = ends
    running = synced.generate(REQUESTS, Sampling(4))
    assert next(running).version == 3
    sender.push()
    break_bucket(link, 1)
    with pytest.raises(SyncError):
        synced.receive()
    with pytest.raises(InvalidWeightsError):
        next(running)


def test_an_engine_that_rejects_or_ignores_weights_fails_the_transfer(
    memory_link_type: Any, weights_type: Any
) -> None:
    """It said nothing in the second case; half of its weights would be old."""
    link = memory_link_type(64)
    sender = WeightSender(weights_type(WEIGHTS | {"refused": torch.ones(1)}), link)
    synced = SyncedEngine(Recorder(), link.source())
    sender.push()
    with pytest.raises(SyncError, match="refused"):
        synced.receive()
    assert link.answers == [(0, "refused is not a parameter")]
    early = SyncedEngine(Recorder(takes=2), link.source())
    sender.policy.own = WEIGHTS
    sender.push()
    with pytest.raises(SyncError, match="version 3"):
        early.receive()
    with pytest.raises(InvalidWeightsError, match="two versions are mixed"):
        sampled(early)


def test_an_engine_that_reports_another_version_fails_the_transfer(
    memory_link_type: Any, weights_type: Any
) -> None:
    class Stale(Recorder):
        def load_weights(
            self, version: int, tensors: Iterable[tuple[str, Tensor]], *, keep_cache: bool = False
        ) -> None:
            super().load_weights(version - 1, tensors)

    link = memory_link_type(64)
    WeightSender(weights_type(WEIGHTS), link).push()
    synced = SyncedEngine(Stale(), link.source())
    with pytest.raises(SyncError, match="reports version 2 after loading version 3"):
        synced.receive()
    with pytest.raises(InvalidWeightsError):
        sampled(synced)


def test_a_rank_without_a_link_gathers_all_weights_and_returns_no_metrics(
    weights_type: Any,
) -> None:
    gathered = []

    class Policy:
        version = 1

        def weights(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in WEIGHTS.items():
                gathered.append(name)
                yield name, tensor

    assert WeightSender(Policy(), None).push() == {}
    assert gathered == list(WEIGHTS)


def test_after_a_broken_link_the_sender_drains_its_weights_and_sends_an_abort(
    memory_link_type: Any,
) -> None:
    gathered = []

    class Policy:
        version = 1

        def weights(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in WEIGHTS.items():
                gathered.append(name)
                yield name, tensor

    link = memory_link_type(64)
    finished = []

    def broken(*_: object) -> None:
        raise LinkError("the cable was pulled")

    link.send, link.finish = broken, finished.append
    with pytest.raises(LinkError, match="the cable was pulled"):
        WeightSender(Policy(), link).push()
    assert gathered == list(WEIGHTS), "the other ranks wait in the same gathers"
    assert finished == [Abort(0, 1, "LinkError: the cable was pulled")]


def test_sleep_wake_and_close_are_forwarded(ends: Any) -> None:
    sender, synced, link = ends
    synced.sleep()
    synced.wake()
    assert synced.engine.log == ["sleep", "wake"]
    sender.close()
    assert link.closed


@pytest.mark.parametrize("lora", [None, LoraConfig(lora_rank=4)])
def test_a_torch_engine_sends_merged_weights(
    lora: LoraConfig | None,
    make_engine: Any,
    tiny_config: ModelConfig,
    tiny_tokenizer: PreTrainedTokenizerBase,
    memory_link_type: Any,
) -> None:
    """Tied embeddings travel once."""
    policy = make_engine(config=tiny_config.model_copy(update={"lora": lora}))
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    rollout = LocalRolloutEngine(load_causal_lm(tiny_config), tiny_tokenizer, LocalEngine())
    link = memory_link_type(1024)
    expected = {n: tuple(p.shape) for n, p in rollout.model.named_parameters()}
    WeightSender(policy, link).push()
    SyncedEngine(rollout, link.source(expected=expected)).receive()
    tokens = torch.tensor([[7, 8, 9]])
    with torch.no_grad():
        ours, theirs = policy.model(tokens).logits, rollout.model(tokens).logits
    # the adapter's product is rounded once more where it is added to the weight; logits of size 1
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
