"""Checks of model paths, names of Python code, and server addresses in recipes, which need neither
a library nor the network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from burnish.config.base import Node
from burnish.config.explain import nearest
from burnish.config.model import ModelConfig

_HUB_NAME = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_LOCAL_ROOTS = {"runs"}
"""First parts of paths that are folders of this project, not owners of hub models."""


def looks_local(path: str) -> bool:
    """Return whether ``path`` can only be a folder of this machine, whether or not it exists.

    >>> [looks_local(p) for p in ("./m", "/data/m", "runs/m", "m.gguf", "owner/m", "m")]
    [True, True, True, True, False, False]
    """
    first = Path(path).parts[:1]
    return (
        not _HUB_NAME.fullmatch(path)
        or path.endswith((".gguf", ".safetensors", ".bin", ".pt"))
        or bool(len(Path(path).parts) > 1 and _LOCAL_ROOTS.intersection(first))
    )


def folder_problem(path: str) -> str | None:
    """Return why ``path`` is not a folder with a model, with a fix. Return None if it may be such a
    folder or the name of a hub model."""
    folder = Path(path)
    if folder.is_file():
        gguf = f", and model.gguf_file={folder.name}" if folder.suffix == ".gguf" else ""
        return f"the model {path} is a file; set the folder that contains it, {folder.parent}{gguf}"
    if folder.is_dir():
        if problem := _unexported(folder):
            return f"{problem} --out DIR"
        if not any(folder.iterdir()):
            return (
                f"the model folder {folder} is empty; set a folder with a model (config.json and "
                "weights)"
            )
        return None
    if not looks_local(path):
        return None
    hint = ""
    if path.startswith("~"):
        hint = f"; ~ is not expanded in recipes, use {Path(path).expanduser()}"
    elif folder.parent.is_dir():
        siblings = [str(p) for p in folder.parent.iterdir() if p.is_dir()]
        hint = nearest(str(folder), siblings)
    return f"the model folder {path} does not exist (working directory: {Path.cwd()}){hint}"


def code_problem(spec: str) -> str | None:
    """Return why ``spec`` does not name Python code: ``path/to/file.py:name``,
    ``package.module:name``, or ``trl:`` before either; ``openrlhf:path/to/file.py``. Return None if
    it does.

    >>> [code_problem(s) is None for s in ("a.py:f", "pkg.mod:f", "trl:a.py:f", "openrlhf:a.py")]
    [True, True, True, True]
    >>> [code_problem(s) is None for s in ("a.py", "a.py:", ":f", "trl:a.py")]
    [False, False, False, False]
    """
    if spec.startswith("openrlhf:"):
        named = spec.removeprefix("openrlhf:")
    else:
        where, _, name = spec.removeprefix("trl:").rpartition(":")
        named = where and name
    if named.strip():
        return None
    example = f"; write {spec}:NAME" if spec.endswith(".py") else ""
    return f"{spec!r} is not of the form path/to/file.py:name or package.module:name{example}"


def code_file(spec: str) -> str | None:
    """Return the file in the name of Python code; None for a module.

    >>> [code_file(s) for s in ("a.py:f", "trl:a.py:f", "openrlhf:a.py", "pkg.mod:f")]
    ['a.py', 'a.py', 'a.py', None]
    """
    named = spec.removeprefix("trl:").removeprefix("openrlhf:")
    file = named if named.endswith(".py") else named.rpartition(":")[0]
    return file if file.endswith(".py") else None


def models_of(node: Node, path: str = "") -> Iterator[tuple[str, ModelConfig]]:
    """Yield every model that a recipe names, with its key."""
    if isinstance(node, ModelConfig):
        yield path, node
    for name, value in vars(node).items():
        key = f"{path}.{name}" if path else name
        items = enumerate(value) if isinstance(value, tuple) else [(None, value)]
        for number, item in items:
            if isinstance(item, Node):
                yield from models_of(item, key if number is None else f"{key}.{number}")


def _unexported(folder: Path) -> str | None:
    """Return that ``folder`` is of a run or a checkpoint, with the beginning of the command that
    exports its model; None if it is not."""
    if (folder / "checkpoints").is_dir():
        kind, source = "a run folder", folder
    elif (folder / "manifest.json").is_file():
        kind, source = "a checkpoint", folder
    elif (folder / "engine.json").is_file() and (folder.parent / "manifest.json").is_file():
        kind, source = "a part of a checkpoint", folder.parent
    elif any(folder.glob("step_*/manifest.json")):
        kind, source = "the checkpoints of a run", folder.parent
    else:
        return None
    return (
        f"{folder} is {kind}, not a model; export its model to a folder first: burnish export "
        f"{source}"
    )


def model_problems(node: Node) -> list[str]:
    """Return a problem for every model folder in a recipe that does not exist or cannot contain a
    model."""
    problems = []
    for key, model in models_of(node):
        for name, path in (("path", model.path), ("tokenizer_path", model.tokenizer_path)):
            problem = None if path is None else folder_problem(path)
            if problem is not None:
                problems.append(f"{key}.{name}: {problem}")
        adapter = None if model.lora is None or not model.lora.path else Path(model.lora.path)
        if adapter is None or (adapter / "adapter_config.json").is_file():
            continue
        if problem := _unexported(adapter):
            problems.append(f"{key}.lora.path: {problem} --lora adapter --out DIR")
    return problems


class Client(Protocol):
    """Keys of a client of equivalent servers."""

    @property
    def urls(self) -> tuple[str, ...]: ...
    @property
    def token_env(self) -> str | None: ...
    @property
    def backoff_s(self) -> float: ...
    @property
    def max_backoff_s(self) -> float: ...


def client_problems(client: Client, example: str) -> Iterator[str]:
    """Yield the problems of a client's keys. ``example``: a valid URL."""
    for i, url in enumerate(client.urls):
        yield from (f"urls[{i}] {problem}" for problem in url_problems(url, example))
    if len({url.rstrip("/") for url in client.urls}) < len(client.urls):
        yield "urls contains the same URL twice; remove one"
    if client.token_env is not None:
        yield from token_env_problems(client.token_env)
    if client.max_backoff_s < client.backoff_s:
        yield (
            f"max_backoff_s={client.max_backoff_s:g} is below backoff_s={client.backoff_s:g}; "
            "lower backoff_s, or raise max_backoff_s"
        )


