"""``precision.py cost``: one train step in each format: time, memory by its parts, and the claims.

A step is forward, backward and update of 8 packed rows of 32 prompt and 96 response tokens, with
a mean log-prob loss (and the entropy, as in an RL step). Every case is a process of its own; the
formats of one micro-batch size take turns, step by step, so that what else the machine does falls
on all of them, and the ratios are fair. ``tf32`` (CUDA only) is fp32 with
``torch.set_float32_matmul_precision("high")``; fp32 is measured with "highest".

What is measured, and how:

- state: the storages of weights, fp32 masters, gradients (or their sums) and moments, each once,
  between backward and update, when all of them exist;
- activations: the storages that autograd holds at the end of the forward pass of the largest
  micro-batch, parameters left out (``torch.autograd.graph.saved_tensors_hooks``). The last chunk of
  fp32 logits, which the log-prob function keeps beside them, is listed apart;
- peak: on a CPU the resident memory of the process, less what it held before the model was loaded
  (Python and libraries); on CUDA ``max_memory_allocated``.

In fp16 the loss scale starts at 2^8: random tokens overflow at the usual 2^16, and a skipped step
does no update. The table marks measured steps that were skipped nevertheless.

A "fp16" matrix product on a CPU is the engine's, which goes through fp32
(``burnish/models/half_linear.py``); PyTorch's own is listed as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import (
    Turns,
    Worker,
    cpu_seconds,
    interleave,
    markdown_table,
    median,
    model_folder,
    versions,
)
from precision_claims import claims_table

CASES = ("fp32", "tf32", "bf16", "fp16")
ROWS, PROMPT, RESPONSE = 8, 32, 96
TINY_ROWS, TINY_PROMPT, TINY_RESPONSE = 4, 4, 12
FIRST_SCALE_POWER = 8
PARTS = ("weights", "masters", "gradients", "moments")
MATMULS = ((64, 576, 1536), (512, 576, 1536))
"""(rows, in, out): SmolLM2-135M's widest projection on the rows of a decode step and of a
micro-batch."""
CUDA_MATMULS = ((4096, 4096, 4096),)
TORCH_FP16 = "fp16 by torch"
TINY_MATMULS = ((8, 32, 64),)
_SCRIPT = Path(__file__).with_name("precision.py")


def add_arguments(parts: Any) -> None:
    """The subcommand and its options."""
    parser = parts.add_parser("cost", help="time and memory of a train step in each format")
    parser.add_argument("--micro", type=int, nargs="+", default=[1, 4, 8], help="rows per pass")
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each case")
    parser.add_argument(
        "--dtypes", choices=CASES, nargs="+", help=("default: all that are available")
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--model", help="a folder, or scratch:HIDDENxLAYERS (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a scratch model and short rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers")
    parser.add_argument("--worker", choices=[*CASES, "matmul"], help=argparse.SUPPRESS)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> None:
    """Measure every case in its turn, print the tables."""
    if args.worker:
        return run_matmuls(args) if args.worker == "matmul" else run_steps(args)
    import torch

    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    cuda = args.device != "cpu"
    args.dtypes = args.dtypes or [c for c in CASES if cuda or c != "tf32"]
    args.model = args.model or ("scratch:32x2" if args.tiny else str(model_folder()))
    matmuls = _matmuls(args)
    cases = [case for micro in args.micro for case in _cases(args, micro)]
    numbers = {
        "machine": versions("torch", "transformers"),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "device": args.device,
        "threads": args.threads,
        "model": Path(args.model).name,
        "rounds": args.rounds,
        "cases": cases,
        "matmuls": matmuls,
    }
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(numbers, indent=1) + "\n")
    print("\n".join(report(numbers)))
    return None


def _cases(args: argparse.Namespace, micro: int) -> list[dict[str, Any]]:
    """The formats at one micro-batch size, taking turns; medians over the rounds."""
    workers = {
        name: Worker(str(_SCRIPT), *_worker_options(args, name, micro=micro), threads=args.threads)
        for name in args.dtypes
    }
    try:
        rounds = interleave(workers, warmup=1, steps=args.rounds)
        parts = {name: worker.go() for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    return [
        {
            "dtype": name,
            "micro": micro,
            "user_cpu_s": median(rounds[name], "cpu_s"),
            "wall_s": median(rounds[name], "wall_s"),
            "tokens_per_s": parts[name]["tokens"] / median(rounds[name], "wall_s"),
            "peak_mb": max(r["peak_mb"] for r in rounds[name]),
            "skipped": sum(r["skipped"] for r in rounds[name]),
            **parts[name],
        }
        for name in args.dtypes
    ]


def _matmuls(args: argparse.Namespace) -> list[dict[str, Any]]:
    command = [sys.executable, str(_SCRIPT), *_worker_options(args, "matmul", micro=1)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _worker_options(args: argparse.Namespace, worker: str, *, micro: int) -> list[str]:
    options = ["cost", "--worker", worker, "--micro", str(micro), "--rounds", str(args.rounds)]
    options += ["--device", args.device, "--model", args.model, "--threads", str(args.threads)]
    return [*options, "--dtypes", *args.dtypes, *["--tiny"] * args.tiny]


# ---- workers -----------------------------------------------------------------------------------


def run_steps(args: argparse.Namespace) -> None:
    """Worker: a train step per turn; the turn after the last round measures memory by its parts."""
    import torch

    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high" if args.worker == "tf32" else "highest")
    turns, base = Turns(), _bytes_before_model(args.device)
    dtype = "fp32" if args.worker == "tf32" else args.worker
    engine = make_engine(dtype, args.model, micro=args.micro[0], device=args.device)
    batch = _batch(args.tiny, engine.model.config.vocab_size)
    cuda = engine.device.type == "cuda"
    for _ in range(1 + args.rounds):
        if not turns.wait():
            return
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        cpu, wall = cpu_seconds(), time.perf_counter()
        engine.forward_backward(batch, mean_logprob)
        step = engine.optim_step()
        if cuda:
            torch.cuda.synchronize()
        turns.done(
            wall_s=time.perf_counter() - wall,
            cpu_s=cpu_seconds() - cpu,
            peak_mb=(_peak_bytes(cuda) - base) / 1e6,
            skipped=step.skipped,
        )
    if turns.wait():
        turns.done(**memory_parts(engine, batch))


def _bytes_before_model(device: str) -> int:
    """Return the memory of the process after all imports; 0 on CUDA, where it does not count."""
    import burnish.runtime.inline
    from burnish.observe.memory import current_rss_bytes

    assert burnish.runtime.inline  # imported for its weight
    return current_rss_bytes() if device == "cpu" else 0


def _peak_bytes(cuda: bool) -> int:
    import torch

    from burnish.observe.memory import peak_rss_bytes

    return int(torch.cuda.max_memory_allocated()) if cuda else peak_rss_bytes()


def make_engine(dtype: str, model: str, *, micro: int | None, device: str) -> Any:
    """A policy's train engine as a run would make it."""
    from burnish.config.model import ModelConfig, PrecisionConfig
    from burnish.config.roles import TrainRole
    from burnish.config.train import TrainConfig
    from burnish.models.load import load_tokenizer
    from burnish.observe.timeline import Timeline
    from burnish.runtime.inline import InlineRuntime
    from burnish.train.spec import EngineSpec

    config = ModelConfig.model_validate(model_source(model))
    scale = {"fp16": {"initial_scale_power": FIRST_SCALE_POWER}} if dtype == "fp16" else {}
    precision = PrecisionConfig.model_validate({"dtype": dtype, **scale})
    runtime = InlineRuntime(
        load_tokenizer(config), precision=precision, device=device, timeline=Timeline()
    )
    train = TrainConfig(lr=1e-6, layout="packed")
    return runtime.language_model(
        EngineSpec(
            TrainRole.alone("policy", train, config, precision=precision), micro_batch_size=micro
        )
    )


