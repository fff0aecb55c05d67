# house: ok one subject with the cells of every path
"""Measure one small random model on every path of the project, against transformers' own forward
pass of each single row.

:func:`measure` returns one :class:`Cell` per path. The reference is plain transformers in fp32: one
row at a time, no padding, no cache, its own attention. Every path of the project must give the same
numbers (``exact``), or be refused with a message (``refused``). ``WRONG`` and ``failed`` are
defects."""

from __future__ import annotations

import itertools
import math
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from family_experts import TOP_K_OF_LOGITS, record, wrong_layers
from family_half import HalfSubject
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from burnish.checkpoint.export import export
from burnish.checkpoint.save import CheckpointStore
from burnish.config.model import Dtype, LoraConfig, ModelConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.auto_class import language_model_class
from burnish.models.load import ModelError, load_causal_lm, num_positions
from burnish.models.lora_layers import merged_weights
from burnish.models.scalar_model import is_own
from burnish.models.scratch import scratch_tokenizer
from burnish.models.shrink import SPECIAL, build, shrink
from burnish.models.tensor_parallel import check_head_counts, shard_dims
from burnish.models.value_head import load_scalar_model
from burnish.rewards.model.reward import load_reward_engine, score_rows
from burnish.rollout.base import Completion, Request, Sampling
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import make_engine as make_local_engine
from burnish.train.base import Outputs
from burnish.train.engine import BaseTrainEngine
from burnish.train.engines import make_engine
from burnish.train.spec import EngineSpec
from burnish.types import Batch, Stats, rows_to_batch

Layout = Literal["padded", "packed", "shared_prefix"]
LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "shared_prefix")
CELLS = (
    *("load", *LAYOUTS, "greedy", "sampled", "lora", "checkpoint", "export", "reward_model"),
    *("tensor_parallel", "bf16", "fp16", "experts"),
)
"""Names of the cells, in column order."""

TOLERANCE = 1e-4
"""Tolerance in nats, and relative to the largest gradient. Rounding in fp32 gives up to 3e-5; a
token that reads another row gives 1e-3 and more."""
SCORE_TOLERANCE = 1e-5
"""Tolerance of fp32 scores, as a fraction of the largest score and at least 1."""
STATES = ("exact", "rounded", "plan", "refused", "WRONG", "failed", "not run")


@dataclass(frozen=True)
class Cell:
    """The result of one path.

    Example: ``Cell("exact", 4.8e-07)`` or ``Cell("refused", text="... use another model")``.
    """

    state: str
    """One of :data:`STATES`."""
    difference: float | None = None
    """Largest difference from the reference: nats, or of the largest gradient if that is larger."""
    text: str = ""
    """Message of a refusal, place of an exception, or a note."""


class Refusal(Exception):
    """Refusal of a path by the project, with its reason."""


