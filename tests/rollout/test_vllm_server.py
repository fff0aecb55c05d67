# house: ok a stand-in server and the tests that use it
"""The engine of vLLM servers against stand-ins: retries, failover, restarts, tokens, bad weights
and bad settings. The contract suite runs it on a real server."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from burnish.config.model import ModelConfig, ScratchConfig
from burnish.models.load import ModelError, load_causal_lm, load_tokenizer
from burnish.rollout.base import Completion, Request, Sampling, VersionSpan
from burnish.rollout.server_guard import VARIABLE, TokenGuard
from burnish.rollout.servers.client import ServerError
from burnish.rollout.servers.config import VllmServers
from burnish.rollout.servers.engine import VllmServerEngine, wait_for_servers
from burnish.rollout.vllm.engine import StaleWeightsError
from burnish.rollout.vllm.model import skeleton_of
from burnish.rollout.vllm.sampling import sample_seed
from burnish.rollout.vllm.weights import PROTOCOL
from burnish.rollout.weights import fingerprint, read_fingerprints

CONFIG = ModelConfig(scratch=ScratchConfig(hidden_size=32, num_layers=1))
MODEL = load_causal_lm(CONFIG)
TOKENIZER = load_tokenizer(CONFIG)
SETTINGS: dict[str, Any] = {
    "protocol": PROTOCOL,
    "hf_config": json.loads(skeleton_of(MODEL).config.to_json_string(use_diff=False)),
    "dtype": "float32",
    "max_model_len": 64,
    "logprobs_mode": "processed_logprobs",
    "max_logprobs": -1,
    "device": "cpu",
    "enable_chunked_prefill": False,
    "v1_sampler": True,
    "quantization": None,
    "kv_cache_dtype": "auto",
    "kv_offloading_size": None,
    "speculative_config": False,
    "watermark_config": False,
    "enable_lora": False,
    "kv_transfer_config": False,
    "logits_processors": [],
    "use_fp64_gumbel": False,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "enable_expert_parallel": False,
    "cpu_offload_gb": 0.0,
}
SECRET = "tok-4711-of-the-server"
REQUESTS = [Request("a", (7, 8, 9), n=3, seed=1), Request("b", (10,), n=2, seed=2)]


def drawn(seed: int, count: int) -> list[int]:
    """The tokens of a stand-in."""
    draw = random.Random(seed)
    return [draw.randrange(6, 40) for _ in range(count)]


class StandIn(ThreadingHTTPServer):
    """Stores weights as vLLM would, and answers with :func:`drawn`. ``before(path, body)`` may
    return (status, reply) in place of it."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.settings = copy.deepcopy(SETTINGS)
        self.label, self.weights = "default", dict[str, torch.Tensor]()
        self.asked: list[tuple[str, Any, str | None]] = []
        """(path, body, header with the token) of each request."""
        self.aborted: set[str] = set()
        self.running = threading.Event()
        self.running.set()
        self.before: Callable[[str, Any], tuple[int, Any] | None] = lambda path, body: None
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.asked]

    def rpc(self, method: str, args: list[str]) -> Any:
        if method == "burnish_describe":
            return self.settings
        if method == "burnish_load":
            self.weights |= load_file(args[0])
        if method == "burnish_report":
            found = read_fingerprints({n: fingerprint(t, t.dtype) for n, t in self.weights.items()})
            return {
                "fingerprints": {name: both.values for name, both in found.items()},
                "placed": {name: both.placed for name, both in found.items()},
                "names": {name: name for name in found},
                "exact": [],
                "findings": [],
            }
        return None

    def end(self) -> None:
        self.running.set()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, *_: Any) -> None:
        """Some tests disconnect their client."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def do_GET(self) -> None:
        self.reply({})

    def do_POST(self) -> None:
        server, path = self.server, self.path.partition("?")[0]
        length = int(self.headers["Content-Length"] or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        server.asked.append((self.path, body, self.headers["Authorization"]))
        if (instead := server.before(path, body)) is not None:
            self.reply(instead[1], status=instead[0])
        elif path == "/collective_rpc":
            self.reply({"results": [server.rpc(body["method"], body["args"])]})
        elif path == "/update_weight_version":
            server.label = body["new_version"]
            self.reply({"success": True})
        elif path == "/inference/v1/abort_requests":
            server.aborted |= set(body["request_ids"])
            self.reply(None)
        elif path == "/inference/v1/generate":
            server.running.wait(20)
            self.generate(body)
        else:
            self.reply({"success": True})

    def generate(self, body: Any) -> None:
        fields = body["sampling_params"]
        ids = drawn(fields["seed"], fields["max_tokens"])
        if not body.get("stream"):
            self.reply({"choices": [self.choice(ids, len(ids))]})
            return
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for i, token in enumerate(ids):
            ended = f"generate-tokens-{body['request_id']}" in self.server.aborted
            last = ended or i == len(ids) - 1
            event = {
                "choices": [self.choice([] if ended else [token], i + (not ended) if last else 0)]
            }
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
            if last:
                break
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def choice(self, ids: list[int], total: int) -> dict[str, Any]:
        """``total``: tokens of a response that ends here; 0: it does not."""
        one = {"logprob": -1.5, "top_logprobs": []}
        span = {"version": self.server.label, "start": 0, "end": total}
        return {
            "token_ids": ids,
            "logprobs": {"content": [one for _ in ids]},
            "finish_reason": "length" if total else None,
            "weight_versions": [span] if total else None,
        }

    def reply(self, body: Any, *, status: int = 200) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[..., StandIn]]:
    servers: list[StandIn] = []

    def start(port: int = 0) -> StandIn:
        servers.append(StandIn(port))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


@pytest.fixture
def engine_of() -> Iterator[Callable[..., VllmServerEngine]]:
    """``engine_of(server, ..., retries=1)``: an engine without weights."""
    made: list[VllmServerEngine] = []

    def make(*servers: StandIn, **options: Any) -> VllmServerEngine:
        quick = {"backoff_s": 0.01, "max_backoff_s": 0.05, "retries": 2, "start_timeout_s": 0.2}
        config = VllmServers(
            kind="vllm_server", urls=tuple(s.url for s in servers), **{**quick, **options}
        )
        made.append(VllmServerEngine(MODEL, TOKENIZER, config, max_model_len=64))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def run(engine: VllmServerEngine, sampling: Sampling = Sampling(8)) -> list[Completion]:
    done = sorted(engine.generate(REQUESTS, sampling), key=lambda c: (c.request_id, c.index))
    assert [(c.request_id, c.index) for c in done] == [
        (r.request_id, i) for r in REQUESTS for i in range(r.n)
    ]
    for c in done:
        seed = sample_seed({"a": 1, "b": 2}[c.request_id], c.index)
        assert list(c.token_ids) == drawn(seed, 8)[: len(c.token_ids)]
        assert c.logprobs == (-1.5,) * len(c.token_ids)
    return done


def load(engine: VllmServerEngine, version: int = 3) -> None:
    engine.load_weights(version, MODEL.named_parameters())


Serve = Callable[..., StandIn]
EngineOf = Callable[..., VllmServerEngine]


def test_a_request_states_everything_that_decides_about_its_tokens(
    serve: Serve, engine_of: EngineOf
) -> None:
    """Ids, lengths, cuts, end tokens and the seed of each sample; no default of the server."""
    server = serve()
    engine = engine_of(server)
    with pytest.raises(RuntimeError, match="no weights yet"):
        run(engine)
    load(engine)
    done = run(engine, Sampling(8, 0.7, top_p=0.9, top_k=5, min_p=0.1, stop_token_ids=(50,)))
    assert all(c.spans == (VersionSpan(3, 0, 8),) and c.finish_reason == "length" for c in done)
    bodies = [body for path, body, _ in server.asked if path == "/inference/v1/generate"]
    (body,) = (b for b in bodies if b["sampling_params"]["seed"] == sample_seed(2, 1))
    assert len(body.pop("request_id")) > 16
    assert body == {
        "token_ids": [10],
        "sampling_params": {
            **{"max_tokens": 8, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
            **{"seed": sample_seed(2, 1), "stop_token_ids": [TOKENIZER.eos_token_id, 50]},
            **{"ignore_eos": True, "logprobs": 0, "detokenize": False},
        },
    }


def test_a_load_pauses_verifies_and_labels(serve: Serve, engine_of: EngineOf) -> None:
    server = serve()
    engine = engine_of(server)
    server.asked.clear()
    load(engine)
    expected = dict(MODEL.named_parameters())
    assert server.weights.keys() == expected.keys()
    assert all(torch.equal(t, expected[name]) for name, t in server.weights.items())
    steps = [f"{path} {(body or {}).get('method', '')}".strip() for path, body, _ in server.asked]
    assert steps == [
        "/collective_rpc burnish_describe",
        "/inference/v1/abort_requests",
        "/pause?mode=keep",
        "/update_weight_version",
        "/collective_rpc burnish_begin",
        "/collective_rpc burnish_load",
        "/collective_rpc burnish_report",
        "/reset_prefix_cache?reset_running_requests=true",
        "/update_weight_version",
        "/resume",
    ]
    (file,) = (body["args"][0] for _, body, _ in server.asked if "burnish_load" in str(body))
    assert not Path(file).parent.exists(), "the files are removed"


def test_other_weights_on_one_server_are_found(serve: Serve, engine_of: EngineOf) -> None:
    good, bad = serve(), serve()
    engine = engine_of(good, bad)

    def flip(path: str, body: Any) -> None:
        if body is not None and body.get("method") == "burnish_report":
            bad.weights["model.norm.weight"].view(torch.int32)[0] ^= 1  # the last bit

    bad.before = flip
    with pytest.raises(StaleWeightsError, match=f"{bad.url}.*model.norm.weight has other values"):
        load(engine)
    with pytest.raises(RuntimeError, match="cannot sample"):
        run(engine)
    assert bad.paths()[-1] == good.paths()[-1] == "/collective_rpc", "both are still paused"
    bad.before = lambda path, body: None
    load(engine, 4)
    assert {c.version for c in run(engine)} == {4}


def test_transient_failures_are_retried(serve: Serve, engine_of: EngineOf) -> None:
    """The failures of 5 concurrent requests count once, so a sixth is allowed. (Requests begin
    within the backoff.)"""
    server = serve()
    engine = engine_of(server, retries=2, backoff_s=0.4, max_backoff_s=0.4)
    load(engine)
    left = iter([(503, {"error": "busy"})] * 6)
    server.before = lambda path, body: next(left, None) if "generate" in path else None
    run(engine)
    assert next(left, None) is None, "six were refused"


def test_requests_of_a_server_that_ends_are_repeated_by_the_other(
    serve: Serve, engine_of: EngineOf, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that it has not answered and new ones. It is used again after a load of weights."""
    first, second = serve(), serve()
    engine = engine_of(first, second)
    load(engine)
    first.before = lambda path, body: (500, {"error": "engine dead"})
    run(engine)
    assert "engine dead" in caplog.text
    count = len(first.asked)
    load(engine, 4)
    run(engine)
    assert len(first.asked) > count, "the load asked it once"
    assert all("generate" not in path for path in first.paths()[count:])
    first.before = lambda path, body: None
    load(engine, 5)
    assert {c.version for c in run(engine)} == {5}
    assert "/inference/v1/generate" in first.paths()[count:]


