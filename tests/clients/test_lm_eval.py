"""``lm-eval`` with a local task against ``burnish serve``."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from agent_session import END, TOKENIZER
from client_venvs import interpreter
from transformers import LlamaConfig, LlamaForCausalLM

from burnish.jobs.serve import in_background
from burnish.serve.base import ModelOptions

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(600)]

TASK = """
task: burnish_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{rows}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "What is {{{{a}}}} + {{{{b}}}}?"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=END,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    found: Any = LlamaForCausalLM(config)
    found.save_pretrained(tmp_path / "tiny")
    TOKENIZER.save_pretrained(str(tmp_path / "tiny"))
    return tmp_path / "tiny"


def test_lm_eval(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The responses are those to the same calls without lm-eval: they are greedy."""
    monkeypatch.setenv("SERVED_TOKEN", "secret-of-the-server")
    python = interpreter("lm-eval")
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"a": i, "b": 1, "answer": str(i + 1)}) for i in range(6)]
    rows.write_text("\n".join(lines))
    (tmp_path / "task.yaml").write_text(TASK.format(rows=rows))
    options = ModelOptions(port=0, device="cpu", token_env="SERVED_TOKEN")
    with in_background(str(model), options, version="1") as url:
        found = [evaluate(python, url, tmp_path, f"out{i}") for i in range(2)]
        direct = {i: ask(url, f"What is {i} + 1?") for i in range(6)}
    assert found == [direct, direct]


def ask(url: str, text: str) -> str:
    """The response of the server to a prompt, with the parameters of the task."""
    messages = [{"role": "user", "content": text}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
    headers = {"Authorization": "Bearer secret-of-the-server"}
    reply = httpx.post(
        f"{url}/chat/completions", json={**body, "stop": ["\n\n"]}, headers=headers, timeout=60
    )
    found: str = reply.json()["choices"][0]["message"]["content"]
    return found


def evaluate(python: Path, url: str, folder: Path, out: str) -> dict[int, str]:
    """The responses by prompt."""
    given = f"model=tiny,base_url={url}/chat/completions,num_concurrent=3,tokenizer_backend=None"
    command: list[Any] = [python, "-m", "lm_eval", "--model", "local-chat-completions"]
    command += ["--model_args", given, "--tasks", "burnish_sums", "--include_path", folder]
    command += ["--apply_chat_template", "--log_samples", "--output_path", folder / out]
    own = {"OPENAI_API_KEY": "secret-of-the-server", "HF_HOME": str(folder / "hf")}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    subprocess.run(command, check=True, env={**os.environ, **own, **offline}, timeout=300)
    (path,) = (folder / out).rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    return {sample["doc"]["a"]: sample["resps"][0][0] for sample in samples}
