"""Small random models of all families, batches for them and engines over them, drawn at random."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from metamorphic.base import Draw, Refused
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from burnish.config.model import LoraConfig, ModelConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.load import load_causal_lm, num_positions
from burnish.models.scratch import scratch_tokenizer
from burnish.models.shrink import SPECIAL, build, shrink
from burnish.train.base import Loss, Outputs
from burnish.train.engines import make_engine
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, Stats, rows_to_batch

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()

_FILE = Path(__file__).resolve().parents[2] / "tools" / "families.py"
_SPEC = importlib.util.spec_from_file_location("families_of_tools", _FILE)
assert _SPEC is not None and _SPEC.loader is not None
families: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(families)

USUAL = ("llama", "gpt2", "gemma2", "qwen3_moe", "stablelm", "mixtral", "deepseek_v3", "olmo2")
"""Half of the draws: plain, learned positions, softcaps and windows, mixtures, padded rows, biases
of routers, other norms."""
TOLERANCE = 1e-4
"""Nats, and of the largest gradient. Rounding in fp32 gives up to 3e-5; a token that reads another
row gives 1e-3 and more."""


@dataclass(frozen=True)
class Model:
    """A drawn model in a folder, as a user has it, and transformers' own copy of it."""

    folder: Path
    reference: Any
    tokenizer: PreTrainedTokenizerFast
    limit: int
    """Longest row."""
    top: int
    """One more than the largest usual token."""

    @property
    def config(self) -> ModelConfig:
        """The model as a recipe names it."""
        return ModelConfig(path=str(self.folder))


def model_of(draw: Draw) -> Model:
    """Draw a family and random weights of a small model of it."""
    usual = draw.rng.random() < 0.5
    name = draw.one(family=USUAL if usual else families.names())
    seed = draw.rng.randrange(1000)
    try:
        model: Any = build(shrink(families.config_of(name)), seed=seed)
        size = int(model(input_ids=torch.arange(5, 9)[None], use_cache=False).logits.shape[-1])
    except Exception as error:
        raise Refused(f"transformers cannot compute a small {name}: {error}") from error
    model.generation_config.eos_token_id = None
    folder = draw.folder / "model"
    model.save_pretrained(folder)
    tokenizer = scratch_tokenizer("".join(chr(ord("!") + i) for i in range(60)))
    tokenizer.save_pretrained(folder)
    limit = num_positions(ModelConfig(path=str(folder)))
    return Model(folder, model, tokenizer, min(limit or 40, 40), min(SPECIAL, size) - 4)


