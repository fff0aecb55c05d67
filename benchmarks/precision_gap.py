"""``precision.py gap``: how far each format's log-probs are from fp64, at fixed weights.

The sampler of each format writes responses to the same prompts with the same seeds, and reports
their log-probs. The trainer of each format then computes the log-probs of all of these, and so does
the same model in fp64, from the fp32 weights: the error of a 16-bit format includes the rounding of
its weights, as in training. transformers computes norms and rotary angles in fp32 even in an fp64
model; here they are fp64.

A trainer's error is taken on the fp32 sampler's responses, so all trainers read the same tokens. A
sampler's error and gap can only be taken on its own; the table says how many of its responses are
those of the fp32 sampler.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from common import chain_sums, markdown_table, model_folder, versions
from precision_cost import model_source

DTYPES = ("fp32", "bf16", "fp16")


def add_arguments(parts: Any) -> None:
    """The subcommand and its options."""
    parser = parts.add_parser("gap", help="log-prob error of each format against fp64")
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--model", help="a folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a scratch model and few prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> None:
    """Sample in every format, compute in every format, compare, print the tables."""
    import torch

    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("highest")
    args.model = args.model or ("scratch:32x2" if args.tiny else str(model_folder()))
    if args.tiny:
        args.prompts, args.samples, args.max_tokens = 4, 2, 4
    # fp32 first: its responses are the ones that every trainer is measured on.
    args.dtypes = list(dict.fromkeys(["fp32", *args.dtypes]))
    cuda = _runtime("fp32", args)[0].device.type == "cuda"
    sampled = {name: _sample(name, args) for name in args.dtypes}
    exact = _exact_logprobs(sampled, args)
    trained = {name: _trainer_logprobs(name, sampled, args) for name in args.dtypes}
    numbers = {
        "machine": versions("torch", "transformers"),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "model": Path(args.model).name,
        "tokens": int(sampled["fp32"].action_mask.sum()),
        "rows": sampled["fp32"].num_rows,
        "formats": [_numbers(name, sampled, trained, exact) for name in args.dtypes],
        "gaps": _gap_matrix(sampled, trained),
    }
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(numbers, indent=1) + "\n")
    print("\n".join(report(numbers)))


# ---- the log-probs of each ---------------------------------------------------------------------


def _runtime(dtype: str, args: argparse.Namespace) -> tuple[Any, Any]:
    """(runtime, model config) of one format."""
    from burnish.config.model import ModelConfig, PrecisionConfig
    from burnish.models.load import load_tokenizer
    from burnish.observe.timeline import Timeline
    from burnish.runtime.inline import InlineRuntime

    model = ModelConfig.model_validate(model_source(args.model))
    precision = PrecisionConfig.model_validate({"dtype": dtype})
    tokenizer = load_tokenizer(model)
    runtime = InlineRuntime(tokenizer, precision=precision, device=args.device, timeline=Timeline())
    return runtime, model


def _sample(dtype: str, args: argparse.Namespace) -> Any:
    """A batch of prompts and responses with the sampler's log-probs, on the CPU."""
    from dataclasses import replace

    import torch

    from burnish.rollout.base import Request, Sampling
    from burnish.rollout.local.config import LocalEngine
    from burnish.types import rows_to_batch

    runtime, model = _runtime(dtype, args)
    prompts = [
        tuple(runtime.tokenizer(row["prompt"])["input_ids"])
        for row in chain_sums(args.prompts, seed=1)
    ]
    engine = runtime.standalone_rollout(model, LocalEngine())
    requests = [Request(str(i), p, n=args.samples, seed=i) for i, p in enumerate(prompts)]
    found = list(engine.generate(requests, Sampling(max_tokens=args.max_tokens)))
    found.sort(key=lambda c: (int(c.request_id), c.index))
    ids = [int(c.request_id) for c in found]
    batch = rows_to_batch(
        [prompts[i] + c.token_ids for i, c in zip(ids, found, strict=True)],
        [
            (False,) * len(prompts[i]) + (True,) * len(c.token_ids)
            for i, c in zip(ids, found, strict=True)
        ],
        prompt_lens=[len(prompts[i]) for i in ids],
        group_ids=ids,
    )
    logprobs = torch.zeros(batch.tokens.numel())
    logprobs[batch.action_mask] = torch.tensor([x for c in found for x in c.logprobs])
    return replace(batch, sampler_logprobs=logprobs)


def _trainer_logprobs(dtype: str, sampled: dict[str, Any], args: argparse.Namespace) -> Any:
    """Sampler's format -> [actions] log-probs of its responses by the trainer of ``dtype``."""
    from burnish.config.roles import TrainRole
    from burnish.config.train import TrainConfig
    from burnish.train.spec import EngineSpec

    runtime, model = _runtime(dtype, args)
    role = TrainRole.alone(
        "policy", TrainConfig(), model, precision=runtime.precision, trainable=False
    )
    spec = EngineSpec(role, micro_batch_size=32)
    engine = runtime.language_model(spec)
    return {
        name: engine.logprobs(batch).double()[batch.action_mask] for name, batch in sampled.items()
    }