def test_a_request_that_hangs_on_a_lost_server_moves_to_the_other(
    serve: Serve, engine_of: EngineOf
) -> None:
    """The server stops answering in a load; its requests are still open then."""
    first, second = serve(), serve()
    engine = engine_of(first, second, retries=0)
    load(engine)
    first.running.clear()
    second.running.clear()
    engine.submit(REQUESTS, Sampling(8))
    while sum(path == "/inference/v1/generate" for s in (first, second) for path in s.paths()) < 5:
        assert engine.poll() == []
    first.before = lambda path, body: (500, {}) if path == "/pause" else None
    load(engine, 4)
    second.running.set()
    done: list[Completion] = []
    while engine.busy:
        done += engine.poll()
    assert len(done) == 5 and {c.version for c in done} == {4}


def test_a_restarted_server_is_detected(serve: Serve, engine_of: EngineOf) -> None:
    """It has the label of a new vLLM; that of another client is no better."""
    first, second = serve(), serve()
    engine = engine_of(first, second)
    load(engine)
    first.label = "default"
    assert {c.version for c in run(engine)} == {3}
    second.label = "0123456789abcdef-3"
    with pytest.raises(ServerError, match=r"(?s)all vLLM servers are lost.*'default'.*restarted"):
        run(engine)
    engine.cancel(["a", "b"])
    load(engine, 4)
    assert {c.version for c in run(engine)} == {4}


