"""The choice of train.attention: what refuses flash, what auto takes, and what a run does when the
operators raise."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

import burnish
import burnish.models.attention_kernel as attention_kernel
import burnish.models.flash as flash
from burnish.config import ConfigError, load_config
from burnish.config.model import ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.attention_kernel import Use, choose_kernel, try_flash
from burnish.models.flash_reference import on_cpu
from burnish.models.load import choose_attention, load_causal_lm
from burnish.models.paths import ModelError
from burnish.models.sdpa import Kernels
from burnish.observe.metrics import read_metrics
from burnish.report.tables import read_warnings
from burnish.steps.objectives import sft_objective
from burnish.train.engines import load_engine
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, rows_to_batch

CPU = torch.device("cpu")
H100, V100 = Kernels((2, 11), (9, 0)), Kernels((2, 11), (7, 0))
MODEL = ModelConfig(scratch=ScratchConfig(hidden_size=64, num_heads=4, num_kv_heads=2))


def config(kind: str = "llama", **fields: Any) -> PretrainedConfig:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    made: PretrainedConfig = CONFIG_MAPPING[kind](**(sizes | fields))
    return made


FITS = Use("bf16", H100)
PROBLEMS = {
    "fp32": (config(), Use("fp32", H100), "precision.dtype"),
    "CPU": (config(), Use("bf16", None), "CPU"),
    "old GPU": (config(), Use("bf16", V100), "8.0"),
    "AMD": (config(), Use("bf16", Kernels((2, 11), (9, 4), hip=True)), "AMD"),
    "padded": (config(), Use("bf16", H100, layout="padded"), "padded"),
    "softcap": (config("gemma2", attn_logit_softcapping=50.0), FITS, "attn_logit_softcapping"),
    "dropout": (config(attention_dropout=0.1), Use("bf16", H100, dropout=True), "dropout"),
    "size above 256": (config(head_dim=264), FITS, "264"),
    "size without backward": (config(head_dim=200), FITS, "200"),
    "size": (config(head_dim=20), FITS, "20"),
    "unequal": (config("deepseek_v3", qk_nope_head_dim=128, v_head_dim=128), FITS, "values"),
}


@pytest.mark.parametrize(("model", "use", "named"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_flash_is_refused_and_auto_says_why_it_is_not_taken(
    model: PretrainedConfig, use: Use, named: str
) -> None:
    with pytest.raises(ModelError, match=r"train\.attention=flash") as raised:
        choose_kernel("flash", model, use)
    assert named in str(raised.value)
    choice = choose_kernel("auto", model, use)
    assert choice.kernel == "sdpa" and named in choice.sentence
    assert choose_kernel("sdpa", model, use).reason == ""


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_auto_takes_flash_where_it_fits(kind: str) -> None:
    assert choose_kernel("auto", config(kind), FITS).kernel == "flash"
    without = Use("bf16", H100, dropout=False)
    assert choose_kernel("flash", config(kind, attention_dropout=0.1), without).kernel == "flash"


def test_an_unknown_schema_is_a_problem_of_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernel, "schema_problem", lambda: "it takes other arguments")
    assert choose_kernel("auto", config(), FITS).kernel == "sdpa"
    with pytest.raises(ModelError, match="other arguments"):
        choose_kernel("flash", config(), FITS)


TREE = {
    "job": "sft",
    "model": {"path": "model"},
    "precision": {"dtype": "bf16"},
    "data": {"sources": ["rows.jsonl"], "max_len": 1024},
    "train": {"train_batch_size": 1, "attention": "flash"},
}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"precision": {"dtype": "fp32"}}, "precision.dtype=fp32"),
        ({"train": {**TREE["train"], "layout": "padded"}}, "train.layout=padded"),  # type: ignore[dict-item]
        ({"model": {"path": "model", "attn_implementation": "sdpa"}}, "attn_implementation=sdpa"),
    ],
)
def test_a_recipe_that_contradicts_flash_is_an_error_at_load(
    changed: dict[str, Any], named: str
) -> None:
    load_config(TREE)
    with pytest.raises(ConfigError) as raised:
        load_config(TREE | changed)
    assert named in str(raised.value)


def spec(attention: str, dtype: str = "fp32") -> EngineSpec:
    train = TrainConfig(lr=1e-3, attention=attention)  # type: ignore[arg-type]
    precision = PrecisionConfig(dtype=dtype)  # type: ignore[arg-type]
    return EngineSpec(TrainRole.alone("policy", train, MODEL, precision=precision))


def test_flash_for_a_model_that_cannot_pack_is_refused_before_it_is_loaded(
    operators: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr("burnish.train.engines.load_causal_lm", lambda *a, **k: loaded.append(a))
    with pytest.raises(ModelError, match="padded"):
        load_engine(spec("flash"), scalar=False, device=CPU, random=model_config("bloom"))
    assert not loaded


def test_flash_on_a_cpu_is_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr("burnish.train.engines.load_causal_lm", lambda *a, **k: loaded.append(a))
    with pytest.raises(ModelError, match="CPU"):
        load_engine(spec("flash"), scalar=False, device=CPU)
    assert not loaded


@pytest.fixture
def operators() -> Iterator[None]:
    with on_cpu():
        yield


def batch() -> Batch:
    rows = [[3, 4, 5, 6] + [7 + i] * n for i, n in enumerate((3, 9, 1, 14))]
    masks = [[False] * 4 + [True] * (len(row) - 4) for row in rows]
    return rows_to_batch(rows, masks, prompt_lens=[4] * 4, group_ids=[0, 0, 0, 1])


def engine(attention: str) -> TorchTrainEngine:
    torch.manual_seed(0)
    return TorchTrainEngine(load_causal_lm(MODEL), spec(attention))


SMALL = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 24, **MIXED},
    "granite": {"attention_multiplier": 0.07},
    "mistral": {"sliding_window": 5},
    "qwen3": {"head_dim": 24},
    "gemma2": {"head_dim": 16, **MIXED},
    "deepseek_v3": {
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "bloom": {"n_layer": 2, "n_head": 4},
}
LEFT_TO_SDPA = {
    "gemma2": "attn_logit_softcapping",
    "deepseek_v3": "24 (queries) and 16 (values)",
    "gpt_oss": "padded",  # attention sinks
    "bloom": "padded",  # ALiBi
}


def model_config(kind: str) -> PretrainedConfig:
    return config(kind, **(SMALL | FAMILIES[kind]))


def family_engine(kind: str, attention: str, **settings: Any) -> TorchTrainEngine:
    torch.manual_seed(0)
    train = TrainConfig(lr=1e-3, attention=attention, **settings)  # type: ignore[arg-type]
    made = AutoModelForCausalLM.from_config(model_config(kind))
    choose_attention(made, kind)
    role = TrainRole.alone("policy", train, MODEL, precision=PrecisionConfig(dtype="fp32"))
    return TorchTrainEngine(made, EngineSpec(role))


def trained(ours: TorchTrainEngine) -> tuple[torch.Tensor, float]:
    """Log-probs of a batch, and the gradient norm of a step on it."""
    logprobs = ours.logprobs(batch())
    ours.forward_backward(batch(), sft_objective())
    return logprobs, ours.optim_step().grad_norm


def assert_equal_training(
    ours: tuple[torch.Tensor, float], expected: tuple[torch.Tensor, float]
) -> None:
    torch.testing.assert_close(ours[0], expected[0], atol=2e-5, rtol=0)
    assert ours[1] == pytest.approx(expected[1], rel=1e-4)


@pytest.mark.parametrize("kind", FAMILIES)
def test_auto_trains_every_kind_of_attention_like_sdpa(kind: str, operators: None) -> None:
    """Other scales than 1 / sqrt(size), windows in some or all layers; and what flash cannot do."""
    ours = family_engine(kind, "auto")
    left = LEFT_TO_SDPA.get(kind)
    assert ours.attention.kernel == ("flash" if left is None else "sdpa")
    assert (left or "") in ours.attention.reason
    assert_equal_training(trained(ours), trained(family_engine(kind, "sdpa")))


def test_a_small_call_agrees_both_ways(operators: None) -> None:
    assert try_flash(CPU, "fp32", 16) is None


def test_a_kernel_with_other_results_is_not_used(
    operators: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = flash._Part.backward
    monkeypatch.setattr(
        flash._Part, "backward", lambda *args: tuple(1.2 * x for x in backward(*args))
    )
    assert "differs" in str(try_flash.__wrapped__(CPU, "fp32", 16))


def raising(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> list[int]:
    """Make the operators raise; return the tokens of their calls."""
    calls: list[int] = []

    def forward(part: Any, qkv: Any, scale: float) -> Any:
        calls.append(len(qkv[0]))
        raise error

    monkeypatch.setattr(flash._Part, "forward", forward)
    return calls


def test_auto_falls_back_once_with_a_warning(
    operators: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, ours = engine("sdpa").logprobs(batch()), engine("auto")
    assert ours.attention.kernel == "flash"
    calls = raising(monkeypatch, RuntimeError("no kernel image"))
    with caplog.at_level(logging.WARNING, logger="burnish"):
        results = [ours.logprobs(batch()) for _ in range(2)]
    assert all(torch.equal(x, expected) for x in results)
    assert len(calls) == 2  # both layers of the first pass
    warnings = [r.getMessage() for r in caplog.records if "FlashAttention" in r.getMessage()]
    assert len(warnings) == 1 and "no kernel image" in warnings[0]
    assert ours.forward.kernel_fallbacks == 1


def test_a_run_counts_kernels_that_were_replaced(
    operators: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"{i}+1=", "response": "2"}) for i in range(4)))
    tree = {
        "job": "sft",
        "model": {"scratch": {"alphabet": "0123456789+= ", "hidden_size": 64}},
        "data": {"sources": [str(rows)], "max_len": 32},
        "train": {"train_batch_size": 2, "micro_train_batch_size": 2},
        "max_steps": 2,
        "run_dir": str(tmp_path / "run"),
    }
    raising(monkeypatch, RuntimeError("no kernel image"))
    run_dir = burnish.run(load_config(tree)).run_dir
    assert [line["train/kernel_fallbacks"] for line in read_metrics(run_dir)] == [1, 1]
    counted = [w.count for w in read_warnings(run_dir) if "no kernel image" in w.text]
    assert counted == [1, 1]  # of the plan's trace, and of the run


def test_a_layer_that_falls_back_leaves_the_recomputed_ones_as_they_were(
    operators: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer (with a window) is computed before the second one raises, and again for
    backward."""
    expected = trained(family_engine("gemma3_text", "sdpa"))
    forward, full = flash._Part.forward, []

    def forward_of_windows(part: Any, qkv: Any, scale: float) -> Any:
        if part.window is None:
            full.append(part)
            raise RuntimeError("no kernel image")
        return forward(part, qkv, scale)

    monkeypatch.setattr(flash._Part, "forward", forward_of_windows)
    ours = family_engine("gemma3_text", "auto", gradient_checkpointing=True)
    ours.forward_backward(batch(), sft_objective())
    norm = ours.optim_step().grad_norm
    assert len(full) == 1
    assert norm == pytest.approx(expected[1], rel=1e-4)


