"""The first tensor of a pass that is not finite: found at every stage and named, with all hooks
removed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from burnish.config.model import LoraConfig, ModelConfig, ScratchConfig
from burnish.models.attention import NO_MASK
from burnish.models.checkpointing import enable_checkpointing
from burnish.models.load import load_causal_lm
from burnish.models.logprobs import Head, token_logprobs
from burnish.train.batching import arrange, read_and_target
from burnish.train.diagnose import BadTensor, first_bad_tensor
from burnish.types import Batch

SCRATCH = ScratchConfig(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2)


Through = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]


@pytest.fixture
def inf_backward(through: Through) -> Callable[[Tensor], Tensor]:
    """The identity, with inf for the first entry of its gradient."""

    def with_inf(grad: Tensor) -> Tensor:
        out = grad.clone()
        out.view(-1)[0] = torch.inf
        return out

    return lambda x: through(x, with_inf)


def to_half(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.half()


@pytest.fixture(params=["plain", "checkpointing"])
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    """In training mode, with and without gradient checkpointing; its head is its embedding."""
    made = load_causal_lm(ModelConfig(scratch=SCRATCH))
    if request.param == "checkpointing":
        checkpointed(made)
    return made.train()


def checkpointed(model: LlamaForCausalLM) -> None:
    enable_checkpointing(model.model, True)


def pass_over(
    model: LlamaForCausalLM,
    batch: Batch,
    *,
    scale: float = 1.0,
    between: Callable[[Tensor], Tensor] = lambda hidden: hidden,
) -> Callable[[], Tensor]:
    """The forward pass of the train engine in the packed layout; ``between`` is applied between
    body and log-probs."""

    def compute() -> Tensor:
        arranged = arrange(batch, "shared_prefix")
        out = model.get_decoder()(
            input_ids=arranged.input_ids,
            position_ids=arranged.position_ids,
            use_cache=False,
            plan=arranged.plan,
            attention_mask=NO_MASK,
        )
        read, target = read_and_target(batch)
        hidden = between(out.last_hidden_state.flatten(0, 1))[arranged.flat_index[read]]
        head = Head(model.lm_head.weight)
        return -scale * token_logprobs(hidden, batch.tokens[target], head)[0].mean()

    return compute


def hooks_of(model: nn.Module) -> list[int]:
    """How many hooks each module and parameter has."""
    counts = []
    for m in model.modules():
        counts += [len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)]
        counts += [len(m._forward_pre_hooks_with_kwargs), len(m._forward_hooks_with_kwargs)]
    return counts + [len(p._backward_hooks or ()) for p in model.parameters()]


def test_a_finite_pass_has_no_bad_tensor(model: LlamaForCausalLM, ragged_batch: Batch) -> None:
    assert first_bad_tensor(model, pass_over(model, ragged_batch)) is None


def test_no_gradient_is_accumulated_and_no_hook_remains(
    model: LlamaForCausalLM, ragged_batch: Batch
) -> None:
    accumulated: list[Tensor] = []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.register_post_accumulate_grad_hook(accumulated.append)
    model.lm_head.register_forward_hook(lambda *_: None)
    before = hooks_of(model)
    assert first_bad_tensor(model, pass_over(model, ragged_batch)) is None
    assert first_bad_tensor(model, pass_over(model, ragged_batch, scale=1e39)) is not None

    def broken() -> Tensor:
        pass_over(model, ragged_batch)()
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        first_bad_tensor(model, broken)
    assert hooks_of(model) == before and sum(before) >= 1
    assert not accumulated
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


def test_a_bad_weight_is_named(model: LlamaForCausalLM, ragged_batch: Batch) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5:7] = torch.inf
        model.model.layers[1].mlp.up_proj.weight[4, 0] = -8.0
    bad = first_bad_tensor(model, pass_over(model, ragged_batch))
    assert bad == BadTensor(
        "weight", "model.layers.1.mlp.up_proj.weight", (128, 32), 2, 4096, largest=8.0
    )
    assert str(bad) == (
        "weight: model.layers.1.mlp.up_proj.weight [128, 32] has 2 of 4096 entries that are not "
        "finite; the largest finite absolute value is 8"
    )


def test_a_buffer_may_contain_minus_inf_but_not_nan() -> None:
    layer = nn.Linear(2, 1)
    layer.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    assert first_bad_tensor(layer, lambda: layer(torch.ones(1, 2)).sum()) is None
    layer.register_buffer("frequencies", torch.tensor([torch.nan]))
    bad = first_bad_tensor(layer, lambda: layer(torch.ones(1, 2)).sum())
    assert bad is not None and (bad.stage, bad.module) == ("weight", "frequencies")


def test_a_module_whose_output_overflows_in_fp16_is_named(
    model: LlamaForCausalLM, ragged_batch: Batch
) -> None:
    to_half(model)
    model.model.layers[0].mlp.register_forward_hook(lambda _m, _a, out: out * 1e30)
    bad = first_bad_tensor(model, pass_over(model, ragged_batch))
    assert bad is not None
    assert (bad.stage, bad.module, bad.side) == ("forward", "model.layers.0.mlp", "output")
    assert bad.num_bad > 0 and str(bad).startswith("forward: the output of model.layers.0.mlp [1, ")


def test_the_innermost_module_is_named(model: LlamaForCausalLM, ragged_batch: Batch) -> None:
    model.model.layers[1].mlp.down_proj.register_forward_hook(lambda _m, _a, out: out * torch.inf)
    bad = first_bad_tensor(model, pass_over(model, ragged_batch))
    assert bad is not None
    assert (bad.stage, bad.module) == ("forward", "model.layers.1.mlp.down_proj")


def test_an_overflow_between_modules_is_a_bad_input_of_the_next(
    model: LlamaForCausalLM, ragged_batch: Batch
) -> None:
    """400 x 400 = 160000 > 65504: silu(gate) and up are finite in fp16 and their product is
    not."""
    to_half(model)
    mlp = model.model.layers[1].mlp
    for part in (mlp.gate_proj, mlp.up_proj):
        part.register_forward_hook(lambda _m, _a, out: out * 0 + 400)
    bad = first_bad_tensor(model, pass_over(model, ragged_batch))
    assert bad is not None
    expected = ("forward", "model.layers.1.mlp.down_proj", "input")
    assert (bad.stage, bad.module, bad.side) == expected
    assert "between this module and the previous ones" in str(bad)
    assert "entries, none of which is finite" in str(bad)


def test_a_loss_that_overflows_is_named(model: LlamaForCausalLM, ragged_batch: Batch) -> None:
    bad = first_bad_tensor(model, pass_over(model, ragged_batch, scale=1e39))
    assert bad is not None and bad == BadTensor("loss", "", (), 1, 1, 0.0)
    assert str(bad).startswith("loss: the scaled loss is not finite")


def test_a_bad_gradient_after_the_last_module_is_found_at_its_output(
    model: LlamaForCausalLM, ragged_batch: Batch, inf_backward: Callable[[Tensor], Tensor]
) -> None:
    bad = first_bad_tensor(model, pass_over(model, ragged_batch, between=inf_backward))
    assert bad is not None
    assert (bad.stage, bad.module, bad.side) == ("backward", "model.norm", "output")
    assert bad.num_bad == 1
    assert "backward of the operations that read this output produced it" in str(bad)


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj"])
def test_the_module_whose_own_backward_overflows_is_named_among_those_that_read_the_same_input(
    model: LlamaForCausalLM,
    ragged_batch: Batch,
    name: str,
    inf_backward: Callable[[Tensor], Tensor],
) -> None:
    module = model.model.layers[0].get_submodule(name)
    plain = module.forward
    module.forward = lambda x: plain(inf_backward(x))
    bad = first_bad_tensor(model, pass_over(model, ragged_batch))
    assert bad is not None
    expected = ("backward", f"model.layers.0.{name}", "input")
    assert (bad.stage, bad.module, bad.side) == expected
    assert "this module's backward produced it" in str(bad)


def test_a_bad_gradient_of_a_parameter_is_named(
    model: LlamaForCausalLM, ragged_batch: Batch, inf_backward: Callable[[Tensor], Tensor]
) -> None:
    module = model.model.layers[0].mlp.down_proj
    module.forward = lambda x: nn.functional.linear(x, inf_backward(module.weight))
    bad = first_bad_tensor(model, pass_over(model, ragged_batch))
    assert bad is not None
    name, shape = "model.layers.0.mlp.down_proj.weight", (32, 128)
    assert (bad.stage, bad.module, bad.shape) == ("gradient", name, shape)
    assert str(bad).startswith(f"gradient: the gradient of {name} [32, 128] has 1 of 4096 entries")


def test_a_gradient_that_overflows_fp16_by_the_loss_scale_is_named() -> None:
    """d(128 x w.x)/dw = 128 x = 128 x 512 = 65536, which is inf in fp16; with 127: 65024."""
    layer, inputs = nn.Linear(2, 1, bias=False).half(), torch.tensor([[512.0, 1.0]]).half()
    nn.init.zeros_(layer.weight)
    assert first_bad_tensor(layer, lambda: 127 * layer(inputs).float().sum()) is None
    bad = first_bad_tensor(layer, lambda: 128 * layer(inputs).float().sum())
    assert bad == BadTensor("gradient", "weight", (1, 2), 1, 2, largest=128.0)


def test_a_pass_is_bad_exactly_if_a_gradient_overflows_in_fp16(
    model: LlamaForCausalLM, ragged_batch: Batch
) -> None:
    to_half(model)
    verdicts = []
    for power in range(0, 40, 3):
        compute = pass_over(model, ragged_batch, scale=2.0**power)
        model.zero_grad()
        compute().backward()
        finite = all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())
        bad = first_bad_tensor(model, compute)
        assert (bad is None) == finite
        assert bad is None or bad.stage in ("backward", "gradient")
        verdicts.append(finite)
    assert verdicts[0] and not verdicts[-1], "both cases occurred"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_with_adapters_only_trained_weights_have_gradients_and_the_bad_tensor_is_found(
    ragged_batch: Batch, checkpointing: bool, inf_backward: Callable[[Tensor], Tensor]
) -> None:
    model = load_causal_lm(ModelConfig(scratch=SCRATCH, lora=LoraConfig(lora_rank=4)))
    if checkpointing:
        checkpointed(model)
    model.train()
    assert first_bad_tensor(model, pass_over(model, ragged_batch)) is None
    base = model.model.layers[1].mlp.up_proj.base_layer
    plain = base.forward
    base.forward = lambda x: plain(inf_backward(x))
    bad = first_bad_tensor(model, pass_over(model, ragged_batch))
    assert bad is not None and bad.stage == "backward"
    assert bad.module == "model.layers.1.mlp.up_proj.base_layer"
    del base.forward
    lora_b = model.model.layers[0].self_attn.q_proj.lora_B["default"]
    lora_b.forward = lambda x: nn.functional.linear(x, inf_backward(lora_b.weight))
    bad = first_bad_tensor(model, pass_over(model, ragged_batch))
    assert bad is not None and bad.stage == "gradient"
    assert bad.module == "model.layers.0.self_attn.q_proj.lora_B.default.weight"
    assert all(p.grad is None for p in model.parameters())


def test_a_tied_embedding_is_checked_with_the_sum_of_both_its_gradients(
    ragged_batch: Batch, inf_backward: Callable[[Tensor], Tensor]
) -> None:
    model = load_causal_lm(ModelConfig(scratch=SCRATCH))
    embedding = model.model.embed_tokens
    assert model.lm_head.weight is embedding.weight
    embedding.forward = lambda ids: nn.functional.embedding(ids, inf_backward(embedding.weight))
    bad = first_bad_tensor(model, pass_over(model, ragged_batch))
    assert bad is not None
    assert (bad.stage, bad.module) == ("gradient", "model.embed_tokens.weight")


def test_models_that_return_a_mapping_or_have_no_trainable_weights_are_checked(
    ragged_batch: Batch,
) -> None:
    model = load_causal_lm(ModelConfig(scratch=SCRATCH)).requires_grad_(False)
    ids = ragged_batch.tokens[None, :8]
    assert first_bad_tensor(model, lambda: model(ids).logits.sum()) is None
    model.register_forward_hook(lambda _m, _a, out: type(out)(logits=out.logits / 0))
    bad = first_bad_tensor(model, lambda: model(ids).logits.sum())
    assert bad is not None and (bad.stage, bad.module) == ("forward", "")
    assert str(bad).startswith("forward: the output of the full model [1, 8, ")
