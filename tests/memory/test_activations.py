"""What a train step really holds, counted on real tensors, against what fake tensors said."""

import itertools
from dataclasses import replace

import pytest

from burnish.config.model import LoraConfig, ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.train import TrainConfig
from burnish.memory.activations import key_of, measure
from burnish.memory.passes import Pass, Row
from burnish.memory.shapes import shape_of
from burnish.memory.tracking import LiveBytes, num_bytes
from burnish.models.load import load_causal_lm
from burnish.train.torch import EngineSpec, TorchTrainEngine
from burnish.types import Stats, rows_to_batch

TOLERANCE = 0.10  # what was asked for; the largest difference seen is in docs/memory.md


def model(hidden=64, layers=4, **more):
    sizes = {"hidden_size": hidden, "num_layers": layers, "num_heads": 4, "num_kv_heads": 2}
    return ModelConfig(scratch=ScratchConfig(**sizes, max_position_embeddings=4096), **more)


def rows_of(count, length, prompt, group=2):
    """Rows of which every second is one token shorter, so that none are equal in a bucket."""
    return tuple(Row(length - i % 2, prompt, i // group) for i in range(count))


def batch_of(rows):
    tokens = [[10 + r.group % 7] * r.prompt + [9] * (r.length - r.prompt) for r in rows]
    masks = [[False] * r.prompt + [True] * (r.length - r.prompt) for r in rows]
    return rows_to_batch(
        tokens, masks, prompt_lens=[r.prompt for r in rows], group_ids=[r.group for r in rows]
    )


def measured(config, work, passes):
    """Most bytes of a real forward_backward beside weights, masters and moments."""
    train = TrainConfig(
        train_batch_size=1,
        layout=work.layout,
        gradient_checkpointing=work.checkpointing,
        logprob_chunk_tokens=work.chunk_tokens,
    )
    precision = PrecisionConfig(dtype=work.dtype, grad_accum_dtype=work.grad_accum_dtype)
    spec = EngineSpec("policy", train, config, micro_batch_size=len(work.rows), precision=precision)
    engine = TorchTrainEngine(load_causal_lm(config, dtype="fp32"), replace(spec, temperature=0.5))
    batch = batch_of(work.rows * passes)
    own = [*engine.model.parameters(), *engine.model.buffers(), *engine.optimizer.masters]
    with LiveBytes() as live:
        live.hold(own)
        base = num_bytes(own)
        assert live.now == base
        engine.forward_backward(
            batch, lambda o, b: ((o.logprobs.exp().sum() + o.entropy.sum()), Stats())
        )
    return live.peak - base


GRID = [
    *(
        dict(hidden=h, layers=n, count=c, length=t, checkpointing=k, layout=layout)
        for (h, n, c, t), k, layout in itertools.product(
            [(64, 4, 4, 128), (128, 8, 2, 256), (32, 12, 8, 64), (64, 6, 1, 600)],
            [False, True],
            ["packed", "padded", "shared_prefix"],
        )
    ),
    dict(hidden=64, layers=6, count=4, length=128, dtype="bf16"),
    dict(hidden=64, layers=6, count=4, length=128, dtype="bf16", checkpointing=True),
    dict(hidden=64, layers=6, count=4, length=128, dtype="fp16"),
    dict(hidden=64, layers=6, count=4, length=128, dtype="bf16", grad_accum_dtype="bf16"),
    dict(hidden=64, layers=6, count=4, length=128, passes=2),
    dict(hidden=64, layers=6, count=4, length=128, passes=2, dtype="bf16", checkpointing=True),
    dict(hidden=64, layers=6, count=4, length=128, chunk_tokens=64),
    dict(hidden=64, layers=6, count=4, length=128, lora=LoraConfig(lora_rank=8)),
    dict(
        hidden=64, layers=6, count=4, length=128, lora=LoraConfig(lora_rank=8), checkpointing=True
    ),
]


def case(hidden, layers, count, length, passes=1, **more):
    lora = more.get("lora")
    work = Pass(
        rows=rows_of(count, length, length // 2),
        with_entropy=True,
        accumulates=passes > 1,
        **more,
    )
    return model(hidden, layers, lora=lora), work, passes


@pytest.mark.parametrize(
    "settings", GRID, ids=lambda s: " ".join(f"{k}={v}" for k, v in s.items() if k != "lora")
)
def test_a_real_pass_holds_what_was_predicted_within_a_tenth(settings):
    config, work, passes = case(**settings)
    predicted = measure(key_of(shape_of(config)), work).peak
    real = measured(config, work, passes)
    assert predicted == pytest.approx(real, rel=TOLERANCE), f"{predicted / real:.3f}"