def measure(config: PretrainedConfig, folder: Path, *, shrunk: bool = False) -> dict[str, Cell]:
    """Return the cells of the model family of ``config``.

    ``folder``: an empty folder for the model, its checkpoint and its export. ``shrunk``: the config
    is already small."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # peft draws the adapters from the global generator
        warnings.simplefilter("ignore")
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        cells = _measure(config, folder, shrunk)
    place = str(folder / "model")
    return {
        name: replace(cell, text=cell.text.replace(place, config.model_type))
        for name, cell in cells
    }


def _measure(config: PretrainedConfig, folder: Path, shrunk: bool) -> list[tuple[str, Cell]]:
    holder: list[Subject] = []

    def load() -> Cell:
        holder.append(Subject(config if shrunk else _small(config), folder))
        return Cell("exact", holder[0].load())

    cells = [("load", _cell(load))]
    if cells[0][1].state != "exact":
        return [*cells, *((name, Cell("not run")) for name in CELLS[1:])]
    subject = holder[0]
    steps: dict[str, Callable[[], Cell]] = {
        **{layout: partial(subject.layout, layout) for layout in LAYOUTS},
        "greedy": subject.greedy,
        "sampled": subject.sampled,
        "lora": subject.lora,
        "checkpoint": subject.checkpoint,
        "export": subject.export,
        "reward_model": subject.reward_model,
        "tensor_parallel": subject.tensor_parallel,
        "bf16": partial(subject.half, "bf16"),
        "fp16": partial(subject.half, "fp16"),
        "experts": subject.experts,
    }
    return [*cells, *((name, _cell(step)) for name, step in steps.items())]


def _small(config: PretrainedConfig) -> PretrainedConfig:
    """Return the small config. Raises Refusal if the family has none, as its check would."""
    try:
        return shrink(config)
    except Exception as error:
        why = _line(f"{type(error).__name__}: {error}", 160)
        raise Refusal(f"no small copy of it can be configured ({why})") from error


def _cell(step: Callable[[], Cell]) -> Cell:
    """Return the result of ``step``; exceptions become data."""
    try:
        cell = step()
    except (ModelError, Refusal) as error:
        return Cell("refused", text=_line(str(error)))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        return Cell("failed", text=_line(f"{type(error).__name__} at {place}: {error}"))
    wrong = cell.difference is not None and not cell.difference <= TOLERANCE
    return Cell("WRONG", cell.difference, cell.text) if wrong and cell.state == "exact" else cell


def _line(text: str, width: int = 400) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 4] + " ..."


class Subject:
    """One small model in a folder, and the reference of each path."""

    def __init__(self, config: PretrainedConfig, folder: Path) -> None:
        try:
            self.reference: Any = build(config)
            logits = self._logits(torch.arange(5, 9))
            self.vocabulary = int(logits.shape[-1])
            if len(logits) != 4:
                raise ValueError(f"{len(logits)} rows of logits for 4 tokens")
            logits.sum().backward()
        except Exception as error:
            raise Refusal(
                "transformers cannot compute a small model of it here "
                f"({type(error).__name__}: {_line(str(error), 160)})"
            ) from error
        self.folder = folder / "model"
        self.work = folder
        self.reference.generation_config.eos_token_id = None
        self.reference.save_pretrained(self.folder)
        alphabet = "".join(chr(ord("!") + i) for i in range(60))
        self.tokenizer = scratch_tokenizer(alphabet)
        self.tokenizer.save_pretrained(self.folder)
        self.model = ModelConfig(path=str(self.folder))
        self.batch = _batch(num_positions(self.model), min(SPECIAL, self.vocabulary) - 4)
        self.logprobs, self.gradients = self._reference_pass()
        self._engine: BaseTrainEngine | None = None

    # ---- the reference ---------------------------------------------------------------------

    def _logits(self, ids: Tensor) -> Tensor:
        """Return [T, V] logits of one row [T]."""
        return self.reference(input_ids=ids[None], use_cache=False).logits[0].float()

    def row_logprobs(self, batch: Batch) -> Tensor:
        """Return [M] log-probs of the action tokens, computed one row at a time."""
        rows = []
        for begin, end in zip(batch.offsets.tolist(), batch.offsets[1:].tolist(), strict=False):
            ids = batch.tokens[begin:end]
            logprobs = self._logits(ids).log_softmax(-1)[:-1]
            found = logprobs.gather(1, ids[1:, None])[:, 0]
            rows.append(torch.cat([found.new_zeros(1), found]))
        return torch.where(batch.action_mask, torch.cat(rows), 0.0)

    def _reference_pass(self) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = self.row_logprobs(self.batch)
        self.reference.zero_grad()
        (-logprobs.sum() / self.batch.num_tokens).backward()
        gradients = {
            name: parameter.grad.clone()
            for name, parameter in self.reference.named_parameters()
            if parameter.grad is not None
        }
        self.reference.zero_grad()
        return logprobs.detach(), gradients

    # ---- the paths -------------------------------------------------------------------------

    def load(self) -> float:
        """Return the largest difference of log-probs between the original model and the one that
        transformers loads from its files, after the project has loaded it without a refusal."""
        load_causal_lm(self.model)
        again = _plain(self.folder)
        ids = self.batch.tokens[: int(self.batch.offsets[1])][None]
        with torch.no_grad():
            one, two = (m(input_ids=ids, use_cache=False).logits for m in (self.reference, again))
        return _difference(one.log_softmax(-1), two.log_softmax(-1))

    def engine(self, layout: Layout = "shared_prefix", **options: Any) -> BaseTrainEngine:
        """Return a train engine over the model in the folder."""
        config = self.model.model_copy(update=options)
        spec = EngineSpec(
            TrainRole.alone("policy", TrainConfig(layout=layout, lr=1e-3), config, dropout=False)
        )
        return make_engine(load_causal_lm(config), spec, tokenizer=self.tokenizer)

    def layout(self, layout: Layout) -> Cell:
        """Compare log-probs, and the gradient of their mean, through the train engine."""
        engine = self.engine(layout)
        difference = _difference(engine.logprobs(self.batch), self.logprobs)
        engine.forward_backward(self.batch, _mean_nll)
        slope = 0.0
        largest = max(float(g.abs().max()) for g in self.gradients.values())
        for name, parameter in engine.model.named_parameters():
            wanted = self.gradients.get(name, torch.zeros_like(parameter))
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            slope = _worst(slope, _difference(found, wanted) / largest)
        used = engine.forward.layout
        text = "" if used == layout else f"computed as {used}"
        if difference <= TOLERANCE < slope:
            text = f"log-probs within {difference:.1e}; the gradient differs"
        return Cell("exact", _worst(difference, slope), text)

    def _generate(
        self, temperature: float, n: int
    ) -> tuple[str, list[tuple[tuple[int, ...], Completion]]]:
        """Return (sampling method, [(prompt, completion)]) for four prompts of different lengths,
        ten tokens each."""
        limit = num_positions(self.model)
        room = 10 if limit is None else min(10, limit // 2)
        lengths = [3, 7, 5, 12] if limit is None or limit >= 24 else [1, 2, 3, limit - room]
        tokens = self.batch.tokens.tolist()
        prompts = {str(i): tuple(tokens[i : i + length]) for i, length in enumerate(lengths)}
        engine = make_local_engine(
            load_causal_lm(self.model),
            self.tokenizer,
            LocalEngine(max_batch_size=6),
            name=self.model.path or "",
        )
        requests = [Request(i, prompt, n=n, seed=1) for i, prompt in prompts.items()]
        found = engine.generate(requests, Sampling(max_tokens=room, temperature=temperature))
        way = {"batched": "", "cached": "computed row by row"}.get(
            engine.decoding, "computed without a cache"
        )
        return way, [(prompts[completion.request_id], completion) for completion in found]

    @torch.no_grad()
    def greedy(self) -> Cell:
        """Compare tokens at temperature 0 with the argmax of the reference after each of them."""
        worst, agreed, total = 0.0, 0, 0
        way, completions = self._generate(0.0, 1)
        for prompt, completion in completions:
            ids = torch.tensor([*prompt, *completion.token_ids])
            logits = self._logits(ids)[len(prompt) - 1 : -1]
            chosen = logits.gather(1, ids[len(prompt) :, None])[:, 0]
            short = logits.amax(-1) - chosen  # 0 if the token is the arg max
            worst = _worst(worst, float(short.max()))
            agreed += int((short <= TOLERANCE).sum())
            total += len(completion.token_ids)
        return Cell("exact", worst, way if agreed == total else f"{agreed} of {total} tokens")

    @torch.no_grad()
    def sampled(self) -> Cell:
        """Compare the sampler's log-probs with those of the reference."""
        worst = 0.0
        way, completions = self._generate(1.0, 2)
        for prompt, completion in completions:
            ids = torch.tensor([*prompt, *completion.token_ids])
            logprobs = self._logits(ids)[len(prompt) - 1 : -1].log_softmax(-1)
            wanted = logprobs.gather(1, ids[len(prompt) :, None])[:, 0]
            end = self._before_media(completion.token_ids)
            found = torch.tensor(completion.logprobs)
            worst = _worst(worst, _difference(found[:end], wanted[:end]))
        return Cell("exact", worst, way)

    def _before_media(self, ids: Sequence[int]) -> int:
        """Return the number of sampled tokens up to the first that stands for an image or a sound:
        the reference replaces its embedding, and text does not contain it."""
        names = ("audio_token", "image_token", "video_token")
        config = self.reference.config.to_dict()
        media = {value for key, value in config.items() if key.startswith(names)}
        return next((i + 1 for i, token in enumerate(ids) if token in media), len(ids))

    def lora(self) -> Cell:
        """Compare log-probs with adapters with the reference with merged weights."""
        engine = self.engine(lora=LoraConfig(lora_rank=4, lora_alpha=8))
        engine.forward_backward(self.batch, _mean_nll)
        generator, used, idle = torch.Generator().manual_seed(3), 0, 0
        for name, parameter in engine.model.named_parameters():
            if ".lora_B" not in name:
                continue
            if parameter.grad is None or not bool(parameter.grad.any()):
                idle += 1  # training leaves it at 0, which adds nothing
                continue
            parameter.data = 0.03 * torch.randn(parameter.shape, generator=generator)
            used += 1
        found = engine.logprobs(self.batch)
        with torch.no_grad(), self._weights(dict(merged_weights(engine.model))):
            wanted = self.row_logprobs(self.batch)
        if _difference(wanted, self.logprobs) < TOLERANCE:
            return Cell("WRONG", 0.0, "the merged weights are those of the base")
        text = f"{used} adapters" + (f", {idle} without effect" if idle else "")
        return Cell("exact", _difference(found, wanted), text)

    def checkpoint(self) -> Cell:
        """Compare log-probs of a trained engine with those of a new one that loaded its checkpoint,
        bit for bit."""
        engine = self._trained()
        again = self.engine()
        again.load(self._checkpoint_folder() / "policy")
        difference = _difference(again.logprobs(self.batch), engine.logprobs(self.batch))
        return Cell("exact" if difference == 0 else "WRONG", difference)

    def export(self) -> Cell:
        """Compare every key and the log-probs of the exported folder, loaded by plain
        transformers."""
        engine = self._trained()
        plain = _plain(export(self._checkpoint_folder(), self.work / "export"))
        state, own = plain.state_dict(), engine.model.state_dict()
        if odd := sorted(set(state) ^ set(own)):
            return Cell("WRONG", math.inf, f"{len(odd)} keys differ, e.g. {odd[0]}")
        differ = [name for name, tensor in own.items() if not torch.equal(tensor, state[name])]
        if differ:
            return Cell("WRONG", math.inf, f"{len(differ)} tensors differ, e.g. {differ[0]}")
        with self._weights(own):
            wanted = self.row_logprobs(self.batch).detach()
        kept, self.reference = self.reference, plain
        try:
            found = self.row_logprobs(self.batch).detach()
        finally:
            self.reference = kept
        return Cell("exact", _difference(found, wanted), f"{len(state)} keys")

    def reward_model(self) -> Cell:
        """Compare the scores of a reward model after one step with those of its export, loaded as
        a reward."""
        scalar = load_scalar_model(self.model, new_head="random", seed=1)
        spec = EngineSpec(
            TrainRole.alone("reward", TrainConfig(lr=1e-3), self.model, dropout=False)
        )
        engine = make_engine(scalar, spec, tokenizer=self.tokenizer)
        engine.forward_backward(self.batch, _squared_scores)
        engine.optim_step()
        store = CheckpointStore(self.work / "rewards", keep_last=1, best_mode="max")
        saved = store.save(1, lambda folder: engine.save(folder / "reward"))
        path = str(export(saved, self.work / "reward", model="reward"))
        again = load_reward_engine(ModelConfig(path=path), dtype="fp32", device="cpu")
        ends = self.batch.offsets.tolist()
        rows = [self.batch.tokens[a:b].tolist() for a, b in itertools.pairwise(ends)]
        scores, found = (torch.tensor(score_rows(e, rows)) for e in (engine, again))
        difference = _difference(found, scores) / max(1.0, float(scores.abs().max()))
        own = is_own(AutoConfig.from_pretrained(path))
        text = "computed in Burnish's form" if own else ""
        return Cell("exact" if difference <= SCORE_TOLERANCE else "WRONG", difference, text)

    def tensor_parallel(self) -> Cell:
        """Check whether the layers can be split over two ranks."""
        model = load_causal_lm(self.model)
        body = model.get_decoder()
        check_head_counts(body.config, 2)
        return Cell("plan", text=f"{len(shard_dims(body))} parameters")

    def half(self, dtype: Dtype) -> Cell:
        """Compare load, layouts, sampler and export in half precision with transformers' own."""
        try:
            half = HalfSubject(
                self.model, self.tokenizer, dtype, rows=self.batch, reference=self.logprobs
            )
        except RuntimeError as error:  # of transformers' own pass
            load_causal_lm(self.model, dtype=dtype)  # refuses it
            raise Refusal(f"transformers' own pass fails in {dtype}: {error}") from error
        work = self.work / dtype
        work.mkdir()
        problem = half.problem(work)
        return Cell("WRONG" if problem else "rounded", half.worst, problem)

    def experts(self) -> Cell:
        """Compare the counted experts with those whose weights compute the tokens."""
        ids = self.batch.tokens[None, : int(self.batch.offsets[1])]
        try:
            routing = record(self.reference, ids)
        except ModelError as error:
            if "has none" in str(error):
                return Cell("not run")
            raise
        layers = len(routing.chosen)
        if self.reference.config.model_type.startswith(TOP_K_OF_LOGITS):
            return Cell("exact", 0.0, f"{layers} layers, the largest logits")
        if wrong := wrong_layers(self.reference, ids, routing):
            return Cell("WRONG", None, f"{len(wrong)} of {layers} layers count other experts")
        return Cell("exact", 0.0, f"{layers} layers")

    # ---- parts -----------------------------------------------------------------------------

    def _trained(self) -> BaseTrainEngine:
        """Return an engine after one step, whose checkpoint is in :meth:`_checkpoint_folder`."""
        if self._engine is None:
            engine = self.engine()
            engine.forward_backward(self.batch, _mean_nll)
            engine.optim_step()
            self._store().save(1, lambda folder: engine.save(folder / "policy"))
            self._engine = engine
        return self._engine

    def _store(self) -> CheckpointStore:
        return CheckpointStore(self.work / "checkpoints", keep_last=1, best_mode="max")

    def _checkpoint_folder(self) -> Path:
        return next(p for p in sorted((self.work / "checkpoints").iterdir()) if p.is_dir())

    def _weights(self, tensors: dict[str, Tensor]) -> _Weights:
        return _Weights(self.reference, tensors)