def test_an_error_in_backward_is_raised_with_the_way_out(
    operators: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backward(*_: Any) -> Any:
        raise RuntimeError("no kernel image")

    ours = engine("auto")
    monkeypatch.setattr(flash._Part, "backward", backward)
    with pytest.raises(RuntimeError, match="no kernel image") as raised:
        ours.forward_backward(batch(), sft_objective())
    assert "train.attention=sdpa" in "".join(raised.value.__notes__)


@pytest.mark.parametrize("kind", ["gemma2", "deepseek_v3"])
def test_calls_that_no_config_announces_are_left_to_sdpa_and_logged_once(
    kind: str,
    operators: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = trained(family_engine(kind, "sdpa"))
    monkeypatch.setattr(attention_kernel, "_model_problem", lambda *_: None)
    ours = family_engine(kind, "auto")
    with caplog.at_level(logging.WARNING, logger="burnish"):
        assert_equal_training(trained(ours), expected)
    said = [r.getMessage() for r in caplog.records if "FlashAttention" in r.getMessage()]
    assert len(said) == 1 and "layer 0" in said[0]
    assert ours.forward.flash is not None and ours.forward.flash.declined == {0, 1}
    with pytest.raises(flash.FlashError, match="layer 0"):
        family_engine(kind, "flash").logprobs(batch())


@pytest.mark.parametrize(
    ("attention", "error"),
    [("flash", "no kernel image"), ("auto", "CUDA out of memory. Tried to allocate 2 GiB")],
)
def test_an_error_of_a_chosen_kernel_or_of_memory_is_raised(
    attention: str, error: str, operators: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = engine(attention)
    raising(monkeypatch, RuntimeError(error))
    with pytest.raises(RuntimeError, match=error[:8]):
        ours.logprobs(batch())
