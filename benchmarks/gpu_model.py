"""The model and the rows that benchmarks/gpu_session.py measures speed with, and what they cost.

The model has the shape of Qwen3-0.6B and random weights. FLOPs of a training pass, counted once for
what is computed once (a shared prompt; no padding, no recomputation):

    3 x (2 x N x T + 2 x V x H x A + 4 x h x d x L x P)

with N parameters in the matrices of the layers, T tokens, vocabulary V, hidden size H, A trained
tokens (the head is computed for these alone), h heads of dimension d, L layers, and P pairs of a
token and one that it reads (itself included). 3: backward takes twice the forward. MFU is that over
seconds and over the dense bf16 (or fp32) rate of the GPU in burnish/plan/hardware.yaml.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_report import Setup
from plan_accuracy import random_model

from burnish.config import load_config
from burnish.config.model import ModelConfig
from burnish.config.roles import TrainRole
from burnish.doctor.calibrate import gpu_of
from burnish.models.gpu import set_up_gpu
from burnish.plan.hardware import load_tables
from burnish.plan.shapes import find_config, matrix_flops, shape_of
from burnish.train.base import Outputs
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, Stats, rows_to_batch

SHAPE = "Qwen/Qwen3-0.6B"
REPEATS = 3
SHAPES: dict[str, dict[str, Any]] = {
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144},
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "layer_types": ["full_attention"] * 36,
        "num_attention_heads": 32,
    },
    "30B-A3B, 4 layers": {"path": "Qwen/Qwen3-30B-A3B", "num_hidden_layers": 4},
}
"""Other models, as differences from :data:`SHAPE` or from the model at ``path``."""
TINY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": ["full_attention"] * 2,
}


@dataclass(frozen=True)
class Group:
    """Rows of one prompt."""

    prompt: int
    responses: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Computed once: the prompt, then each response."""
        return self.prompt + sum(self.responses)

    @property
    def row_tokens(self) -> int:
        """In the rows, the prompt in each of them."""
        return self.tokens + self.prompt * (len(self.responses) - 1)

    @property
    def pairs(self) -> int:
        """Count pairs of a token and one that it reads.

        A prompt of 2 and responses of 1 and 2: 1 + 2 = 3 in the prompt, 2 x 1 + 1 = 3 and
        2 x 2 + 1 + 2 = 7 in the responses; 13.

        >>> Group(2, (1, 2)).pairs
        13
        """
        own = [self.prompt, *self.responses]
        return sum(n * (n + 1) // 2 for n in own) + self.prompt * sum(self.responses)


def model_folder(setup: Setup, shape: str | None = None) -> Path:
    """Return a folder with the model's config alone, that of :data:`SHAPE` or of another shape in
    :data:`SHAPES`."""
    folder = setup.work / (shape or "model")
    if not (folder / "config.json").is_file():
        changes = dict(SHAPES[shape]) if shape else {}
        found = find_config(ModelConfig(path=changes.pop("path", SHAPE)))[0]
        found.update(changes | (TINY if setup.tiny else {}))
        if setup.tiny and "num_experts" in found.to_dict():
            found.update(TINY_EXPERTS)
        found.save_pretrained(folder)
    return folder


def make_recipe(setup: Setup, shape: str | None = None, **train: Any) -> Any:
    """Return a recipe of supervised fine-tuning. Only its model and engine are used."""
    tree = {
        "job": "sft",
        "model": {"path": str(model_folder(setup, shape))},
        "precision": {"dtype": "fp32" if setup.tiny else "bf16"},
        "data": {"sources": ["rows.jsonl"], "max_len": 1024},
        "train": {"train_batch_size": 1, **train},
    }
    return load_config(tree)


def make_engine(
    setup: Setup, *, with_entropy: bool, shape: str | None = None, **train: Any
) -> TorchTrainEngine:
    """Make a train engine over random weights. ``train``: keys of the recipe."""
    set_up_gpu(torch.device(setup.device))
    config = make_recipe(setup, shape, **train)
    torch.manual_seed(0)
    model = random_model(config, torch.device(setup.device))
    spec = EngineSpec(
        TrainRole.alone(
            "policy",
            config.train,
            config.model,
            with_entropy=with_entropy,
            precision=config.precision,
        ),
        micro_batch_size=config.batch_plan().micro_train_batch_size,
    )
    return TorchTrainEngine(model, spec)


def make_batch(groups: Sequence[Group], vocabulary: int) -> Batch:
    """Make rows of random tokens. Responses are trained on."""
    generator = random.Random(0)
    rows, masks, prompts, ids = [], [], [], []
    for number, group in enumerate(groups):
        prompt = generator.choices(range(3, vocabulary), k=group.prompt)
        for response in group.responses:
            rows.append(prompt + generator.choices(range(3, vocabulary), k=response))
            masks.append([False] * group.prompt + [True] * response)
            prompts.append(group.prompt)
            ids.append(number)
    return rows_to_batch(rows, masks, prompt_lens=prompts, group_ids=ids)


def nll(outputs: Outputs, batch: Batch) -> tuple[torch.Tensor, Stats]:
    """Compute minus the mean log-prob of the trained tokens."""
    assert outputs.logprobs is not None
    return -outputs.logprobs.sum() / batch.num_tokens, Stats()


def train_flops(setup: Setup, groups: Sequence[Group], model: str | None = None) -> float:
    """Return the FLOPs of a training pass over the groups, by the formula above."""
    shape = shape_of(ModelConfig(path=str(model_folder(setup, model))))
    text = shape.text
    head = 2.0 * text.vocab_size * text.hidden_size
    body = matrix_flops(shape) - head
    trained = sum(sum(group.responses) for group in groups)
    width = text.num_attention_heads * shape.head_dim
    scores = 4.0 * width * len(shape.layers) * sum(group.pairs for group in groups)
    return 3.0 * (body * sum(group.tokens for group in groups) + head * trained + scores)


def peak_flops(setup: Setup) -> float | None:
    """Return this GPU's FLOPs per second on its data sheet, None if the table lacks it."""
    if setup.tiny:
        return None
    memory = torch.cuda.get_device_properties(0).total_memory
    gpu = gpu_of(load_tables(), torch.cuda.get_device_name(0), memory)
    return None if gpu is None else gpu.bf16_tflops * 1e12


def vocabulary_of(setup: Setup) -> int:
    """Return the number of tokens in the model's vocabulary."""
    return int(shape_of(ModelConfig(path=str(model_folder(setup)))).text.vocab_size)


def synchronize(setup: Setup) -> None:
    """Wait for the device."""
    if setup.device == "cuda":
        torch.cuda.synchronize()


def free(setup: Setup) -> None:
    """Free unreferenced memory and reset the peak, so that each case has its own."""
    gc.collect()
    if setup.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gb(setup: Setup) -> tuple[float, float] | None:
    """Return the peaks (tensors, reserved) since :func:`free` in GB, None on a CPU."""
    if setup.device != "cuda":
        return None
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return peaks[0] / 1e9, peaks[1] / 1e9


def milliseconds(setup: Setup, run: Callable[[], object]) -> tuple[float, float | None]:
    """Return the median time of a call, and the peak of memory above its inputs in MB."""
    cuda = setup.device == "cuda"
    run()
    taken = []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    for _ in range(REPEATS):
        synchronize(setup)
        begun = time.perf_counter()
        run()
        synchronize(setup)
        taken.append(1e3 * (time.perf_counter() - begun))
    peak = (torch.cuda.max_memory_allocated() - before) / 1e6 if cuda else None
    return median(taken), peak