def client_advice(client: Client) -> Iterator[str]:
    """Yield a warning if the token leaves this machine unencrypted."""
    plain = [url for url in client.urls if url.startswith("http:") and not is_local(url)]
    if client.token_env is not None and plain:
        host = urlsplit(plain[0]).hostname
        yield f"the token would be sent to {host} unencrypted (http); use https"


def url_problems(url: str, example: str) -> Iterator[str]:
    """Yield the problems of a server's URL, without repeating a password in it.

    ``example``: a valid URL.
    """
    try:
        parts = urlsplit(url)
        port_ok = parts.port is None or parts.port > 0
    except ValueError:  # the port, or an IPv6 address
        yield f"has an invalid host or port; use the form {example}"
        return
    if parts.username is not None or parts.password is not None:
        yield "contains a user name or password; use token_env"
    elif parts.scheme not in ("http", "https"):
        yield f"is {url!r}, which starts with neither http:// nor https://; use the form {example}"
    elif not parts.hostname or not port_ok or re.search(r"[\s#\x00-\x1f]", url):
        yield f"is {url!r}, which is not a valid server URL; use the form {example}"


def is_local(url: str) -> bool:
    """Return whether a URL names this machine."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def token_env_problems(name: str) -> Iterator[str]:
    """Yield the problem of a ``token_env`` that is not the name of an environment variable. The
    value may be a token, so it is not repeated."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        yield (
            "token_env must be the name of an environment variable (letters, digits and "
            "underscores); put the token into a variable, and set token_env to its name"
        )