def model_source(text: str) -> dict[str, Any]:
    """``scratch:HIDDENxLAYERS`` or a folder, as a model config. Heads are 32 to 128 wide."""
    if not text.startswith("scratch:"):
        return {"path": text}
    hidden, layers = (int(x) for x in text.removeprefix("scratch:").split("x"))
    heads = max(1, hidden // (128 if hidden >= 2048 else 64 if hidden >= 256 else 16))
    shape = {"hidden_size": hidden, "num_layers": layers, "num_heads": heads}
    return {"scratch": {**shape, "num_kv_heads": heads}}


def _batch(tiny: bool, vocab: int) -> Any:
    import torch

    from burnish.types import rows_to_batch

    sizes = (TINY_ROWS, TINY_PROMPT, TINY_RESPONSE) if tiny else (ROWS, PROMPT, RESPONSE)
    rows, prompt, response = sizes
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab, (rows, prompt + response), generator=generator).tolist()
    mask = [False] * prompt + [True] * response
    return rows_to_batch(tokens, [mask] * rows, prompt_lens=[prompt] * rows)


def mean_logprob(outputs: Any, batch: Any) -> Any:
    """The loss: minus the mean log-prob of the step's action tokens."""
    from burnish.types import Stats

    return -outputs.logprobs.sum() / batch.num_tokens, Stats()


