"""Weights that transformers keeps in fp32, in every place that casts: load, training, weights for
the sampler, and export."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from burnish.checkpoint.export import export
from burnish.checkpoint.save import CheckpointStore
from burnish.config.model import Dtype, LoraConfig, ModelConfig, PrecisionConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.config.train_engines import DeepSpeedEngine
from burnish.models.buffers import wanted_dtype
from burnish.models.islands import fp32_names, with_islands
from burnish.models.load import DTYPES, ModelError, load_causal_lm
from burnish.models.scratch import scratch_tokenizer
from burnish.models.shrink import build, shrink
from burnish.models.value_head import load_scalar_model
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import make_engine as make_local_engine
from burnish.steps.objectives import sft_objective
from burnish.train.engines import make_engine
from burnish.train.spec import EngineSpec
from burnish.types import rows_to_batch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from families import config_of

ISLANDS: list[tuple[str, Dtype]] = [
    *(("hunyuan_v1_moe", "bf16"), ("zamba", "bf16"), ("olmo_hybrid", "fp16"), ("flint", "bf16")),
    *(("ernie4_5_moe", "bf16"), ("beam", "fp16"), ("hy_v4", "bf16"), ("bailing_hybrid", "bf16")),
    *(("inkling2_text", "bf16"), ("deepseek_v4", "bf16"), ("rwkv", "fp16"), ("gpt_oss", "fp16")),
    *(("longcat_flash", "fp16"), ("afmoe", "fp16")),
]
BATCH = rows_to_batch(
    [[7, 8, 9, 10, 11, 12], [7, 30, 31]], [[False] + [True] * 5, [False] + [True] * 2],
    prompt_lens=[1, 1],
).with_global_counts()  # fmt: skip


def saved(family: str, folder: Path) -> ModelConfig:
    model = build(shrink(config_of(family)))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    scratch_tokenizer("abcdef").save_pretrained(folder)
    return ModelConfig(path=str(folder))


def transformers_own(folder: str | Path, dtype: Dtype | str) -> Any:
    asked = dtype if dtype == "auto" else DTYPES[dtype]  # type: ignore[index]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=asked).eval()


def differing(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Return names whose dtype or bits differ."""
    return [
        name
        for name, tensor in wanted.items()
        if name in found
        and (found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor))
    ]


def engine_of(model: ModelConfig, dtype: Dtype, **train: Any) -> Any:
    settings = TrainConfig(lr=1e-2, **train)
    spec = EngineSpec(
        TrainRole.alone("policy", settings, model, precision=PrecisionConfig(dtype=dtype))
    )
    return make_engine(load_causal_lm(model), spec, tokenizer=scratch_tokenizer("abcdef"))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), ISLANDS)
