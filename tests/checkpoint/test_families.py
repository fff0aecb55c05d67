"""Models beyond Llama: the trained weights are those exported, transferred and resumed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    Gemma3Config,
    Gemma4TextConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from burnish.checkpoint.export import export
from burnish.checkpoint.manifest import write_manifest
from burnish.config.model import Dtype, LoraConfig, ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.config.train_engines import DeepSpeedEngine, TorchEngine
from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.models.buffers import BUFFERS, persistent_buffers
from burnish.models.load import DTYPES, ModelError, load_causal_lm, load_tokenizer
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import LocalRolloutEngine
from burnish.rollout.vllm.model import skeleton_of
from burnish.sync.base import encode
from burnish.sync.buckets import messages
from burnish.sync.disk import DiskSender, DiskSource
from burnish.sync.inproc import InprocWeightSync
from burnish.sync.snapshot import SnapshotSource
from burnish.train.base import Loss
from burnish.train.engines import make_engine as engine_of
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch

MakeEngine = Callable[..., TorchTrainEngine]
TOKENIZER = load_tokenizer(ModelConfig(scratch=ScratchConfig(hidden_size=32)))
TOKENS = torch.tensor([[7, 8, 9, 10, 11, 12, 30, 31]])
SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,  # distributions far from uniform
    "num_experts_per_tok": 2,
}
MIXTURES: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16, head_dim=8),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "olmoe": OlmoeConfig(**SIZES, num_experts=4),
}


BUFFERED: dict[str, PreTrainedConfig] = {
    "deepseek_v3": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        **{"moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
        **{"n_shared_experts": 1, "first_k_dense_replace": 1},
        **{"kv_lora_rank": 8, "q_lora_rank": 16},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    ),
    "gemma4": Gemma4TextConfig(
        **{name: size for name, size in SIZES.items() if name != "num_experts_per_tok"},
        **{"head_dim": 8, "global_head_dim": 8, "pad_token_id": 0},
        **{"layer_types": ["sliding_attention", "full_attention"]},
        **{"vocab_size_per_layer_input": len(TOKENIZER), "hidden_size_per_layer_input": 0},
        **{"num_kv_shared_layers": 0, "final_logit_softcapping": None},
    ),
}
"""Models with persistent buffers; those of DeepSeek-V3 are fp32 whatever the model's format."""
ENGINES: dict[str, Any] = {
    "torch": TorchEngine(),
    "fsdp": TorchEngine(sharding="full"),
    "zero1": DeepSpeedEngine(kind="deepspeed", zero_stage=1),
    "zero3": DeepSpeedEngine(kind="deepspeed", zero_stage=3),
}


