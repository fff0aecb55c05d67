"""TRL's own trainers, made to take a few optimizer steps on a tiny model while everything that goes
in and comes out is written down. TRL is imported when it is used: it imports vLLM, 2 s in every
process that collects the tests."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

ADAM: dict[str, Any] = {
    "lr": 1e-2,
    "optimizer": {"betas": (0.9, 0.95), "eps": 1e-4},
    "weight_decay": 0.0,
}
"""For both sides. The eps is large beside rounding, so that a gradient near 0 moves a weight by
next to nothing instead of by the sign of its rounding error."""


@dataclass
class Steps:
    """TRL's results, one entry per optimizer step."""

    inputs: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)


def _arguments(folder: Path, steps: int, rows: int) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": rows,
        "max_steps": steps,
        "learning_rate": ADAM["lr"],
        "adam_beta1": ADAM["optimizer"]["betas"][0],
        "adam_beta2": ADAM["optimizer"]["betas"][1],
        "adam_epsilon": ADAM["optimizer"]["eps"],
        "weight_decay": ADAM["weight_decay"],
        "max_grad_norm": 1e9,  # measured, and never reached
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def _watched(kind: type, seen: Steps) -> type:
    class Watched(kind):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            seen.inputs.append(
                {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}
            )
            out = super().compute_loss(model, inputs, *rest, **more)
            seen.losses.append(float((out[0] if isinstance(out, tuple) else out).detach()))
            return out

        def log(self, logs: dict[str, float], *rest: Any) -> None:
            if "grad_norm" in logs:
                seen.grad_norms.append(float(logs["grad_norm"]))
                state = self.model.state_dict()
                seen.weights.append({n: p.detach().clone() for n, p in state.items()})
            super().log(logs, *rest)

    return Watched


def preference_steps(  # house: ok what a step is made of
    kind: str,
    model: LlamaForCausalLM,
    reference: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict[str, Any]],
    folder: Path,
    **options: Any,
) -> Steps:
    """One step of TRL's ``dpo`` or ``kto`` trainer on all ``rows`` at once."""
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

    seen = Steps()
    trainers = {"dpo": (DPOTrainer, DPOConfig), "kto": (KTOTrainer, KTOConfig)}
    trainer_kind, config = trainers[kind]
    arguments = _arguments(folder, 1, len(rows)) | {"train_sampling_strategy": "sequential"}
    trainer = _watched(trainer_kind, seen)(
        model=copy.deepcopy(model),
        ref_model=copy.deepcopy(reference),
        args=config(**arguments, **options),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
    )
    trainer.train()
    return seen


def grpo_steps(  # house: ok what a step is made of
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    folder: Path,
    *,
    num_generations: int,
    **options: Any,
) -> tuple[Steps, dict[tuple[int, ...], float]]:
    """Two steps of TRL's GRPO on one rollout (``num_iterations`` 2), and the reward that each
    response (token ids) was given: TRL shuffles its rows.

    The second step is off the policy that sampled: its ratios differ from 1, and some are clipped.
    """
    from trl import GRPOConfig, GRPOTrainer

    seen, rewards = Steps(), {}
    path = folder / "model"
    model.save_pretrained(path)  # TRL loads the reference from where the policy came from
    tokenizer.save_pretrained(path)

    def score(completion_ids: list[list[int]], **_: Any) -> list[float]:
        found = [len(set(ids)) + 0.25 * (ids[0] % 5) for ids in completion_ids]
        rewards.update(zip(map(tuple, completion_ids), found, strict=True))
        return found

    rows = len(prompts) * num_generations
    trainer = _watched(GRPOTrainer, seen)(
        model=LlamaForCausalLM.from_pretrained(path, dtype=torch.float32),
        args=GRPOConfig(
            **_arguments(folder, 2, rows),
            num_generations=num_generations,
            num_iterations=2,
            temperature=1.0,
            shuffle_dataset=False,
            max_completion_length=12,
            seed=3,
            **options,
        ),
        processing_class=tokenizer,
        reward_funcs=score,
        train_dataset=Dataset.from_list([{"prompt": p} for p in prompts]),
    )
    trainer.train()
    return seen, rewards
