"""Relations of models: training passes, sampling, checkpoints and exports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from metamorphic.base import Draw, close, equal, relation
from metamorphic.draw_models import (
    TOLERANCE,
    Model,
    batch_of,
    engine_of,
    gradients,
    model_of,
    reference_gradients,
    row_logprobs,
    set_adapters,
    settings_of,
    slope_difference,
    weighted_loss,
)
from transformers import AutoModelForCausalLM

from burnish.checkpoint.export import export
from burnish.checkpoint.save import CheckpointStore
from burnish.models.buffers import persistent_buffers
from burnish.models.load import load_causal_lm
from burnish.rollout.base import Completion, Request, Sampling
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import make_engine as make_local_engine
from burnish.types import Batch, rows_to_batch

# ---- training ------------------------------------------------------------------------------------


@relation
def engine_is_transformers(draw: Draw) -> None:
    """Log-probs and gradients of a train engine are those of transformers' forward of each row by
    itself, in every layout, split and temperature, with gradient checkpointing.

    1e-4: see TOLERANCE. Log-probs of unscaled logits differ 1 / temperature times as much."""
    model = model_of(draw)
    batch, loss = weighted_loss(batch_of(draw, model))
    temperature = draw.one(temperature=[1.0, 1.0, 0.7, 1.5])
    engine = engine_of(model, settings_of(draw), temperature=temperature)
    wanted = row_logprobs(model.reference, batch, temperature)
    close(engine.logprobs(batch), wanted, TOLERANCE / min(1.0, temperature), "log-probs")
    slopes = reference_gradients(model.reference, wanted, batch)
    worst = slope_difference(gradients(engine, batch, loss), slopes)
    close(worst, torch.zeros(()), TOLERANCE, "gradients")


@relation
def engine_settings(draw: Draw) -> None:
    """Log-probs and gradients do not depend on how an engine is set up, nor on the order of rows:
    layout, micro-batches, checkpointing, chunks. Adapters of LoRA included.

    1e-4: see TOLERANCE."""
    model = model_of(draw)
    lora = draw.one(lora=[True, False])
    batch, loss = weighted_loss(batch_of(draw, model))
    order = draw.rng.sample(range(batch.num_rows), batch.num_rows)
    results = []
    for rows in (batch, batch.select(order)):
        engine = engine_of(model, settings_of(draw), lora=lora)
        set_adapters(engine.model)
        results.append((engine.logprobs(rows), gradients(engine, rows, loss)))
    one = replace(batch, old_logprobs=results[0][0]).select(order).old_logprobs
    assert one is not None
    close(results[1][0], one, TOLERANCE, "log-probs")
    worst = slope_difference(results[1][1], results[0][1])
    close(worst, torch.zeros(()), TOLERANCE, "gradients")


@relation
def garbage_rows(draw: Draw) -> None:
    """Rows without a trained token, and tokens behind the last trained one, change neither the
    log-probs of other tokens nor the gradient.

    1e-4: see TOLERANCE (layouts and micro-batches change with the rows)."""
    model = model_of(draw)
    batch, loss = weighted_loss(batch_of(draw, model, groups=2))
    longer = _with_garbage(draw, model, batch)
    settings = settings_of(draw)
    one, two = (engine_of(model, settings) for _ in range(2))
    wanted = one.logprobs(batch)
    found = two.logprobs(longer)
    close(found[longer.action_mask], wanted[batch.action_mask], TOLERANCE, "log-probs")
    worst = slope_difference(gradients(two, longer, loss), gradients(one, batch, loss))
    close(worst, torch.zeros(()), TOLERANCE, "gradients")


def _with_garbage(draw: Draw, model: Model, batch: Batch) -> Batch:
    """The batch with untrained tokens behind its rows and untrained rows, in the same order."""
    assert batch.advantages is not None
    rng = draw.rng
    rows: list[tuple[list[int], list[bool], list[float], int, int]] = []
    for row in range(batch.num_rows):
        begin, end = int(batch.offsets[row]), int(batch.offsets[row + 1])
        extra = rng.randint(0, max(0, min(6, model.limit - (end - begin))))
        rows.append(
            (
                batch.tokens[begin:end].tolist() + rng.choices(range(5, model.top), k=extra),
                batch.action_mask[begin:end].tolist() + [False] * extra,
                batch.advantages[begin:end].tolist() + [1e3] * extra,
                int(batch.prompt_lens[row]),
                int(batch.group_ids[row]),
            )
        )
        if rng.random() < 0.4:
            length = rng.randint(1, model.limit)
            ids = rng.choices(range(5, model.top), k=length)
            rows.append((ids, [False] * length, [1e3] * length, length, 1000 + row))
    ids, masks, weights, lengths, groups = (list(column) for column in zip(*rows, strict=True))
    found = rows_to_batch(ids, masks, prompt_lens=lengths, group_ids=groups)
    flat = torch.tensor([value for row in weights for value in row])
    return replace(found, advantages=flat, num_sequences=batch.num_sequences)


# ---- sampling ------------------------------------------------------------------------------------


def _requests(draw: Draw, model: Model) -> tuple[list[Request], Sampling]:
    rng = draw.rng
    room = rng.randint(1, max(1, min(8, model.limit // 3)))
    requests = []
    for i in range(rng.randint(2, 5)):
        length = rng.randint(1, max(1, model.limit - room))
        prompt = tuple(rng.choices(range(5, model.top), k=length))
        requests.append(Request(str(i), prompt, n=rng.randint(1, 3), seed=rng.randrange(100)))
    temperature = draw.one(temperature=[1.0, 0.7, 1.5])
    return requests, Sampling(max_tokens=room, temperature=temperature)


def _sampled(
    draw: Draw, model: Model, requests: list[Request], sampling: Sampling
) -> dict[tuple[str, int], Completion]:
    config = LocalEngine(
        max_batch_size=draw.rng.choice([1, 2, 5, 64]),
        max_prefill_tokens=draw.rng.choice([1, 16, 8192]),
    )
    network = load_causal_lm(model.config)
    engine = make_local_engine(network, model.tokenizer, config, name="model")
    found = engine.generate(requests, sampling)
    return {(c.request_id, c.index): c for c in found}


@relation
def sampler_is_trainer(draw: Draw) -> None:
    """The log-probs that the local engine reports are those that the trainer computes for the same
    tokens at the same temperature.

    1e-4 at temperature 1: see TOLERANCE."""
    model = model_of(draw)
    requests, sampling = _requests(draw, model)
    found = _sampled(draw, model, requests, sampling)
    prompts = {request.request_id: request.prompt_ids for request in requests}
    keys = sorted(found)
    rows = [[*prompts[key[0]], *found[key].token_ids] for key in keys]
    lengths = [len(prompts[key[0]]) for key in keys]
    masks = [[i >= n for i in range(len(row))] for row, n in zip(rows, lengths, strict=True)]
    groups = [int(key[0]) for key in keys]
    batch = rows_to_batch(rows, masks, prompt_lens=lengths, group_ids=groups)
    engine = engine_of(model, settings_of(draw), temperature=sampling.temperature)
    wanted = engine.logprobs(batch)[batch.action_mask]
    reported = torch.tensor([p for key in keys for p in found[key].logprobs])
    close(reported, wanted, TOLERANCE / min(1.0, sampling.temperature), "reported log-probs")


@relation
def requests_apart(draw: Draw) -> None:
    """The tokens of a request do not depend on which other requests share the batch, on their
    order, or on how many fit at a time.

    Exact on tokens: a rounding error moves one of them with a probability of about 1e-6."""
    model = model_of(draw)
    requests, sampling = _requests(draw, model)
    together = _sampled(draw, model, requests, sampling)
    some = draw.rng.sample(requests, draw.rng.randint(1, len(requests)))
    apart = _sampled(draw, model, some, sampling)
    wanted = {key: together[key].token_ids for key in apart}
    equal({key: found.token_ids for key, found in apart.items()}, wanted, "sampled tokens")


# ---- checkpoints and exports ---------------------------------------------------------------------


@relation
def exported_model(draw: Draw) -> None:
    """A trained model that is saved, loaded by a new engine, and exported computes the same
    log-probs each time: plain transformers on the exported folder, LoRA merged, buffers included.

    Exact for the new engine; 1e-4 for transformers: see TOLERANCE."""
    model = model_of(draw)
    lora = draw.one(lora=[True, False])
    batch, loss = weighted_loss(batch_of(draw, model, groups=2))
    settings = settings_of(draw)
    engine = engine_of(model, settings, lora=lora)
    if not lora:
        _move_buffers(engine.model)
    engine.forward_backward(batch, loss)
    set_adapters(engine.model)
    engine.optim_step()
    wanted = engine.logprobs(batch)
    store = CheckpointStore(draw.folder / "checkpoints", keep_last=1, best_mode="max")
    folder = store.save(1, lambda part: engine.save(part / "policy"))
    again = engine_of(model, settings, lora=lora)
    again.load(folder / "policy")
    close(again.logprobs(batch), wanted, 0.0, "log-probs after load")
    plain = AutoModelForCausalLM.from_pretrained(
        export(folder, draw.folder / "export"), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        found = row_logprobs(plain, batch)
    close(found, wanted, TOLERANCE, "log-probs of the export")


def _move_buffers(model: Any) -> None:
    """Move persistent buffers of numbers, as training with router biases does."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, buffer in persistent_buffers(model):
            if buffer.is_floating_point():
                buffer.mul_(1 + 0.05 * torch.rand(buffer.shape, generator=generator))
