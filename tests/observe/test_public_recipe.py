"""Secrets of a recipe are in no output of a run but its config.yaml, which only the user reads."""

from __future__ import annotations

import json
import stat
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

import burnish
from burnish.config import load_config
from burnish.observe.public_recipe import public_recipe, recipe_secrets
from burnish.report.build import build_report
from burnish.secret import without_secret_values

QUERY, ENV, ARGUMENT = "queryvalue-81c2", "envvalue-77aa0", "argvalue-40bd9"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = len(rows["query"])
        data = json.dumps({"rewards": [i / 7 for i in range(count)]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/score?api_key={QUERY}"
    server.shutdown()
    thread.join()
    server.server_close()


def recipe(folder: Path, url: str) -> dict[str, Any]:
    rows = [{"prompt": f"{a}+1=", "label": a} for a in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "job": "rl",
        "run_dir": str(folder / "run"),
        "max_steps": 2,
        "model": {"scratch": {"hidden_size": 16, "num_heads": 2, "num_kv_heads": 1}},
        "data": {"sources": [str(folder / "rows.jsonl")]},
        "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "generate_max_len": 4},
        "rewards": [{"kind": "remote", "urls": [url]}],
        "train": {"train_batch_size": 4},
        "checkpoint": {"every_n_steps": 1},
        "observe": {"tensorboard": True, "wandb": {"mode": "offline", "project": "p"}},
    }


def files_with(folder: Path, text: str) -> set[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(p.relative_to(folder)) for p in files if text.encode() in p.read_bytes()}


@pytest.mark.slow
def test_no_file_of_a_run_but_its_recipe_contains_a_secret_of_the_recipe(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb also records the arguments of the process."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    tree = recipe(tmp_path, url)
    monkeypatch.setattr(sys, "argv", ["burnish", "rl", f"rewards.0.urls=[{url}]"])
    run_dir = burnish.run(load_config(tree)).run_dir
    other = {
        **tree,
        "max_steps": 3,
        "rewards": [{"kind": "remote", "urls": [f"{url}&more=other9"]}],
    }
    burnish.run(load_config(other), resume=run_dir)
    wandb.teardown()
    build_report(run_dir)
    assert any(run_dir.rglob("*.wandb")) and any((run_dir / "tensorboard").iterdir())
    assert "?***" in (run_dir / "report.html").read_text()
    assert files_with(tmp_path, QUERY) == {"run/config.yaml"}
    assert stat.S_IMODE((run_dir / "config.yaml").stat().st_mode) == 0o600
    assert (
        f"?api_key={QUERY}"
        in yaml.safe_load((run_dir / "config.yaml").read_text())["rewards"][0]["urls"][0]
    )


def test_a_recipe_is_published_without_environments_arguments_and_queries(tmp_path: Path) -> None:
    tree = recipe(tmp_path, f"http://h:1/p?k={QUERY}")
    command = ["serve", "--api-key", ARGUMENT, f"--token={ARGUMENT}", "-e", f"HF_TOKEN={ARGUMENT}"]
    tree["rollout"]["episodes"] = {
        "max_tokens": 4000,
        "mcp": {"files": {"command": command, "env": {"PLAIN": ENV}}},
    }
    tree["rewards"] = [{"kind": "remote", "urls": [f"http://h:1/p?k={QUERY}"]}]
    config = load_config(tree)
    public = public_recipe(config)
    assert not {QUERY, ENV, ARGUMENT} & set(str(public).replace("'", " ").replace("=", " ").split())
    assert all(text not in str(public) for text in (QUERY, ENV, ARGUMENT))
    assert {QUERY, ENV, ARGUMENT} <= recipe_secrets(config)
    server = public["rollout"]["episodes"]["mcp"]["files"]
    hidden = ["serve", "--api-key", "***", "--token=***", "-e", "HF_TOKEN=***"]
    assert server["command"] == hidden and server["env"] == {"PLAIN": "***"}


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("https://me:pw@h/x", "https://***@h/x"),
        ("see http://h/p?a=secretly, or", "see http://h/p?***, or"),
        ("http://h/p#token=abc", "http://h/p#***"),
        ("run --api-key abc --verbose", "run --api-key *** --verbose"),
        ("run --hf-token='abc' x", "run --hf-token='***' x"),
        ("sent Bearer abcdefgh12 twice", "sent Bearer *** twice"),
        ("hf_abcdefghijklmnopqrstuvwx", "***"),
        ("x sk-abcdefghijklmnop1234 y", "x *** y"),
        ("a basic task, --max-tokens 8, is? it", "a basic task, --max-tokens 8, is? it"),
        ("What is 2 + 2? key=value", "What is 2 + 2? key=value"),
    ],
)
def test_secrets_inside_a_text_are_replaced(text: str, public: str) -> None:
    assert without_secret_values([text]) == [public]
    assert without_secret_values({"prompt": text}) == {"prompt": public}


def test_headers_and_environments_in_lists_are_replaced() -> None:
    tree = {"headers": ["X-Id: v"], "args": ["-H", "X-Api-Key: v", "A_TOKEN_NAME=b", "lr=1"]}
    assert without_secret_values(tree) == {
        "headers": ["***"],
        "args": ["-H", "X-Api-Key: ***", "A_TOKEN_NAME=***", "lr=1"],
    }
