"""Bytes per parameter of every engine, worked out by hand."""

from dataclasses import replace

import pytest

from burnish.config.model import LoraConfig, ModelConfig, Nf4Config, PrecisionConfig, ScratchConfig
from burnish.config.train import TrainConfig
from burnish.models.load import load_causal_lm
from burnish.models.value_head import load_scalar_model
from burnish.plan.engine_profile import profile_of
from burnish.plan.model_state import EngineSetup, checkpoint_bytes, state_bytes, total
from burnish.plan.shapes import PlanError, known_models, shape_from_config, shape_of

SCRATCH = ModelConfig(scratch=ScratchConfig(hidden_size=64, num_layers=3))
FP32 = PrecisionConfig(dtype="fp32")
LLAMA_8B, LLAMA_70B = 8_030_261_248, 70_553_706_496


def setup(dtype="bf16", ranks=1, sums="fp32", path="meta-llama/Meta-Llama-3-8B", **train):
    engine = train.pop("engine", {"kind": "torch"})
    trainable = train.pop("trainable", True)
    return EngineSetup(
        shape=shape_of(ModelConfig(path=path)),
        train=TrainConfig(train_batch_size=8, engine=engine, **train),
        precision=PrecisionConfig(dtype=dtype, grad_accum_dtype=sums),
        ranks=ranks,
        trainable=trainable,
    )


def per_parameter(s, where="device"):
    """Bytes per parameter of what is there for good and of the gradients in the step, buckets left
    out."""
    profile = profile_of(s)
    items = [*profile.state(), *profile.gradients_in_step()]
    return total((i for i in items if i.name != "communication"), where) / s.shape.parameters


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", LLAMA_8B),
        ("meta-llama/Meta-Llama-3-70B", LLAMA_70B),
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen2.5-14B", 14_770_033_664),
        ("Qwen/Qwen2.5-32B", 32_763_876_352),
        ("Qwen/Qwen2.5-72B-Instruct", 72_706_203_648),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("google/gemma-3-270m-it", 268_098_176),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008),
    ],
)
def test_parameter_counts_match_the_model_cards(name, count):
    assert shape_of(ModelConfig(path=name)).parameters == count


def test_every_model_in_the_table_can_be_built():
    for name, entry in known_models().items():
        least = 1e8 if "source" in entry else 1e5  # models of the hub, and of shipped recipes
        assert shape_of(ModelConfig(path=f"owner/{name}")).parameters > least


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize(
    ("lora", "trained"),
    [
        # 7 projections of 3 layers: 4 x (64 + 64), 2 x 4 x (64 + 32), 4 x (64 + 64), MLP 3 x 4 x
        # (64 + 256)
        (LoraConfig(lora_rank=4), 3 * 4 * (2 * 128 + 2 * 96 + 3 * 320)),
        (LoraConfig(lora_rank=4, target_modules=("o_proj", "lm_head")), None),
        (LoraConfig(lora_rank=4, target_modules=r".*[.]1[.].*q_proj", use_dora=True), 4 * 128 + 64),
        (LoraConfig(target_modules=("q_proj",), modules_to_save=("embed_tokens", "norm")), None),
    ],
)
def test_shape_counts_what_lora_trains(lora, trained, scalar):
    """Adapters, saved modules and the head of a reward model, and the copies that stay frozen."""
    scratch = ScratchConfig(hidden_size=64, num_layers=3, tie_word_embeddings=False)
    config = ModelConfig(scratch=scratch, lora=lora)
    model = load_scalar_model(config, new_head="zero") if scalar else load_causal_lm(config)
    shape = shape_of(config, scalar=scalar)
    assert shape.parameters + shape.adapters == sum(p.numel() for p in model.parameters())
    assert shape.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained is None or shape.trained == trained + 64 * scalar


