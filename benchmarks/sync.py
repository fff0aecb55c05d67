"""Bytes per second of a hand-over of weights between two processes, against the bare link.

    python benchmarks/sync.py [--mb 500] [--bucket-mb 32] [--rounds 5] [--kinds collective ipc disk]

One process holds the weights (bf16; a few hundred tensors, or fp32 that become bf16 with --cast),
the other loads them into tensors of its own; one thread each. Measured from the start of the push
until the receiver has verified and loaded everything. In turn with it, the bare link moves the same
bytes: gloo broadcasts of one bucket after another (collective), one copy within memory (ipc), one
file written, flushed and read (disk). Reported are medians over rounds and the ratio. Checksums
alone are measured first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from common import markdown_table, versions

FILE_LINK = "bare"


class Weights:
    """A trainer's weights: an embedding, then layers of seven matrices and two norms."""

    version = 0

    def __init__(self, num_bytes: int, *, fp32: bool) -> None:
        import torch

        dtype = torch.float32 if fp32 else torch.bfloat16
        hidden, self.tensors = 1024, dict[str, Any]()
        left = num_bytes // 2  # elements: they travel as bf16

        def add(name: str, *shape: int) -> int:
            self.tensors[name] = torch.randn(shape).to(dtype)
            return self.tensors[name].numel()

        left -= add("embed", 16_384, hidden)
        layer = 0
        while left > 0:
            shapes = [(hidden, hidden)] * 4 + [(4 * hidden, hidden)] * 3 + [(hidden,)] * 2
            for i, shape in enumerate(shapes):
                left -= add(f"layers.{layer}.{i}", *shape)
            layer += 1

    def weights(self) -> Iterator[tuple[str, Any]]:
        """As a train engine gives them."""
        yield from self.tensors.items()


class Loader:
    """A rollout engine's part in it: weights are copied into tensors of its own."""

    def __init__(self, shapes: dict[str, Any]) -> None:
        import torch

        self.version = 0
        self.own = {n: torch.zeros(s, dtype=torch.bfloat16) for n, s in shapes.items()}

    def load_weights(
        self, version: int, tensors: Iterable[tuple[str, Any]], *, keep_cache: bool = False
    ) -> None:
        """Copy in by name."""
        for name, tensor in tensors:
            self.own[name].copy_(tensor)
        self.version = version

    def generate(self, requests: Sequence[Any], sampling: Any) -> Iterator[Any]:
        """Yield nothing: this engine does not sample."""
        yield from ()

    def sleep(self, *, new_weights_follow: bool = False) -> None:
        """Do nothing."""

    def wake(self) -> None:
        """Do nothing."""


def measure_checksums(num_bytes: int) -> dict[str, float]:
    """Bytes per second of each checksum, one thread."""
    import torch

    from burnish.sync.checksum import checksum, word_sums

    payload = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    out = {}
    for name, run in (("xxh3", checksum), ("sums", word_sums)):
        seconds = []
        for _ in range(4):
            started = time.perf_counter()
            run(payload)
            seconds.append(time.perf_counter() - started)
        out[name] = num_bytes / min(seconds)
    return out


# ---- the bare links ------------------------------------------------------------------------------


def bare_broadcast(store: Any, rank: int, num_bytes: int, bucket_bytes: int) -> Callable[[], None]:
    """Gloo broadcasts, one bucket after another."""
    import torch

    dist: Any = torch.distributed
    limit = timedelta(seconds=300)
    group = dist.ProcessGroupGloo(dist.PrefixStore("bare", store), rank, 2, limit)
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    buffer = torch.zeros(bucket_bytes, dtype=torch.uint8)

    def run() -> None:
        for begin in range(0, num_bytes, bucket_bytes):
            part = buffer[: min(bucket_bytes, num_bytes - begin)]
            group.broadcast([part], options).wait()

    return run


def bare_copy(rank: int, num_bytes: int) -> Callable[[], None]:
    """One copy in memory, by the sender alone."""
    import torch

    source = torch.zeros(num_bytes if rank == 0 else 0, dtype=torch.uint8)
    target = torch.ones_like(source)

    def run() -> None:
        target.copy_(source)

    return run


