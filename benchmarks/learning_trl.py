"""TRL's GRPOTrainer on a task of ``learning.py``, told to do what Burnish's recipe says."""

from __future__ import annotations

import tempfile
from typing import Any

from common import TRL_QUIET, cpu_seconds
from learning_tasks import Task


def run_trl(task: Task, seed: int, curve: Any) -> Any:
    """TRL's loop, measured at its steps. ``loss_type="dapo"`` is the mean over all tokens of the
    batch, Burnish's ``token_mean``."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    total = task.prompts * task.samples
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), seed=seed,
        per_device_train_batch_size=total // 2, steps_per_generation=2,
        gradient_accumulation_steps=1, num_iterations=1,
        num_generations=task.samples, max_completion_length=task.new_tokens,
        temperature=1.0, top_p=1.0, top_k=0, beta=0.0, epsilon=0.2,
        loss_type="dapo", scale_rewards="group", mask_truncated_completions=False,
        learning_rate=task.lr, weight_decay=0.0,
        adam_beta1=0.9, adam_beta2=0.95, max_grad_norm=1.0,
        max_steps=2 * task.steps, bf16=False, **TRL_QUIET,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    model.generation_config.eos_token_id = _ends(task, tokenizer)
    rewards: list[float] = []

    def score(completions: list[str], label: list[str], **_: Any) -> list[float]:
        found = [task.reward(c, a) for c, a in zip(completions, label, strict=True)]
        rewards.append(sum(found) / len(found))
        return found

    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=score,
        args=config,
        train_dataset=Dataset.from_list(task.train),
        callbacks=[_measuring(task, tokenizer, curve, rewards)],
    )
    trainer.train()
    return curve


def _ends(task: Task, tokenizer: Any) -> list[int]:
    """The end token, and every token in which a response would stop: TRL has no stop strings, but
    several end tokens."""
    stops = [
        token
        for token in range(len(tokenizer))
        if task.stop is not None and task.stop in tokenizer.decode([token])
    ]
    return [tokenizer.eos_token_id, *stops]


def _measuring(task: Task, tokenizer: Any, curve: Any, rewards: list[float]) -> Any:
    from transformers import TrainerCallback

    class Measuring(TrainerCallback):
        """Two of the trainer's steps are one of ours: one rollout, two updates."""

        def on_train_begin(self, *_: Any, **given: Any) -> None:
            curve.measured(accuracy(given["model"], tokenizer, task))
            self.cpu = cpu_seconds()

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step % 2:
                return
            curve.step(cpu_seconds() - self.cpu, task.prompts * task.samples, rewards[-1])
            if len(curve.rewards) % task.eval_every == 0:
                curve.measured(accuracy(given["model"], tokenizer, task))
            self.cpu = cpu_seconds()

    return Measuring()


def accuracy(model: Any, tokenizer: Any, task: Task) -> float:
    """Mean reward of the held-out prompts, by HuggingFace's own ``generate``."""
    import torch

    training = model.training
    model.eval()
    tokenizer.padding_side = "left"
    prompts = [r["prompt"] for r in task.held_out for _ in range(task.tries)]
    labels = [r["label"] for r in task.held_out for _ in range(task.tries)]
    encoded = tokenizer(prompts, return_tensors="pt", padding=True)
    how: dict[str, Any] = {"do_sample": False}
    if task.temperature:
        how = {"do_sample": True, "temperature": task.temperature, "top_k": 0, "top_p": 1.0}
    with torch.no_grad():
        out = model.generate(
            **encoded, max_new_tokens=task.new_tokens, pad_token_id=tokenizer.pad_token_id, **how
        )
    model.train(training)
    texts = tokenizer.batch_decode(
        out[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return sum(map(task.reward, texts, labels)) / len(texts)