def _exact_logprobs(sampled: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Sampler's format -> [actions] fp64 log-probs of its responses, row by row."""
    import torch

    from burnish.models.load import load_causal_lm

    runtime, config = _runtime("fp32", args)
    model = in_fp64(load_causal_lm(config, device=runtime.device))

    def row_logprobs(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = model(tokens[None].to(runtime.device), use_cache=False).logits[0, :-1]
        assert logits.dtype == torch.float64
        log_p = logits.log_softmax(-1).cpu()
        return log_p.gather(-1, tokens[1:, None])[mask[1:], 0]

    exact = {}
    for name, batch in sampled.items():
        sizes = batch.lengths.tolist()
        rows = zip(batch.tokens.split(sizes), batch.action_mask.split(sizes), strict=True)
        exact[name] = torch.cat([row_logprobs(tokens, mask) for tokens, mask in rows])
    return exact


def in_fp64(model: Any) -> Any:
    """A Llama-style model that computes in fp64 throughout; its rotary frequencies keep their fp32
    values, which all formats share."""
    model = model.double().eval()
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = partial(_norm, module)
        elif name.endswith("RotaryEmbedding"):
            assert module.attention_scaling == 1.0, (
                "scaled rotary embeddings are not implemented here"
            )
            module.forward = partial(_rotary, module)
    return model


def _norm(module: Any, hidden: Any) -> Any:
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return module.weight * hidden * (variance + module.variance_epsilon).rsqrt()


def _rotary(module: Any, _: Any, position_ids: Any) -> tuple[Any, Any]:
    import torch

    angles = position_ids[..., None].double() * module.inv_freq.double()
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


# ---- what they come to -------------------------------------------------------------------------


def _numbers(
    name: str, sampled: dict[str, Any], trained: dict[str, Any], exact: dict[str, Any]
) -> dict[str, Any]:
    """Errors against fp64 and the gap between trainer and sampler of one format, in nats."""
    import torch

    batch = sampled[name]
    own = batch.sampler_logprobs.double()[batch.action_mask]
    trainer_error = (trained[name]["fp32"] - exact["fp32"]).abs()
    sampler_error = (own - exact[name]).abs()
    gap = trained[name][name] - own
    responses = [
        torch.equal(a, b)
        for a, b in zip(_responses(batch), _responses(sampled["fp32"]), strict=True)
    ]
    return {
        "dtype": name,
        "trainer_mean": float(trainer_error.mean()),
        "trainer_max": float(trainer_error.max()),
        "sampler_mean": float(sampler_error.mean()),
        "sampler_max": float(sampler_error.max()),
        "gap_mean": float(gap.abs().mean()),
        "gap_max": float(gap.abs().max()),
        "gap_k3": float((gap.exp() - 1 - gap).mean()),
        "same_responses": sum(responses) / len(responses),
    }


def _responses(batch: Any) -> list[Any]:
    sizes = batch.lengths.tolist()
    rows = zip(batch.tokens.split(sizes), batch.action_mask.split(sizes), strict=True)
    return [tokens[mask] for tokens, mask in rows]


def _gap_matrix(sampled: dict[str, Any], trained: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Trainer's format -> sampler's format -> mean |gap| on that sampler's responses, in nats."""
    reported = {n: b.sampler_logprobs.double()[b.action_mask] for n, b in sampled.items()}
    return {
        trainer: {
            sampler: float((found[sampler] - reported[sampler]).abs().mean()) for sampler in sampled
        }
        for trainer, found in trained.items()
    }


def report(numbers: dict[str, Any]) -> Iterator[str]:
    """The lines to print."""
    yield f"{numbers['machine']}{', ' + numbers['gpu'] if numbers['gpu'] else ''}"
    yield (
        f"{numbers['model']}: {numbers['rows']} responses, {numbers['tokens']} tokens; nats per "
        "token"
    )
    yield ""
    heads = ["format", "trainer - fp64, mean", "max", "sampler - fp64, mean", "max"]
    heads += ["trainer - sampler, mean", "max", "k3", "responses as in fp32"]
    keys = ["trainer_mean", "trainer_max", "sampler_mean", "sampler_max"]
    keys += ["gap_mean", "gap_max", "gap_k3"]
    rows = [
        [f["dtype"], *(f"{f[k]:.2e}" for k in keys), f"{f['same_responses']:.0%}"]
        for f in numbers["formats"]
    ]
    yield from markdown_table(heads, rows)
    yield ""
    samplers = list(numbers["gaps"])
    rows = [
        [trainer, *(f"{gaps[s]:.2e}" for s in samplers)]
        for trainer, gaps in numbers["gaps"].items()
    ]
    yield from markdown_table(
        ["mean gap: trainer in", *(f"sampler in {s}" for s in samplers)], rows
    )
