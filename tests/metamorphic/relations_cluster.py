"""Relations of transfers, secrets and files: weights arrive bit by bit however they are packed, a
death ends every wait, secrets stay in the recipe, and every reader refuses the same files."""

from __future__ import annotations

import os
import string
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import yaml
from metamorphic.base import CLOSERS, REFUSALS, Broken, Draw, equal, relation
from torch import Tensor

from burnish.config import dump_yaml, load_config
from burnish.data.batches import load_batch
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.forms import open_rows
from burnish.data.sources import first_rows
from burnish.models.load import DTYPES, load_tokenizer
from burnish.observe.public_recipe import public_recipe, recipe_secrets
from burnish.secret import without_texts
from burnish.sync import channel, collective
from burnish.sync.base import SyncError, encode
from burnish.sync.buckets import messages
from burnish.sync.channel import Channel, connect_store, end_connection, serve_store
from burnish.sync.collective import CollectiveSender, CollectiveSource
from burnish.sync.disk import DiskSender, DiskSource
from burnish.sync.engine import WeightSender
from burnish.sync.ipc import SharedSender, SharedSource
from burnish.sync.snapshot import SnapshotSource

MODEL = {"scratch": {"hidden_size": 16, "num_heads": 2, "num_kv_heads": 1}}


class Policy:
    """A train engine, as far as transfers need one."""

    version = 3

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor)."""
        yield from self.tensors.items()


def _policy(draw: Draw, largest: int = 40) -> Policy:
    """Tensors of several formats and layouts: scalars, empty, transposed, strided."""
    generator = torch.Generator().manual_seed(draw.rng.randrange(1 << 30))
    tensors: dict[str, Tensor] = {}
    for i in range(draw.rng.randint(1, 6)):
        shape = [draw.rng.choice((0, 1, 2, 7, largest)) for _ in range(draw.rng.randint(0, 2))]
        tensor = torch.randn(shape, generator=generator)
        tensor = tensor.to(draw.rng.choice((torch.float32, torch.bfloat16, torch.int64)))
        if tensor.ndim == 2:
            tensor = draw.rng.choice((tensor, tensor.T, tensor[::2], tensor[:, 1:]))
        tensors[f"w{i}"] = torch.nn.Buffer(tensor) if draw.rng.random() < 0.2 else tensor
    draw.note(tensors={name: (t.dtype, list(t.shape)) for name, t in tensors.items()})
    return Policy(tensors)


def _bits(tensors: dict[str, Tensor]) -> dict[str, tuple[Any, list[int], bytes]]:
    flat = {n: t.detach().contiguous().view(-1) for n, t in tensors.items()}
    raw = {n: t.view(torch.uint8).numpy().tobytes() if t.numel() else b"" for n, t in flat.items()}
    return {n: (t.dtype, list(t.shape), raw[n]) for n, t in tensors.items()}


def _received(source: Any) -> dict[str, Tensor]:
    with source.open(Policy.version) as transfer:
        return {name: tensor.clone() for name, tensor in transfer}


@relation
def weights_arrive(draw: Draw) -> None:
    """Weights in any order, in buckets or files of any size, arrive as torch converts them. Exact:
    bits are compared."""
    policy = _policy(draw)
    names = draw.rng.sample(list(policy.tensors), len(policy.tensors))
    sent = Policy({name: policy.tensors[name] for name in names})
    dtype = draw.one(dtype=[None, "bf16", "fp32"])
    size = 16 * draw.one(units=[1, 2, 5, 64])
    if draw.one(way=["buckets", "files"]) == "files":
        DiskSender(sent, draw.folder, bucket_bytes=size, dtype=dtype).push()
        source: Any = DiskSource(draw.folder, timeout_s=5)
    else:
        found = messages(
            sent.weights(),
            lambda: torch.empty(size, dtype=torch.uint8),
            push=0,
            version=Policy.version,
            dtype=None if dtype is None else DTYPES[dtype],
        )
        stored = [(encode(message), payload.numpy().copy()) for message, payload in found]
        headers, payloads = zip(*stored, strict=True)
        source = SnapshotSource(headers, map(np.asarray, payloads[:-1]))
    wanted = {
        name: t if dtype is None or isinstance(t, torch.nn.Buffer) or not t.is_floating_point()
        else t.to(DTYPES[dtype])
        for name, t in policy.tensors.items()
    }  # fmt: skip
    equal(_bits(_received(source)), _bits(wanted), "weights of the receiver")


# ---- deaths --------------------------------------------------------------------------------------

PATIENCE_S = 20.0
"""Time limit of the connections. A wait that lasts this long is a failure."""
GLOO_S = 4.0
"""Time limit of gloo's groups, which block the end of the interpreter."""
_KEPT: list[tuple[float, Any]] = []
"""(Time, links of threads that died): a group that waits cannot be destroyed."""