# ---- memory by its parts -----------------------------------------------------------------------


class _Saved:
    """A tensor that autograd holds. Dies with the node that saved it."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


def memory_parts(engine: Any, batch: Any) -> dict[str, Any]:
    """Bytes of each part of the model state and of the activations, and the step's tokens."""
    import torch

    from burnish.models.logprobs import chunk_tokens

    alive: weakref.WeakSet[_Saved] = weakref.WeakSet()
    activations = [0]

    def pack(tensor: Any) -> _Saved:
        saved = _Saved(tensor)
        alive.add(saved)
        return saved

    parameters = {t.untyped_storage().data_ptr() for t in engine.model.parameters()}

    def loss(outputs: Any, micro: Any) -> Any:
        result = mean_logprob(outputs, micro)
        held = [s.tensor for s in list(alive) if s.tensor.device == engine.device]
        activations.append(_storage_bytes(held, seen=set(parameters)))
        return result

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        engine.forward_backward(batch, loss)
    state = state_parts(engine)
    engine.optim_step()
    rows = min(engine.spec.micro_batch_size or batch.num_rows, batch.num_rows)
    actions = rows * int(batch.action_mask.sum()) // batch.num_rows
    wanted = engine.spec.role.train.logprob_chunk_tokens
    chunk = min(actions, chunk_tokens(wanted, engine.device.type)) * engine.model.config.vocab_size
    return {
        "tokens": int(batch.tokens.numel()),
        "parameters": sum(p.numel() for p in engine.model.parameters()),
        "state_bytes": state,
        "activation_bytes": max(activations),
        "logits_chunk_bytes": 4 * chunk,
    }


def state_parts(engine: Any) -> dict[str, int]:
    """Bytes of weights, masters, gradients and moments; a storage counts once, where it comes
    first."""
    weights, masters = list(engine.model.parameters()), list(engine.optimizer.masters)
    (adamw,) = engine.optimizer.rules
    moments = [t for master in adamw.masters for t in adamw.state(master).values()]
    tensors = {
        "weights": weights,
        "masters": masters,
        "gradients": [t.grad for t in [*weights, *masters] if t.grad is not None],
        "moments": moments,
    }
    seen: set[int] = set()
    return {part: _storage_bytes(tensors[part], seen=seen) for part in PARTS}


