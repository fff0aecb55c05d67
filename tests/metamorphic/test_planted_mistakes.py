"""Every relation can fail: for each there is one mistake, planted in the code, that it finds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from metamorphic import (
    hunt,
    planted_cluster,
    planted_columns,
    planted_episodes,
    planted_folders,
    planted_heads,
    planted_messages,
    planted_numerics,
    planted_plan,
    planted_requests,
    planted_rewards,
    planted_rows,
    planted_runs,
    planted_serving,
    planted_templates,
    planted_tools,
    planted_turns,
)
from metamorphic.base import RELATIONS, Broken, check

import burnish.checkpoint.export as export_module
import burnish.config.load as load_module
import burnish.config.load as overrides
import burnish.data.chat as chat
import burnish.data.demonstrations.encode as sft
import burnish.data.pieces as pieces
import burnish.data.response_rows as response_rows
import burnish.data.rows as data_rows
import burnish.rewards.math.text as math_text
import burnish.rollout.local.row_sampler as row_sampler
import burnish.rollout.local.running_batch as running_batch
import burnish.rollout.local.sampling as local_sampling
import burnish.steps.credit as credit
import burnish.train.batching as batching
from burnish.algorithms import ADVANTAGES, POLICY_LOSSES
from burnish.data.stream import IndexStream
from burnish.models.segments import Segment
from burnish.types import Batch, Stats

Patch = pytest.MonkeyPatch


def special_tokens_in_the_middle(patch: Patch) -> None:
    """The tokenizer adds its special tokens to rendered text, too."""

    def wrapped(tokenizer: Any, text: str, **_: Any) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    patch.setattr(pieces, "plain_ids", wrapped)


def answers_are_texts_of_their_own(patch: Patch) -> None:
    """Answers get what the tokenizer adds at the start of a text."""
    patch.setattr(pieces, "_continued", lambda *_, **__: None)


def end_token_not_trained(patch: Patch) -> None:
    """Answers are trained without their last token."""
    patch.setattr(
        chat, "_trained_length", lambda tokenizer, answer, *_, **__: max(1, len(answer) - 2)
    )


def pairs_keep_the_rest_of_the_template(patch: Patch) -> None:
    """A row of a pair keeps what the template writes behind the end token."""
    patch.setattr(response_rows, "to_last_trained", lambda row: row)


def sampled_ids_are_not_used(patch: Patch) -> None:
    """Generated rows are tokenized again."""
    patch.setattr(data_rows, "_sampled", lambda *_, **__: None)


def bos_is_not_looked_for(patch: Patch) -> None:
    """Text that brings BOS gets a second one."""

    def naive(tokenizer: Any, text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    patch.setattr(chat, "_encode_with_prefix", naive)


def rows_see_each_other(patch: Patch) -> None:
    """The encoder of demonstrations keeps a count between rows."""
    count, own = itertools.count(), sft.SFTEncoder.encode

    def encode(self: Any, row: Any, ref: Any) -> Any:
        found = own(self, row, ref)
        return replace(found, ids=[next(count), *list(found.ids)[1:]])

    patch.setattr(sft.SFTEncoder, "encode", encode)


def a_resume_forgets_the_position(patch: Patch) -> None:
    """A resumed stream begins its epoch again."""
    own = IndexStream.load_state_dict

    def load(self: Any, state: Any) -> None:
        own(self, state)
        self._positions = [0] * len(self._positions)

    patch.setattr(IndexStream, "load_state_dict", load)


def packed_rows_are_one(patch: Patch) -> None:
    """All packed rows are one segment, so that each reads those before it."""
    own = batching.plan_segments

    def plan(segments: Any, positions: Any) -> Any:
        return own([Segment(0, sum(segment.length for segment in segments))], positions)

    patch.setattr(batching, "plan_segments", plan)


def micro_batches_count_for_themselves(patch: Patch) -> None:
    """A micro-batch divides by its own counts."""
    own = Batch.select
    patch.setattr(Batch, "select", lambda self, rows: own(self, rows).with_global_counts())


def untrained_tokens_are_trained(patch: Patch) -> None:
    """The mask is lost on the way to the model."""
    own = Batch.select

    def select(self: Batch, rows: Any) -> Batch:
        found = own(self, rows)
        mask = torch.ones_like(found.action_mask)
        mask[found.offsets[:-1]] = False
        return replace(found, action_mask=mask)

    patch.setattr(Batch, "select", select)


def temperature_is_not_in_the_logprobs(patch: Patch) -> None:
    """The sampler reports log-probs of unscaled logits."""
    own = local_sampling.sample_tokens

    def sample(logits: Any, uniforms: Any, sampling: Any) -> Any:
        plain = logits.clone().log_softmax(-1)
        drawn = own(logits, uniforms, sampling)
        return drawn._replace(logprobs=plain.gather(-1, drawn.tokens[:, None])[:, 0])

    patch.setattr(local_sampling, "sample_tokens", sample)


def randomness_is_shared(patch: Patch) -> None:
    """Requests draw from one generator in turn."""
    count, own = itertools.count(), running_batch.uniforms_for
    for module in (running_batch, row_sampler):
        patch.setattr(module, "uniforms_for", lambda seed, index, n: own(next(count), index, n))


def exports_are_rounded(patch: Patch) -> None:
    """An export rounds its weights to bf16."""
    patch.setattr(export_module, "_cast", lambda tensor, dtype: tensor.bfloat16().to(dtype))


def groups_are_by_position(patch: Patch) -> None:
    """Advantages take neighbors for a group."""

    def wrong(rewards: Any, group_ids: Any, **_: Any) -> Any:
        return rewards - rewards.roll(1)

    for name in ADVANTAGES:
        patch.setitem(ADVANTAGES, name, wrong)


def values_of_tools_count(patch: Patch) -> None:
    """Advantage estimation runs over tokens that are not the policy's."""
    own = credit.gae

    def gae(rewards: Any, values: Any, mask: Any, **options: Any) -> Any:
        return own(rewards, values, torch.ones_like(mask), **options)

    patch.setattr(credit, "gae", gae)


