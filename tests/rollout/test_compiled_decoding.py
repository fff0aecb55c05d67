"""Recorded decode steps with compiled layers (``rollout.engine.compile``). Graphs are tapes of
operations on the CPU (``tests/support/graph_tapes.py``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiling import compiles  # noqa: F401
from graph_tapes import record_on_cpu
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from burnish.config.model import ModelConfig, ScratchConfig
from burnish.models.attention import ATTENTION_NAME, NO_MASK, plan_segments
from burnish.models.compiled_layers import Compilations, CompiledLayers
from burnish.models.load import load_tokenizer
from burnish.models.paths import ModelError
from burnish.models.segments import Segment
from burnish.rollout.base import Request, Sampling
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import LocalRolloutEngine, make_engine

TOKENIZER = load_tokenizer(ModelConfig(scratch=ScratchConfig(hidden_size=32, num_heads=2)))


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on the CPU, and a compiler without its code generator."""
    record_on_cpu(monkeypatch)
    monkeypatch.setattr(CompiledLayers, "backend", "aot_eager")


def small_qwen() -> PreTrainedModel:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 53}
    config = Qwen3Config(num_hidden_layers=3, initializer_range=0.5, **sizes, **heads)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def engine_of(model: PreTrainedModel, **config: Any) -> Any:
    """An engine that records blocks as on a GPU, and ends no response before its limit."""
    engine: Any = LocalRolloutEngine(model, TOKENIZER, LocalEngine(**config))
    engine.network.uses_graphs, engine.network.keeps_conversations = True, False
    engine._end_tokens = set()
    return engine


def results(engine: Any, requests: list[Request]) -> dict[Any, Any]:
    return {(c.request_id, c.index): c for c in engine.generate(requests, Sampling(1))}


def test_compiled_layers_give_the_bits_of_recorded_steps() -> None:
    """In the same order, without the code generator, in bf16. Four graphs, of the parts of a layer,
    for 1 to 8 rows and every length of the cache."""
    shapes = [(3, 4, 100), (30, 1, 9), (1, 2, 40), (12, 1, 230)]
    work = [
        Request(str(i), tuple(range(6, 6 + p)), n=n, seed=i, max_tokens=m)
        for i, (p, n, m) in enumerate(shapes)
    ]
    done = []
    for setting in ("off", "layers"):
        engine = engine_of(small_qwen(), compile=setting, max_batch_size=6)
        before = Compilations.so_far().graphs
        done.append(results(engine, work))
        graphs = [Compilations.so_far().graphs - before]
        done[-1] |= results(engine, [Request("alone", (7, 8, 9), max_tokens=90)])
        graphs.append(Compilations.so_far().graphs - before)
    assert done[0] == done[1] and len(done[0]) == 9
    compiled = engine.network.compiled
    assert compiled is not None and compiled.uses > 0 and graphs == [4, 4]
    uses = compiled.uses
    with engine.network.computing():  # (a pass without a plan)
        engine.model(input_ids=torch.ones(1, 4, dtype=torch.long), use_cache=False)
    assert compiled.uses == uses


def test_trainer_and_sampler_compile_the_layers_of_one_module_apart() -> None:
    model = small_qwen()
    trained = CompiledLayers(model.get_decoder())
    engine = engine_of(model, compile="layers", max_batch_size=2)
    results(engine, [Request("r", (7, 8, 9), max_tokens=9)])
    assert trained.uses == 0
    uses = engine.network.compiled.uses
    positions = torch.arange(4)
    plan = plan_segments([Segment(0, 4)], positions)
    ids = {"input_ids": positions[None], "position_ids": positions[None]}
    model.get_decoder()(**ids, attention_mask=NO_MASK, plan=plan, use_cache=False)
    assert trained.uses == 3 and engine.network.compiled.uses == uses > 0


def test_compiled_steps_are_refused_where_they_are_not_recorded() -> None:
    with pytest.raises(ModelError, match=r"rollout\.engine\.compile=layers: .* on a GPU.*=off"):
        make_engine(small_qwen(), TOKENIZER, LocalEngine(compile="layers"), name="model")
