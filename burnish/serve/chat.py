"""The command ``burnish chat``: the smallest client of a model server."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from typing import Any

import httpx
import typer

from burnish.serve.base import ListenOptions, ServeError
from burnish.serve.running import token_of

_CONNECT_S = 10.0


class Chat:
    """A conversation with the first model of a server.

    Raises ServeError if the server cannot be reached, has no model, or refuses the token.
    """

    def __init__(
        self,
        url: str,
        *,
        token_env: str | None = None,
        system: str | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """``url``: address of the server, with or without ``/v1``. ``token_env``: environment
        variable with its token. ``parameters``: fields of every request; None values are not
        sent."""
        root = url.rstrip("/").removesuffix("/v1")
        token = token_of(ListenOptions(token_env=token_env))
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        # A response may take any time. Servers on this machine are not reached through a proxy.
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        self._client = httpx.Client(
            base_url=f"{root}/v1/", headers=headers, timeout=timeout, trust_env=False
        )
        self._parameters = {n: v for n, v in (parameters or {}).items() if v is not None}
        self.messages: list[dict[str, str]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self.model = self._first_model()

    def close(self) -> None:
        self._client.close()

    def ask(self, text: str) -> Generator[tuple[bool, str], None, None]:
        """Yield the parts of the response to a message: (True if it is reasoning, text).

        The message and what was received become part of the conversation, also if the iteration
        ends early; nothing does if nothing was received. Raises ServeError if the request is
        refused or fails.
        """
        question = {"role": "user", "content": text}
        body = {
            "model": self.model,
            "messages": [*self.messages, question],
            "stream": True,
            **self._parameters,
        }
        received = ""
        try:
            for delta in self._deltas(body):
                if delta.get("reasoning_content"):
                    yield True, delta["reasoning_content"]
                if delta.get("content"):
                    received += delta["content"]
                    yield False, delta["content"]
        except httpx.HTTPError as error:
            raise _failed(self._client, error) from error
        finally:
            if received:
                self.messages += [question, {"role": "assistant", "content": received}]

    def _deltas(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield what each event of a streamed response adds."""
        with self._client.stream("POST", "chat/completions", json=body) as response:
            if response.is_error:
                response.read()
                raise _refused(response)
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ServeError(f"the server ended the response: {event['error']['message']}")
                yield from (choice["delta"] for choice in event["choices"])

    def _first_model(self) -> str:
        try:
            response = self._client.get("models")
        except httpx.HTTPError as error:
            raise _failed(self._client, error) from error
        if response.is_error:
            raise _refused(response)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            problem = (
                f"{response.url} names no model; give the address of an OpenAI-compatible server"
            )
            raise ServeError(problem) from error


def _failed(client: httpx.Client, error: httpx.HTTPError) -> ServeError:
    reason = str(error) or type(error).__name__
    return ServeError(f"no connection to {client.base_url}: {reason}; is the server running?")


def _refused(response: httpx.Response) -> ServeError:
    """Return the error in a response, in OpenAI's form if it has it."""
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = response.text[:300]
    hint = "; name its token with --token-env" if response.status_code == 401 else ""
    return ServeError(f"{response.url} answers {response.status_code}: {message}{hint}")


# ---- the terminal ------------------------------------------------------------------------------


def talk(chat: Chat) -> None:
    """Answer questions: a prompt loop on a terminal, else one question from standard input.

    On a terminal, Ctrl-C stops a response and Ctrl-D ends the loop; a refused question is reported
    and the loop continues. Raises ServeError if the one question is refused.
    """
    try:
        if sys.stdin.isatty():
            _loop(chat)
        else:
            _answer(chat, sys.stdin.read().strip(), show_reasoning=False)
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ServeError(
            f"standard input is not UTF-8 text ({error.reason}); convert it: "
            "iconv -f LATIN1 -t UTF-8 FILE | ..."
        ) from error
    finally:
        chat.close()


def _loop(chat: Chat) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401 (line editing and history in input())
    # A shell may start a command with SIGINT ignored: in the background, or after `trap '' INT`.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    typer.echo(f"{chat.model}: Ctrl-C stops a response, Ctrl-D ends")
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo()
            continue
        if not text:
            continue
        try:
            _answer(chat, text, show_reasoning=True)
        except KeyboardInterrupt:
            typer.echo(" [stopped]")
        except ServeError as error:
            typer.echo(str(error), err=True)


def _answer(chat: Chat, text: str, *, show_reasoning: bool) -> None:
    """Print the response to one message."""
    if not text:
        raise ServeError("standard input is empty; write a question to it: echo QUESTION | ...")
    text.encode()  # in the locale C, bytes that are not UTF-8 are lone surrogates
    was_reasoning = False
    parts = chat.ask(text)
    try:
        for is_reasoning, part in parts:
            if is_reasoning and not show_reasoning:
                continue
            if was_reasoning and not is_reasoning:
                typer.echo()
            was_reasoning = is_reasoning
            typer.secho(part, nl=False, dim=is_reasoning)
    finally:
        parts.close()
    typer.echo()
