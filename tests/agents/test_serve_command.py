"""``burnish serve`` and ``burnish chat``: one tiny model, with the official client."""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fork_server
import httpx
import openai
import pytest
import torch
from agent_session import END, RENDERER, TOKENIZER, backend_of, call, user, wait_for
from chat_families import chat_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import burnish
from burnish.agents.app import AgentApp
from burnish.agents.calls import CallError
from burnish.agents.serving import OneModel
from burnish.checkpoint.manifest import write_manifest
from burnish.cli import app
from burnish.config.model import ModelConfig, PrecisionConfig
from burnish.episodes.renderer import ChatRenderer
from burnish.episodes.template import RendererError
from burnish.jobs.serve import in_background
from burnish.observe.timeline import Timeline
from burnish.rollout.base import Completion, Request, Sampling
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.vllm.engine import INSTALL
from burnish.runtime.inline import InlineRuntime
from burnish.serve.base import ModelOptions
from burnish.serve.guard import RequestGuard, ServerLimits
from burnish.serve.running import sigterm_exits

ROOT = Path(burnish.__file__).parents[1]
BRIEF = "{% if brief %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
MESSAGES: list[Any] = [user("What is 2 + 2?")]
TOKEN = "secret-of-the-server"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose distributions are far from uniform. Greedy responses do not end."""
    made = tmp_path_factory.mktemp("served") / "tiny"
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = BRIEF + str(tokenizer.chat_template)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=END,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
        model.lm_head.weight[tokenizer.all_special_ids] = 0
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """A server that needs a token."""
    os.environ["SERVED_TOKEN"] = TOKEN
    options = ModelOptions(port=0, device="cpu", token_env="SERVED_TOKEN", max_queue=8)
    with in_background(str(folder), options, version="1.2.3") as found:
        yield found
    del os.environ["SERVED_TOKEN"]


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=TOKEN, max_retries=0) as found:
        yield found


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, **fields}
    return client.chat.completions.create(**given)


def texts(reply: Any) -> list[str]:
    return [choice.message.content for choice in reply.choices]


def engine_answer(folder: Path, prompt: tuple[int, ...], **sampling: Any) -> Completion:
    """The answer of the local engine itself."""
    model = ModelConfig(path=str(folder))
    runtime = InlineRuntime(
        TOKENIZER, precision=PrecisionConfig(), device="cpu", timeline=Timeline()
    )
    engine = runtime.standalone_rollout(model, LocalEngine())
    (found,) = engine.generate([Request("r", prompt)], Sampling(**sampling))
    engine.close()
    return found


def test_greedy_responses_are_those_of_the_engine(folder: Path, client: Any) -> None:
    prompt = RENDERER.render(MESSAGES)
    expected = engine_answer(folder, prompt, max_tokens=12, temperature=0.0)
    reply = ask(client, temperature=0, logprobs=True)
    assert texts(reply) == [expected.text]
    found = [entry.logprob for entry in reply.choices[0].logprobs.content]
    assert found == pytest.approx(expected.logprobs, abs=1e-5)  # other batches, fp32
    assert reply.usage.prompt_tokens == len(prompt) and reply.usage.completion_tokens == 12
    assert reply.choices[0].finish_reason == "length"
    text = client.completions.create(
        model="tiny", prompt=RENDERER.decode(prompt), max_tokens=12, temperature=0
    )
    assert text.choices[0].text == expected.text  # the same prompt as text
    ids = client.completions.create(model="tiny", prompt=list(prompt), temperature=1e-9)
    assert ids.choices[0].text.startswith(expected.text)  # 16 tokens are the default


def test_a_seed_reproduces_responses_and_without_one_they_differ(client: Any) -> None:
    first = texts(ask(client, seed=5, n=3))
    assert len(set(first)) == 3
    assert texts(ask(client, seed=5, n=3)) == first
    assert texts(ask(client, seed=6, n=3)) != first
    assert texts(ask(client)) != texts(ask(client))


def test_sampling_parameters_take_effect(client: Any) -> None:
    """top_k of 1 is greedy at any temperature; a high temperature alone is not."""
    greedy = texts(ask(client, temperature=0))
    assert texts(ask(client, temperature=5, extra_body={"top_k": 1})) == greedy
    assert texts(ask(client, temperature=5, top_p=1e-6)) == greedy
    assert texts(ask(client, temperature=5, seed=1)) != greedy


def test_a_stop_string_ends_the_response_before_it(client: Any) -> None:
    (text,) = texts(ask(client, temperature=0))
    stop = text[len(text) // 2 :][:2]
    reply = ask(client, temperature=0, stop=stop)
    assert texts(reply) == [text[: text.index(stop)]]
    assert reply.choices[0].finish_reason == "stop"


def tokens(choice: Any) -> list[str]:
    return [entry.token for entry in choice.logprobs.content]


def test_a_stream_has_the_text_and_the_usage_of_the_response(client: Any) -> None:
    """Sent while it is sampled, with any text that ends it."""
    for more in ({}, {"stop": ["e", "a "]}, {"n": 3, "logprobs": True}):
        given = {"seed": 2, "max_tokens": 200, "temperature": 0.8, **more}
        whole = ask(client, **given)
        options = {"stream_options": {"include_usage": True}}
        *events, last = ask(client, **given, stream=True, **options)
        found = {choice.index: "" for choice in whole.choices}
        for event in events:
            found[event.choices[0].index] += event.choices[0].delta.content or ""
        assert list(found.values()) == texts(whole)
        assert last.usage == whole.usage
        assert len(events) > 10 * len(found) or "stop" in more
        scored = [tokens(e.choices[0]) for e in events if e.choices[0].logprobs]
        assert scored == [tokens(choice) for choice in whole.choices if choice.logprobs]
    given = {"model": "tiny", "prompt": "Once", "seed": 2, "max_tokens": 200, "temperature": 0.8}
    parts = [event.choices[0].text for event in client.completions.create(**given, stream=True)]
    assert "".join(parts) == client.completions.create(**given).choices[0].text
    assert len(parts) > 10


def test_template_variables_of_the_client_take_effect(client: Any) -> None:
    def num_tokens(**variables: Any) -> int:
        body = {"chat_template_kwargs": variables}
        return int(ask(client, max_tokens=1, extra_body=body).usage.prompt_tokens)

    added = len(TOKENIZER("<|im_start|>system\nBe brief.<|im_end|>\n")["input_ids"])
    assert num_tokens(brief=True) == num_tokens() + added == num_tokens(brief=False) + added
    for variables in ({"brieff": True}, {"messages": []}, {"brief": ["a"]}):
        with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
            num_tokens(**variables)


def test_wrong_tokens_and_models_are_refused_in_the_form_of_the_api(url: str, client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        ask(client, model="gpt")
    with pytest.raises(openai.AuthenticationError, match="token is missing or wrong"):
        ask(client.with_options(api_key="wrong"))
    root = url.removesuffix("/v1")
    with httpx.Client(trust_env=False) as plain:
        for path in ("models", "chat/completions", "messages"):
            reply = plain.get(f"{url}/{path}") if path == "models" else plain.post(f"{url}/{path}")
            assert reply.status_code == 401
        keyed = {"x-api-key": TOKEN}
        body = {"model": "gpt", "max_tokens": 4, "messages": MESSAGES}
        reply = plain.post(f"{url}/messages", headers=keyed, json=body)
        assert reply.status_code == 404 and reply.json()["error"]["type"] == "not_found_error"
        body["model"] = "tiny"
        assert plain.post(f"{url}/messages", headers=keyed, json=body).status_code == 200
        assert plain.get(f"{root}/s/x/models", headers=keyed).status_code == 404
        state = plain.get(f"{root}/health").json()
        assert state == {"ready": True, "model": "tiny", "version": "1.2.3", "open_responses": 0}
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_requests_that_cannot_be_answered_get_the_reason(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="samples at most 8 responses"):
        ask(client, n=9)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens"):
        ask(client, messages=[user("long " * 1200)])
    with pytest.raises(openai.BadRequestError, match="prompt"):
        client.completions.create(model="tiny", prompt=[len(TOKENIZER)])
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        ask(client, logit_bias={"5": 1})
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, tools=[ADD], tool_choice="required", max_tokens=3
    )
    assert raw.headers["burnish-ignored"] == "tool_choice"


ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


# ---- the backend alone -------------------------------------------------------------------------


def test_too_many_requests_get_429_until_one_is_answered_or_its_client_leaves() -> None:
    gate = threading.Event()

    def answer(_: Request) -> list[int]:
        assert gate.wait(30)
        return [5, END]

    async def scenario() -> None:
        with backend_of(answer) as backend:
            web = AgentApp(OneModel(backend, None), RequestGuard(ServerLimits(), token=None))
            transport = httpx.ASGITransport(web.asgi)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                body = {"model": "gpt", "messages": MESSAGES}
                two = asyncio.create_task(http.post("/v1/chat/completions", json={**body, "n": 2}))
                await wait_for(lambda: backend.num_open == 2)
                refused = await http.post("/v1/chat/completions", json=body)
                assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
                assert "2 responses are sampled or wait" in refused.json()["error"]["message"]
                gate.set()
                assert (await two).status_code == 200 and backend.num_open == 0
            gate.clear()
            left = asyncio.create_task(
                backend.respond(call(*MESSAGES, n=2), digest=b"", is_retry=False)
            )
            await wait_for(lambda: backend.num_open == 2)
            left.cancel()
            await wait_for(lambda: backend.num_open == 0)
            gate.set()

    asyncio.run(scenario())


def test_a_failed_engine_is_reported_as_503_and_by_the_health_check() -> None:
    def answer(_: Request) -> list[int]:
        raise ArithmeticError("not finite")

    async def scenario() -> None:
        with backend_of(answer) as backend:
            assert backend.is_ready
            for _ in range(2):
                with pytest.raises(CallError, match="engine of this server has failed") as refused:
                    await backend.respond(call(*MESSAGES), digest=b"", is_retry=False)
                assert refused.value.status == 503
            assert not backend.is_ready and backend.num_open == 0

    asyncio.run(scenario())


def test_a_model_without_a_chat_template_answers_completions_only() -> None:
    def make(_: Any) -> ChatRenderer:
        raise RendererError("the tokenizer has no chat template")

    async def scenario() -> None:
        with backend_of(lambda _: [5, 6, END], make) as backend:
            with pytest.raises(CallError, match=r"only completions.*no chat template") as refused:
                await backend.respond(call(*MESSAGES), digest=b"", is_retry=False)
            assert refused.value.status == 400
            reply = await backend.respond(call(prompt="a"), digest=b"", is_retry=False)
            assert reply.choices[0].token_ids == (5, 6, END)

    asyncio.run(scenario())


# ---- the commands ------------------------------------------------------------------------------


@pytest.fixture
def start(folder: Path) -> Iterator[Any]:
    """``start("--port", "0")``: (process, URL) of a server that listens. Killed at the end."""
    processes: list[Any] = []

    def started(*options: object) -> tuple[Any, str]:
        command = [fork_server.interpreter(), "-m", "burnish", "serve", *map(str, options)]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        processes.append(process)
        pattern = r"serving \w+ at (http://127\.0\.0\.1:\d+/v1)\n"
        found = re.fullmatch(pattern, process.stdout.readline())
        assert found is not None
        return process, found[1]

    yield started
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.slow
def test_sigterm_lets_a_request_finish_and_ends_with_exit_code_0(start: Any, folder: Path) -> None:
    process, url = start(folder, "--port", 0, "--device", "cpu")
    root = url.removesuffix("/v1")
    with (
        ThreadPoolExecutor(1) as pool,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
        httpx.Client(trust_env=False) as plain,
    ):
        asked = pool.submit(ask, client, n=8, max_tokens=500, temperature=0)
        deadline = time.monotonic() + 60
        while plain.get(f"{root}/health").json()["open_responses"] < 8:
            assert not asked.done() and time.monotonic() < deadline
        process.send_signal(signal.SIGTERM)
        reply = asked.result(120)
        assert reply.usage.completion_tokens == 8 * 500
    assert process.wait(60) == 0


@pytest.mark.slow
def test_a_checkpoint_is_exported_and_served(tmp_path: Path, make_engine: Any) -> None:
    """By its own folder, and by that of its run."""
    engine, run_folder = make_engine(), tmp_path / "run"
    checkpoint = run_folder / "checkpoints/step_000001"
    checkpoint.mkdir(parents=True)
    engine.save(checkpoint / "policy")
    write_manifest(checkpoint, step=1, extra={"metric": None})
    options = ModelOptions(port=0, device="cpu")
    for given in (checkpoint, run_folder):
        with (
            in_background(str(given), options, version="1") as url,
            openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
        ):
            reply = client.completions.create(model=given.name, prompt="1+1=", max_tokens=4)
            assert reply.usage is not None and 1 <= reply.usage.completion_tokens <= 4


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason=INSTALL)
def test_vllm_gives_the_same_greedy_text_and_caches_the_prefix(
    folder: Path, client: Any, quick_vllm_starts: None
) -> None:
    options = ModelOptions(port=0, engine="vllm", max_len=256, max_batch_size=4)
    with in_background(str(folder), options, version="1") as url:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as other:
            assert texts(ask(other, temperature=0)) == texts(ask(client, temperature=0))
            given = {"temperature": 0, "max_tokens": 60}
            deltas = [e.choices[0].delta.content or "" for e in ask(other, stream=True, **given)]
            assert ["".join(deltas)] == texts(ask(other, **given)) and len(deltas) > 10
            question = [user("What is 2 + 2? " * 3)]  # more than one block of the cache
            first = ask(other, messages=question)
            history = [*question, {"role": "assistant", "content": texts(first)[0]}]
            second = ask(other, messages=[*history, user("And 3 + 3?")], n=2, seed=1)
            assert second.usage.prompt_tokens_details.cached_tokens > 0
            assert len(set(texts(second))) == 2


def run(*arguments: object, question: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=question)


def test_chat_answers_one_question_from_standard_input(folder: Path, url: str, client: Any) -> None:
    root = url.removesuffix("/v1")
    asked = [{"role": "system", "content": "Be exact."}, user("Why?")]
    given = {"temperature": 0.7, "seed": 3, "max_tokens": 9}
    (expected,) = texts(ask(client, messages=asked, **given))
    options = ["--system", "Be exact.", "--temperature", 0.7, "--seed", 3, "--max-tokens", 9]
    there = run("chat", root, *options, "--token-env", "SERVED_TOKEN", question="Why?\n")
    assert there.exit_code == 0 and there.stdout == expected + "\n"
    here = run("chat", folder, *options, "--device", "cpu", question="Why?\n")
    assert here.exit_code == 0 and here.stdout == expected + "\n"
    binary = run("chat", folder, question=b"Why\xff?\n")
    assert binary.exit_code == 2 and "UTF-8" in binary.stderr
    refused = run("chat", root, question="Why?\n")
    assert refused.exit_code == 2 and "name its token with --token-env" in refused.stderr


@pytest.mark.slow
def test_ctrl_c_stops_a_response_and_ctrl_d_ends_the_loop(url: str) -> None:
    """On a pseudo-terminal, from a shell that ignores SIGINT (as those of background jobs do). The
    server drops the stopped response."""
    root = url.removesuffix("/v1")
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "burnish", "chat", root, "--token-env", "SERVED_TOKEN"]
    process = subprocess.Popen(
        ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command, "--temperature", "0"],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)

    def read_until(text: str) -> str:
        found = b""
        while not found.decode("utf-8", "replace").replace("\r\n", "\n").endswith(text):
            assert select.select([ours], [], [], 60)[0], found
            found += os.read(ours, 4096)
        return found.decode("utf-8", "replace")

    def wait_for_open(count: int) -> None:
        deadline = time.monotonic() + 60
        while httpx.get(f"{root}/health", trust_env=False).json()["open_responses"] != count:
            assert time.monotonic() < deadline

    try:
        read_until("> ")
        os.write(ours, b"What is 2 + 2?\n")
        wait_for_open(1)
        os.write(ours, b"\x03")
        assert "[stopped]" in read_until("\n> ")
        wait_for_open(0)
        os.write(ours, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_sigterm_before_the_server_runs_removes_temporary_folders(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"), sigterm_exits():
        with tempfile.TemporaryDirectory(dir=tmp_path):
            signal.raise_signal(signal.SIGTERM)
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_problems_are_reported_before_the_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    gguf = tmp_path / "quantized/model-q8.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(b"GGUF")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases: list[tuple[list[object], str]] = [
            (["serve", folder, "--port", port], f"cannot listen on 127.0.0.1:{port}"),
            (["serve", folder, "--host", "0.0.0.0"], "there is no token"),
            (["serve", folder, "--token-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
            (["serve", folder, "--tensor-parallel-size", 2], "use --engine vllm"),
            (["serve", folder, "--gpu-memory-utilization", 0.5], "is an option of vLLM"),
            (["serve", folder, "--engine", "vllm", "--device", "cpu"], "omit --device"),
            (["serve", folder, "--port", 0, "--max-len", 5000], "reads at most 1024 tokens"),
            (["serve", tmp_path / "none", "--port", 0], "does not exist"),
            (["serve", gguf.parent, "--port", 0], "convert them to safetensors"),
            (["serve", gguf, "--port", 0], "convert them to safetensors"),
            (["chat", "http://127.0.0.1:1", "--device", "cpu"], "has chosen its own"),
            (["chat", "http://127.0.0.1:1"], "is the server running?"),
            (["chat", folder, "--token-env", "T"], "MODEL is no URL"),
        ]
        for arguments, said in cases:
            result = run(*arguments, question="Why?\n")
            assert result.exit_code == 2 and said in result.stderr, (arguments, result.output)
