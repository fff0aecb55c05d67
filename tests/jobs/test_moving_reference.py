"""A reference that follows the policy: the numbers of its updates, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import burnish.train.engine as train_engine
from burnish.checkpoint.manifest import verify
from burnish.checkpoint.reduce import has_only_weights
from burnish.checkpoint.save import CheckpointStore
from burnish.config.model import ModelConfig, MovingReferenceConfig, ReferenceConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.distributed.process_group import SINGLE
from burnish.models.load import ModelError, load_causal_lm
from burnish.steps.moving_reference import MovingReference, load_reference, moving_reference
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine


@pytest.fixture
def engine() -> Callable[..., TorchTrainEngine]:
    """A model whose weights all have the same value."""

    def make(value: float, *, trainable: bool = True, width: int = 8) -> TorchTrainEngine:
        scratch = ScratchConfig(hidden_size=width, num_layers=1, num_heads=2)
        config = ModelConfig(scratch=scratch)
        model = load_causal_lm(config)
        for parameter in model.parameters():
            parameter.data.fill_(value)
        role = "policy" if trainable else "reference"
        train = TrainConfig(train_batch_size=1, lr=1e-3)
        return TorchTrainEngine(
            model, EngineSpec(TrainRole.alone(role, train, config, trainable=trainable))
        )

    return make


def value(moving: MovingReference) -> float:
    """The value of all weights of the reference."""
    values = torch.cat([t.flatten() for _, t in moving.reference.weights()]).unique()
    return float(values.item())


def test_updates_are_weighted_means_every_n_steps_and_are_restored(
    engine: Callable[..., TorchTrainEngine], tmp_path: Path
) -> None:
    """Policy 4, reference 0, alpha 1/4, every second step: after step 2 the reference is 1/4 x 4 =
    1, after step 4 it is 1/4 x 4 + 3/4 x 1 = 1.75. All numbers are exact in fp32."""
    config = ReferenceConfig(moving=MovingReferenceConfig(every_n_steps=2, mixup_alpha=0.25))
    moving = moving_reference(config, engine(4.0), engine(0.0, trainable=False), SINGLE)
    assert moving is not None
    seen = []
    for step in range(1, 6):
        moving.before_step(step)
        seen.append(value(moving))
        if step == 4:
            moving.save(tmp_path)
    assert seen == [0.0, 0.0, 1.0, 1.0, 1.75]
    written, moving.num_bytes = moving.num_bytes, 0
    moving.load(tmp_path)
    assert value(moving) == 1.0 and moving.num_bytes == pytest.approx(written, rel=0.2)
    assert written == sum(t.nbytes for _, t in moving.reference.weights())
    moving.num_bytes = 0
    moving.check()
    assert moving.num_bytes == written
    load_reference(moving, tmp_path / "of a frozen reference")
    assert value(moving) == 1.0
    load_reference(None, tmp_path / "of a frozen reference")
    with pytest.raises(ValueError, match="would continue with the one that the run started from"):
        load_reference(None, tmp_path)


def test_a_mixture_in_slices_is_the_mixture(
    engine: Callable[..., TorchTrainEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of one row, and of parts of the parameters."""
    policy = engine(4.0)
    for parameter in policy.model.parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(0))
    found = []
    for size in (1, 4 * 8 * 3, 64 << 20):
        monkeypatch.setattr(train_engine, "MIX_BYTES", size)
        reference = engine(1.0, trainable=False)
        reference.mix(policy.weights(), 0.25)
        found.append(dict(reference.weights()))
    for name, tensor in policy.weights():
        assert all(torch.equal(mixed[name], found[0][name]) for mixed in found)
        # 1e-6: fp32, in another form of the same sum
        torch.testing.assert_close(found[0][name], 0.75 + 0.25 * tensor, atol=1e-6, rtol=0)


def test_a_checkpoint_of_weights_alone_has_no_reference(
    engine: Callable[..., TorchTrainEngine], tmp_path: Path
) -> None:
    config = ReferenceConfig(moving=MovingReferenceConfig(every_n_steps=1))
    moving = moving_reference(config, engine(4.0), engine(0.0, trainable=False), SINGLE)
    assert moving is not None
    store = CheckpointStore(tmp_path, keep_last=2, best_mode="max", keep="weights")
    first, newest = (store.save(step, moving.save) for step in (1, 2))
    assert not list(first.rglob("*.safetensors")) and list(newest.rglob("*.safetensors"))
    assert has_only_weights(first) and not verify(first)


def test_a_reference_of_another_architecture_is_refused_before_the_first_step(
    engine: Callable[..., TorchTrainEngine],
) -> None:
    config = ReferenceConfig(
        moving=MovingReferenceConfig(every_n_steps=2), model=ModelConfig(scratch=ScratchConfig())
    )
    with pytest.raises(ModelError, match=r"weights differ in names or shapes, e.g. lm_head|model."):
        moving_reference(config, engine(1.0), engine(0.0, trainable=False, width=16), SINGLE)