def test_stop_strings_end_a_stream(serve: Serve, engine_of: EngineOf) -> None:
    server = serve()
    engine = engine_of(server)
    load(engine)
    tokens = drawn(sample_seed(2, 1), 8)
    string = TOKENIZER.decode(tokens[2:4])
    done = {(c.request_id, c.index): c for c in run(engine, Sampling(8, stop=(string,)))}
    c = done["b", 1]
    assert list(c.token_ids) == tokens[:4] and c.finish_reason == "stop"
    assert c.spans == (VersionSpan(3, 0, 4),)
    assert server.aborted, "vLLM is asked to stop"
    assert len(done["a", 0].token_ids) == 8 or string in done["a", 0].text


def test_canceled_requests_return_nothing(serve: Serve, engine_of: EngineOf) -> None:
    server = serve()
    engine = engine_of(server, max_concurrency=1)
    load(engine)
    server.running.clear()
    engine.submit(REQUESTS, Sampling(8))
    assert engine.poll() == []
    engine.cancel(["a", "unknown"])
    server.running.set()
    done: list[Completion] = []
    while engine.busy:
        done += engine.poll()
    assert {(c.request_id, c.index) for c in done} == {("b", 0), ("b", 1)}
    assert sum(path == "/inference/v1/generate" for path in server.paths()) <= 3


