"""Peak memory of a train step: counted on real tensors and predicted from fake ones."""

import itertools
import logging
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import CONFIG_MAPPING

from burnish.config.model import LoraConfig, ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.fused_head import BY_TORCH, FusedHead, HeadKernels
from burnish.models.load import load_causal_lm
from burnish.models.sdpa import Kernels
from burnish.plan.activations import Pass, _trace, fake_plan, key_of, measure
from burnish.plan.model_state import EngineSetup
from burnish.plan.role_base import by_formula
from burnish.plan.shapes import shape_from_config, shape_of
from burnish.plan.tracking import LiveBytes, num_bytes
from burnish.train.batching import arrange
from burnish.train.row_layout import RowSize
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Stats, rows_to_batch

A100 = Kernels((2, 13), (8, 0))
TOLERANCE = 0.10  # what was asked for; the largest difference seen is in docs/memory.md


def model(hidden=64, layers=4, *, tied=True, **more):
    sizes = {"hidden_size": hidden, "num_layers": layers, "num_heads": 4, "num_kv_heads": 2}
    sizes |= {"max_position_embeddings": 4096, "tie_word_embeddings": tied}
    return ModelConfig(scratch=ScratchConfig(**sizes), **more)


def rows_of(count, length, prompt, group=2):
    """Rows of which every second is one token shorter, so that none are equal in a bucket."""
    return tuple(RowSize(length - i % 2, prompt, i // group) for i in range(count))


def batch_of(rows):
    tokens = [[10 + r.group % 7] * r.prompt + [9] * (r.length - r.prompt) for r in rows]
    masks = [[False] * r.prompt + [True] * (r.length - r.prompt) for r in rows]
    return rows_to_batch(
        tokens, masks, prompt_lens=[r.prompt for r in rows], group_ids=[r.group for r in rows]
    )


def unseen(call):
    """Run kernels without their intermediate tensors, of which Triton's have none."""

    def wrapper(*args):
        with _disable_current_modes():
            call(*args)

    return wrapper


UNSEEN = HeadKernels(unseen(BY_TORCH.reduce), unseen(BY_TORCH.backward_), lambda *_: None)


def measured(config, work, passes):
    """Return the peak bytes of a real forward_backward, excluding weights, masters and moments."""
    train = TrainConfig(
        train_batch_size=1,
        layout=work.layout,
        gradient_checkpointing=work.checkpointing,
        logprob_chunk_tokens=work.chunk_tokens,
    )
    precision = PrecisionConfig(dtype=work.dtype, grad_accum_dtype=work.grad_accum_dtype)
    spec = EngineSpec(
        TrainRole.alone("policy", train, config, precision=precision),
        micro_batch_size=len(work.rows),
    )
    engine = TorchTrainEngine(load_causal_lm(config, dtype="fp32"), replace(spec, temperature=0.5))
    if work.fused_chunk_tokens is not None:
        engine.forward.fused_head = FusedHead(UNSEEN, work.fused_chunk_tokens)
    batch = batch_of(work.rows * passes)
    if work.kept_ids:
        own_ids = torch.full((batch.tokens.numel(), work.kept_ids), -1, dtype=torch.int32)
        own_ids[:, 0] = batch.tokens
        batch = replace(batch, kept_ids=own_ids)
    own = [*engine.model.parameters(), *engine.model.buffers(), *engine.optimizer.masters]
    with LiveBytes() as live:
        live.hold(own)
        base = num_bytes(own)
        assert live.now == base
        engine.forward_backward(
            batch,
            lambda o, b: (
                o.logprobs.exp().sum() + (o.entropy.sum() if work.entropy_gradient else 0.0),
                Stats(),
            ),
        )
    return live.peak - base


LAYOUTS = ("packed", "padded", "shared_prefix")
GRID = [
    *(
        dict(hidden=h, layers=n, count=c, length=t, checkpointing=k, layout=LAYOUTS[(i + j) % 3])
        for (i, (h, n, c, t)), (j, k) in itertools.product(
            enumerate([(64, 4, 4, 128), (128, 8, 2, 256), (32, 12, 8, 64), (64, 6, 1, 600)]),
            enumerate([False, True, "selective"]),
        )
    ),
    dict(hidden=64, layers=4, count=4, length=128, dtype="bf16", checkpointing="selective"),
    dict(hidden=64, layers=4, count=4, length=128, passes=2, checkpointing="selective"),
    dict(
        hidden=64,
        layers=6,
        count=4,
        length=128,
        lora=LoraConfig(lora_rank=8),
        checkpointing="selective",
    ),
    dict(hidden=64, layers=4, count=4, length=128, dtype="bf16"),
    dict(hidden=64, layers=4, count=4, length=128, dtype="bf16", checkpointing=True),
    dict(hidden=64, layers=4, count=4, length=128, dtype="fp16"),
    dict(hidden=64, layers=4, count=4, length=128, dtype="bf16", grad_accum_dtype="bf16"),
    dict(hidden=64, layers=4, count=4, length=128, passes=2),
    dict(hidden=64, layers=4, count=4, length=128, passes=2, dtype="bf16", checkpointing=True),
    dict(hidden=64, layers=4, count=4, length=128, chunk_tokens=64),
    dict(hidden=64, layers=4, count=4, length=128, chunk_tokens=64, entropy_gradient=False),
    dict(hidden=64, layers=2, count=2, length=128, dtype="bf16", entropy_gradient=False),
    dict(hidden=64, layers=4, count=4, length=128, kept_ids=800, chunk_tokens=64),
    *(
        dict(hidden=64, layers=4, count=4, length=128, fused_chunk_tokens=chunk, **more)
        for chunk in (32, 512)
        for more in ({}, {"dtype": "bf16"}, {"kept_ids": 800, "chunk_tokens": 64})
    ),
    dict(hidden=64, layers=4, count=4, length=128, lora=LoraConfig(lora_rank=8)),
    dict(
        hidden=64, layers=4, count=4, length=128, lora=LoraConfig(lora_rank=8), checkpointing=True
    ),
    *(
        dict(hidden=64, layers=4, count=2, length=128, lora=LoraConfig(lora_rank=8, **form))
        for form in (
            {"quantization": "nf4"},  # a pass saves codes and not the dequantized matrices
            {"quantization": "nf4", "use_dora": True},
            {"quantization": "nf4", "modules_to_save": ["embed_tokens", "lm_head"]},
            {"target_modules": ["q_proj", "lm_head"]},
        )
    ),
]
"""Every pair of a size, a kind of checkpointing and a layout; and other options."""


def case(hidden, layers, count, length, passes=1, **more):
    lora = more.get("lora")
    work = Pass(
        rows=rows_of(count, length, length // 2),
        with_entropy=True,
        accumulates=passes > 1,
        **{"entropy_gradient": True} | more,
    )
    tied = lora is None or not (lora.modules_to_save or "lm_head" in lora.target_modules)
    return model(hidden, layers, tied=tied, lora=lora), work, passes


@pytest.mark.parametrize(
    "settings", GRID, ids=lambda s: " ".join(f"{k}={v}" for k, v in s.items() if k != "lora")
)
def test_measured_peak_of_a_pass_is_within_10_percent_of_the_prediction(settings):
    config, work, passes = case(**settings)
    predicted = measure(key_of(shape_of(config)), work).peak
    real = measured(config, work, passes)
    assert predicted == pytest.approx(real, rel=TOLERANCE), f"{predicted / real:.3f}"


def with_layers(path, count):
    """Return the shape of a real model with another number of layers."""
    shape = shape_of(ModelConfig(path=path))
    deep = {"num_hidden_layers": count, "layer_types": None}
    config = type(shape.config)(**{**shape.config.to_dict(), **deep})
    return shape_from_config(config, f"{path} with {count} layers", "here")


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
@pytest.mark.parametrize(
    ("name", "layers"),
    [("HuggingFaceTB/SmolLM2-135M", 6), ("google/gemma-3-270m", 12), ("Qwen/Qwen3-0.6B", 6)],
)
def test_extrapolation_from_two_depths_equals_the_full_trace(name, layers, checkpointing):
    """Every layer of real widths traced, against the line through two depths (three for the two
    kinds of layers of Gemma, of which every sixth is the second): equal but for 0.1%, single
    tensors that are freed a moment earlier."""
    shape = with_layers(name, layers)
    work = Pass(rows_of(2, 600, 300), dtype="bf16", checkpointing=checkpointing, accumulates=True)
    whole = _trace(shape, len(shape.layers), None, work)
    assert measure(key_of(shape), work).peak == pytest.approx(whole.peak, rel=1e-3)


def test_checkpointing_adds_one_hidden_state_per_layer():
    """28 layers more keep 28 x 2048 tokens x 3584 x 2 B = 411 MB more, and nothing else."""
    work = Pass(rows_of(1, 2048, 1024), dtype="bf16", checkpointing=True, kernels=A100)
    shapes = (with_layers("Qwen/Qwen2.5-7B", count) for count in (28, 56))
    few, many = (measure(key_of(shape), work).other["forward"] for shape in shapes)
    assert many - few == 28 * 2048 * 3584 * 2


def test_selective_checkpointing_adds_products_and_attention_per_layer():
    """28 layers more of Qwen2.5-7B (width 3584, 28 heads and 4 key/value heads of 128, inner width
    18944) keep, in bf16 for each of 2048 tokens: the layer's input, queries, keys and values,
    attention, its projection, two inner products and their projection: 3584 + 3584 + 2 x 512 +
    3584 + 3584 + 2 x 18944 + 3584 = 56832 numbers; and 28 log-sum-exps in fp32."""
    work = Pass(
        rows_of(1, 2048, 1024), dtype="bf16", checkpointing="selective", kernels=A100, flash=True
    )
    shapes = (with_layers("Qwen/Qwen2.5-7B", count) for count in (28, 56))
    few, many = (measure(key_of(shape), work) for shape in shapes)
    saved = many.other["forward"] - few.other["forward"]
    assert saved == 28 * 2048 * (56832 * 2 + 28 * 4)
    by_sizes = by_formula(
        EngineSetup(
            shape=with_layers("Qwen/Qwen2.5-7B", 28),
            train=TrainConfig(),
            precision=PrecisionConfig(dtype="bf16"),
            ranks=1,
            trainable=True,
        ),
        work,
    )
    assert by_sizes.activations == pytest.approx(few.activations, rel=TOLERANCE)


def test_selective_checkpointing_plans_no_product_twice():
    """Bytes and kernels are between those of the two other modes, for the norms and the rest."""
    shape = with_layers("Qwen/Qwen3-0.6B", 6)
    works = [
        measure(
            key_of(shape), Pass(rows_of(2, 600, 300), dtype="bf16", checkpointing=mode)
        ).work.body
        for mode in (False, "selective", True)
    ]
    plain, selective, full = works
    assert selective.matmul_flops == plain.matmul_flops < full.matmul_flops
    assert plain.bytes < selective.bytes < full.bytes
    assert plain.kernels < selective.kernels < full.kernels


def test_buckets_are_those_of_the_attention_plan():
    generator = torch.Generator().manual_seed(3)
    for layout in ("packed", "shared_prefix"):
        for _ in range(20):
            count = int(torch.randint(1, 9, (1,), generator=generator))
            prompts = torch.randint(1, 30, (count,), generator=generator).tolist()
            rows = tuple(
                RowSize(
                    prompts[i // 3] + int(torch.randint(1, 40, (1,), generator=generator)),
                    prompts[i // 3],
                    i // 3,
                )
                for i in range(count)
            )
            work = Pass(rows, layout=layout)
            arranged, planned = arrange(batch_of(rows), layout), fake_plan(work)
            assert arranged.input_ids.numel() == work.tokens
            real, sizes = (
                [(*b.q_index.shape, b.k_index.shape[1], b.plain) for b in plan.buckets]
                for plan in (arranged.plan, planned)
            )
            assert real == sizes and arranged.plan.longest == planned.longest


def test_one_mask_is_planned_for_all_layers():
    """Rows of 300 and 299 tokens: a mask of 2 x 300 x 304 numbers in bf16, 365 kB, made in the
    first layer and read by all. Of a copy for each layer, 4 layers more would keep 4 more."""
    rows = rows_of(2, 300, 150)
    equal, newer = tuple(replace(row, length=300) for row in rows), Kernels((2, 14), (8, 0))
    few, many = (
        [
            measure(key_of(shape_of(model(64, layers))), Pass(r, dtype="bf16", kernels=newer))
            for r in (rows, equal)
        ]
        for layers in (4, 8)
    )
    masked, plain = (
        a.other["forward"] - b.other["forward"] for a, b in zip(many, few, strict=True)
    )
    assert masked - plain <= 0  # one token less


@pytest.mark.parametrize("layout", ["packed", "shared_prefix"])
@pytest.mark.parametrize("train", [False, True])
def test_no_mask_and_no_copies_of_keys_are_planned_with_flash(train, layout):
    """What a layer keeps for backward is query, key, value, output and log-sum-exp: with rows of
    600 and 599 tokens less than without, by the masks (of the longest row at least 600 x 608
    numbers, made once), and in each layer by the gathered and repeated keys and values."""
    rows = rows_of(2, 600, 300)
    few, many = (
        [
            measure(
                key_of(shape_of(model(64, layers))),
                Pass(rows, layout, dtype="bf16", kernels=A100, train=train, flash=flash),
            ).other["forward"]
            for flash in (False, True)
        ]
        for layers in (4, 8)
    )
    assert few[0] - few[1] > 600 * 304 * 2
    if train:  # keys and values of 600 tokens and more, repeated for 4 heads of 16, are saved
        per_layer = ((many[0] - few[0]) - (many[1] - few[1])) / 4
        assert per_layer > 2 * 600 * 4 * 16 * 2


def test_attention_scores_are_counted_if_no_fused_kernel_supports_the_dtype():
    """bf16 before compute capability 8.0: [2, 4, 300, 300] scores in fp32 are 2.9 MB a layer, kept
    for backward with their softmax."""
    shape, rows = shape_of(model(64, 4)), rows_of(2, 300, 150)
    fused, scores = (
        measure(key_of(shape), Pass(rows, dtype="bf16", kernels=kernels)).other["forward"]
        for kernels in (A100, Kernels((2, 13), (7, 0)))
    )
    assert scores - fused > 4 * 2 * 4 * 300 * 300 * 4


def test_the_counter_subtracts_freed_tensors():
    """1000 x 1000 fp32 are 4e6 bytes: a product of two, one of which goes, then a view."""
    x = torch.randn(1000, 1000)
    with LiveBytes() as live:
        y = x * 2
        z = y.view(-1)
        assert live.now == 4_000_000
        del y
        assert live.now == 4_000_000
        del z
        assert live.now == 0
    assert live.peak == 4_000_000


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_mixture_is_traced_without_a_traceback(dtype, caplog):
    """PyTorch logs one if an operator has no fake form, also if the error is caught."""
    config = CONFIG_MAPPING["qwen3_moe"](
        hidden_size=32, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, vocab_size=64
    )
    work = Pass(rows_of(2, 16, 8), dtype=dtype, checkpointing=False, accumulates=True)
    for name in ("torch._subclasses.fake_tensor", "torch"):
        logging.getLogger(name).propagate = True
    assert _trace(shape_from_config(config, name="small", source="config"), 2, None, work).peak > 0
    assert not caplog.records
