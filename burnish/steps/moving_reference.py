"""A reference model that follows the policy: its updates, and its weights in checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import cast

from torch import Tensor

from burnish.checkpoint.reduce import REFERENCE
from burnish.config.model import ReferenceConfig
from burnish.distributed.process_group import RankGroup
from burnish.models.load import ModelError
from burnish.models.tensor_files import TensorFiles, in_parts, save_tensors
from burnish.sync.engine import drain
from burnish.train.base import HasLogprobs, MixableModel, TrainEngine
from burnish.train.state import write_together

log = logging.getLogger("burnish")

_FILE_BYTES = 1 << 30


class MovingReference:
    """Updates of the reference with the policy's weights: reference = alpha x policy + (1 - alpha)
    x reference (arXiv 2404.09656, equation 4; alpha = 1 copies the policy).

    The update after step n is computed before step n + 1, from the weights that a checkpoint of
    step n contains, so a resumed run makes the same one.
    """

    def __init__(
        self,
        policy: TrainEngine,
        reference: MixableModel,
        *,
        every_n_steps: int,
        alpha: float,
        ranks: RankGroup,
    ) -> None:
        """``ranks``: those that run the loop."""
        self.policy, self.reference, self.ranks = policy, reference, ranks
        self.every_n_steps, self.alpha = every_n_steps, alpha
        self.num_bytes = 0
        """Size of the reference in a checkpoint; 0 if it is not known yet."""

    def before_step(self, step: int) -> None:
        """Update the reference if the update after ``step`` - 1 is due."""
        if step > 1 and (step - 1) % self.every_n_steps == 0:
            self.reference.mix(self.policy.weights(), self.alpha)
            log.info("after step %d: the reference was updated with the policy", step - 1)

    def check(self) -> None:
        """Raise ModelError if policy and reference do not have the same weights."""
        shapes = []
        for model in (self.policy, self.reference):
            self.num_bytes, shape_of = 0, {}
            for name, tensor in model.weights():
                shape_of[name] = tuple(tensor.shape)
                self.num_bytes += tensor.nbytes
            shapes.append(shape_of)
        odd = sorted(name for name, _ in set(shapes[0].items()) ^ set(shapes[1].items()))
        if odd:
            raise ModelError(
                "reference.moving mixes the policy into the reference, but their "
                f"weights differ in names or shapes, e.g. {odd[0]}; use a reference.model with the "
                "policy's architecture, or remove reference.moving"
            )

    def save(self, folder: Path) -> None:
        """Write the weights in the compute dtype into the checkpoint ``folder``. Raises OSError
        on all ranks if rank 0 cannot write."""
        weights = self.reference.weights()
        write = partial(self._write, folder / REFERENCE, weights)
        write_together(self.ranks, write if self.ranks.rank == 0 else partial(drain, weights))

    def _write(self, folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.num_bytes = 0
            for number, part in enumerate(in_parts(weights, _FILE_BYTES), start=1):
                save_tensors(part, folder / f"weights{number}.safetensors")
                self.num_bytes += sum(tensor.nbytes for tensor in part.values())
        finally:
            drain(weights)  # the other ranks wait in the same gathers

    def load(self, folder: Path) -> None:
        """Restore the weights that :meth:`save` wrote. A checkpoint of a run with a frozen
        reference has none: the reference stays as it is."""
        paths = sorted((folder / REFERENCE).glob("weights*.safetensors"))
        self.num_bytes = sum(path.stat().st_size for path in paths)
        files = TensorFiles(paths)
        self.reference.mix(((name, files.read(name)) for name in files), 1.0)


def load_reference(moving: MovingReference | None, folder: Path) -> None:
    """Restore a reference that follows the policy from the checkpoint ``folder``; a frozen one is
    that of the recipe. Raises ValueError if the run has a frozen one and the checkpoint another."""
    if moving is not None:
        moving.load(folder)
    elif (folder / REFERENCE).is_dir():
        raise ValueError(
            "the checkpoint contains a reference model that followed the policy, and "
            "without reference.moving the run would continue with the one that the run started "
            "from; set moving as in that run, or every_n_steps to more steps than the run has "
            "left, "
            "which keeps the reference as it is now"
        )


def moving_reference(
    config: ReferenceConfig | None,
    policy: TrainEngine,
    reference: HasLogprobs | None,
    ranks: RankGroup,
) -> MovingReference | None:
    """Return the updates of the reference that a recipe sets, or None if it is frozen. Raises
    ModelError if weights of ``reference.model`` differ from the policy's in name or shape."""
    if config is None or config.moving is None:
        return None
    assert reference is not None, "the rules of the recipe require a reference"
    moving = MovingReference(
        policy,
        cast(MixableModel, reference),
        every_n_steps=config.moving.every_n_steps,
        alpha=config.moving.mixup_alpha,
        ranks=ranks,
    )
    if config.model is not None:
        moving.check()
    return moving
