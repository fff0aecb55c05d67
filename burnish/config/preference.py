"""Recipe of the job ``preference``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal, get_args

from pydantic import Field, TypeAdapter

from burnish.config.arithmetic import (
    BatchError,
)
from burnish.config.base import OlderKeys, switched_by
from burnish.config.eval_section import OLDER_EVAL_KEYS, SupervisedEval, with_sets
from burnish.config.held_out import held_out_advice
from burnish.config.job import SupervisedJob
from burnish.config.model import ReferenceConfig, lora_advice, random_reference_advice
from burnish.config.preference_losses import (
    DivergenceConfig,
    DpoLoss,
    FDivergence,
    PreferenceLossConfig,
)
from burnish.config.roles import ForwardPass, TrainRole
from burnish.config.train import reference_sync_advice, reference_sync_rules
from burnish.data.preferences.config import PreferenceDataConfig


class PreferenceReferenceConfig(ReferenceConfig):
    """Model that preferences are measured against."""

    precompute: bool = False
    """Compute its log-probs of all rows before the first step, store them in the run folder and
    free the model. With kto: those of every step, with its mismatched rows. A resumed run
    recomputes them if rows are missing, or model or number format differ."""

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        if self.precompute and self.moving is not None:
            yield (
                "precompute with moving: log-probs computed "
                "before the first step are those of a frozen reference; remove one of the two"
            )


PAIR_METRICS = (
    *("loss", "accuracy", "reward_margin", "reward_chosen", "reward_rejected"),
    *("logprob_chosen", "logprob_rejected", "nll"),
)
KTO_METRICS = ("loss", "accuracy", "reward_desirable", "reward_undesirable", "kl_estimate")

AddedKind = Literal[
    "dpo",
    "cdpo",
    "robust",
    "ipo",
    "hinge",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
]
"""Losses of pairs and a reference, of which a run may add several."""
OF_THE_GAP = ("dpo", "cdpo", "robust", "hinge", "exo_pair", "discopop")
"""Losses of the difference of two log-ratios, with any divergence from the reference."""


class PreferenceEval(SupervisedEval[PreferenceDataConfig]):
    """Evaluation on held-out preferences of the same form."""


class PreferenceConfig(SupervisedJob):
    """``burnish preference``: a policy from preferences, without rollouts (DPO and its family).

    simpo and orpo refuse ``reference``. kto counts single responses in ``train_batch_size`` (a pair
    is two), and refuses ``drop_last: false``."""

    older_keys = (
        OLDER_EVAL_KEYS,
        OlderKeys("f_divergence", "f_divergence", switched_by("kind"), {"f_alpha": ("alpha", 0.5)}),
    )

    job: Literal["preference"] = "preference"
    """Job of the recipe."""
    data: PreferenceDataConfig
    """Pairs; for kto also single labeled responses (``label_key``)."""
    eval: PreferenceEval | None = None
    """Held-out evaluation. None: none."""
    loss: PreferenceLossConfig = DpoLoss()
    """Loss: a kind, or a mapping."""
    nll_coef: float = Field(0.0, ge=0)
    """Weight of the chosen response's mean negative log-likelihood per token in the loss (arXiv
    2404.19733). Refused with orpo and kto."""
    added_losses: dict[AddedKind, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Weights of further losses that are added to ``loss``, which has weight 1 (MPO), such as
    ``{bco_pair: 0.25}``. They have the beta of ``loss``."""
    f_divergence: DivergenceConfig = FDivergence()
    """Divergence from the reference; its derivative f'(policy / reference) replaces the log-ratio
    (arXiv 2309.16240): a kind, or a mapping."""
    ld_alpha: float = Field(1.0, ge=0, le=1)
    """Weight of the log-probs of tokens beyond the shorter response's length (LD-DPO, arXiv
    2409.06411). 1: all tokens count alike."""
    weight_pairs: bool = False
    """Weight each pair by the policy's likelihood of its responses (WPO, arXiv 2406.11827)."""
    reference: PreferenceReferenceConfig | None = None
    """Reference model. None: the policy at the start (with LoRA: its base)."""

    @property
    def rows(self) -> PreferenceDataConfig:
        return self.data

    @property
    def evaluation(self) -> PreferenceEval | None:
        return self.eval

    @property
    def eval_metrics(self) -> frozenset[str]:
        if self.eval is None:
            return frozenset()
        names = PAIR_METRICS if self.loss.is_paired else KTO_METRICS
        return with_sets(names, self.eval.sets)

    @property
    def rows_per_item(self) -> int:
        """Number of rows per data item: 2 if KTO splits pairs, else 1."""
        return 1 if self.loss.is_paired or self.data.label_key is not None else 2

    @property
    def rows_per_unit(self) -> int:
        """Number of rows per counted unit: 2 for a pair; 1 for KTO, which counts single
        responses."""
        return 2 if self.loss.is_paired else 1

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss measures against a reference model."""
        return self.loss.needs_reference

    @property
    def holds_reference(self) -> bool:
        """Return whether the reference model is the base of the LoRA policy."""
        model = self.reference.model if self.reference is not None else None
        return self.needs_reference and self.model.lora is not None and model is None

    @property
    def added_terms(self) -> list[tuple[PreferenceLossConfig, float]]:
        """Configs and weights of ``added_losses``."""
        make: TypeAdapter[PreferenceLossConfig] = TypeAdapter(PreferenceLossConfig)
        return [
            (make.validate_python({"kind": kind, "beta": self.loss.beta}), weight)
            for kind, weight in self.added_losses.items()
        ]

    def roles(self) -> tuple[TrainRole, ...]:
        settings, kl = self.reference or PreferenceReferenceConfig(), not self.loss.is_paired
        of_reference = 0 if settings.precompute else 1 + kl  # also of mismatched rows
        passes: dict[ForwardPass, int] = {
            "logprobs": kl + self.loss.ranks_pairs,
            "entropies": self.weight_pairs,
            "base_logprobs": of_reference * self.holds_reference,
        }
        policy = replace(
            self.trained_role("policy"),
            dropout=False,
            passes=tuple(name for name, times in passes.items() for _ in range(times)),
            precomputed_reference=self.holds_reference and settings.precompute,
        )
        if not self.needs_reference or self.holds_reference:
            return (policy,)
        reference = policy.derived_role("reference", settings.model, self.cluster, trainable=False)
        reference = replace(
            reference,
            passes=reference.passes * of_reference,
            precomputed_reference=settings.precompute,
            is_saved=settings.moving is not None,
        )
        return policy, reference

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        kind, sections = self.loss.kind, self._sections()
        for name, data in sections.items():
            if data.margin_key is not None:
                yield (
                    f"{name}.margin_key={data.margin_key} has no effect: margins are used only "
                    "by reward models (job rm), not by preference losses; remove it"
                )
        if self.reference is not None and not self.needs_reference:
            yield f"reference is set, but loss={kind} does not use one; remove it, or use dpo"
        else:
            engine = self.train.engine
            yield from reference_sync_rules(
                self.reference, self.cluster, engine, holds_reference=self.holds_reference
            )
        if self.reference is not None and self.reference.precompute and self.data.streamed:
            yield (
                "reference.precompute computes log-probs of all rows before the first step, but "
                f"{self.data.streamed[0].place} is streamed; remove precompute, or streaming"
            )
        if self.loss.is_paired:
            for name, data in sections.items():
                yield from data.missing_pairs(name)
                if data.label_key is not None:
                    yield (
                        f"{name}.label_key={data.label_key} means that rows are single "
                        f"responses, but loss={kind} compares two; remove it, or use loss=kto"
                    )
        elif self.nll_coef:
            yield "nll_coef is a term of the chosen response, but loss=kto has none; remove it"
        if kind == "orpo" and self.nll_coef:
            yield (
                f"nll_coef={self.nll_coef:g} adds the chosen response's negative log-likelihood, "
                "which loss=orpo already contains; remove it (loss.beta weights the other term)"
            )
        if not self.loss.is_paired:
            yield from self._kto_rules()
        yield from self._variant_rules()

    def _variant_rules(self) -> Iterator[str]:
        kinds = (self.loss.kind, *self.added_losses)
        by_mean, is_paired = self.loss.by_mean, self.loss.is_paired
        if self.added_losses and self.loss.kind not in get_args(AddedKind):
            yield (
                f"added_losses with loss={self.loss.kind}: only losses that compare a pair with a "
                f"reference can be added to each other; use one of {', '.join(get_args(AddedKind))}"
            )
        if self.loss.kind in self.added_losses:
            yield (
                f"added_losses contains {self.loss.kind}, which is the loss itself, with weight 1; "
                "remove it, or divide the other weights by the weight that it should have"
            )
        other = [kind for kind in kinds if kind not in OF_THE_GAP]
        if self.f_divergence.kind != "reverse_kl" and (other or by_mean):
            yield (
                f"f_divergence={self.f_divergence.kind} with loss={other[0] if other else kinds[0]}"
                + (": it" if other else " and mean_logprobs: it")
                + " replaces the difference of two log-ratios of entire responses, which only "
                f"{', '.join(OF_THE_GAP)} have (without mean_logprobs); use one of them, or "
                "f_divergence=reverse_kl"
            )
        if self.weight_pairs and (self.loss.ranks_pairs or not is_paired):
            yield (
                f"weight_pairs with loss={self.loss.kind}, whose terms are not those of one pair; "
                "remove it, or use a loss of pairs (dpo)"
            )
        if self.ld_alpha != 1 and (by_mean or not is_paired):
            yield (
                f"ld_alpha={self.ld_alpha:g} weighs the surplus of the longer response in a sum of "
                f"log-probs, but loss={self.loss.kind} "
                + ("uses means per token" if is_paired else "has no pairs")
                + "; remove ld_alpha, or use a loss of sums (dpo)"
            )

    def advice(self) -> Iterator[str]:
        yield from super().advice()
        yield from held_out_advice(self.data, self.eval)
        has_model = self.reference is not None and self.reference.model is not None
        if self.needs_reference and not has_model and self.model.scratch is not None:
            yield random_reference_advice(f"loss={self.loss.kind}")
        yield from lora_advice(self.model, holds_reference=self.holds_reference)
        yield from reference_sync_advice(self.reference, self.precision)

    def _sections(self) -> dict[str, PreferenceDataConfig]:
        """Return all data sections by their place in the recipe."""
        return {"data": self.data, **({} if self.eval is None else self.eval.sections)}

    def _kto_rules(self) -> Iterator[str]:
        if not self.drop_last:
            yield (
                "drop_last=false with loss=kto: its reference point needs other prompts in every "
                "batch, but the last batch may contain only one; use drop_last=true"
            )
        limits = {d.max_len for name, d in self._sections().items() if name != "data"}
        if len(limits) > 1:
            yield (
                f"eval.data and eval.sets with loss=kto have max_len {sorted(limits)}: the KL "
                "estimate of all sets uses one limit; set the same max_len"
            )
        for name, data in self._sections().items():
            if data.label_key is not None:
                continue
            for path in data.files_without_pairs():
                yield (
                    f"loss=kto without labels: {name}.label_key is not set, and {path} has no "
                    f"columns {data.chosen_key!r} and {data.rejected_key!r} to derive labels "
                    f"from; set {name}.label_key to the column that says whether a response was "
                    "liked"
                )
        try:
            rows = self.batch_plan().train_batch_size
        except BatchError:
            return
        least = 2 if self.data.label_key is not None else 4
        if rows < least or (self.data.label_key is None and rows % 2):
            yield (
                f"train.train_batch_size={rows} with loss=kto: it counts single responses, pairs "
                f"them with other prompts of the batch, and needs {least} or more"
                + ("" if least == 2 else ", an even number (two for each pair)")
            )