def _end_groups() -> None:
    """Wait for groups that still connect: they must not end with the interpreter."""
    for thread in threading.enumerate():
        if thread.name == "burnish-connect":
            thread.join(2 * GLOO_S)
    _KEPT.clear()


CLOSERS.append(_end_groups)


class Died(BaseException):
    """The end of a process, which no handler of errors sees."""


class Mortal(Channel):
    """A channel of a process that dies at its operation ``dies_at``, silently."""

    dies_at = 1 << 30

    def _alive(self) -> Any:
        self.dies_at -= 1
        if self.dies_at < 0:
            raise Died
        return super()._alive()


def _run_end(chan: Mortal, kind: str, policy: Policy, results: dict[int, Any]) -> None:
    """One process: its end of a connection and one transfer."""
    link: Any = None
    ends: Any = {
        "collective": (CollectiveSender, CollectiveSource),
        "ipc": (SharedSender, SharedSource),
    }[kind]
    try:
        link = ends[1](chan) if chan.rank else ends[0](chan, bucket_bytes=64)
        chan.timeout_s = PATIENCE_S
        results[chan.rank] = (
            _received(link) if chan.rank else WeightSender(policy, link).push() and None
        )
    except (Died, SyncError) as error:
        results[chan.rank] = error
        if kind == "collective":
            _KEPT.append((time.monotonic(), (link, chan, error)))


@relation
def death_ends_the_wait(draw: Draw) -> None:
    """If one end of a connection dies at any point of a transfer and this is announced, the other
    ends stop waiting; who has all weights has them bit by bit. Exact."""
    kind, num = draw.one(kind=["collective", "ipc"]), draw.one(receivers=[1, 2, 3])
    policy, victim = _policy(draw, largest=9), draw.one(victim=range(num + 1))
    server = serve_store("127.0.0.1", timeout_s=PATIENCE_S)
    while _KEPT and _KEPT[0][0] < time.monotonic() - 2 * GLOO_S:
        _KEPT.pop(0)
    results: dict[int, Any] = {}
    threads = []
    for rank in range(num + 1):
        store = connect_store("127.0.0.1", server.port, timeout_s=PATIENCE_S)
        limit = GLOO_S if kind == "collective" else PATIENCE_S
        chan = Mortal(store, "c", rank=rank, num_receivers=num, timeout_s=limit)
        if rank == victim:
            chan.dies_at = draw.one(dies_at=[*range(12), 20, 30, 1 << 30])
        run = (chan, kind, policy, results)
        threads.append(threading.Thread(target=_run_end, args=run, daemon=True))
    with patch.object(channel, "LOOK_S", 0.05), patch.object(collective, "LOOK_S", 0.05):
        for thread in threads:
            thread.start()
        threads[victim].join(PATIENCE_S)
        if isinstance(results.get(victim), Died):
            _KEPT.append((time.monotonic(), server))
            end_connection(server, "c", "the victim died")
        for thread in threads:
            thread.join(PATIENCE_S / 2)
    equal([t.name for t in threads if t.is_alive()], [], "processes that still wait")
    if not isinstance(results[victim], Died):
        equal([r for r, end in results.items() if isinstance(end, SyncError)], [], "failures")
    for tensors in results.values():
        if isinstance(tensors, dict):
            equal(_bits(tensors), _bits(policy.tensors), "weights of a receiver")


# ---- secrets -------------------------------------------------------------------------------------


def _places(secret: str) -> dict[str, tuple[str, Any]]:
    """Places of a recipe in which users write secrets: (key, value)."""
    server = {"command": ["serve"]}
    mcp = "rollout.episodes.mcp"
    return {
        "query": ("rewards", [{"kind": "remote", "urls": [f"http://h:1/p?k={secret}"]}]),
        "two": ("rewards", [{"kind": "remote", "urls": [f"http://h:1/p?a=b&k={secret}"]}]),
        "env": (mcp, {"f": server | {"env": {"PLAIN": secret}}}),
        "option": (mcp, {"f": {"command": ["serve", "--api-key", secret]}}),
        "glued": (mcp, {"f": {"command": ["serve", f"--token={secret}"]}}),
        "setting": (mcp, {"f": {"command": ["env", f"HF_TOKEN={secret}", "serve"]}}),
        "shell": (mcp, {"f": {"command": ["sh", "-c", f"HF_TOKEN={secret} serve"]}}),
        "exported": (mcp, {"f": {"command": ["sh", "-c", f"export A_KEY='{secret}'; serve"]}}),
        "header": (mcp, {"f": {"command": ["curl", "-H", f"Authorization: Bearer {secret}"]}}),
        "token": (mcp, {"f": {"command": ["serve", secret]}}),
    }