def test_a_refused_request_is_an_error_at_once(serve: Serve, engine_of: EngineOf) -> None:
    server = serve()
    engine = engine_of(server)
    load(engine)
    server.before = lambda path, body: (400, {"error": "too long"}) if "generate" in path else None
    with pytest.raises(ServerError, match=f"{server.url}.*status 400.*too long"):
        run(engine)


def test_the_token_is_sent_and_never_shown(
    serve: Serve,
    engine_of: EngineOf,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("ENGINE_TOKEN", SECRET)
    server = serve()
    engine = engine_of(server, token_env="ENGINE_TOKEN")
    load(engine)
    assert {header for _, _, header in server.asked} == {f"Bearer {SECRET}"}
    server.before = lambda path, body: (503, {"error": f"you sent {SECRET}"})
    with pytest.raises(ServerError, match=r"you sent \[token\]") as raised:
        run(engine)
    assert SECRET not in f"{raised.value} {caplog.text} {engine.config!r}"
    engine.cancel(["a", "b"])
    monkeypatch.delenv("ENGINE_TOKEN")
    with pytest.raises(ModelError, match="ENGINE_TOKEN, which is not set"):
        engine_of(server, token_env="ENGINE_TOKEN")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dtype": "bfloat16"}, "--dtype float32"),
        ({"max_model_len": 63}, "--max-model-len 64 or more"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"v1_sampler": False}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"enable_chunked_prefill": True}, "--no-enable-chunked-prefill"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8: it computes in another number format"),
        ({"speculative_config": True}, "its draft model is not updated"),
        ({"data_parallel_size": 2}, "one server for each part"),
        ({"protocol": 0}, "install the same version of Burnish"),
        (
            {"hf_config": SETTINGS["hf_config"] | {"num_hidden_layers": 2, "use_cache": True}},
            r"another model: num_hidden_layers=2 \(trainer: 1\)",
        ),
    ],
)
def test_a_server_with_other_settings_is_refused(
    changes: dict[str, Any], told: str, serve: Serve, engine_of: EngineOf
) -> None:
    server = serve()
    server.settings |= changes
    with pytest.raises(ModelError, match=f"(?s){server.url} cannot be used.*{told}"):
        engine_of(server)