def losses_without_a_mask(patch: Patch) -> None:
    """A policy loss forgets its mask."""

    def loss(logprobs: Any, old: Any, advantages: Any, mask: Any, **_: Any) -> Any:
        return -advantages * logprobs, Stats()

    for name in POLICY_LOSSES:
        patch.setitem(POLICY_LOSSES, name, loss)


def a_dump_forgets_a_key(patch: Patch) -> None:
    """The written config has no seed."""
    own = load_module.dump

    def dump(tree: Any) -> Any:
        return own({key: value for key, value in tree.items() if key != "seed"})

    patch.setattr(load_module, "dump", dump)


def overrides_are_yaml(patch: Patch) -> None:
    """Text on the command line is read as YAML."""
    patch.setattr(overrides, "field_value", lambda text, annotation: yaml.safe_load(text))


def thoughts_count(patch: Patch) -> None:
    """The answer is looked for in the thoughts, too."""
    patch.setattr(math_text, "after_reasoning", lambda text, _: text.partition("</think>")[0])


PLANTED: dict[str, tuple[Callable[[Patch], None], tuple[int, ...]]] = {
    "rl_prompt_ids": (special_tokens_in_the_middle, (0, 1, 2, 3)),
    "first_answer_continues_its_prompt": (answers_are_texts_of_their_own, tuple(range(24))),
    "sft_mask_and_text": (end_token_not_trained, (0, 1, 2, 3)),
    "pair_rows": (pairs_keep_the_rest_of_the_template, tuple(range(12))),
    "generated_rows": (sampled_ids_are_not_used, (0, 1)),
    "ends_are_not_doubled": (bos_is_not_looked_for, tuple(range(12))),
    "permuted_file": (rows_see_each_other, (0, 1, 2)),
    "resumed_stream": (a_resume_forgets_the_position, tuple(range(8))),
    "engine_is_transformers": (packed_rows_are_one, (5, 9, 51)),
    "engine_settings": (micro_batches_count_for_themselves, (21, 27)),
    "garbage_rows": (untrained_tokens_are_trained, (5,)),
    "sampler_is_trainer": (temperature_is_not_in_the_logprobs, (13, 19, 38)),
    "requests_apart": (randomness_is_shared, (13, 28)),
    "exported_model": (exports_are_rounded, (34,)),
    "group_advantages": (groups_are_by_position, (0, 1)),
    "assigned_advantages": (values_of_tools_count, tuple(range(24))),
    "losses_ignore_masked": (losses_without_a_mask, (0, 1)),
    "objective_of_parts": (micro_batches_count_for_themselves, tuple(range(8))),
    "dumped_config": (a_dump_forgets_a_key, tuple(range(12))),
    "override_is_file": (overrides_are_yaml, tuple(range(24))),
    "math_surroundings": (thoughts_count, tuple(range(12))),
    **planted_cluster.PLANTED,
    **planted_columns.PLANTED,
    **planted_episodes.PLANTED,
    **planted_folders.PLANTED,
    **planted_heads.PLANTED,
    **planted_messages.PLANTED,
    **planted_rewards.PLANTED,
    **planted_rows.PLANTED,
    **planted_runs.PLANTED,
    **planted_numerics.PLANTED,
    **planted_plan.PLANTED,
    **planted_requests.PLANTED,
    **planted_serving.PLANTED,
    **planted_templates.PLANTED,
    **planted_tools.PLANTED,
    **planted_turns.PLANTED,
}


def test_a_hunt_prints_the_command_that_reproduces_a_failure(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--relation", "group_advantages", "--case", "1"]
    assert hunt.main(words) == 0
    groups_are_by_position(monkeypatch)
    assert hunt.main(words) == 1
    said = capsys.readouterr().out
    assert 'FAILED make hunt ARGS="--relation group_advantages --case 1"' in said
    assert hunt.main(["--relation", "group_advantage"]) == 2


def test_there_is_a_mistake_for_every_relation() -> None:
    assert set(PLANTED) == set(RELATIONS)


@pytest.mark.parametrize("name", PLANTED)
def test_a_relation_finds_a_planted_mistake(name: str, monkeypatch: Patch) -> None:
    plant, seeds = PLANTED[name]
    plant(monkeypatch)
    with pytest.raises(Broken):
        for seed in seeds:
            check(name, seed)
