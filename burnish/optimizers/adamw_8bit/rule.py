"""8-bit AdamW of bitsandbytes, and AdamW for the parameters that keep fp32 moments."""

from __future__ import annotations

import math
from typing import Any

from burnish.models.tensor_files import Rows
from burnish.optimizers.adamw.rule import adamw_rules
from burnish.optimizers.adamw_8bit.config import (
    BLOCK,
    AdamW8bit,
    PagedAdamW8bit,
    has_8bit_moments,
    undivided_blocks,
)
from burnish.optimizers.rule import (
    OptimizerError,
    RuleInputs,
    StateShard,
    UpdateRule,
    decay_groups,
    embedding_names,
)


def make_rules(config: AdamW8bit | PagedAdamW8bit, inputs: RuleInputs) -> list[UpdateRule]:
    """Return the rule of the large matrices and that of the rest. Raises OptimizerError if
    bitsandbytes is missing, or a block of entries would be divided between ranks."""
    trained = inputs.trained
    paged = isinstance(config, PagedAdamW8bit)
    if paged and trained[0].master.device.type == "cpu":
        raise OptimizerError(
            "train.optimizer.kind=paged_adamw_8bit on a CPU: pages move between GPU and host "
            "memory, so it needs CUDA; use adamw_8bit"
        )
    try:
        from bitsandbytes.optim import adamw as bitsandbytes
    except ImportError as error:
        raise OptimizerError(
            "train.optimizer.kind=adamw_8bit needs the package bitsandbytes, and importing it "
            f"failed ({error}); install it with: pip install 'burnish[quant]'"
        ) from None
    tables = embedding_names(inputs.model)
    has_8_bits = {t.name: has_8bit_moments(t.shape) and t.name not in tables for t in trained}
    small = [t for t in trained if not has_8_bits[t.name]]
    large = [t for t in trained if has_8_bits[t.name]]
    if not large:
        return adamw_rules(config, small, inputs)
    for t in large:
        if problem := undivided_blocks(t.name, t.shape, t.shard_ranks):
            raise OptimizerError(problem)
    kind = bitsandbytes.PagedAdamW8bit if paged else bitsandbytes.AdamW8bit
    optimizer = kind(
        decay_groups(large, inputs.train.weight_decay),
        lr=inputs.lr,
        betas=config.betas,
        eps=config.eps,
        min_8bit_size=1,  # a rank's rows may have fewer entries than SMALLEST
    )
    device = large[0].master.device

    def maps() -> dict[str, Any]:
        optimizer.fill_qmap()
        names = {"qmap1": "dynamic", "qmap2": "udynamic"}
        return {key: optimizer.name2qmap[name].to(device) for key, name in names.items()}

    kinds = {"exp_avg_8bit": "state1", "exp_avg_sq_8bit": "state2", "step": "step"}
    kinds |= {"exp_avg_absmax": "absmax1", "exp_avg_sq_absmax": "absmax2"}
    scales = {"exp_avg_absmax": _of_blocks, "exp_avg_sq_absmax": _of_blocks}
    rule = UpdateRule(optimizer, kinds, extra=maps, layouts=scales)
    return [rule, *adamw_rules(config, small, inputs)]


def _of_blocks(shape: tuple[int, ...], rows: Rows, columns: Rows) -> StateShard:
    """Return the part of a state with one number per block of 256 entries."""
    row = math.prod(shape[1:])
    count, begin, end = (-(-row * r // BLOCK) for r in (shape[0], *rows))
    return StateShard((count,), (begin, end))