@pytest.mark.parametrize(
    ("path", "reply", "told"),
    [
        (
            "/collective_rpc",
            (500, {"error": "'Worker' object has no attribute 'burnish_describe'"}),
            "--worker-extension-cls burnish.rollout.vllm.PatchedWorker",
        ),
        ("/collective_rpc", (404, {"detail": "Not Found"}), "VLLM_SERVER_DEV_MODE=1"),
        (
            "/inference/v1/abort_requests",
            (403, {"error": "Restart vllm serve with --enable-scale-out"}),
            "--enable-scale-out",
        ),
        ("/inference/v1/abort_requests", (401, {"error": "Unauthorized"}), "set token_env"),
    ],
)
def test_a_server_without_a_part_is_refused(
    path: str, reply: tuple[int, Any], told: str, serve: Serve, engine_of: EngineOf
) -> None:
    server = serve()
    server.before = lambda asked, body: reply if asked == path else None
    with pytest.raises(ModelError, match=told):
        engine_of(server)


def test_a_server_that_does_not_respond_is_reported_before_models_are_loaded(
    serve: Serve, engine_of: EngineOf, caplog: pytest.LogCaptureFixture
) -> None:
    good, gone = serve(), serve()
    gone.server_close()
    config = VllmServers(kind="vllm_server", urls=(good.url, gone.url), start_timeout_s=0.5)
    with pytest.raises(ModelError, match=f"1 of 2 servers.*\n.*{gone.url}.*ConnectError"):
        wait_for_servers(config)
    assert f"{gone.url} does not respond yet" in caplog.text


def test_files_that_a_server_cannot_read_are_explained(
    serve: Serve, engine_of: EngineOf, tmp_path: Path
) -> None:
    server = serve()
    engine = engine_of(server, weights_folder=str(tmp_path / "shared"))
    load(engine)
    assert list((tmp_path / "shared").iterdir()) == []
    finding = "its loader failed: FileNotFoundError: No such file or directory"
    report = {"fingerprints": {}, "names": {}, "exact": [], "findings": [finding]}
    server.before = lambda path, body: (
        (200, {"results": [report]}) if "burnish_report" in str(body) else None
    )
    with pytest.raises(ServerError, match=r"cannot read.*rollout\.engine\.weights_folder"):
        load(engine, 4)


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/collective_rpc", f"Bearer {SECRET}", 200),
        ("/collective_rpc", f"Bearer {SECRET}x", 401),
        ("/collective_rpc", None, 401),
        ("/inference/v1/generate", "Bearer ", 401),
        ("/health", None, 200),
    ],
)
def test_the_guard_asks_for_the_token_on_every_path(
    path: str, header: str | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if header is None else [(b"authorization", header.encode())]
    scope = {"type": "http", "path": path, "headers": headers}
    asyncio.run(TokenGuard(app)(scope, None, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == status
