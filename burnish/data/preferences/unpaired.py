"""Single responses with a binary label, for KTO: rows of their own, or the two halves of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
from transformers import PreTrainedTokenizerBase

from burnish.data.batches import BatchStream, load_batch
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.types import Batch, rows_to_batch


class SplitPairsStream(BatchStream):
    """A stream of pairs, each split into a desirable and an undesirable response."""

    @property
    def num_rows(self) -> int | None:
        """Number of responses: two per pair. None: unknown, because a source is streamed."""
        pairs = super().num_rows
        return None if pairs is None else 2 * pairs

    def next(self, num_rows: int) -> Batch:
        """Return the next ``num_rows`` responses, from half as many pairs."""
        return split_pairs(super().next(num_rows // 2))


def load_unpaired(
    config: PreferenceDataConfig, tokenizer: PreTrainedTokenizerBase, *, section: str = "data"
) -> Batch:
    """Return all responses once, in file order. Raises DataError as the streams do."""
    rows = load_batch(config, tokenizer, section=section)
    return rows if config.label_key is not None else split_pairs(rows)


def split_pairs(pairs: Batch) -> Batch:
    """Convert a batch of pairs to one of single responses. Even rows are desirable."""
    labels = torch.arange(pairs.num_rows) % 2 == 0
    return replace(pairs, rows_per_unit=1, labels=labels, margins=None)


def mismatched_pairs(batch: Batch, *, max_len: int) -> Batch:
    """Pair every prompt of the batch with the response of another prompt.

    KTO estimates the KL between policy and reference from these rows. Adjacent rows with the same
    prompt get the responses of the next prompt's rows, in turn. If each prompt has two rows, all
    responses are used. If there is only one prompt, every row keeps its own response.

    A row over ``max_len`` (the limit of the batch's own rows) is truncated on the left of its
    prompt. The last prompt token is always kept, because it predicts the first response token.
    """
    begins, ends = batch.offsets[:-1].tolist(), batch.offsets[1:].tolist()
    tokens, mask = batch.tokens.tolist(), batch.action_mask.tolist()
    cuts = [b + p for b, p in zip(begins, batch.prompt_lens.tolist(), strict=True)]
    prompts = [tuple(tokens[b:c]) for b, c in zip(begins, cuts, strict=True)]
    rows, masks = [], []
    for j, prompt in zip(_of_the_next_prompt(prompts), prompts, strict=True):
        response = tokens[cuts[j] : ends[j]]
        excess = len(prompt) + len(response) - max_len
        prompt_end = prompt[min(max(0, excess), len(prompt) - 1) :]
        rows.append([*prompt_end, *response])
        masks.append([False] * len(prompt_end) + mask[cuts[j] : ends[j]])
    return rows_to_batch(rows, masks, prompt_lens=[0] * len(rows))


def _of_the_next_prompt(prompts: Sequence[tuple[int, ...]]) -> list[int]:
    """Return, for every row, the index of a row with another prompt.

    The row comes from the next run of equal prompts, cyclically. If all prompts are equal, it is
    the row itself.
    """
    runs = [list(run) for _, run in groupby(range(len(prompts)), key=lambda row: prompts[row])]
    if len(runs) > 1 and prompts[0] == prompts[-1]:  # one run that wraps around the end
        runs[0] = runs.pop() + runs[0]
    if len(runs) == 1:
        return list(range(len(prompts)))
    partners = [0] * len(prompts)
    for run, following in zip(runs, runs[1:] + runs[:1], strict=True):
        for place, row in enumerate(run):
            partners[row] = following[place % len(following)]
    return partners
