"""Fixtures shared by all tests: small models made on the spot, one thread, ragged batches."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed is an oracle of tests
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The command line sets it. A process with another value would be no fork (see fork_server.py).
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Triton reads it when it is imported. Without a GPU its kernels run in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "0" if os.path.exists("/dev/nvidiactl") else "1")
os.environ.update(RAY_prestart_worker_first_driver="0")  # no test has tasks for such workers
os.environ["BURNISH_TESTS_PROCESS"] = str(os.getpid())  # whatever a test starts inherits it

import gc
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fork_server
import garbage
import hypothesis
import psutil
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from burnish import shm
from burnish.config.model import Dtype, ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.models.value_head import load_scalar_model
from burnish.train.base import Outputs, Role
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, Stats, rows_to_batch

for _name in [name for name in os.environ if name.startswith("WANDB_")]:
    del os.environ[_name]
os.environ["WANDB_MODE"] = "offline"  # tests of trackers use no network
os.environ["WANDB_ERROR_REPORTING"] = "false"

torch.set_num_threads(1)
garbage.keep_frozen()

TINY = ModelConfig(scratch=ScratchConfig(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2))
LIVELY = ModelConfig(scratch=ScratchConfig(hidden_size=32, tie_word_embeddings=False))

# A machine that is busy with something else is no finding.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    distributes = getattr(config.option, "numprocesses", None) and not hasattr(
        config, "workerinput"
    )
    if not distributes:
        fork_server.start(tempfile.gettempdir())
        gc.disable()  # until the tests are collected: what imports make is not garbage


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests may take longest come first (by the longest ``timeout``, then by the number
    of ``slow`` tests): where several files run at a time, short ones are left to fill in at the
    end."""
    patience: dict[Path, float] = {}
    slow: Counter[Path] = Counter()
    for item in items:
        mark = item.get_closest_marker("timeout")
        patience[item.path] = max(patience.get(item.path, 0), mark.args[0] if mark else 0)
        slow[item.path] += item.get_closest_marker("slow") is not None
    items.sort(key=lambda item: (-patience[item.path], -slow[item.path]))


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture
def tiny_config() -> ModelConfig:
    return TINY


@pytest.fixture
def tiny_model() -> LlamaForCausalLM:
    """Made anew for every test: tests may train it."""
    return load_causal_lm(TINY)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(TINY)


@pytest.fixture
def ragged_batch() -> Batch:
    """Three groups of 3, 1 and 4 rows with prompts of 5, 3 and 9 tokens and responses of 1 to
    11."""
    generator = torch.Generator().manual_seed(7)

    def tokens(count: int) -> list[int]:
        return torch.randint(6, 50, (count,), generator=generator).tolist()

    rows, masks, prompt_lens, group_ids = [], [], [], []
    for group, (prompt_len, responses) in enumerate(
        [(5, (3, 7, 1)), (3, (11,)), (9, (2, 2, 8, 5))]
    ):
        prompt = tokens(prompt_len)
        for length in responses:
            rows.append(prompt + tokens(length))
            masks.append([False] * prompt_len + [True] * length)
            prompt_lens.append(prompt_len)
            group_ids.append(group)
    return rows_to_batch(rows, masks, prompt_lens=prompt_lens, group_ids=group_ids)


def mean_logprob(outputs: Outputs, batch: Batch) -> tuple[torch.Tensor, Stats]:
    """A loss with a global denominator: minus the mean log-prob of the step's action tokens."""
    assert outputs.logprobs is not None
    return -outputs.logprobs.sum() / batch.num_tokens, Stats(
        sums={"tokens": int(batch.action_mask.sum())}
    )


@pytest.fixture
def nll() -> Callable[[Outputs, Batch], tuple[torch.Tensor, Stats]]:
    return mean_logprob


@pytest.fixture
def make_engine() -> Callable[..., TorchTrainEngine]:
    """``make_engine(role="policy", micro=None, dtype="fp32", config=TINY, **train)``."""

    def make(  # house: ok what an engine can vary in
        *,
        role: Role = "policy",
        micro: int | None = None,
        dtype: Dtype = "fp32",
        precision: PrecisionConfig | None = None,
        config: ModelConfig = TINY,
        total_steps: int = 10,
        temperature: float = 1.0,
        trainable: bool = True,
        **train: object,
    ) -> TorchTrainEngine:
        scalar = role in ("critic", "reward")
        model = load_scalar_model(config, new_head="random") if scalar else load_causal_lm(config)
        spec = EngineSpec(
            TrainRole.alone(
                role,
                TrainConfig(**{"lr": 1e-3, **train}),
                config,
                trainable=trainable,
                precision=precision or PrecisionConfig(dtype=dtype),
            ),
            micro_batch_size=micro,
            total_steps=total_steps,
            temperature=temperature,
        )
        return TorchTrainEngine(model, spec, tokenizer=load_tokenizer(config))

    return make


