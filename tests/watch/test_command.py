"""``burnish watch`` as a command."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from typer.testing import CliRunner

from burnish.cli import app


def test_the_command_serves_until_ctrl_c_also_with_an_open_page(runs):
    command = [sys.executable, "-m", "burnish", "watch", str(runs), "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        ready = process.stdout.readline()
        assert "5 runs" in ready
        address = re.search(r"http://\S+", ready)[0]
        with httpx.stream("GET", f"{address}/api/runs", timeout=30) as reply:
            parts = reply.iter_text()
            next(parts)
            process.send_signal(signal.SIGINT)
            list(parts)
        assert process.wait(10) == 0 and process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


def test_what_cannot_be_watched_is_refused(runs, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.delenv("NO_SUCH", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, said in {
            (str(tmp_path / "none"),): "does not exist",
            (str(tmp_path / "file"),): "is a file",
            (str(runs), "--port", port): "choose another port",
            (str(runs), "--host", "0.0.0.0"): "there is no token",
            (str(runs), "--token-env", "NO_SUCH"): "NO_SUCH, which is not set",
            (str(runs), "--host", "no.such.host.invalid"): "is not an address",
        }.items():
            result = CliRunner().invoke(app, ["watch", *words])
            assert result.exit_code != 0 and said in result.output, (words, result.output)
            assert "Traceback" not in result.output


@pytest.mark.parametrize("name", ["first", "."])
def test_text_shows_runs_in_the_terminal(runs, name):
    result = CliRunner().invoke(app, ["watch", str(runs / name), "--text"])
    assert result.exit_code == 0 and "0.049 → 0.950" in result.output
    assert "▁" in result.output
    assert CliRunner().invoke(app, ["watch", str(runs / "no_run"), "--text"]).exit_code != 0