def _storage_bytes(tensors: list[Any], *, seen: set[int]) -> int:
    """Bytes of the storages not yet in ``seen``, which they are added to."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


# ---- matrix products ---------------------------------------------------------------------------


def run_matmuls(args: argparse.Namespace) -> None:
    """Worker: seconds per product of each shape and format, the formats in turn."""
    import torch

    torch.set_num_threads(args.threads)
    cuda = args.device != "cpu"
    names = [*args.dtypes, *([TORCH_FP16] if "fp16" in args.dtypes and not cuda else ())]
    shapes = TINY_MATMULS if args.tiny else MATMULS + (CUDA_MATMULS if cuda else ())
    found = []
    for shape in shapes:
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(3 + args.rounds):
            for name in names:
                seconds[name].append(_matmul_seconds(name, shape, args.device))
        found.append({"shape": shape} | {n: statistics.median(s) for n, s in seconds.items()})
    print(json.dumps(found))


def _matmul_seconds(name: str, shape: tuple[int, int, int], device: str) -> float:
    """Seconds of one ``rows x in @ in x out``, over at least 50 ms of them, after a warm-up."""
    import torch

    from burnish.models.half_linear import linear

    formats = {"bf16": torch.bfloat16, "fp16": torch.float16, TORCH_FP16: torch.float16}
    product = torch.nn.functional.linear if name == TORCH_FP16 else linear
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    rows, inner, out = shape
    dtype = formats.get(name, torch.float32)
    left = torch.ones(rows, inner, device=device, dtype=dtype)
    weight = torch.ones(out, inner, device=device, dtype=dtype)

    @torch.no_grad()
    def timed(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            product(left, weight)
        if device != "cpu":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    timed(2)
    count = max(1, int(0.05 / max(timed(2) / 2, 1e-7)))
    return timed(count) / count


# ---- tables ------------------------------------------------------------------------------------


def report(numbers: dict[str, Any]) -> Iterator[str]:
    """The lines to print."""
    cases = numbers["cases"]
    yield f"{numbers['machine']}{', ' + numbers['gpu'] if numbers['gpu'] else ''}"
    yield (
        f"{numbers['model']}, {cases[0]['parameters'] / 1e6:.1f} M parameters, "
        f"{cases[0]['tokens']} tokens per step, {numbers['device']}, threads: "
        f"{numbers['threads']}, "
        f"medians of {numbers['rounds']} steps that take turns"
    )
    yield ""
    peak = "peak RSS" if numbers["device"] == "cpu" else "peak GPU"
    heads = ["micro-batch", "format", "user-CPU s", "wall s", "tokens/s", f"{peak}, MB"]
    heads += ["beyond state, MB", "activations, MB", "logits chunk, MB"]
    yield from markdown_table(heads, [_cost_row(c) for c in cases])
    yield ""
    yield "Model state, MB (bytes per parameter); the same at every micro-batch size:"
    yield ""
    largest = [c for c in cases if c["micro"] == cases[-1]["micro"]]
    yield from markdown_table(["format", *PARTS, "together"], [_state_row(c) for c in largest])
    yield ""
    yield from _matmul_table(numbers["matmuls"])
    if skipped := [f"{c['dtype']} at {c['micro']}: {c['skipped']}" for c in cases if c["skipped"]]:
        yield ""
        yield f"Skipped steps among the measured ones (no update, so less work): {skipped}"
    yield ""
    yield from claims_table(cases, numbers["matmuls"])


def _cost_row(case: dict[str, Any]) -> list[str]:
    state = sum(case["state_bytes"].values()) / 1e6
    return [
        str(case["micro"]),
        case["dtype"],
        f"{case['user_cpu_s']:.3f}",
        f"{case['wall_s']:.3f}",
        f"{case['tokens_per_s']:.0f}",
        f"{case['peak_mb']:.0f}",
        f"{case['peak_mb'] - state:.0f}",
        f"{case['activation_bytes'] / 1e6:.2f}",
        f"{case['logits_chunk_bytes'] / 1e6:.2f}",
    ]


def _state_row(case: dict[str, Any]) -> list[str]:
    parts = {**case["state_bytes"], "together": sum(case["state_bytes"].values())}
    cells = [f"{x / 1e6:.1f} ({x / case['parameters']:.2f})" for x in parts.values()]
    return [case["dtype"], *cells]


def _matmul_table(matmuls: list[dict[str, Any]]) -> Iterator[str]:
    names = [n for n in matmuls[0] if n != "shape"]
    rows = []
    for found in matmuls:
        rows_, inner, out = found["shape"]
        flops = 2 * rows_ * inner * out
        cells = [f"{found[n] * 1e6:.1f} ({flops / found[n] / 1e9:.0f})" for n in names]
        rows.append([f"{rows_} x {inner} x {out}", *cells])
    yield from markdown_table(["matrix product", *[f"{n}, us (GFLOP/s)" for n in names]], rows)