def full_state(engine: TorchTrainEngine) -> dict[str, torch.Tensor]:
    """Copies of all that training moves: weights, masters, moments, EMA and the version."""
    assert engine.optimizer is not None
    state = {f"weight/{n}": p.detach().clone() for n, p in engine.model.named_parameters()}
    for kind, tensors in engine.optimizer.tensors().items():
        state |= {f"{kind}/{n}": t.detach().clone() for n, t in tensors.items()}
    return state | {"version": torch.tensor(engine.version)}


@pytest.fixture
def state_of() -> Callable[[TorchTrainEngine], dict[str, torch.Tensor]]:
    return full_state


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grad), None


class HostReads(TorchDispatchMode):
    """Counts reads of tensors by the host, for each of which a GPU's queue runs empty."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0
        """Single values (``item``, ``int``, ``bool``)."""
        self.lists: list[tuple[int, ...]] = []
        """Shapes of what was read by ``tolist``."""

    def __enter__(self) -> HostReads:
        self._tolist, lists = torch.Tensor.tolist, self.lists
        tolist = self._tolist

        def counted(tensor: Tensor) -> Any:
            lists.append(tuple(tensor.shape))
            return tolist(tensor)

        torch.Tensor.tolist = counted  # type: ignore[assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.Tensor.tolist = self._tolist  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.values += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def host_reads() -> type[HostReads]:
    """``with host_reads() as reads:`` counts what is read inside."""
    return HostReads


@pytest.fixture
def through() -> Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]:
    """``through(x, change)`` is x, and what comes back to x in backward is ``change(gradient)``."""
    return _Through.apply


@pytest.fixture
def lively_model() -> LlamaForCausalLM:
    """Untied and with large weights: its distributions are far from uniform and differ by
    position, so that a wrong position, mask or row changes the argmax."""
    return make_lively(load_causal_lm(LIVELY))


@pytest.fixture
def lively_config() -> ModelConfig:
    return LIVELY


def make_lively(model: LlamaForCausalLM) -> LlamaForCausalLM:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


@pytest.fixture(scope="session")
def run_together() -> Callable[..., list[int]]:
    """``run_together(SCRIPT, [["0"], ["1"]], folder, timeout_s=150)``: the script as processes that
    run at a time, one for each list of arguments; the exit codes. What they print is in
    ``<log><rank>.log``. All have to end well, unless ``end_well=False``; none is left."""
    return _run_together


def _run_together(
    script: Path,
    arguments: Sequence[Sequence[str]],
    folder: Path,
    *,
    timeout_s: float,
    end_well: bool = True,
    log: str = "rank",
    **env: str,
) -> list[int]:
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    own["PYTHONPATH"] = os.pathsep.join(paths)
    logs = [folder / f"{log}{rank}.log" for rank in range(len(arguments))]
    processes = []
    try:
        for path, words in zip(logs, arguments, strict=True):
            with path.open("w") as out:
                command = [*fork_server.command(), str(script), *words]
                processes.append(
                    subprocess.Popen(
                        command, env=os.environ | own | env, stdout=out, stderr=subprocess.STDOUT
                    )
                )
        codes = [process.wait(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = "\n".join(path.read_text()[-3000:] for path in logs)
    assert not end_well or codes == [0] * len(codes), said
    return codes


@pytest.fixture(scope="module", autouse=True)
def garbage_collector_skips_what_is_loaded() -> None:
    garbage.skip_loaded()


@pytest.fixture
def quick_vllm_starts() -> None:
    """The same for what the last test imported, before a test that starts vLLM."""
    garbage.skip_loaded()


def _is_call_guard(process: psutil.Process) -> bool:
    """Return whether a process is the guard of user calls, which ends with this process."""
    try:
        return any(word.endswith("call_guard.py") for word in process.cmdline())
    except psutil.Error:
        return False


@pytest.fixture(scope="module", autouse=True)
def nothing_outlives_its_file() -> Iterator[None]:
    """No process that a file's tests start, and so no port that one listens on, is there when its
    fixtures have ended; and no shared memory (or folder) of ours whose owner has ended."""
    before, names = frozenset(psutil.pids()), _names()
    yield
    new = [process for process in started_here(before) if not _is_call_guard(process)]
    _, alive = psutil.wait_procs(new, timeout=30)
    left = [_described(process) for process in alive]
    assert not left, f"processes are left: {left}"
    owned = sorted(name for name in _names() - names if shm.owner_has_ended(name))
    assert not owned, f"shared memory is left: {owned}"


@pytest.fixture(scope="session")
def leftovers() -> Callable[[], list[str]]:
    """Processes that were started here and are there still, as the check of files says it."""
    return lambda: [_described(process) for process in started_here()]


_HELPERS = re.compile(r"from multiprocessing\.|fork_server\.py serve")
_RAYS = re.compile(r"(^|[/\s])ray(let|::|/|-)")


def started_here(before: frozenset[int] = frozenset()) -> list[psutil.Process]:
    """Processes below this one, and those that lost their parent, but for those of ``before``
    (which are not looked at: 20 ms for 120 processes). Without Ray's, for which ``ray_cluster``
    looks, and multiprocessing's own helpers, which stay."""
    me = os.getpid()
    family = {process.pid for process in psutil.Process().children(recursive=True)}
    found = []
    for pid in sorted(set(psutil.pids()) - before - {me}):
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                line, parent = " ".join(process.cmdline()), process.ppid()
        except psutil.Error:  # it has ended, or is a zombie
            continue
        if (parent == me and _HELPERS.search(line)) or _RAYS.search(line):
            continue
        if pid in family or _has_mark(process, me):
            found.append(process)
    return found


