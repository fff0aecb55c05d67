"""Relations of heads and ends: the token that ends a turn, and reward models after an export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from metamorphic.base import Broken, Draw, Refused, close, equal, relation
from metamorphic.draw_models import (
    TOLERANCE,
    Model,
    Settings,
    batch_of,
    engine_of,
    model_of,
    row_logprobs,
    weighted_loss,
)
from metamorphic.draw_text import conversation_of, tokenizer_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from burnish.checkpoint.export import export
from burnish.checkpoint.save import CheckpointStore
from burnish.config.model import LoraConfig, ModelConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.data.chat import encode_conversation
from burnish.models.end_tokens import add_end_tokens, configured_end_tokens
from burnish.models.load import ModelError, load_causal_lm
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


@relation
def ends_of_a_folder(draw: Draw) -> None:
    """A folder with one end of the model (embedding, output projection), or both, equal or not, is
    read, trained and exported as transformers reads it, whatever its config says of them. An engine
    that reads shards has the same parameters.

    1e-4: see TOLERANCE."""
    model = model_of(draw)
    pairs = dict(type(model.reference)._tied_weights_keys or {})
    if not pairs:
        raise Refused("the family has no ends that can be tied")
    head, embedding = next(iter(pairs.items()))
    tied = draw.one(tied=[True, False])
    stored = load_file(model.folder / "model.safetensors")
    if embedding not in stored:
        raise Refused("the family's files have other names")
    ends = draw.one(ends=["one", "equal", "different"])
    stored.pop(head, None)
    if ends != "one":
        table = stored[embedding]
        stored[head] = table.clone() if ends == "equal" else 0.02 * torch.randn_like(table)
    save_file(stored, model.folder / "model.safetensors", metadata={"format": "pt"})
    path = model.folder / "config.json"
    config = json.loads(path.read_text())
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part["tie_word_embeddings"] = tied
    path.write_text(json.dumps(config))
    batch, loss = weighted_loss(batch_of(draw, model, groups=2))
    engine = engine_of(model, Settings())
    plain = _transformers(model.folder)
    wanted = {name for name, _ in plain.named_parameters()}
    equal({name for name, _ in engine.model.named_parameters()}, wanted, "parameters")
    shards = load_causal_lm(model.config, empty=True)
    equal({name for name, _ in shards.named_parameters()}, wanted, "parameters of shards")
    with torch.no_grad():
        close(engine.logprobs(batch), row_logprobs(plain, batch), TOLERANCE, "log-probs")
    engine.forward_backward(batch, loss)
    engine.optim_step()
    store = CheckpointStore(draw.folder / "checkpoints", keep_last=1, best_mode="max")
    saved = store.save(1, lambda folder: engine.save(folder / "policy"))
    trained = _transformers(export(saved, draw.folder / "export"))
    with torch.no_grad():
        found = row_logprobs(trained, batch)
    close(found, engine.logprobs(batch), TOLERANCE, "log-probs of the export")


def _transformers(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


HEADS = ("score.weight", "v_head.summary.weight", "value_head.weight", "classifier.weight")


@relation
def heads_of_other_forms(draw: Draw) -> None:
    """A folder with a trained head that is not read becomes no reward model with a new head, and if
    its config names another kind than a language model, no policy. Exact: an error or none."""
    model = model_of(draw)
    stored = load_file(model.folder / "model.safetensors")
    name = draw.one(head=HEADS)
    stored[name] = torch.randn(1, stored[next(iter(stored))].shape[-1])
    save_file(stored, model.folder / "model.safetensors", metadata={"format": "pt"})
    path = model.folder / "config.json"
    config = json.loads(path.read_text())
    loads: dict[str, Callable[[], Any]] = {
        "a body for a new head": lambda: load_scalar_model(model.config, new_head="random")
    }
    if kind := draw.one(kind=["LlamaRewardModel", "XForTokenClassification", None]):
        config["architectures"] = [kind]
        path.write_text(json.dumps(config))
        loads["a policy"] = lambda: load_causal_lm(model.config)
    for use, load in loads.items():
        try:
            load()
        except ModelError as error:
            draw.note(error=str(error))
        else:
            raise Broken(f"{name} is dropped: the folder is read as {use}")


def _rows(draw: Draw, model: Model) -> list[list[int]]:
    lengths = [draw.rng.randint(1, min(12, model.limit)) for _ in range(3)]
    return [draw.rng.choices(range(5, model.top), k=length) for length in lengths]


def _squared(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
    assert outputs.values is not None
    return (outputs.values[batch.offsets[1:] - 1] - 1).square().sum() / batch.num_rows, Stats()