def folder_of(config: PreTrainedConfig, folder: Path) -> ModelConfig:
    """The random model of ``config`` in a folder, as a run would start from."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for _, buffer in persistent_buffers(model):  # other than in a new model
        buffer.add_(torch.rand(buffer.shape) / 3)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return ModelConfig(path=str(folder))


def checkpoint(folder: Path, engine: TorchTrainEngine) -> Path:
    folder.mkdir()
    engine.save(folder / engine.role)
    write_manifest(folder, step=1, extra={"metric": None})
    return folder


def logprobs(model: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """[1, T, V], by plain attention."""
    model.eval().set_attn_implementation("eager")
    with torch.no_grad():
        found: torch.Tensor = model(tokens).logits.float().log_softmax(-1)
    return found


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        *((family, "all-linear") for family in MIXTURES),
        ("qwen3_moe", ("down_proj",)),
        ("mixtral", ("w2",)),
        ("olmoe", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_adapters_of_experts_are_in_exports_and_transfers(  # house: ok fixtures and parameters
    family: str,
    targets: Any,
    make_engine: MakeEngine,
    ragged_batch: Batch,
    nll: Loss,
    tmp_path: Path,
) -> None:
    base = folder_of(MIXTURES[family], tmp_path / "base")
    torch.manual_seed(1)
    lora = LoraConfig(lora_rank=4, target_modules=targets)
    config = base.model_copy(update={"lora": lora})
    engine = make_engine(config=config, lr=0.02)
    before = logprobs(engine.model)
    for _ in range(2):
        engine.forward_backward(ragged_batch, nll)
        engine.optim_step()
    expected = logprobs(engine.model)
    assert float((expected - before).abs().max()) > 0.1, "the adapters learned nothing"

    merged = AutoModelForCausalLM.from_pretrained(
        export(checkpoint(tmp_path / "c", engine), tmp_path / "out"), dtype="auto"
    )
    # fp32, log-probs of about 4 (4.8e-7 per bit): a product with the sum of base and adapter
    # instead of the sum of two products
    torch.testing.assert_close(logprobs(merged), expected, atol=5e-6, rtol=0)

    rollout = LocalRolloutEngine(load_causal_lm(base), TOKENIZER, LocalEngine())
    InprocWeightSync(engine, rollout)
    torch.testing.assert_close(logprobs(rollout.model), expected, atol=5e-6, rtol=0)

    adapter = export(tmp_path / "c", tmp_path / "adapter", lora="adapter")
    plain = AutoModelForCausalLM.from_pretrained(base.path, dtype="auto")
    again = PeftModel.from_pretrained(plain, adapter)
    torch.testing.assert_close(logprobs(again.base_model.model), expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize(
    ("targets", "says"),
    [("all-linear", True), (("q_proj", "up_proj"), True), (("q_proj", "v_proj"), False)],
)
def test_experts_without_adapters_are_logged_if_they_were_requested(
    targets: Any, says: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """peft does not know the fused experts of Qwen2-MoE."""
    base = folder_of(MIXTURES["qwen2_moe"], tmp_path / "base")
    lora = LoraConfig(lora_rank=4, target_modules=targets)
    with caplog.at_level(logging.WARNING, "burnish"):
        load_causal_lm(base.model_copy(update={"lora": lora}))
    text = "gives no adapters to 4 fused expert weights"
    assert (text in caplog.text) is says


# ---- persistent buffers ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_rank() -> RankGroup:
    """A process group of one rank (ended with the file: see conftest)."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return RankGroup(torch.distributed.group.WORLD)


def engine_for(base: ModelConfig, kind: str, dtype: Dtype, ranks: RankGroup) -> Any:
    """A train engine over the model in ``base``, as the runtime makes it."""
    train = TrainConfig(lr=0.02, engine=ENGINES[kind])
    spec = EngineSpec(
        TrainRole.alone("policy", train, base, precision=PrecisionConfig(dtype=dtype))
    )
    model = load_causal_lm(base, empty=kind == "fsdp")
    own = ranks if kind != "torch" else SINGLE
    return engine_of(model, spec, tokenizer=TOKENIZER, ranks=own)