def _has_mark(process: psutil.Process, pid: int) -> bool:
    try:
        return bool(process.environ().get("BURNISH_TESTS_PROCESS") == str(pid))
    except (psutil.Error, OSError):
        return False


def _described(process: psutil.Process) -> str:
    """Its command, and where it listens."""
    with process.oneshot():
        sockets = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        ports = "".join(f" (listens on {c.laddr.ip}:{c.laddr.port})" for c in sockets)
        return f"{process.pid} {' '.join(process.cmdline())[:200]}{ports}"


def _names() -> set[str]:
    """What processes of ours have in shared memory, and in temporary folders in its stead."""
    folders = Path("/dev/shm"), Path(tempfile.gettempdir())
    return {path.name for folder in folders for path in folder.glob("burnish-*")}


@pytest.fixture(scope="module", autouse=True)
def process_groups_end_with_their_file() -> Iterator[None]:
    """A DeepSpeed engine that is alone makes a group of one process and sets LOCAL_RANK; stage 3
    replaces ``torch.nn.functional.linear``. All stay; files that come after in the same process
    begin without."""
    had_rank, linear = "LOCAL_RANK" in os.environ, torch.nn.functional.linear
    yield
    torch.nn.functional.linear = linear
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if not had_rank:
        os.environ.pop("LOCAL_RANK", None)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """The package ray, started on this machine with 16 places to hand out, on whatever cores there
    are. Once for a file; afterwards nothing of it may be left."""
    import ray
    from ray._private.node import Node

    before = {process.pid for process in psutil.process_iter()}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with pytest.MonkeyPatch.context() as patch:
        for daemon in ("start_log_monitor", "start_monitor"):  # no logs are shown, no nodes added
            patch.setattr(Node, daemon, lambda node: None)
        ray.init(
            address="local",
            num_cpus=16,
            num_gpus=4,  # numbers only: no process uses one
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=256 << 20,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
        )
    mine = ray.get_runtime_context().get_node_id()
    yield ray
    ray.shutdown()
    check_nothing_left(before, mine)


def check_nothing_left(before: set[int], node: str) -> None:
    """No process that was started since ``before`` by a Ray of this process, and no shared memory
    of ours whose process has ended."""
    deadline = time.monotonic() + 60
    while (left := _ray_processes(before, node)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"processes are left: {left}"
    owned = [name for name in _names() if shm.owner_has_ended(name)]
    assert not owned, f"shared memory is left: {owned}"


def _ray_processes(before: set[int], node: str) -> list[str]:
    """Command lines of new processes below this one, or of the Ray node that was ours."""
    family = {child.pid for child in psutil.Process().children(recursive=True)}
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        ours = process.pid in family or node in line
        if process.pid not in before and ours and ("ray::" in line or "raylet" in line):
            found.append(line[:200])
    return found