def test_every_place_keeps_in_fp32_the_weights_that_transformers_does(
    tmp_path: Path, family: str, dtype: Dtype
) -> None:
    config = saved(family, tmp_path / "model")
    theirs = transformers_own(tmp_path / "model", dtype)
    wanted = dict(theirs.named_parameters())
    wide = {name for name, p in wanted.items() if p.dtype == torch.float32}
    loaded = load_causal_lm(config, dtype=dtype)
    assert wide and fp32_names(loaded, DTYPES[dtype]) == wide
    assert not differing(dict(loaded.named_parameters()), wanted)

    empty = load_causal_lm(config, dtype=dtype, empty=True)
    assert {n: p.dtype for n, p in empty.named_parameters()} == {
        n: p.dtype for n, p in wanted.items()
    }

    engine = engine_of(config, dtype)
    assert not differing(dict(engine.model.named_parameters()), wanted)
    engine.forward_backward(BATCH, sft_objective())
    engine.optim_step()
    own = dict(engine.model.named_parameters())
    assert {n for n, p in own.items() if p.dtype == torch.float32} == wide
    given = dict(engine.weights())
    as_sent = {n: t.to(wanted_dtype(t, DTYPES[dtype])) for n, t in given.items()}
    sampler = make_local_engine(loaded, scratch_tokenizer("abcdef"), LocalEngine(), name="")
    sampler.load_weights(1, as_sent.items())
    assert not differing(dict(loaded.named_parameters()), own)

    store = CheckpointStore(tmp_path / "saves", keep_last=1, best_mode="max")
    store.save(1, lambda folder: engine.save(folder / "policy"))
    checkpoint = next(p for p in (tmp_path / "saves").iterdir() if p.is_dir())
    again = transformers_own(export(checkpoint, tmp_path / "out", dtype=dtype), "auto")
    masters = dict(zip(engine.optimizer.names, engine.optimizer.masters, strict=True))
    exported = {n: p for n, p in again.named_parameters() if n in masters}
    expected = {n: masters[n].to(wanted[n].dtype) for n in exported}
    assert not differing(exported, expected) and wide <= exported.keys()


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba", "inkling2_text"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_bodies_that_return_fp32_states_run_in_half_precision(
    tmp_path: Path, family: str, dtype: Dtype
) -> None:
    """Log-probs of engine and sampler's model against transformers' own in that dtype, measured by
    the distance of these from fp32."""
    config = saved(family, tmp_path)
    engine = engine_of(config, dtype)
    found = engine.logprobs(BATCH)[1:6]
    ids = BATCH.tokens[None, :6]
    rows = [
        transformers_own(tmp_path, kind)(input_ids=ids, use_cache=False)
        .logits[0, :-1]
        .float()
        .log_softmax(-1)
        .gather(1, ids[0, 1:, None])[:, 0]
        for kind in (dtype, "fp32")
    ]
    rounding = float((rows[0] - rows[1]).abs().max())
    assert 0 < float((found - rows[1]).abs().max()) <= 2 * rounding + 1e-3
    engine.forward_backward(BATCH, sft_objective())
    step = engine.optim_step()  # in fp16 the first scale of the loss may be too large
    assert math.isfinite(step.grad_norm) or (dtype == "fp16" and step.skipped)
    sampler = make_local_engine(
        load_causal_lm(config, dtype=dtype), scratch_tokenizer("abcdef"), LocalEngine(), name=""
    )
    hidden = torch.randn(2, engine.body.config.hidden_size)
    assert sampler.network.head_logits(hidden).dtype == torch.float32


@pytest.mark.parametrize(("family", "dtype"), [("xlstm", "bf16"), ("deepseek_v4", "fp16")])
def test_models_whose_own_code_mixes_dtypes_are_refused_with_a_way_out(
    tmp_path: Path, family: str, dtype: Dtype
) -> None:
    config = saved(family, tmp_path)
    with pytest.raises(ModelError, match=r"cannot be computed in .*precision\.dtype=fp32"):
        load_causal_lm(config, dtype=dtype)
    load_causal_lm(config)


def test_engines_with_one_dtype_for_a_layer_refuse_such_models(tmp_path: Path) -> None:
    config = saved("ernie4_5_moe", tmp_path)
    with pytest.raises(ModelError, match=r"kind=deepspeed with precision\.dtype=bf16.*in fp32"):
        engine_of(config, "bf16", engine=DeepSpeedEngine())


def test_islands_of_scalar_models_and_of_models_with_adapters(tmp_path: Path) -> None:
    config = saved("flint", tmp_path)
    wide = fp32_names(load_causal_lm(config), torch.bfloat16)
    scalar = load_scalar_model(config, dtype="bf16", new_head="random")
    assert fp32_names(scalar, torch.bfloat16) == wide
    assert {n for n, p in scalar.named_parameters() if p.dtype == torch.float32} == wide
    lora = config.model_copy(update={"lora": LoraConfig(lora_rank=2)})
    adapted = engine_of(lora, "bf16")
    given = dict(adapted.weights())
    assert {n for n, t in given.items() if t.dtype == torch.float32} >= wide
    assert {n for n, t in given.items() if isinstance(t, torch.nn.Buffer)} >= wide


def test_an_fp32_trainer_marks_what_a_half_precision_sampler_keeps() -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(2)}
    marked = dict(with_islands(tensors.items(), frozenset({"b"})))
    assert wanted_dtype(marked["a"], torch.bfloat16) == torch.bfloat16
    assert wanted_dtype(marked["b"], torch.bfloat16) == torch.float32
