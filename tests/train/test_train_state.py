"""State that a train engine saves, loads and transfers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor

from burnish.config.model import LoraConfig, ModelConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.load import load_causal_lm
from burnish.models.lora_layers import adapters_off
from burnish.runtime.ray.runtime import with_absolute_paths
from burnish.train.base import FrozenBase, Loss
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch

MakeEngine = Callable[..., TorchTrainEngine]
StateOf = Callable[[TorchTrainEngine], dict[str, Tensor]]
LORA = ModelConfig(
    scratch=ScratchConfig(hidden_size=32), lora=LoraConfig(lora_rank=4, lora_alpha=8)
)


def train(engine: TorchTrainEngine, batch: Batch, loss: Loss, steps: int) -> list[float]:
    norms = []
    for _ in range(steps):
        engine.forward_backward(batch, loss)
        norms.append(engine.optim_step().grad_norm)
    return norms


def trained_lora(
    make_engine: MakeEngine, batch: Batch, loss: Loss, steps: int = 3
) -> TorchTrainEngine:
    torch.manual_seed(0)
    engine = make_engine(config=LORA, lr=1e-2)
    train(engine, batch, loss, steps)
    return engine


@pytest.mark.parametrize("written", ["inline", "ray"])
@pytest.mark.parametrize("moved", [False, True])
def test_adapters_match_their_base_by_recipe_name_or_full_path(
    written: str, moved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers get full paths, and may work in another folder than the recipe's; and a folder with
    recipe, base and run may be moved."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    elsewhere.mkdir()
    load_causal_lm(ModelConfig(scratch=LORA.scratch)).save_pretrained(home / "base")
    load_causal_lm(ModelConfig(scratch=LORA.scratch)).save_pretrained(home / "other")

    def engine(path: str, *, ray: bool) -> TorchTrainEngine:
        monkeypatch.chdir(home)
        spec = EngineSpec(
            TrainRole.alone("policy", TrainConfig(), ModelConfig(path=path, lora=LORA.lora))
        )
        spec = with_absolute_paths(spec) if ray else spec
        made = TorchTrainEngine(load_causal_lm(spec.role.model), spec)
        if ray:
            monkeypatch.chdir(elsewhere)
        return made

    engine("base", ray=written == "ray").save(tmp_path / "policy")
    if moved:
        home = home.rename(tmp_path / "new home")
    for ray in (False, True):
        engine("base", ray=ray).load(tmp_path / "policy")
        with pytest.raises(
            ValueError, match=r"adapters for the base .*base.*base of this recipe is .*other"
        ):
            engine("other", ray=ray).load(tmp_path / "policy")


CASES = [
    {},
    {"ema_decay": 0.9, "weight_decay": 0.1, "lr_scheduler": "cosine", "lr_warmup_ratio": 0.2},
    {"dtype": "bf16", "ema_decay": 0.9},
    {"config": LORA},
]


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("before", [0, 3])
def test_a_loaded_engine_continues_bitwise(  # house: ok fixtures and parameters
    options: dict[str, object],
    before: int,
    make_engine: MakeEngine,
    ragged_batch: Batch,
    nll: Loss,
    state_of: StateOf,
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    first = make_engine(micro=3, **options)
    train(first, ragged_batch, nll, before)
    first.save(tmp_path)
    torch.manual_seed(1)  # another start for the adapters
    second = make_engine(micro=3, **options)
    train(second, ragged_batch, nll, 1)  # what it had before does not matter
    second.load(tmp_path)
    assert second.version == before
    norms = [train(engine, ragged_batch, nll, 2) for engine in (first, second)]
    assert norms[0] == norms[1]
    one, two = state_of(first), state_of(second)
    assert one.keys() == two.keys()
    differ = [name for name in one if not torch.equal(one[name], two[name])]
    assert not differ


def test_an_average_that_was_not_saved_starts_from_the_loaded_weights(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss, tmp_path: Path
) -> None:
    first = make_engine(lr=1e-2)
    train(first, ragged_batch, nll, 2)
    first.save(tmp_path)
    second = make_engine(ema_decay=0.9)
    second.load(tmp_path)
    assert second.optimizer is not None and second.optimizer.ema is not None
    for average, master in zip(second.optimizer.ema, second.optimizer.masters, strict=True):
        assert torch.equal(average, master)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            ScratchConfig(hidden_size=32, num_layers=3),
            r"layers\.2",
        ),
        (
            ScratchConfig(hidden_size=64),
            "checkpoint",
        ),
        (ScratchConfig(hidden_size=32, tie_word_embeddings=False), "another model: .*lm_head"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_the_difference(
    other: ScratchConfig, message: str, make_engine: MakeEngine, tmp_path: Path
) -> None:
    make_engine(config=ModelConfig(scratch=other)).save(tmp_path)
    with pytest.raises(ValueError, match=message):
        make_engine().load(tmp_path)


def test_a_checkpoint_of_another_role_is_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    make_engine(role="critic").save(tmp_path)
    with pytest.raises(ValueError, match="checkpoint of a critic, not of a reward"):
        make_engine(role="reward").load(tmp_path)


def test_state_bytes_is_what_save_writes(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss, tmp_path: Path
) -> None:
    engine = make_engine(ema_decay=0.9)
    train(engine, ragged_batch, nll, 1)
    engine.save(tmp_path)
    written = sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    headers = 5 * 4096  # one JSON header a file with about a hundred bytes a parameter
    assert engine.state_bytes <= written <= engine.state_bytes + headers


def test_only_adapters_of_a_lora_policy_are_saved(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss, tmp_path: Path
) -> None:
    engine = trained_lora(make_engine, ragged_batch, nll)
    engine.save(tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert {f.stem for f in files} == {"master", "exp_avg", "exp_avg_sq", "step"}
    for file in files:
        assert all(".lora_" in name for name in load_file(file)), file


def test_the_frozen_base_of_a_lora_policy_is_its_base_model(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss
) -> None:
    engine = trained_lora(make_engine, ragged_batch, nll)
    base = make_engine().logprobs(ragged_batch)
    tuned = engine.logprobs(ragged_batch)
    assert (tuned - base).abs().max() > 0.1, "training must have moved it"
    # the same sums, with the wrapped layers in between
    torch.testing.assert_close(FrozenBase(engine).logprobs(ragged_batch), base, atol=1e-6, rtol=0)
    assert torch.equal(engine.logprobs(ragged_batch), tuned)
    before = {n: p.detach().clone() for n, p in engine.model.named_parameters() if p.requires_grad}
    assert before and all(".lora_" in name for name in before)
    train(engine, ragged_batch, nll, 1)
    now = dict(engine.model.named_parameters())
    assert not any(torch.equal(now[name], before[name]) for name in before), (
        "it trains on afterwards"
    )


def test_adapters_are_enabled_again_after_an_error(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss
) -> None:
    engine = trained_lora(make_engine, ragged_batch, nll)
    tuned = engine.logprobs(ragged_batch)
    with pytest.raises(RuntimeError, match="inside"), adapters_off(engine.model):
        raise RuntimeError("inside")
    assert torch.equal(engine.logprobs(ragged_batch), tuned)


def test_weights_of_a_lora_policy_are_merged_as_peft_merges(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss
) -> None:
    engine = trained_lora(make_engine, ragged_batch, nll)
    ours = dict(engine.weights())
    assert ours.keys() == dict(make_engine().weights()).keys()
    merged = copy.deepcopy(engine.model)
    for name, module in list(merged.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            expected = module.get_base_layer().weight
            torch.testing.assert_close(
                ours[f"{name}.weight"], expected, atol=1e-7, rtol=0
            )  # 1 ulp below 1
    fresh = make_engine()
    with torch.no_grad():
        for name, parameter in fresh.model.named_parameters():
            parameter.copy_(ours[name])
    tuned = engine.logprobs(ragged_batch)
    # (W + BA) x against W x + BA x, in fp32 through two layers
    torch.testing.assert_close(fresh.logprobs(ragged_batch), tuned, atol=5e-6, rtol=0)


def test_weights_have_the_compute_dtype_and_transformers_names(
    make_engine: MakeEngine,
) -> None:
    weights = dict(make_engine(dtype="bf16").weights())
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    assert "model.layers.1.self_attn.q_proj.weight" in weights and "lm_head.weight" not in weights
    assert not any(t.requires_grad for t in weights.values())


def test_a_frozen_engine_has_no_optimizer_and_no_gradient(
    make_engine: MakeEngine, ragged_batch: Batch
) -> None:
    engine = make_engine(trainable=False)
    assert not any(p.requires_grad for p in engine.model.parameters())
    torch.testing.assert_close(
        engine.logprobs(ragged_batch), make_engine().logprobs(ragged_batch), atol=0, rtol=0
    )
    with pytest.raises(AssertionError, match="frozen"):
        engine.optim_step()


def test_dropout_applies_only_in_training_passes(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss
) -> None:
    config = LORA.model_copy(update={"lora": LoraConfig(lora_rank=4, lora_dropout=0.5)})
    torch.manual_seed(0)
    engine = make_engine(config=config, lr=1e-2)
    train(engine, ragged_batch, nll, 2)
    assert torch.equal(engine.logprobs(ragged_batch), engine.logprobs(ragged_batch))
    losses = [
        engine.forward_backward(ragged_batch, _with_loss(nll)).floats()["loss"] for _ in range(2)
    ]
    assert losses[0] != losses[1]


def _with_loss(loss: Loss) -> Loss:
    from burnish.types import Stats

    def wrapped(outputs, batch):
        scalar, stats = loss(outputs, batch)
        return scalar, stats + Stats(sums={"loss": scalar.detach()})

    return wrapped