class _Weights:
    """Context in which ``model`` has the given parameters and buffers."""

    def __init__(self, model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
        self.own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.tensors, self.kept = tensors, {name: t.clone() for name, t in self.own.items()}

    @torch.no_grad()
    def __enter__(self) -> None:
        for name, tensor in self.tensors.items():
            if name in self.own:  # the second name of a tied weight is left out
                self.own[name].copy_(tensor)

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for name, tensor in self.kept.items():
            self.own[name].copy_(tensor)


def _plain(folder: Path) -> Any:
    auto = language_model_class(AutoConfig.from_pretrained(folder))
    return auto.from_pretrained(folder, dtype=torch.float32).eval()


def _mean_nll(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
    assert outputs.logprobs is not None
    return -outputs.logprobs.sum() / batch.num_tokens, Stats()


def _squared_scores(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
    assert outputs.values is not None
    return (outputs.values[batch.offsets[1:] - 1] - 1).square().sum() / batch.num_rows, Stats()


def _difference(one: Tensor, two: Tensor) -> float:
    """Return the largest absolute difference, or infinity if a number is not finite."""
    found = (one.detach().float() - two.detach().float()).abs()
    if not found.numel():
        return 0.0
    return float(found.max()) if bool(found.isfinite().all()) else math.inf


def _worst(*values: float) -> float:
    return math.inf if any(math.isnan(v) for v in values) else max(values)


def _batch(limit: int | None, top: int) -> Batch:
    """Return three groups of 3, 1 and 2 rows, with rows longer than the small windows. ``limit``:
    the longest row. ``top``: one more than the largest token id."""
    generator = torch.Generator().manual_seed(7)

    def tokens(count: int) -> list[int]:
        return torch.randint(5, top, (count,), generator=generator).tolist()

    groups: Sequence[tuple[int, tuple[int, ...]]] = [(5, (3, 9, 6)), (3, (14,)), (11, (4, 2))]
    if limit is not None and limit < 17:
        half = limit // 2
        groups = [(half, (1, limit - half, 2)), (1, (limit - 1,)), (limit - 2, (2, 1))]
    rows, masks, prompt_lens, group_ids = [], [], [], []
    for group, (prompt_len, responses) in enumerate(groups):
        prompt = tokens(prompt_len)
        for length in responses:
            rows.append(prompt + tokens(length))
            masks.append([False] * prompt_len + [True] * length)
            prompt_lens.append(prompt_len)
            group_ids.append(group)
    return rows_to_batch(rows, masks, prompt_lens=prompt_lens, group_ids=group_ids)


def as_json(cells: dict[str, Cell]) -> dict[str, Any]:
    """Return cells as plain data, without empty fields."""
    return {
        name: {field: value for field, value in asdict(cell).items() if value not in (None, "")}
        for name, cell in cells.items()
    }
