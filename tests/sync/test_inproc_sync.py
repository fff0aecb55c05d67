"""After a push the rollout engine samples from the policy's weights and says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from burnish.config.model import Dtype, LoraConfig, ModelConfig, ScratchConfig
from burnish.models.load import DTYPES, load_causal_lm
from burnish.rollout.base import Request, Sampling
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import LocalRolloutEngine
from burnish.sync.inproc import InprocWeightSync
from burnish.train.base import Loss
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch

MakeEngine = Callable[..., TorchTrainEngine]


def step(engine: TorchTrainEngine, batch: Batch, loss: Loss) -> None:
    engine.forward_backward(batch, loss)
    engine.optim_step()


def test_a_shared_module_is_never_copied_and_its_version_follows(
    make_engine: MakeEngine,
    tiny_tokenizer: PreTrainedTokenizerBase,
    ragged_batch: Batch,
    nll: Loss,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = make_engine(lr=0.05)
    rollout = LocalRolloutEngine(policy.model, tiny_tokenizer, LocalEngine())
    monkeypatch.setattr(rollout, "load_weights", lambda *_, **__: pytest.fail("copied"))
    sync = InprocWeightSync(policy, rollout)
    request = [Request("r", (7, 8, 9), seed=1)]
    (before,) = rollout.generate(request, Sampling(8))
    step(policy, ragged_batch, nll)
    assert rollout.version == 0, "not before the push"
    sync.push()
    assert rollout.version == policy.version == 1
    (after,) = rollout.generate(request, Sampling(8))
    assert (before.version, after.version) == (0, 1) and before.logprobs != after.logprobs
    for version, keep_cache in ((2, True), (3, False)):
        rollout.submit(request, Sampling(8))
        assert not rollout.poll()
        step(policy, ragged_batch, nll)
        sync.push(keep_cache=keep_cache)
        assert bool(rollout.batch.active) == keep_cache  # type: ignore[union-attr]
        (mixed,) = [c for _ in range(9) for c in rollout.poll()]
        assert mixed.versions == (version - 1, *(version for _ in mixed.token_ids[1:]))


@pytest.mark.parametrize("shared", [True, False])
def test_staged_weights_are_those_of_their_step(  # house: ok fixtures and a parameter
    shared: bool,
    make_engine: MakeEngine,
    tiny_config: ModelConfig,
    tiny_tokenizer: PreTrainedTokenizerBase,
    ragged_batch: Batch,
    nll: Loss,
) -> None:
    """The trainer takes another step before the copy is loaded. Shared weights are not copied."""
    policy = make_engine(lr=0.05)
    model = policy.model if shared else load_causal_lm(tiny_config)
    rollout = LocalRolloutEngine(model, tiny_tokenizer, LocalEngine())
    sync = InprocWeightSync(policy, rollout)
    step(policy, ragged_batch, nll)
    staged = sync.stage("finish")
    expected = {name: tensor.clone() for name, tensor in policy.weights()}
    assert staged.needs_idle and not staged.waits and rollout.version == 0
    assert bool(staged.metrics) != shared
    if not shared:
        step(policy, ragged_batch, nll)
    staged.load(rollout)
    assert rollout.version == staged.version == 1
    own = dict(rollout.model.named_parameters())
    assert all(torch.equal(own[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("lora", [None, LoraConfig(lora_rank=4)])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("train", "sample"), [("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp32")]
)
def test_a_copy_in_another_dtype_is_updated_at_every_push(  # house: ok fixtures and parameters
    train: Dtype,
    sample: Dtype,
    tied: bool,
    lora: LoraConfig | None,
    make_engine: MakeEngine,
    tiny_tokenizer: PreTrainedTokenizerBase,
    ragged_batch: Batch,
    nll: Loss,
) -> None:
    base = ModelConfig(scratch=ScratchConfig(hidden_size=32, tie_word_embeddings=tied, seed=5))
    torch.manual_seed(0)
    policy = make_engine(config=base.model_copy(update={"lora": lora}), dtype=train, lr=0.05)
    other = base.model_copy(update={"scratch": base.scratch.model_copy(update={"seed": 6})})
    rollout = LocalRolloutEngine(load_causal_lm(other, dtype=sample), tiny_tokenizer, LocalEngine())
    sync = InprocWeightSync(policy, rollout)

    def same() -> bool:
        own = dict(rollout.model.named_parameters())
        return all(torch.equal(own[n], t.to(DTYPES[sample])) for n, t in policy.weights())

    assert same() and rollout.version == 0, "handed over when connected"
    for version in (1, 2):
        step(policy, ragged_batch, nll)
        assert not same()
        sync.push()
        assert same() and rollout.version == policy.version == version
    assert {p.dtype for p in rollout.model.parameters()} == {DTYPES[sample]}
    (done,) = rollout.generate([Request("r", (7, 8))], Sampling(4))
    assert done.version == 2


def test_a_skipped_step_does_not_change_the_version(
    make_engine: MakeEngine, tiny_tokenizer: PreTrainedTokenizerBase, ragged_batch: Batch
) -> None:
    policy = make_engine()
    rollout = LocalRolloutEngine(policy.model, tiny_tokenizer, LocalEngine())
    sync = InprocWeightSync(policy, rollout)

    def bad(outputs, batch):
        from burnish.types import Stats

        return outputs.logprobs.sum() * float("nan"), Stats()

    policy.forward_backward(ragged_batch, bad)
    assert policy.optim_step().skipped
    sync.push()
    assert rollout.version == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w | {"model.extra": torch.zeros(1)},
            "model.extra",
        ),
        (
            lambda w: {k: v for k, v in w.items() if k != "model.norm.weight"},
            r"model\.norm\.weight: they",
        ),
        (
            lambda w: w | {"model.norm.weight": torch.ones(3)},
            r"shape \[3\]",
        ),
        # copy_ would broadcast a single number without a word
        (
            lambda w: w | {"model.norm.weight": torch.ones(1)},
            r"shape \[1\]",
        ),
    ],
)
def test_mismatched_weights_are_rejected_and_the_version_is_unchanged(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    message: str,
    make_engine: MakeEngine,
    tiny_config: ModelConfig,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    rollout = LocalRolloutEngine(load_causal_lm(tiny_config), tiny_tokenizer, LocalEngine())
    with pytest.raises(ValueError, match=message):
        rollout.load_weights(7, change(dict(make_engine().weights())).items())
    assert rollout.version == 0