def drift(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Change the buffers as running statistics change in training passes; copies of them."""
    for _, buffer in persistent_buffers(model):
        buffer.add_(0.1 * torch.rand(buffer.shape))
    return {name: buffer.clone() for name, buffer in persistent_buffers(model)}


def same(found: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    own = dict(persistent_buffers(found))
    assert own.keys() == expected.keys() and expected
    for name, buffer in own.items():
        assert buffer.dtype == torch.float32 and torch.equal(buffer, expected[name])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("family", BUFFERED)
def test_buffers_are_in_checkpoints_exports_and_transfers(  # house: ok fixtures and parameters
    family: str,
    kind: str,
    dtype: Dtype,
    one_rank: RankGroup,
    ragged_batch: Batch,
    nll: Loss,
    tmp_path: Path,
) -> None:
    base = folder_of(BUFFERED[family], tmp_path / "base")
    engine = engine_for(base, kind, dtype, one_rank)
    engine.forward_backward(ragged_batch, nll)
    engine.optim_step()
    buffers = drift(engine.model)
    source = checkpoint(tmp_path / "c", engine)

    merged = export(source, tmp_path / "out", dtype=dtype)
    assert (merged / "config.json").is_file()
    trained = dict(engine.weights())
    rollout = LocalRolloutEngine(load_causal_lm(base, dtype=dtype), TOKENIZER, LocalEngine())
    rollout.load_weights(1, trained.items())
    same(rollout.model, buffers)
    plain = AutoModelForCausalLM.from_pretrained(merged, dtype=DTYPES[dtype])
    if dtype == "fp32":
        same(plain, buffers)
        assert torch.equal(logprobs(plain), logprobs(rollout.model))

    again = engine_for(base, kind, dtype, one_rank)
    again.load(source / "policy")
    same(again.model, buffers)


def test_a_checkpoint_without_buffers_takes_them_from_its_base(
    make_engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As older versions wrote them: in resumes and in exports, with a log line."""
    base = folder_of(BUFFERED["gemma4"], tmp_path / "base")
    engine = make_engine(config=base)
    own = {name: buffer.clone() for name, buffer in persistent_buffers(engine.model)}
    drift(engine.model)
    engine.save(tmp_path / "c" / "policy")
    (tmp_path / "c" / "policy" / BUFFERS).unlink()
    write_manifest(tmp_path / "c", step=1, extra={"metric": None})
    again = make_engine(config=base)
    with caplog.at_level(logging.INFO, "burnish"):
        again.load(tmp_path / "c" / "policy")
        merged = export(tmp_path / "c", tmp_path / "out")
    same(again.model, own)
    same(AutoModelForCausalLM.from_pretrained(merged), own)
    assert caplog.text.count("has no buffers") == 2


def test_buffers_of_another_model_are_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    base = folder_of(BUFFERED["gemma4"], tmp_path / "base")
    engine = make_engine(config=base)
    engine.save(tmp_path / "policy")
    layer = engine.model.model.layers[0]
    layer.layer_scalar = torch.ones(2)
    with pytest.raises(ValueError, match=r"layers\.0\.layer_scalar"):
        engine.load(tmp_path / "policy")
    with pytest.raises(ValueError, match=r"\[1\], but"):
        LocalRolloutEngine(engine.model, TOKENIZER, LocalEngine()).load_weights(
            1, make_engine(config=base).weights()
        )
    with pytest.raises(ValueError, match="layer_scalar"):
        rollout = LocalRolloutEngine(load_causal_lm(base), TOKENIZER, LocalEngine())
        rollout.load_weights(1, load_causal_lm(base).named_parameters())


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("way", ["disk", "buckets"])
def test_a_transfer_casts_weights_and_keeps_buffers(
    way: str, dtype: Dtype | None, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """``buckets`` are sent by collective, ipc and the object store. A weight may hold any bits:
    NaN, infinity, zeros of both signs, subnormal numbers, and ties of the rounding to bf16."""
    base = folder_of(BUFFERED["deepseek_v3"], tmp_path / "base")
    engine = make_engine(config=base)
    drift(engine.model)
    odd = [math.nan, math.inf, -math.inf, -0.0, 1e-40, -1e-40, 1 + 2**-8, 1 + 3 * 2**-8]
    engine.model.lm_head.weight.data.view(-1)[: len(odd)] = torch.tensor(odd)
    given = dict(engine.weights())
    if way == "disk":
        DiskSender(engine, tmp_path / "sync", bucket_bytes=1 << 14, dtype=dtype).push()
        source: Any = DiskSource(tmp_path / "sync", timeout_s=1)
    else:
        sent = []
        for message, payload in messages(
            engine.weights(),
            lambda: torch.empty(1 << 14, dtype=torch.uint8),
            push=0,
            version=0,
            dtype=None if dtype is None else DTYPES[dtype],
        ):
            sent.append((encode(message), payload.numpy().copy()))
        source = SnapshotSource(*zip(*sent, strict=True), hold=True)
    with source.open(0) as transfer:
        got = {name: tensor.clone() for name, tensor in transfer}
    assert got.keys() == given.keys()
    buffers = dict(persistent_buffers(engine.model))
    assert buffers
    for name, tensor in given.items():
        cast = dtype is not None and name not in buffers
        sent = tensor.detach().to(torch.bfloat16 if cast else torch.float32).contiguous()
        assert got[name].dtype == sent.dtype
        assert torch.equal(got[name].view(torch.uint8), sent.view(torch.uint8)), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_that_is_read_in_shards_has_its_buffers(dtype: Dtype, tmp_path: Path) -> None:
    base = folder_of(BUFFERED["gemma4"], tmp_path / "base")
    whole = dict(persistent_buffers(load_causal_lm(base, dtype=dtype)))
    parts = load_causal_lm(base, dtype=dtype, empty=True)
    assert all(parameter.is_meta for parameter in parts.parameters())
    for name, buffer in persistent_buffers(parts):
        assert buffer.dtype == whole[name].dtype and torch.equal(buffer, whole[name])


# ---- composite models and other vocabularies -------------------------------------------------


def composite(folder: Path, config: PreTrainedConfig) -> ModelConfig:
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return ModelConfig(path=str(folder))


TEXT = {name: size for name, size in SIZES.items() if name != "num_experts_per_tok"}
VISION: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}


def test_the_language_model_of_a_composite_model_is_exported_and_transferred(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss, tmp_path: Path
) -> None:
    """Keys, and so files, are those of the original; a rollout copy has the same logits."""
    text = {**TEXT, "head_dim": 8, "vocab_size": len(TOKENIZER) + 11}
    base = composite(tmp_path / "base", Gemma3Config(text_config=text, vision_config=VISION))
    engine = make_engine(config=base, lr=0.02)
    engine.forward_backward(ragged_batch, nll)
    engine.optim_step()
    rollout = LocalRolloutEngine(load_causal_lm(base), TOKENIZER, LocalEngine())
    InprocWeightSync(engine, rollout)
    expected = logprobs(engine.model)
    assert torch.equal(logprobs(rollout.model), expected)
    out = export(checkpoint(tmp_path / "c", engine), tmp_path / "out")
    assert torch.equal(logprobs(AutoModelForCausalLM.from_pretrained(out)), expected)
    files = [load_file(Path(path) / "model.safetensors") for path in (out, str(base.path))]
    assert files[0].keys() == files[1].keys()
    with pytest.raises(ModelError, match=r"composite model .gemma3., but the trainer has only its"):
        skeleton_of(engine.model)


@pytest.mark.parametrize("tied", [True, False])
def test_a_padded_vocabulary_stays_as_it_is(
    tied: bool, make_engine: MakeEngine, ragged_batch: Batch, nll: Loss, tmp_path: Path
) -> None:
    """More rows of embeddings than the tokenizer has tokens, as after padding to a multiple."""
    torch.manual_seed(0)
    sizes = {**TEXT, "tie_word_embeddings": tied}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    model.resize_token_embeddings(len(TOKENIZER) + 1, pad_to_multiple_of=64)
    model.save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    base = ModelConfig(path=str(tmp_path / "base"))
    engine = make_engine(config=base, lr=0.02)
    engine.forward_backward(ragged_batch, nll)
    engine.optim_step()
    rollout = LocalRolloutEngine(load_causal_lm(base), TOKENIZER, LocalEngine())
    InprocWeightSync(engine, rollout)
    expected = logprobs(engine.model)
    assert expected.shape[-1] == 64 and torch.equal(logprobs(rollout.model), expected)
    plain = AutoModelForCausalLM.from_pretrained(
        export(checkpoint(tmp_path / "c", engine), tmp_path / "out")
    )
    assert torch.equal(logprobs(plain), expected) and plain.config.vocab_size == 64


@pytest.mark.parametrize(("missing", "refused"), [(5, False), (len(TOKENIZER) - 1, True)])
def test_tokens_without_embeddings_are_logged(
    missing: int, refused: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A vocabulary that is smaller than the tokenizer's: a warning, or an error for its end."""
    LlamaConfig(**{**TEXT, "vocab_size": len(TOKENIZER) - missing}).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    if refused:
        with pytest.raises(
            ModelError, match=r"end token .* is not in the vocabulary of .* 1 token"
        ):
            load_tokenizer(ModelConfig(path=str(tmp_path)))
        return
    with caplog.at_level(logging.WARNING, "burnish"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert f"has {len(TOKENIZER)} tokens, but {tmp_path} has embeddings for" in caplog.text
