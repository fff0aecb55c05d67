"""Commands that serve models over HTTP, and the client of a served model."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from burnish import __version__
from burnish.cli_arguments import (
    AllowedHost,
    Dtype,
    Engine,
    EngineOption,
    ServedDevice,
    ServedDtype,
    ServedModel,
    ServedOverlong,
    ServerHost,
    ServerPort,
    ServerTokenEnv,
)
from burnish.config import ConfigError
from burnish.config.paths import folder_problem


def serve_reward(  # house: ok typer makes the options from the signature
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder or hub name.")],
    host: ServerHost = "127.0.0.1",
    port: ServerPort = 5000,
    allowed_host: AllowedHost = None,
    token_env: ServerTokenEnv = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the model.")] = Dtype.fp32,
    device: ServedDevice = "auto",
    max_batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of one forward pass.")
    ] = 16384,
    max_wait_ms: Annotated[
        float, typer.Option(min=0, help="Maximum wait for more requests to fill a pass.")
    ] = 5.0,
    max_len: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum text length in tokens. Default: the model's limit."),
    ] = None,
    max_chars: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum text length in characters. Default: 32 per token of max-len."
        ),
    ] = None,
    overlong: Annotated[
        ServedOverlong,
        typer.Option(help="Longer texts: reject them, or truncate them on the left."),
    ] = ServedOverlong.error,
    append_eos: Annotated[
        bool, typer.Option("--append-eos", help="Append the end token to every text.")
    ] = False,
    max_items: Annotated[int, typer.Option(min=1, help="Maximum texts per request.")] = 1024,
    max_request_bytes: Annotated[int, typer.Option(min=1, help="Maximum size of a request.")] = 16
    << 20,
    max_queue: Annotated[int, typer.Option(min=1, help="Maximum number of waiting texts.")] = 4096,
) -> None:
    """Serve a reward model over HTTP. Compatible with OpenRLHF's servers."""
    if problem := folder_problem(model):
        raise ConfigError(problem.replace("--out DIR", "--model reward --out DIR"))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from burnish.serve.base import ServeOptions
    from burnish.serve.reward import serve_reward

    options = ServeOptions(
        host=host,
        port=port,
        allowed_hosts=tuple(allowed_host or ()),
        token_env=token_env,
        dtype=dtype.value,
        device=device,
        max_batch_tokens=max_batch_tokens,
        max_wait_ms=max_wait_ms,
        max_len=max_len,
        max_chars=max_chars,
        overlong=overlong.value,
        append_eos=append_eos,
        max_items=max_items,
        max_request_bytes=max_request_bytes,
        max_queue=max_queue,
    )
    serve_reward(model, options, version=__version__)


def serve(  # house: ok typer makes the options from the signature
    model: ServedModel,
    host: ServerHost = "127.0.0.1",
    port: ServerPort = 8000,
    allowed_host: AllowedHost = None,
    token_env: ServerTokenEnv = None,
    engine: EngineOption = Engine.local,
    dtype: ServedDtype = None,
    device: ServedDevice = "auto",
    max_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Maximum tokens of prompt and response. Default: the model's limit; local engine: "
            "at most 8192.",
        ),
    ] = None,
    max_batch_size: Annotated[
        int, typer.Option(min=1, help="Maximum responses that are sampled at once.")
    ] = 128,
    max_queue: Annotated[
        int,
        typer.Option(
            min=1,
            help="Maximum responses that are sampled or wait; more are refused with status 429.",
        ),
    ] = 512,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="vLLM: GPUs (on CPU: processes) of the model.")
    ] = 1,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(help="vLLM on CUDA: share of GPU memory to use. Default: 0.9."),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Jinja chat template. Default: the model's own."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model contains.")
    ] = False,
) -> None:
    """Serve a language model with OpenAI's and Anthropic's APIs."""
    _check_served(model)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from burnish.jobs.serve import serve
    from burnish.serve.base import ModelOptions

    options = ModelOptions(
        host=host,
        port=port,
        allowed_hosts=tuple(allowed_host or ()),
        token_env=token_env,
        engine=engine.value,
        dtype=None if dtype is None else dtype.value,
        device=device,
        max_len=max_len,
        max_batch_size=max_batch_size,
        max_queue=max_queue,
        tensor_parallel_size=tensor_parallel_size,
        gpu_memory_utilization=gpu_memory_utilization,
        chat_template=chat_template,
        trust_remote_code=trust_remote_code,
    )
    serve(model, options, version=__version__)


def chat(  # house: ok typer makes the options from the signature
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_URL", help="As for serve, or the URL of a server: http://HOST:PORT."
        ),
    ],
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Softmax temperature. 0: greedy.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of a response.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    token_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable with the token of the server."),
    ] = None,
    engine: EngineOption = Engine.local,
    dtype: ServedDtype = None,
    device: ServedDevice = "auto",
) -> None:
    """Talk to a model or a server. On a terminal: a prompt loop. Otherwise: one question from
    standard input."""
    from burnish.serve.chat import Chat, talk

    parameters = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    if re.match(r"https?://", model):
        if engine != Engine.local or dtype is not None or device != "auto":
            raise ConfigError(
                f"--engine, --dtype and --device are those of a model, but {model} is a server, "
                "which has chosen its own; omit them"
            )
        talk(Chat(model, token_env=token_env, system=system, parameters=parameters))
        return
    if token_env is not None:
        raise ConfigError("--token-env is the token of a server, but MODEL is no URL; omit it")
    _check_served(model)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from burnish.jobs.serve import in_background
    from burnish.serve.base import ModelOptions
    from burnish.serve.running import sigterm_exits

    options = ModelOptions(
        port=0,
        engine=engine.value,
        dtype=None if dtype is None else dtype.value,
        device=device,
        max_batch_size=1,
    )
    with sigterm_exits(), in_background(model, options, version=__version__) as url:
        talk(Chat(url, system=system, parameters=parameters))


def _check_served(model: str) -> None:
    """Raise ConfigError if ``model`` is neither a checkpoint nor possibly a model."""
    folder = Path(model)
    is_checkpoint = (folder / "checkpoints").is_dir() or (folder / "manifest.json").is_file()
    is_gguf = model.endswith(".gguf")  # the job says how to convert it
    if not (is_checkpoint or is_gguf) and (problem := folder_problem(model)):
        raise ConfigError(problem)
