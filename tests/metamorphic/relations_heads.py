"""Relations of heads and ends: the token that ends a turn, and reward models after an export."""

from __future__ import annotations

import torch
from metamorphic.base import Broken, Draw, Refused, close, relation
from metamorphic.draw_models import Model, model_of
from metamorphic.draw_text import conversation_of, tokenizer_of
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from burnish.checkpoint.export import export
from burnish.checkpoint.save import CheckpointStore
from burnish.config.model import LoraConfig, ModelConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.data.chat import encode_conversation
from burnish.models.end_tokens import add_end_tokens, configured_end_tokens
from burnish.models.value_head import load_scalar_model
from burnish.rewards.model.reward import load_reward_engine, score_rows
from burnish.rollout.base import Sampling
from burnish.rollout.requests import StopRule, end_tokens
from burnish.special_tokens import end_token_ids, set_configured_ends, special_tokens
from burnish.train.base import Outputs
from burnish.train.engines import make_engine
from burnish.train.spec import EngineSpec
from burnish.types import Batch, Stats, rows_to_batch


@relation
def trained_end_is_a_stop(draw: Draw) -> None:
    """The last trained token of every turn of a conversation ends a response of the same model,
    whatever its generation config says.

    Exact."""
    tokenizer = tokenizer_of(draw)
    if draw.facts["template"] == "no end token":
        raise Refused("the template ends no turn")
    ids, mask = encode_conversation(tokenizer, conversation_of(draw, plain=True))
    pairs = zip(ids, mask, [*mask[1:], False], strict=True)
    last = [token for token, trained, more in pairs if trained and not more]
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": len(tokenizer)}
    model = LlamaForCausalLM(LlamaConfig(**small, **heads))
    configured = draw.one(configured=[None, 1, [1, 2], tokenizer.eos_token_id])
    model.generation_config = GenerationConfig(eos_token_id=configured)
    add_end_tokens(model, tokenizer)
    rule = StopRule(
        tokenizer, Sampling(max_tokens=9), end_tokens(model.generation_config, tokenizer)
    )
    for token in last:
        if token not in special_tokens(tokenizer) or rule.begin().add(token, 9) != "stop":
            raise Broken(f"a response does not end at the trained token {token}")


@relation
def exported_reward_model(draw: Draw) -> None:
    """A reward model that was trained for a step has the same scores and end tokens after its
    export, loaded as a reward, with full weights and with merged adapters.

    1e-5 of the largest score, at least of 1: the same operations in rows of another layout; 1e-4
    with adapters, whose product is added to the weights in another order."""
    model = model_of(draw)
    lora = LoraConfig(lora_rank=2) if draw.one(lora=[False, False, True]) else None
    config = model.config.model_copy(update={"lora": lora})
    set_configured_ends(model.tokenizer, draw.one(configured=[None, [3, 4]]))
    outputs = draw.one(outputs=[1, 1, 2])
    scalar = load_scalar_model(config, new_head="random", seed=3, num_outputs=outputs)
    spec = EngineSpec(
        TrainRole.alone("reward", TrainConfig(lr=0.01), config, outputs=outputs, dropout=False)
    )
    engine = make_engine(scalar, spec, tokenizer=model.tokenizer)
    rows = _rows(draw, model)
    masks = [[False] * (len(row) - 1) + [True] for row in rows]
    engine.forward_backward(rows_to_batch(rows, masks, prompt_lens=[0] * len(rows)), _squared)
    engine.optim_step()
    wanted = torch.tensor(score_rows(engine, rows))
    store = CheckpointStore(draw.folder / "checkpoints", keep_last=1, best_mode="max")
    saved = store.save(1, lambda folder: engine.save(folder / "reward"))
    again = ModelConfig(path=str(export(saved, draw.folder / "reward", model="reward")))
    ends = configured_end_tokens(again, None)
    missing = end_token_ids(model.tokenizer) - set([ends] if isinstance(ends, int) else ends or ())
    if missing:
        raise Broken(f"the exported reward model has lost the end tokens {missing}")
    if outputs > 1:
        network = load_scalar_model(again, new_head="random", num_outputs=outputs)
        found = torch.tensor(score_rows(make_engine(network, spec), rows))
    else:
        found = torch.tensor(
            score_rows(load_reward_engine(again, dtype="fp32", device="cpu"), rows)
        )
    tolerance = (1e-4 if lora else 1e-5) * max(1.0, float(wanted.abs().max()))
    close(found, wanted, tolerance, "scores")


def _rows(draw: Draw, model: Model) -> list[list[int]]:
    lengths = [draw.rng.randint(1, min(12, model.limit)) for _ in range(3)]
    return [draw.rng.choices(range(5, model.top), k=length) for length in lengths]


def _squared(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
    assert outputs.values is not None
    return (outputs.values[batch.offsets[1:] - 1] - 1).square().sum() / batch.num_rows, Stats()
