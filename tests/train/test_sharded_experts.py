"""The load-balancing loss of a mixture on sharded engines gives the gradient of one replica."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Qwen3MoeConfig

from burnish.config.model import ModelConfig, ScratchConfig
from burnish.distributed.process_group import SINGLE
from burnish.models.load import load_tokenizer
from burnish.models.tensor_files import tensor_sets

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("expert_ranks.py")
_SPEC = importlib.util.spec_from_file_location("expert_ranks", SCRIPT)
assert _SPEC is not None and _SPEC.loader is not None
expert_ranks: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["expert_ranks"] = expert_ranks
_SPEC.loader.exec_module(expert_ranks)


def save_mixture(folder: Path, kind: type[Any], **more: Any) -> None:
    tokenizer = load_tokenizer(ModelConfig(scratch=ScratchConfig(alphabet="0123456789+=")))
    torch.manual_seed(5)
    config = kind(
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        head_dim=8,
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **more,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # routers that prefer some experts
        for name, weight in model.named_parameters():
            if name.endswith("gate.weight"):
                weight.mul_(20)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(
    run_together: Callable[..., list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Results of two ranks."""
    folder = tmp_path_factory.mktemp("experts")
    save_mixture(folder / "mixture", Qwen3MoeConfig, num_experts=4)
    save_mixture(folder / "shared", Glm4MoeConfig, n_routed_experts=4, first_k_dense_replace=1)
    arguments = [[str(folder), str(rank), "2"] for rank in range(2)]
    run_together(SCRIPT, arguments, folder, timeout_s=300)
    return folder


def test_sharded_engines_balance_experts_as_a_replica_does(folder: Path) -> None:
    """One step of AdamW with eps 1 and lr 1 moves a weight by g / (|g| + 1), so weights after it
    compare gradients. Five rows on two ranks, one per pass: the second rank computes no row in its
    last pass. Tensor parallelism splits every expert and replicates the router."""
    before = AutoModelForCausalLM.from_pretrained(folder / "mixture").state_dict()
    replica, stats = expert_ranks.step(folder, {}, SINGLE, recompute=False)
    weights = dict(replica.weights())
    routers = [name for name in weights if name.endswith("gate.weight")]
    assert len(routers) == 2
    assert all((weights[name] - before[name]).abs().max() > 1e-3 for name in routers)
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    for name in expert_ranks.ENGINES:
        assert found[0][name] == found[1][name]
        assert found[0][name] == pytest.approx(stats, rel=1e-5)  # fp32 sums
        sharded = load_file(folder / f"{name}.safetensors")
        for key, weight in weights.items():  # fp32: sums in another order
            torch.testing.assert_close(
                sharded[key], weight, rtol=1e-5, atol=2e-6, msg=f"{name} {key}"
            )


TENSOR = [n for n in expert_ranks.ENGINES if n.startswith("tensor") and "recomputed" not in n]


@pytest.mark.parametrize("name", TENSOR)
def test_a_shared_expert_and_dense_layers_train_with_tensor_parallelism(
    name: str, folder: Path
) -> None:
    """GLM-4-MoE: its first layer is dense, and tensor parallelism splits its shared expert as a
    dense MLP."""
    found = load_file(folder / f"shared {name}.safetensors")
    for key, weight in expert_ranks.shared_expert_step(folder, {}, SINGLE).weights():
        torch.testing.assert_close(found[key], weight, rtol=1e-5, atol=2e-6)  # sums, as above


@pytest.mark.parametrize("name", TENSOR)
def test_a_checkpoint_of_split_experts_is_that_of_one_rank(name: str, folder: Path) -> None:
    """Adafactor with equal gradients: weights and means of rows and columns of [4, 32, 32] gate and
    up projections, which ranks split in halves of either."""
    alone = expert_ranks.adafactor(folder, {}, SINGLE)
    kinds = tensor_sets(folder / f"saved {name}")
    for kind, tensors in alone.optimizer.tensors().items():
        assert set(kinds[kind]) == set(tensors)
        for key, expected in tensors.items():  # sums of up to 32 squares in another order
            torch.testing.assert_close(kinds[kind].read(key), expected, rtol=2e-6, atol=1e-7)
    alone.load(folder / f"saved {name}")
    assert alone.version == 1