@pytest.mark.parametrize(
    ("lora", "rule"),
    [
        ({"target_modules": ["q_prof"]}, "target_modules.*matches no module"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save.*are tied"),
    ],
)
def test_adapters_that_a_run_refuses_have_no_plan(lora, rule):
    with pytest.raises(PlanError, match=rule):
        shape_of(SCRATCH.model_copy(update={"lora": LoraConfig(**lora)}))


@pytest.mark.parametrize("outputs", [1, 5])
def test_a_scalar_model_has_the_head_of_its_outputs(outputs):
    shape = shape_of(SCRATCH, scalar=True, outputs=outputs)
    model = load_scalar_model(SCRATCH, new_head="random", num_outputs=outputs)
    assert shape.parameters == sum(p.numel() for p in model.parameters())


def test_units_match_fsdp_gathers():
    """Llama-3-8B: 32 layers of 218,112,000; embedding and head 128256 x 4096 each, and a norm."""
    shape = shape_of(ModelConfig(path="meta-llama/Meta-Llama-3-8B"))
    assert [u.numel for u in shape.layers] == [218_112_000] * 32
    rest = {u.kind: u.numel for u in shape.units if u.kind != "layer"}
    assert rest == {"embedding": 525_336_576, "rest": 525_336_576 + 4096}


def test_the_torch_engine_takes_16_bytes_per_parameter_in_fp32_and_18_in_half():
    """fp32: 4 weight + 4 gradient + 8 moments. bf16: 2 + 4 master + 4 sum + 8."""
    assert per_parameter(setup("fp32")) == 16
    assert per_parameter(setup("bf16")) == 18
    assert per_parameter(setup("bf16", ema_decay=0.9)) == 22


def test_sharding_divides_all_16_bytes_by_the_ranks():
    full = {"kind": "torch", "sharding": "full"}
    assert per_parameter(setup("bf16", ranks=8, engine=full)) == pytest.approx(2)
    offload = {**full, "cpu_offload": True}
    assert per_parameter(setup("bf16", ranks=8, engine=offload)) == 0
    assert per_parameter(setup("bf16", ranks=8, engine=offload), "host") == pytest.approx(2)


@pytest.mark.parametrize(
    ("stage", "options", "device", "host"),
    [
        # 2 weights + (4 masters + 8 moments + 4 of the step) / 8 + 4 sums, replicated
        (1, {}, 2 + 16 / 8 + 4, 0),
        # ... sums in shards too
        (2, {}, 2 + 20 / 8, 0),
        # ... weights in shards too: (2 + 4 + 4 + 8) / 8, and 4 of the step for 1e9 at a time
        (3, {}, 18 / 8 + 4e9 / LLAMA_8B, 0),
        # masters, moments, sums and the gradient of the step on the host
        (3, {"adam_offload": True}, 2 / 8, 20 / 8),
        (3, {"adam_offload": True, "param_offload": True}, 0, 22 / 8),
        (2, {"adam_offload": True}, 2, 20 / 8),
    ],
)
def test_deepspeed_divides_by_stage(stage, options, device, host):
    s = setup(ranks=8, engine={"kind": "deepspeed", "zero_stage": stage, **options})
    small = 0.0002  # norms, which stage 3 replicates: 65 x 4096 x 2 B of 8.03e9 parameters
    assert per_parameter(s) == pytest.approx(device, abs=small)
    assert per_parameter(s, "host") == pytest.approx(host)


def test_hpz_adds_a_second_shard_within_the_node():
    """2 B / 8 more than without hpZ, over groups of 8 of 32 ranks."""
    plain = setup(ranks=32, engine={"kind": "deepspeed", "zero_stage": 3})
    more = setup(
        ranks=32, engine={"kind": "deepspeed", "zero_stage": 3, "zero_hpz_partition_size": 8}
    )
    assert per_parameter(more) - per_parameter(plain) == pytest.approx(2 / 8)


def test_lora_trains_the_adapters_only():
    """7.6e9 frozen x 2 B, and 18 B for each adapter entry."""
    s = EngineSetup(
        shape=shape_of(ModelConfig(path="Qwen/Qwen2.5-7B", lora=LoraConfig(lora_rank=64))),
        train=TrainConfig(train_batch_size=1),
        precision=PrecisionConfig(dtype="bf16"),
    )
    assert s.trained == s.shape.adapters == 161_480_704
    bytes_ = total([*profile_of(s).state(), *profile_of(s).gradients_in_step()])
    assert bytes_ == 7_615_616_512 * 2 + 161_480_704 * 18


@pytest.mark.parametrize(("ema", "size"), [(None, 12), (0.99, 16)])
def test_background_checkpoint_adds_a_host_copy(ema, size):
    """Masters, two moments and the moving average, 4 B each, of this rank's part."""
    plain = setup(ranks=8, engine={"kind": "torch", "sharding": "full"}, ema_decay=ema)
    copied = replace(plain, saves_in_background=True)
    assert per_parameter(copied) == per_parameter(plain)
    assert per_parameter(plain, "host") == 0
    assert per_parameter(copied, "host") == pytest.approx(size / 8)
    assert per_parameter(replace(copied, trainable=False), "host") == 0


def test_a_frozen_model_has_weights_only():
    assert per_parameter(setup(trainable=False)) == 2
    s = setup(trainable=False, ranks=32, engine={"kind": "deepspeed", "zero_stage": 3})
    assert per_parameter(s) == pytest.approx(2 / 32, abs=0.0002)


def test_fsdp_gathers_are_independent_of_depth():
    """M4: two layers, and the ends."""
    short = shape_of(ModelConfig(path="Qwen/Qwen2.5-7B"))
    config = type(short.config)(
        **{**short.config.to_dict(), "num_hidden_layers": 56, "layer_types": None}
    )
    sizes = []
    for shape in (short, shape_from_config(config, "twice as deep", "here")):
        s = setup(ranks=8, engine={"kind": "torch", "sharding": "full"})
        sizes.append(total(profile_of(replace(s, shape=shape)).gathered()))
    assert sizes[0] == sizes[1]


def test_checkpoint_is_12_bytes_per_trained_parameter_for_any_number_of_ranks():
    s = setup(ranks=32, engine={"kind": "deepspeed", "zero_stage": 3})
    assert checkpoint_bytes(s) == 12 * LLAMA_8B
    assert checkpoint_bytes(setup(ema_decay=0.9)) == 16 * LLAMA_8B


@pytest.mark.parametrize("double", [True, False])
def test_nf4_weights_count_their_codes_and_scales(double):
    """Within 10% of the loaded model: every parameter and buffer but rotary frequencies."""
    scratch = ScratchConfig(hidden_size=128, num_layers=2)
    lora = LoraConfig(lora_rank=4, quantization=Nf4Config(double=double))
    config = ModelConfig(scratch=scratch, lora=lora)
    model = load_causal_lm(config)
    tensors = [*model.parameters()]
    tensors += [b for n, b in model.named_buffers() if "scale" in n or "levels" in n]
    setup = EngineSetup(
        shape=shape_of(config), train=TrainConfig(train_batch_size=1), precision=PrecisionConfig()
    )
    items = profile_of(setup).state()
    planned = sum(item.bytes for item in items if item.name == "parameters")
    assert planned == pytest.approx(sum(t.nbytes for t in tensors), rel=1e-3)


def test_parameters_that_muon_leaves_to_adamw_have_two_moments():
    """The MLP of a layer has three matrices of 64 x 256 entries, each with 4 more bytes."""
    found = []
    for params in ([], ["mlp"], ["proj"]):
        optimizer = {"kind": "muon", "adamw_params": params}
        train = TrainConfig(train_batch_size=8, optimizer=optimizer)
        shape = shape_of(SCRATCH)
        found.append(state_bytes(EngineSetup(shape=shape, train=train, precision=FP32)))
    assert found[1] - found[0] == 3 * 3 * 64 * 256 * 4
    assert found[2] == 8 * shape_of(SCRATCH).parameters


def test_zero_divides_the_momentum_of_muon():
    """Stage 2 on 8 ranks: 8 B / 8 of Adam's moments without the 4 B / 8 of each matrix of the
    layers. Stage 0 has all of it. A step gathers the largest matrix, 14336 x 4096, at 12 B."""
    matrices = LLAMA_8B - 2 * 128_256 * 4096 - 65 * 4096
    for stage, ranks in ((0, 1), (2, 8), (3, 8)):
        engine = {"kind": "deepspeed", "zero_stage": stage}
        s = setup("fp32", ranks=8, engine=engine, optimizer="muon")
        (moments,) = [i for i in profile_of(s).state() if i.how.startswith("moments")]
        assert moments.bytes == (8 * LLAMA_8B - 4 * matrices) / ranks
        assert profile_of(s).gradients_in_step()[-1].bytes == 14_336 * 4096 * 12


def test_8_bit_moments_are_divided_between_blocks_of_256_entries():
    """Llama 3 8B: all weights but the embedding (128256 x 4096) and 65 norms at 2 + 8 / 256 bytes,
    those at 8. Its rows of 4096 entries are multiples of 256 on any number of ranks. Of 64 x 64
    entries, 3 ranks have 22, 22 and 20 rows: 1408 entries are 5.5 blocks."""
    sharded = {"engine": {"sharding": "full"}, "optimizer": "adamw_8bit"}
    s = setup(ranks=8, **sharded)
    small = 128_256 * 4096 + 65 * 4096
    moments = sum(i.bytes for i in profile_of(s).state() if i.name == "optimizer")
    assert moments == ((LLAMA_8B - small) * (2 + 8 / 256) + small * 8) / 8
    assert profile_of(setup(ranks=3, **sharded)).state()
    narrow = replace(s, shape=shape_of(SCRATCH), ranks=3)
    with pytest.raises(PlanError, match=r"q_proj.weight \[64, 64\] cannot be divided over 3 ranks"):
        profile_of(narrow).state()


def test_shards_of_adafactor_divide_rows_but_not_columns():
    """A matrix of m x n on 8 ranks: m / 8 row means and n column means of 4 B; a norm 4 B per
    entry. A step holds the update of the rank's rows of the largest matrix, in fp32."""
    full = {"sharding": "full"}
    s = setup("fp32", ranks=8, engine=full, optimizer="adafactor")
    shapes = [weight.shape for unit in s.shape.units for weight in unit.base]
    matrices = [own for own in shapes if len(own) == 2]
    norms = sum(own[0] for own in shapes if len(own) == 1)
    expected = 4 * (sum(m / 8 + n for m, n in matrices) + norms / 8)
    moments = [i.bytes for i in profile_of(s).state() if i.name == "optimizer"]
    assert sum(moments) == expected
    step = [i for i in profile_of(s).gradients_in_step() if i.name == "optimizer"]
    assert total(step) == 128_256 * 4096 / 8 * 4
    replicas = setup("fp32", ranks=8, optimizer="adafactor")
    moments = [i.bytes for i in profile_of(replicas).state() if i.name == "optimizer"]
    assert sum(moments) == state_bytes(s) == 4 * (sum(m + n for m, n in matrices) + norms)
