"""One train engine made of a group of ranks in other processes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from burnish.checkpoint.save import PendingSave
from burnish.models.tensor_files import in_parts
from burnish.runtime.ray.worker_group import WorkerGroup
from burnish.runtime.worker import BUCKET_BYTES, TransferOptions, pack_share, to_array, to_tensor
from burnish.sync.snapshot import SnapshotSource, WeightSnapshot
from burnish.train.base import DistributedPasses, Loss, NonFiniteError, StepStats
from burnish.train.batching import RowSplit, fill_rows
from burnish.types import Batch, Stats


@dataclass(frozen=True)
class PutShares:
    """A batch in the object store."""

    refs: list[Any]
    """Reference to each share."""
    rows: list[Sequence[int]]
    """Rows of the batch in each share."""


class BatchStore:
    """Batches in the object store, as one object per share.

    The last batch is kept while its arrays exist, because several engines read the same batch one
    after another. Arrays of a batch must not be written.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._last: tuple[_Contents, PutShares] | None = None

    def put(self, batch: Batch, split: RowSplit) -> PutShares:
        """Return the shares of ``batch`` by ``split``; put them into the object store unless the
        last call did."""
        contents, last = _Contents(batch, split), self._last
        if last is not None and last[0] == contents:
            return last[1]
        last = self._last = None  # the object store may free it before it gets more
        refs, rows = [], []
        for share in split.shares(batch):
            refs.append(self._ray.put(pack_share(share)))
            rows.append(share.row_numbers)
        shares = PutShares(refs, rows)
        self._last = contents, shares

        def forget() -> None:
            if self._last is not None and self._last[0] is contents:
                self._last = None

        weakref.finalize(batch.tokens, forget)
        return shares


class _Contents:
    """Identity of the arrays of a batch and of its split, without keeping the arrays alive."""

    def __init__(self, batch: Batch, split: RowSplit) -> None:
        values = vars(batch).items()
        arrays = {name: value for name, value in values if isinstance(value, Tensor)}
        self._plain = split, {name: value for name, value in values if name not in arrays}
        self._arrays = {name: weakref.ref(value) for name, value in arrays.items()}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Contents) or self._plain != other._plain:
            return False
        arrays, others = (
            {name: array() for name, array in contents._arrays.items()}
            for contents in (self, other)
        )
        return arrays.keys() == others.keys() and all(
            arrays[name] is not None and arrays[name] is others[name] for name in arrays
        )


class RemoteTrainEngine(DistributedPasses):
    """A group of ranks as one ``train.base.TrainEngine``."""

    def __init__(self, group: WorkerGroup, batches: BatchStore | None = None) -> None:
        """``batches``: shared with other engines that read the same batches; None: its own."""
        self.group, self.role = group, group.role
        self.batches = batches or BatchStore(group.cluster.ray)
        self.version = 0

    def optim_step(self) -> StepStats:
        """Run one optimizer step of all ranks. Raises NonFiniteError as a local engine does."""
        stats, failure, self.version = self.group.all(lambda w: w.optim_step.remote())[0]
        if failure is not None:
            raise NonFiniteError(failure, stats)
        result: StepStats = stats
        return result

    def offload(self) -> None:
        self.group.all(lambda w: w.offload.remote())

    def reload(self) -> None:
        self.group.all(lambda w: w.reload.remote())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (HuggingFace name, tensor) on the controller. A sync transfers buckets instead."""
        snapshot = self.transfer_weights(0, TransferOptions(BUCKET_BYTES, None, verify=True))
        payloads = [self.group.cluster.ray.get(ref) for ref in snapshot.payloads]
        with SnapshotSource(snapshot.headers, payloads, hold=True).open(self.version) as transfer:
            yield from transfer

    def mix(self, weights: Iterable[tuple[str, Tensor]], alpha: float) -> None:
        """Mix weights into those of a frozen model, on all ranks. They pass through the object
        store in parts of about 64 MiB."""
        self.group.mixed = True
        for part in in_parts(weights, BUCKET_BYTES):
            packed = self.group.cluster.ray.put([(n, to_array(t)) for n, t in part.items()])
            self.group.all(lambda w, packed=packed: w.mix.remote(packed, alpha))

    def transfer_weights(self, push: int, options: TransferOptions) -> WeightSnapshot[Any]:
        """Return the weights from rank 0: headers here, bytes in the object store."""
        streams: list[Any] = []

        def start(worker: Any) -> Any:
            method = worker.transfer_weights.options(num_returns="streaming")
            streams.append(method.remote(push, options))
            return streams[-1].completed()

        self.group.all(start)
        refs = list(streams[-self.group.size])  # rank 0's: a bucket's bytes, then its header
        headers = self.group.cluster.ray.get(refs[1::2])
        return WeightSnapshot(tuple(headers), tuple(refs[0:-2:2]))  # the end message has no bytes

    @property
    def state_bytes(self) -> int:
        size: int = self.group.all(lambda w: w.state_bytes.remote())[0]
        return size

    def save(self, folder: Path) -> None:
        """Write the state of all ranks. The folder must be on a file system shared by all nodes."""
        path = str(Path(folder).absolute())
        self.group.all(lambda w: w.save.remote(path))

    def save_async(self, folder: Path) -> PendingSave:
        """Start a :meth:`save` of the current state, in the background if the ranks support it."""
        path = str(Path(folder).absolute())
        self.group.all(lambda w: w.save_async.remote(path))
        return RemoteSave(self.group)

    def load(self, folder: Path) -> None:
        path = str(Path(folder).absolute())
        self.version = self.group.all(lambda w: w.load.remote(path))[0]

    @cached_property
    def _row_splits(self) -> list[tuple[RowSplit, int]]:
        """Split of batches, and number of the share, of each rank. Restarted ranks have the same
        ones."""
        return self.group.all(lambda w: w.row_split.remote())

    def _put(self, batch: Batch) -> tuple[list[Any], list[Sequence[int]]]:
        """Return the reference that each rank gets to its share, and the rows of each share.
        Ranks of a model-parallel group have the same share."""
        put = self.batches.put(batch, self._row_splits[0][0])
        return [put.refs[number] for _, number in self._row_splits], put.rows

    def _per_token(self, method: str, batch: Batch) -> Tensor:
        shares, rows_of_shares = self._put(batch.model_inputs())
        results = self.group.all(lambda w, share: w.per_token.remote(method, share), shares)
        parts = [to_tensor(result) for result in results if result is not None]
        out = parts[0].new_zeros(batch.tokens.numel(), *parts[0].shape[1:])
        for rows, values in zip(rows_of_shares, parts, strict=True):
            fill_rows(out, batch, [(rows, values)])
        return out

    def _stats(self, method: str, batch: Batch, loss: Loss) -> Stats:
        function = self.group.cluster.ray.put(loss)
        shares, _ = self._put(batch)
        stats: list[Stats] = self.group.all(
            lambda w, share: w.stats.remote(method, share, function), shares
        )
        return stats[0]


class RemoteSave:
    """A checkpoint that ranks write during training. Implements ``PendingSave``."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group

    @property
    def done(self) -> bool:
        """Return whether all ranks have finished. Raises WorkerLostError."""
        return all(self.group.all(lambda w: w.is_saved.remote()))

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Raises the error of a rank that failed."""
        self.group.all(lambda w: w.finish_save.remote())