def batch_of(draw: Draw, model: Model, *, groups: int = 3) -> Batch:
    """Draw groups of rows that share their prompts; some tokens of responses are not the policy's,
    and some rows of one prompt stand apart."""
    rng = draw.rng
    rows = []
    for group in range(rng.randint(1, groups)):
        length = rng.randint(1, max(1, model.limit // 2))
        prompt = rng.choices(range(5, model.top), k=length)
        for _ in range(rng.randint(1, 3)):
            answer = rng.randint(1, model.limit - length)
            mask = [True] + [rng.random() < 0.9 for _ in range(answer - 1)]
            ids = prompt + rng.choices(range(5, model.top), k=answer)
            rows.append((ids, [False] * length + mask, length, group))
    if rng.random() < 0.3:
        rng.shuffle(rows)
    draw.note(rows=[(len(ids), length, group) for ids, _, length, group in rows])
    ids, masks, lengths, owners = (list(column) for column in zip(*rows, strict=True))
    return rows_to_batch(ids, masks, prompt_lens=lengths, group_ids=owners)


@dataclass(frozen=True)
class Settings:
    """How an engine computes: none of it may change a number."""

    layout: Any = "padded"
    micro: int | None = None
    max_tokens: int | None = None
    gradient_checkpointing: Any = False
    logprob_chunk_tokens: int = 512


def settings_of(draw: Draw) -> Settings:
    """Draw the settings of an engine."""
    rng = draw.rng
    budget = rng.random() < 0.4
    found = Settings(
        layout=rng.choice(["padded", "packed", "shared_prefix"]),
        micro=None if budget else rng.choice([None, 1, 2, 3]),
        max_tokens=rng.randint(8, 120) if budget else None,
        gradient_checkpointing=rng.choice([*[False] * 7, True, True, "selective"]),
        logprob_chunk_tokens=rng.choice([1, 7, 512]),
    )
    draw.note(settings=found)
    return found


def engine_of(model: Model, settings: Settings, **options: Any) -> TorchTrainEngine:
    """A train engine over a model, as jobs make it. ``lora``: with adapters; ``temperature``."""
    lora = LoraConfig(lora_rank=2, lora_alpha=8) if options.get("lora") else None
    config = model.config.model_copy(update={"lora": lora})
    train = TrainConfig(
        layout=settings.layout,
        lr=1e-3,
        max_tokens_per_micro_batch=settings.max_tokens,
        gradient_checkpointing=settings.gradient_checkpointing,
        logprob_chunk_tokens=settings.logprob_chunk_tokens,
    )
    spec = EngineSpec(
        TrainRole.alone("policy", train, config, dropout=False),
        micro_batch_size=settings.micro,
        temperature=options.get("temperature", 1.0),
    )
    return make_engine(load_causal_lm(config), spec, tokenizer=model.tokenizer)


def row_logprobs(model: Any, batch: Batch, temperature: float = 1.0) -> Tensor:
    """[M] log-probs of the action tokens by transformers' forward of each row alone."""
    rows = []
    for begin, end in zip(batch.offsets.tolist(), batch.offsets[1:].tolist(), strict=False):
        ids = batch.tokens[begin:end]
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / temperature
        found = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        rows.append(torch.cat([found.new_zeros(1), found]))
    return torch.where(batch.action_mask, torch.cat(rows), 0.0)


def weighted_loss(batch: Batch) -> tuple[Batch, Loss]:
    """A batch with a random weight for each token, and a loss that uses it: every token has another
    gradient, so that a wrong place shows."""
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(batch.tokens.numel(), generator=generator)

    def loss(outputs: Outputs, micro: Batch) -> tuple[Tensor, Stats]:
        assert outputs.logprobs is not None and micro.advantages is not None
        return -(micro.advantages * outputs.logprobs).sum() / micro.num_tokens, Stats()

    return replace(batch, advantages=weights), loss


def gradients(engine: TorchTrainEngine, batch: Batch, loss: Loss) -> dict[str, Tensor]:
    """Gradients of all parameters, zeros where there are none."""
    engine.forward_backward(batch, loss)
    return _grads(engine.model)


def reference_gradients(model: Any, logprobs: Tensor, batch: Batch) -> dict[str, Tensor]:
    """The same of transformers' model."""
    assert batch.advantages is not None
    model.zero_grad()
    (-(batch.advantages * logprobs).sum() / batch.num_tokens).backward()
    found = _grads(model)
    model.zero_grad()
    return found


def _grads(model: Any) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def slope_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> Tensor:
    """Largest difference of gradients, of the largest gradient; parameters that both have."""
    names = sorted(set(found) & set(wanted))
    largest = max([float(wanted[n].abs().max()) for n in names], default=0.0) or 1.0
    worst = [float((found[n] - wanted[n]).abs().max()) / largest for n in names]
    return torch.tensor(max(worst) if all(map(math.isfinite, worst)) else math.inf)


def set_adapters(model: Any, scale: float = 0.05) -> None:
    """Give the adapters of LoRA, if there are any, weights that do not depend on their random
    beginning. Adapters that no forward uses (their gradient is None) stay idle: a merge would add
    what training never saw."""
    trained = any(".lora_" in n and p.grad is not None for n, p in model.named_parameters())
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if ".lora_" in name and (tensor.grad is not None or not trained):
                tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