def bare_file(store: Any, rank: int, folder: Path, num_bytes: int) -> Callable[[], None]:
    """The sender writes a file and flushes it to the disk, the receiver reads it."""
    data, turn = bytearray(num_bytes), [0]
    path = folder / FILE_LINK

    def run() -> None:
        turn[0] += 1
        key = f"bare-file/{turn[0]}"
        if rank == 0:
            with open(path, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            store.set(key, "1")
        else:
            store.wait([key])
            with open(path, "rb", buffering=0) as file:
                file.readinto(data)

    return run


# ---- the two processes ---------------------------------------------------------------------------


def process(args: argparse.Namespace) -> None:
    """One of the two; each prints a line of JSON for each kind."""
    import torch

    from burnish.sync.channel import connect_store, serve_store

    torch.set_num_threads(1)
    folder = Path(args.folder)
    if args.rank == 0:
        store = serve_store("127.0.0.1")
        (folder / "port.tmp").write_text(str(store.port))
        os.replace(folder / "port.tmp", folder / "port")
    else:
        while not (folder / "port").is_file():
            time.sleep(0.05)
        store = connect_store("127.0.0.1", int((folder / "port").read_text()))
    policy = Weights(args.mb * 10**6, fp32=args.cast)
    for kind in args.kinds:
        result = measure(args, kind, store, policy)
        print(json.dumps(result), flush=True)


def measure(args: argparse.Namespace, kind: str, store: Any, policy: Weights) -> dict[str, Any]:
    """Seconds of the bare link and of hand-overs of one kind, in turn."""
    folder, bucket_bytes = Path(args.folder), args.bucket_mb << 20
    num_bytes = sum(t.numel() for t in policy.tensors.values()) * 2
    if kind == "collective":
        bare = bare_broadcast(store, args.rank, num_bytes, bucket_bytes)
    elif kind == "ipc":
        bare = bare_copy(args.rank, num_bytes)
    else:
        bare = bare_file(store, args.rank, folder, num_bytes)
    receive = make_ends(args, kind, store, policy)
    seconds: dict[str, list[float]] = {"bare": [], "sync": [], "bare cpu": [], "sync cpu": []}
    for i in range(args.rounds + 1):
        for name, run in (("bare", bare), ("sync", receive)):
            wait_for_both(store, f"{kind}/{name}/{i}", args.rank)
            started, cpu = time.perf_counter(), time.process_time()
            run()
            wait_for_both(store, f"{kind}/{name}/{i}/done", args.rank)
            if i:  # the first touches memory for the first time
                seconds[name].append(time.perf_counter() - started)
                seconds[f"{name} cpu"].append(time.process_time() - cpu)
    return {"kind": kind, "num_bytes": num_bytes, **seconds}


def wait_for_both(store: Any, key: str, rank: int) -> None:
    """Both processes are here."""
    store.set(f"{key}/{rank}", "1")
    store.wait([f"{key}/0", f"{key}/1"])


def make_ends(
    args: argparse.Namespace, kind: str, store: Any, policy: Weights
) -> Callable[[], Any]:
    """Return the function that makes one transfer in this process."""
    from burnish.config.sync import DiskSync, LinkSync
    from burnish.sync.connect import Rendezvous, open_sender, open_source
    from burnish.sync.engine import SyncedEngine

    bucket_bytes, verify = args.bucket_mb << 20, not args.no_verify
    sync: LinkSync | DiskSync
    if kind == "disk":
        folder = str(Path(args.folder) / "disk")
        sync = DiskSync(kind="disk", folder=folder, bucket_bytes=bucket_bytes, verify=verify)
    else:
        sync = LinkSync.model_validate(
            {"kind": kind, "bucket_bytes": bucket_bytes, "verify": verify}
        )
    rendezvous = Rendezvous(store, kind, num_receivers=1, rank=args.rank)
    if args.rank == 0:
        sender = open_sender(sync, policy, rendezvous, dtype="bf16")
        return sender.push
    loader: Any = Loader({n: t.shape for n, t in policy.tensors.items()})
    return SyncedEngine(loader, open_source(sync, rendezvous)).receive


# ---- the parent ----------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> None:
    """Start both processes and print the tables."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--rank"]
        both = [
            subprocess.Popen([*command, str(rank)], env=env, stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        try:
            outputs = [process.communicate()[0].splitlines() for process in both]
            if any(process.returncode for process in both):
                raise SystemExit("a process failed; see its output above")
        finally:
            for process in both:
                process.kill()
                process.wait()
    print(versions("torch", "xxhash"))
    for name, rate in measure_checksums(args.mb * 10**6).items():
        print(f"checksum {name}: {rate / 1e9:.2f} GB/s")
    rows = []
    for sender, receiver in zip(*(map(json.loads, lines) for lines in outputs), strict=True):
        size, best = sender["num_bytes"], {n: min(sender[n]) for n in ("sync", "bare")}
        middle = {n: statistics.median(sender[n]) for n in best}
        cpu = {
            n: statistics.median(map(sum, zip(sender[n], receiver[n], strict=True)))
            for n in ("sync cpu", "bare cpu")
        }
        cells = [sender["kind"], f"{size / 1e6:.0f}"]
        for seconds in (best, middle):
            ours, bare = (size / value / 1e9 for value in seconds.values())
            cells += [f"{ours:.2f}", f"{bare:.2f}", f"**{ours / bare:.2f}**"]
        cells += [f"{value / size * 1e9:.2f}" for value in cpu.values()]
        rows.append(cells)
    heads = ["kind", "MB"]
    for how in ("best", "median"):
        heads += [f"{how}: hand-over, GB/s", f"{how}: bare link, GB/s", f"{how}: ratio"]
    heads += ["hand-over, CPU s/GB of both", "bare link, CPU s/GB of both"]
    print("\n".join(markdown_table(heads, rows)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=500, help="weights, in 10^6 bytes of bf16")
    parser.add_argument("--bucket-mb", type=int, default=32, help="sync.bucket_bytes, in 2^20")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", default=["collective", "ipc", "disk"])
    parser.add_argument("--cast", action="store_true", help="the trainer has fp32 weights")
    parser.add_argument("--no-verify", action="store_true", help="no checksums")
    parser.add_argument("--disk", default=None, help="folder on the disk to measure")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.rank is None:
        main(parsed)
    else:
        process(parsed)
