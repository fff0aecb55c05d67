"""A tiny reward model in a folder, and servers of it on loopback ports."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaForSequenceClassification

from burnish.config.model import ModelConfig, ScratchConfig
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.serve.app import RewardApp
from burnish.serve.base import ServeOptions
from burnish.serve.guard import make_server
from burnish.serve.scorer import EncodedText, TextScorer, load_text_scorer

SCRATCH = ModelConfig(
    scratch=ScratchConfig(
        alphabet="0123456789+=",
        hidden_size=32,
        num_layers=1,
        max_position_embeddings=64,
    )
)


@pytest.fixture(scope="session")
def scratch() -> ModelConfig:
    """A policy with the reward model's vocabulary."""
    return SCRATCH


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sequence classifier of one output, whose scores differ by tenths."""
    folder = tmp_path_factory.mktemp("reward") / "model"
    config = load_causal_lm(SCRATCH).config
    config.num_labels = 1
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    model.save_pretrained(folder)
    load_tokenizer(SCRATCH).save_pretrained(folder)
    return folder


class Gate:
    """Gate before the model: keeps the rows of every pass, and blocks on demand."""

    def __init__(self, scorer: TextScorer) -> None:
        self._score = scorer.score
        self.passes: list[Sequence[EncodedText]] = []
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Semaphore(0)
        """Released at the beginning of every pass."""
        self.instead: Callable[[Sequence[EncodedText]], list[float]] | None = None

    def __call__(self, rows: Sequence[EncodedText]) -> list[float]:
        self.passes.append(rows)
        self.entered.release()
        assert self.open.wait(60)
        return (self.instead or self._score)(rows)


@dataclass(frozen=True)
class Running:
    """A server in a thread of this process."""

    url: str
    app: RewardApp
    gate: Gate
    server: Any
    client: httpx.Client

    def post(self, query: Any, **more: Any) -> httpx.Response:
        return self.client.post(f"{self.url}/get_reward", json={"query": query, **more})

    def rewards(self, query: list[str], **more: Any) -> list[float]:
        response = self.post(query, **more)
        assert response.status_code == 200, response.text
        return response.json()["rewards"]

    def health(self) -> dict[str, Any]:
        return self.client.get(f"{self.url}/health").json()


@contextmanager
def running(folder: Path, *, token: str | None = None, **options: Any) -> Iterator[Running]:
    """Serve ``folder`` until the block ends."""
    chosen = ServeOptions(port=0, **options)
    scorer = load_text_scorer(ModelConfig(path=str(folder)), chosen)
    gate = Gate(scorer)
    app = RewardApp(scorer, chosen, token=token, model="tiny", version="1.2.3")
    app.batcher._score = gate
    server = make_server(app.asgi, app.guard, shutdown_s=chosen.shutdown_s)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            with httpx.Client(timeout=60, trust_env=False) as client:
                yield Running(f"http://127.0.0.1:{port}", app, gate, server, client)
        finally:
            gate.open.set()
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def serving(reward_model: Path) -> Callable[..., Any]:
    """``with serving(max_items=3) as server:``"""
    return lambda **options: running(reward_model, **options)


@pytest.fixture(scope="module")
def server(reward_model: Path) -> Iterator[Running]:
    """One with small limits, for tests that leave it as it is."""
    with running(
        reward_model, max_items=20, max_request_bytes=4000, max_len=40, max_batch_tokens=100
    ) as found:
        yield found