@relation
def secrets_stay_in_the_recipe(draw: Draw) -> None:
    """A secret at any of the usual places of a recipe is in no published form of it and in no line
    of its log, and only there: all else is published. Exact."""
    place = draw.one(place=list(_places("")))
    secret = "hf_" * (place == "token") + "".join(draw.rng.choices(string.ascii_letters, k=20))
    key, value = _places(secret)[place]
    rows = draw.folder / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "label": 2}\n')
    tree: dict[str, Any] = {
        "job": "rl",
        "max_steps": 1,
        "run_dir": str(draw.folder / "run"),
        "model": MODEL,
        "data": {"sources": [str(rows)]},
        "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "generate_max_len": 4},
        "train": {"train_batch_size": 4},
    }
    if key == "rewards":
        tree["rewards"] = value
    else:
        tree["rewards"] = [{"kind": "math"}]
        tree["rollout"]["episodes"] = {"max_tokens": 4000, "mcp": value}
    config = load_config(tree)
    saved = dump_yaml(config)
    equal(secret in saved, True, "the saved recipe, which resumes the run, has the secret")
    public = yaml.safe_dump(public_recipe(config))
    logged = without_texts(f"lost {value} after 3 s: {secret}", recipe_secrets(config))
    equal([secret in public, secret in logged], [False, False], "the secret is published")
    equal(public.count("***") >= 1, True, "a mark at its place")
    tree["rollout"].pop("episodes", None)
    plain = load_config(tree | {"rewards": [{"kind": "math"}]})
    equal(public_recipe(plain), yaml.safe_load(dump_yaml(plain)), "a recipe without secrets")


# ---- files ---------------------------------------------------------------------------------------

ROW = '{"prompt": "1=", "response": "1"}\n'


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _hostile(draw: Draw) -> tuple[Path, bool]:
    """A path of data, and whether it is usable."""
    folder = draw.folder
    path = folder / "rows.jsonl"
    kind = draw.one(
        kind=["fifo", "loop", "dangling", "device", "folder", "long", "nul", "name", "zero", "file"]
    )
    made: dict[str, Callable[[], Any]] = {
        "fifo": lambda: _fifo(path),
        "loop": lambda: path.symlink_to(path.name),
        "dangling": lambda: path.symlink_to("missing.jsonl"),
        "device": lambda: path.symlink_to("/dev/null"),
        "folder": path.mkdir,
        "zero": lambda: path.write_text(""),
        "file": lambda: path.write_text(ROW),
    }
    if kind in made:
        made[kind]()
        return path, kind == "file"
    if kind == "long":
        return folder / ("r" * 300 + ".jsonl"), False
    if kind == "nul":
        return folder / "ro\0ws.jsonl", False
    name = draw.rng.choice(["a b", "-rf", "ä\n", "[x]", "~", "$HOME", "%s", "{0}", "..", "a'\""])
    path = folder / f"{name}.jsonl"
    path.write_text(ROW)
    return path, True


@relation
def files_are_refused_alike(draw: Draw) -> None:
    """Every reader of data accepts a path or refuses it with a sentence, as all others do, and none
    opens what is no file, which may never end. Exact."""
    path, usable = _hostile(draw)
    opened: list[str] = []
    is_fifo = path.name == "rows.jsonl" and path.is_fifo()

    def write() -> None:
        os.close(os.open(path, os.O_WRONLY))  # waits for a reader
        opened.append("a reader")

    writer = threading.Thread(target=write, daemon=True)
    if is_fifo:
        writer.start()
    data = SFTDataConfig(sources=({"path": str(path)},))
    readers: dict[str, Callable[[], Any]] = {
        "rows": lambda: load_batch(data, load_tokenizer(load_config(_sft(path)).model)),
        "planned": lambda: load_config(_sft(path)),
        "opened": lambda: [source[0] for source in open_rows(data)],
        "first": lambda: first_rows(data.sources[0], 1)[0],
    }
    outcomes = {name: _accepts(read) for name, read in readers.items()}
    equal(opened, [], "opened the pipe")
    if is_fifo:
        end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        writer.join()
        os.close(end)
    planned = outcomes.pop("planned")  # of what it refuses, nothing else is usable
    equal(planned or not usable, True, "the recipe is accepted")
    equal(outcomes, dict.fromkeys(outcomes, usable), "which readers accept it")


def _sft(path: Path) -> dict[str, Any]:
    return {
        "job": "sft",
        "model": MODEL,
        "data": {"sources": [str(path)]},
        "max_epochs": 1,
        "train": {"train_batch_size": 1},
    }


def _accepts(read: Callable[[], Any]) -> bool:
    try:
        read()
    except REFUSALS as error:
        if not str(error).strip():
            raise Broken("a refusal without a sentence") from error
        return False
    return True
