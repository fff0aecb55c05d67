"""Measure a small model in bf16 or fp16: weights bit for bit, and log-probs by the rounding of
transformers' own pass in that format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from burnish.checkpoint.export import export
from burnish.checkpoint.save import CheckpointStore
from burnish.config.model import Dtype, ModelConfig, PrecisionConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.auto_class import language_model_class
from burnish.models.buffers import wanted_dtype
from burnish.models.load import DTYPES, load_causal_lm
from burnish.rollout.base import Request, Sampling
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import make_engine as make_local_engine
from burnish.train.engine import BaseTrainEngine
from burnish.train.engines import make_engine
from burnish.train.spec import EngineSpec
from burnish.types import Batch, Stats, rows_to_batch

TIMES = 2.0
"""Allowed median error, in multiples of transformers' own in the format. (Medians: rounding moves
single tokens of a mixture to another expert.)"""
FLOOR = 2e-3
"""Allowed median error in nats of models that transformers rounds less."""


class HalfSubject:
    """A model in a folder, computed in one half-precision format. ``rows``: a batch.
    ``reference``: its fp32 log-probs [M]."""

    def __init__(
        self, model: ModelConfig, tokenizer: Any, dtype: Dtype, *, rows: Batch, reference: Tensor
    ) -> None:
        self.model, self.tokenizer, self.dtype, self.rows = model, tokenizer, dtype, rows
        self.reference = reference
        self.plain: Any = _plain(str(model.path), DTYPES[dtype])
        self.rounding = self._error(_row_logprobs(self.plain, rows))
        self.worst = 0.0

    def problem(self, work: Path) -> str:
        """Return the first path that is wrong, with a reason; "" if all agree. ``work``: an empty
        folder."""
        loaded = load_causal_lm(self.model, dtype=self.dtype)
        if odd := _odd(dict(loaded.named_parameters()), dict(self.plain.named_parameters())):
            return f"load: {odd} is not that of transformers"
        for layout in ("padded", "packed", "shared_prefix"):
            engine = self._engine(layout)
            if odd := self._too_far(engine.logprobs(self.rows)):
                return f"{layout}: {odd}"
        return self._after_a_step(engine, loaded, work)

    def _after_a_step(self, engine: Any, loaded: Any, work: Path) -> str:
        engine.forward_backward(self.rows, _mean_nll)
        engine.optim_step()
        own = dict(engine.model.named_parameters())
        plain = dict(self.plain.named_parameters())
        if wrong := [n for n, p in own.items() if n in plain and p.dtype != plain[n].dtype]:
            return f"train: {wrong[0]} has another dtype than transformers'"
        sampler = make_local_engine(loaded, self.tokenizer, LocalEngine(), name="the model")
        target = DTYPES[self.dtype]
        sent = [(name, t.to(wanted_dtype(t, target))) for name, t in engine.weights()]
        sampler.load_weights(1, sent)
        if odd := _odd(dict(loaded.named_parameters()), own):
            return f"weights for the sampler: {odd} is not the trainer's"
        if odd := self._sampled(sampler, engine):
            return f"sampled: {odd}"
        return self._exported(engine, work)

    def _sampled(self, sampler: Any, engine: BaseTrainEngine) -> str:
        """Compare the sampler's log-probs with the trainer's."""
        prompt = tuple(self.rows.tokens[:3].tolist())
        sampling = Sampling(max_tokens=5, temperature=1.0)
        done = list(sampler.generate([Request("a", prompt, n=3, seed=1)], sampling))
        tokens = [[*prompt, *c.token_ids] for c in done]
        masks = [[False] * 3 + [True] * len(c.token_ids) for c in done]
        batch = rows_to_batch(tokens, masks, prompt_lens=[3] * len(done))
        trainer = engine.logprobs(batch)[batch.action_mask]
        own = torch.cat([torch.tensor(c.logprobs) for c in done])
        gap = float((trainer - own).abs().median())
        return "" if gap <= TIMES * self.rounding + FLOOR else f"{gap:.1e} nats from the trainer"

    def _exported(self, engine: Any, work: Path) -> str:
        store = CheckpointStore(work / "saves", keep_last=1, best_mode="max")
        store.save(1, lambda folder: engine.save(folder / "policy"))
        folder = next(p for p in sorted((work / "saves").iterdir()) if p.is_dir())
        exported = _plain(str(export(folder, work / "out", dtype=self.dtype)), "auto")
        found = dict(exported.named_parameters())
        plain = dict(self.plain.named_parameters())
        optimizer = engine.optimizer
        pairs = zip(optimizer.names, optimizer.masters, strict=True)
        odd = _odd(found, {n: m.detach().to(plain[n].dtype) for n, m in pairs if n in plain})
        return f"export: {odd} is not the master" if odd else ""

    def _engine(self, layout: Any) -> Any:
        precision = PrecisionConfig(dtype=self.dtype)
        train = TrainConfig(layout=layout, lr=1e-3)
        spec = EngineSpec(
            TrainRole.alone("policy", train, self.model, precision=precision, dropout=False)
        )
        return make_engine(load_causal_lm(self.model), spec, tokenizer=self.tokenizer)

    def _error(self, logprobs: Tensor) -> float:
        mask = self.rows.action_mask
        return float((logprobs - self.reference).abs()[mask].median())

    def _too_far(self, logprobs: Tensor) -> str:
        error = self._error(logprobs)
        self.worst = max(self.worst, error)
        if error <= TIMES * self.rounding + FLOOR:
            return ""
        return f"median error {error:.1e} nats from fp32, transformers' own {self.rounding:.1e}"


def _plain(folder: str, dtype: Any) -> Any:
    auto = language_model_class(AutoConfig.from_pretrained(folder))
    return auto.from_pretrained(folder, dtype=dtype).eval()


def _odd(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    """Return the first name whose dtype or bits differ; "" if there is none."""
    for name, tensor in wanted.items():
        if name in found and (
            found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor)
        ):
            return name
    return ""


@torch.no_grad()
def _row_logprobs(model: Any, batch: Batch) -> Tensor:
    """Return [M] log-probs of the action tokens, computed one row at a time."""
    rows = []
    for begin, end in zip(batch.offsets.tolist(), batch.offsets[1:].tolist(), strict=False):
        ids = batch.tokens[begin:end]
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
        found = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        rows.append(torch.cat([found.new_zeros(1), found]))
    return torch.where(batch.action_mask, torch.cat(rows), 0.0)


def _mean_nll(outputs: Any, batch: Batch) -> Any:
    return -outputs.logprobs.sum() / batch.num_tokens, Stats()
