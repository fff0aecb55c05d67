"""Exports pushed to a local stand-in for the API of the Hugging Face Hub, and their model cards."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

import burnish
from burnish.cli import app
from burnish.publish.model_card import write_card
from burnish.secret import without_secret_values

TOKEN = "hf_0123456789abcdefghij"
SECRET = "a-secret-of-the-machine"


class Hub(ThreadingHTTPServer):
    """The endpoints that ``huggingface_hub`` calls for an upload: create, branch, tree, card
    validation, preupload, LFS batch, and commit. Every request needs the token."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, dict[str, Any]] = {}
        self.blobs: dict[str, bytes] = {}
        self.status: dict[str, int] = {}
        """Status to return for paths that contain the key. 0: no answer."""
        self.silent = threading.Event()

    def answer(self, method: str, path: str, body: bytes) -> Any:
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            header = json.loads(body)["content"].split("---")[1]
            return 200, {"errors": [], "warnings": [], "metadata": yaml.safe_load(header)}
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            found = [
                o | {"actions": {"upload": {"href": f"{self.url}/blob/{o['oid']}"}}}
                for o in objects
            ]
            return 200, {"transfer": "basic", "objects": found}
        if path.startswith("/blob/"):
            self.blobs[path.rpartition("/")[2]] = body
            return 200, {}
        return self._repo(path, body)

    def _create(self, wanted: dict[str, Any]) -> tuple[int, Any]:
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.repos:
            return 409, {"error": "You already created this model repo", "url": self._url(name)}
        private = wanted.get("visibility") == "private" or wanted.get("private") is True
        self.repos[name] = {"private": private, "branches": {"main": {}}, "messages": []}
        return 200, {"url": self._url(name), "name": name}

    def _url(self, name: str) -> str:
        return f"{self.url}/{name}"

    def _repo(self, path: str, body: bytes) -> tuple[int, Any]:
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(\w+)/([^/]+))?/?", path)
        assert match, path
        repo, (_, verb, revision) = self.repos[match[1]], match.groups()
        if verb is None:
            return 200, {"id": match[1], "private": repo["private"], "siblings": []}
        if verb == "branch":
            repo["branches"].setdefault(revision, dict(repo["branches"]["main"]))
            return 200, {}
        files = repo["branches"][revision]
        if verb == "tree":
            return 200, [
                {"type": "file", "path": p, "size": len(data), "oid": "0" * 40}
                for p, data in files.items()
            ]
        if verb == "preupload":
            wanted = json.loads(body)["files"]
            return 200, {"files": [
                {"path": f["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular"}
                for f in wanted
            ]}  # fmt: skip
        assert verb == "commit", path
        self._commit(repo, files, [json.loads(line) for line in body.splitlines()])
        return 200, {"commitUrl": f"{self._url(match[1])}/commit/1", "commitOid": "1" * 40}

    def _commit(self, repo: dict[str, Any], files: dict[str, bytes], lines: list[Any]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                repo["messages"].append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
                assert hashlib.sha256(files[value["path"]]).hexdigest() == value["oid"]
            else:
                assert line["key"] == "deletedFile"
                del files[value["path"]]


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def _serve(self) -> None:
        chunks = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        refused = [status for part, status in self.server.status.items() if part in path]
        if not path.startswith("/blob/") and self.headers["Authorization"] != f"Bearer {TOKEN}":
            status, answer = 401, {"error": "Invalid username or password."}
        elif refused == [0]:
            self.server.silent.wait()
            return
        elif refused:
            status, answer = refused[0], {"error": "Refused."}
        else:
            status, answer = self.server.answer(self.command, path, chunks)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = _serve

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    # huggingface_hub reads its environment once, on import
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with LoRA. Its recipe then gets a hub dataset and secrets, as a real one may have."""
    folder = tmp_path_factory.mktemp("hub")
    rows = [{"prompt": f"{i}=", "response": str(i)} for i in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "job": "sft",
        "run_dir": str(folder / "run"),
        "max_steps": 2,
        "model": {
            "scratch": {"alphabet": "0123456789=", "hidden_size": 32, "num_layers": 1},
            "lora": {"lora_rank": 2},
        },
        "data": {"sources": [str(folder / "rows.jsonl")]},
        "train": {"train_batch_size": 4, "lr": 1e-2},
    }
    made = burnish.run(burnish.load_config(tree)).run_dir
    recipe = yaml.safe_load((made / "config.yaml").read_text())
    recipe["data"]["sources"].append({"kind": "dataset", "path": "my-name/sums", "split": "train"})
    recipe["model"]["path"] = "my-name/base"
    recipe["tool"] = {"api_key": "abc", "url": f"http://me:{SECRET}@host/?q={SECRET}"}
    (made / "config.yaml").write_text(yaml.safe_dump(recipe))
    return made


def export(run_dir: Path, out: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["export", str(run_dir), "--out", str(out), *options])


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.*")}


def test_a_push_delivers_every_file_and_a_branch_replaces_weights_only(
    hub: Hub, run_dir: Path, tmp_path: Path
) -> None:
    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    done = export(run_dir, merged, "--push", "me/sums", "--private", "--commit-message", "First")
    assert done.exit_code == 0, done.output
    assert f"pushed to {hub.url}/me/sums" in done.stdout
    repo = hub.repos["me/sums"]
    assert (repo["private"], repo["messages"]) == (True, ["First"])
    assert repo["branches"]["main"] == contents(merged)
    assert "model.safetensors" in repo["branches"]["main"]

    repo["branches"]["main"]["README.md"] = b"edited by hand"
    again = ("--lora", "adapter", "--push", "me/sums", "--revision", "adapter")
    done = export(run_dir, adapter, *again)
    assert done.exit_code == 0, done.output
    assert repo["branches"]["main"].keys() == contents(merged).keys()
    branch = repo["branches"]["adapter"]
    assert "model.safetensors" not in branch and "adapter_config.json" in branch
    expected = contents(adapter) | {"README.md": b"edited by hand"}
    assert {name: branch[name] for name in expected} == expected
    assert "library_name: peft" in (adapter / "README.md").read_text()
    assert load_file(adapter / "adapter_model.safetensors")


def test_the_card_has_metadata_metrics_recipe_and_versions_but_no_secret(
    run_dir: Path, tmp_path: Path
) -> None:
    """A card that exists is kept."""
    (tmp_path / "a").mkdir()
    path = write_card(tmp_path / "a", run_dir, model="policy", lora="merge", title="sums")
    assert path is not None
    card = path.read_text()
    assert yaml.safe_load(card.split("---")[1]) == {
        "base_model": "my-name/base",
        "library_name": "transformers",
        "tags": ["burnish", "sft", "lora"],
        "datasets": ["my-name/sums"],
    }
    for text in (
        "after step 2",
        "`LOCAL/rows.jsonl`",
        "| `train/loss` |",
        "recipe.yaml",
        "| torch |",
    ):
        assert text in card, text
    assert SECRET not in card and "api_key: abc" not in card and str(run_dir.parent) not in card
    recipe = card.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(recipe)["train"]["lr"] == 1e-2
    assert write_card(tmp_path / "a", run_dir, model="policy", lora="merge", title="x") is None
    curve = card.split("| step | `")[1].split("\n\n")[0]
    assert [line.split("|")[1].strip() for line in curve.split("\n")[2:]] == ["1", "2"]


def test_the_card_has_the_best_metric_and_those_of_evaluation_sets(tmp_path: Path) -> None:
    """A set may be named as a metric; its direction is that of the recipe."""
    step = tmp_path / "run" / "checkpoints" / "step_000002"
    step.mkdir(parents=True)
    recipe = {
        "job": "rm",
        "checkpoint": {"best_metric": "eval/hard/odd", "best_mode": "min"},
        "eval": {"sets": {"hard": {}, "reward": {}}},
    }
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(recipe))
    measured = ("accuracy", "hard/accuracy", "reward/accuracy", "hard/odd", "hard/other", "x/loss")
    values = [{f"eval/{name}": float(i) for name in measured} for i in (1, 2)]
    lines = [{"step": i, "time": i, **each} for i, each in enumerate(values, 1)]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    path = write_card(tmp_path, step, model="reward", lora="merge", title="x")
    assert path is not None
    table = path.read_text().partition("| --- | --- | --- | --- | --- |\n")[2].partition("\n\n")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert rows[0] == ["eval/hard/odd", "2", "2", "1", "1"]
    accuracies = ["eval/accuracy", "eval/hard/accuracy", "eval/reward/accuracy"]
    assert [row[0] for row in rows[1:]] == accuracies
    assert all(row[1:] == ["2", "2", "2", "2"] for row in rows[1:])


def test_the_metrics_of_many_evaluation_sets_leave_room_for_others(tmp_path: Path) -> None:
    """18 pass rates are three metrics on six sets. Of more than twelve metrics, those of all charts
    are in the table, and the others are named."""
    sets, rates = [f"s{i}" for i in range(6)], ("pass@1", "pass@4", "pass@8")
    (tmp_path / "checkpoints").mkdir()
    recipe = {"job": "rl", "eval": {"sets": {name: {} for name in sets}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recipe))
    measured = [f"eval/{name}/{rate}" for name in sets for rate in rates]
    parts = [f"reward/part{i:02d}" for i in range(20)]
    measured += ["reward/mean", "train/loss", *parts]
    line = {"step": 1, "time": 1, **dict.fromkeys(measured, 0.5)}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line))
    path = write_card(tmp_path, tmp_path, model="policy", lora="merge", title="x")
    assert path is not None
    section = path.read_text().partition("## Metrics")[2].partition("## Recipe")[0]
    table, _, rest = section.partition("Also measured: ")
    shown = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert shown[:20] == [*sorted(measured[:18], key=lambda n: n), "reward/mean", "train/loss"]
    assert shown[20:] == parts[:7]
    assert all(f"`{name}`" in rest for name in parts[7:])
    curves = [line for line in rest.splitlines() if line.startswith("| step |")]
    columns = ("eval/s0/pass@1", "reward/mean", "train/loss", "reward/part00")
    assert curves == ["| step | " + " | ".join(f"`{name}`" for name in columns) + " |"]


@pytest.mark.parametrize(
    ("tree", "public"),
    [
        ({"headers": {"X-Id": "v"}}, {"headers": {"X-Id": "***"}}),
        ({"env": {"A": "b"}, "list": []}, {"env": {"A": "***"}, "list": []}),
        (["run", "--api-key", "v", "x"], ["run", "--api-key", "***", "x"]),
        (["--api-key=v", "--token=a"], ["--api-key=***", "--token=***"]),
        ({"tokenizer_path": "a-name-of-a-model/x", "token_env": "A_VARIABLE_OF_THE_SHELL"}, None),
        ({"prompt_key": "question", "max_tokens": 8}, None),
        ({"secret": "v"}, {"secret": "***"}),
        (["http://h/p?token=v"], ["http://h/p?***"]),
    ],
)  # fmt: skip
def test_secrets_of_a_recipe_are_replaced(tree: Any, public: Any) -> None:
    assert without_secret_values(tree) == (tree if public is None else public)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--push", "sums"), "OWNER/NAME, such as"),
        (("--push", "me/a b"), "not a valid name"),
        (("--push", "me/a/b"), "not a valid name"),
        (("--push", "me/sums", "--revision", " "), "--revision is empty"),
        (("--private",), "no effect without --push"),
        (("--push", "me/sums"), "export HF_TOKEN=..."),
    ],
)
def test_a_push_that_cannot_succeed_is_refused_before_the_export(
    options: tuple[str, ...],
    message: str,
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("burnish.publish.hub.get_token", lambda: None)
    done = export(run_dir, tmp_path / "out", *options)
    assert done.exit_code == 2 and message in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("trouble", "options", "message"),
    [
        ("token", (), "accept"),
        ("/api/repos/create 403", (), "write to me/sums"),
        ("/commit/ 403", (), "write to me/sums"),
        ("/blob/ 403", (), "write to me/sums"),
        ("/api/validate-yaml 400", (), "failed"),
        ("taken", (), "nothing"),
        ("taken", ("--private", "--revision", "main"), "--private"),
        ("down", (), "could not be reached"),
        ("/commit/ 0", (), "me/sums broke"),
    ],
)
def test_a_failed_push_says_why_and_keeps_the_folder(  # house: ok fixtures
    trouble: str,
    options: tuple[str, ...],
    message: str,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from burnish.publish.hub import Destination, HubError, push

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "README.md").write_text("---\ntags: [a]\n---\n")
    (folder / "model.safetensors").write_bytes(b"weights")
    before = contents(folder)
    if trouble.endswith(" 0"):
        monkeypatch.setattr("burnish.publish.hub.SILENCE_S", 2.0)
    if trouble == "token":
        monkeypatch.setenv("HF_TOKEN", "hf_another_token_of_somebody")
    elif trouble == "taken":
        hub.repos["me/sums"] = {"private": False, "branches": {"main": {}}, "messages": []}
    elif trouble == "down":
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    else:
        part, status = trouble.split()
        hub.status[part] = int(status)
    revision = "main" if "--revision" in options else None
    destination = Destination("me/sums", private="--private" in options, revision=revision)
    with pytest.raises(HubError, match=message) as failed:
        push(folder, destination)
    assert f"hf upload me/sums {folder} ." in str(failed.value)
    assert "hf_another" not in str(failed.value)
    assert contents(folder) == before
    assert not any(r["branches"]["main"] for r in hub.repos.values())
