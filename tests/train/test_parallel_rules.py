"""Unsupported combinations for ranks that compute the same rows: refused before a run starts, with
names and numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from burnish.config import SFTConfig
from burnish.config.model import ModelConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.config.train_engines import TorchEngine
from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.models.load import ModelError, load_causal_lm
from burnish.models.tensor_parallel import layer_styles, shard_layers
from burnish.train.batching import arrange
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.train.torch.sequence_parallel import check_sequence_parallel, local_shard
from burnish.types import rows_to_batch

MODEL = ModelConfig(scratch=ScratchConfig(hidden_size=48, num_heads=6, num_kv_heads=3))


class Group:
    """A process group of which only the place is asked."""

    def __init__(self, rank: int, size: int) -> None:
        self._place = rank, size

    def rank(self) -> int:
        return self._place[0]

    def size(self) -> int:
        return self._place[1]


def recipe(ranks: int, batch: int, **engine: Any) -> SFTConfig:
    return SFTConfig.model_validate(
        {
            "model": {"scratch": {}},
            "data": {"sources": [{"path": "x.jsonl"}]},
            "train": {"train_batch_size": batch, "engine": engine},
            "cluster": {"runtime": "ray", "policy_ranks": ranks},
        }
    )


def test_a_rank_count_that_is_not_a_multiple_is_refused_in_the_recipe() -> None:
    with pytest.raises(
        ValueError,
        match=r"sequence_parallel_size=2 does not divide cluster.policy_"
        r"ranks=3, .*use a multiple of 2",
    ):
        recipe(3, 12, sequence_parallel_size=2)


def test_a_model_parallel_group_counts_as_one_data_parallel_rank() -> None:
    """B = 6 over 6 ranks in teams of 3 is 2 data-parallel ranks of 3 samples; over 6 it is 1."""
    plan = recipe(6, 6, sequence_parallel_size=3).batch_plan()
    assert (plan.data_parallel_size, plan.micro_train_batch_size) == (2, 3)
    assert recipe(6, 6).batch_plan().micro_train_batch_size == 1


def test_an_engine_with_incomplete_rank_groups_is_refused() -> None:
    spec = EngineSpec(
        TrainRole.alone("policy", TrainConfig(engine=TorchEngine(sequence_parallel_size=2)), MODEL)
    )
    with pytest.raises(ValueError, match=r"size=2: 2 ranks .* \(1\) must be a multiple of 2"):
        TorchTrainEngine(load_causal_lm(MODEL), spec, ranks=SINGLE)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (
            "llama",
            {"hidden_size": 48, "num_attention_heads": 6},
            "size=4",
        ),
        (
            "qwen3_next",
            {"num_attention_heads": 8},
            "linear_attention",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "embedding",
        ),
    ],
)
def test_a_model_without_sequence_parallel_support_is_refused(
    kind: str, values: dict[str, Any], message: str
) -> None:
    config = AutoConfig.for_model(kind, **values)
    with pytest.raises(ModelError, match=message):
        check_sequence_parallel(config, 4)


def test_heads_divisible_by_the_parallel_size_are_accepted() -> None:
    for heads, kv in ((8, 8), (8, 2), (8, 1), (12, 3)):
        config = AutoConfig.for_model(
            "llama", hidden_size=96, num_attention_heads=heads, num_key_value_heads=kv
        )
        check_sequence_parallel(config, 4)


def body_of(kind: str, **values: Any) -> Any:
    sizes = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(kind, **{**sizes, **heads, **values})
    return AutoModelForCausalLM.from_config(config).get_decoder()


@pytest.mark.parametrize(
    ("kind", "values", "size", "message"),
    [
        ("llama", {}, 3, r"\(num_attention_heads\)"),
        ("llama", {}, 4, r"\(num_key_value_heads\)"),
        ("llama", {"intermediate_size": 25}, 2, "layers.0.mlp.gate_proj.weight"),
        (
            "mixtral",
            {"intermediate_size": 25},
            2,
            "layers.0.mlp.experts.gate_up_pr",
        ),
        ("llama", {"attention_bias": True}, 2, "layers.0.self_attn.o_proj.bias"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_refused(
    kind: str, values: dict[str, Any], size: int, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        shard_layers(body_of(kind, **values), Group(0, size))  # type: ignore[arg-type]


def test_a_model_without_a_plan_is_refused() -> None:
    body = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "opt",
            vocab_size=11,
            hidden_size=16,
            ffn_dim=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            word_embed_proj_dim=16,
        )
    ).get_decoder()
    with pytest.raises(ModelError, match=r"no tensor-parallel plan for this opt model"):
        layer_styles(body)


def test_an_incomplete_or_unsupported_plan_is_refused() -> None:
    body = body_of("qwen3", head_dim=4)
    plan = dict(body.config.base_model_tp_plan)
    body.config.base_model_tp_plan = {k: v for k, v in plan.items() if "q_norm" not in k}
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_norm"):
        layer_styles(body)
    body.config.base_model_tp_plan = {**plan, "layers.*.mlp.gate_proj": "packed_colwise"}
    with pytest.raises(ModelError, match=r"layers.\*.mlp.gate_proj"):
        layer_styles(body)
    body = body_of("mixtral", num_local_experts=2)
    assert layer_styles(body)["layers.0.mlp.experts"] == "moe_tp_experts"
    plan = dict(body.config.base_model_tp_plan)
    body.config.base_model_tp_plan = {**plan, "layers.*.mlp.experts.down_proj": "colwise"}
    with pytest.raises(ModelError, match=r"layers.\*.mlp.experts.gate_up_proj"):
        layer_styles(body)


def test_sequence_and_tensor_parallelism_cannot_be_combined() -> None:
    both = {"sequence_parallel_size": 2, "tensor_parallel_size": 2}
    with pytest.raises(ValueError, match="combination"):
        recipe(4, 4, **both)
    spec = EngineSpec(TrainRole.alone("policy", TrainConfig(engine=TorchEngine(**both)), MODEL))
    with pytest.raises(ValueError, match="combination"):
        TorchTrainEngine(load_causal_lm(MODEL), spec, ranks=SINGLE)
    with pytest.raises(ValueError, match="tensor_parallel_size=2"):
        recipe(3, 12, tensor_parallel_size=2)


@pytest.mark.parametrize("layout", ["packed", "shared_prefix", "padded"])
def test_concatenated_local_shards_equal_the_row(layout: Any) -> None:
    """Rows of 3 and 2 tokens over 4 ranks: 5 tokens (6 when padded) in stretches of 2; the last
    rank has padding only (when padded: too)."""
    batch = rows_to_batch(
        [[7, 8, 9], [5, 6]], [[False, True, True], [False, True]], prompt_lens=[1, 1]
    )
    arranged = arrange(batch, layout)
    parts = [local_shard(arranged, RankGroup(Group(r, 4))) for r in range(4)]  # type: ignore[arg-type]
    assert [p.begin for p in parts] == [0, 2, 4, 6]
    ids = torch.cat([p.input_ids for p in parts], dim=1)[0]
    at = torch.cat([p.position_ids for p in parts], dim=1)[0]
    count = 6 if layout == "padded" else 5
    assert all(p.plan.num_tokens == count for p in parts)
    assert ids[:count].tolist() == arranged.input_ids.flatten().tolist() and not ids[count:].any()
    assert at[:count].tolist() == arranged.position_ids.flatten().tolist()
    assert ids[arranged.flat_index].tolist() == batch.tokens.tolist()
