"""The page of runs in Chromium while ``burnish rl`` trains."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import fork_server
import pytest
from watched_runs import open_view, serving

from burnish.observe.metrics import read_metrics

pytestmark = pytest.mark.timeout(900)

PATIENCE_MS = 120_000
"""A limit for a busy machine. Every wait is for a condition."""

REWARD = '''
import time
from pathlib import Path

ALLOWED = Path(__file__).with_name("allowed")  # one byte per step
calls = 0

def score(responses):
    """Wait until the test allows the next step. The check before the run has fewer responses."""
    global calls
    calls += len(responses) == 8
    while ALLOWED.stat().st_size < calls:
        time.sleep(0.02)
    return [float(i % 2 == calls % 3) for i, _ in enumerate(responses)]
'''
RECIPE = """
job: rl
run_dir: {folder}/runs/live
max_steps: 4
model: {{scratch: {{alphabet: "0123456789>", hidden_size: 8, num_layers: 1, num_heads: 2,
  num_kv_heads: 2, max_position_embeddings: 16}}}}
data: {{sources: [{folder}/prompts.jsonl]}}
rollout: {{rollout_batch_size: 2, n_samples_per_prompt: 4, generate_max_len: 4}}
rewards: [{{kind: function, function: "{folder}/reward.py:score"}}]
train: {{train_batch_size: 8}}
"""
LAST_POINT = """(step) => document.querySelector(
  'figure:not(.waiting) [role=slider]')?.getAttribute('aria-valuemax') === step"""


def test_a_run_is_watched_from_its_start_to_its_end(page, tmp_path: Path) -> None:
    """The page is loaded once: all that it shows later arrives over its connection."""
    page.set_default_timeout(PATIENCE_MS)
    (tmp_path / "runs").mkdir()
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(folder=tmp_path))
    prompts = [json.dumps({"prompt": f"{i}>"}) for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    command = [*fork_server.command(), "-m", "burnish", "rl", "recipe.yaml"]
    with (
        serving(tmp_path / "runs") as address,
        open(tmp_path / "allowed", "ab", buffering=0) as allowed,
    ):
        open_view(page, address)
        page.wait_for_selector("text=contains no run yet")
        page.evaluate("window.loadedOnce = true")
        with subprocess.Popen(command, cwd=tmp_path) as training:
            try:
                page.wait_for_selector("tbody tr:has-text('live') .pill:text-is('running')")
                allowed.write(b".")
                page.wait_for_selector("tbody td:text-is('1/4')")
                page.get_by_role("link", name="live", exact=True).click()
                page.wait_for_selector(".tile:has-text('Steps') .value:text-is('1')")
                allowed.write(b".")
                page.wait_for_function(LAST_POINT, arg="2")
                allowed.write(b".")
                page.wait_for_function(LAST_POINT, arg="3")
                page.get_by_role("link", name="Samples").click()
                page.wait_for_selector("text=3 steps with samples")
                page.locator(".numbers a").first.click()
                page.wait_for_selector("h1:has-text('Step 3')")
                page.wait_for_selector(".group >> nth=1")
                page.locator("a.home").click()
                allowed.write(b".")
                page.wait_for_selector("tbody tr:has-text('live') .pill:text-is('finished')")
                page.wait_for_selector("tbody td:text-is('4/4')")
                assert training.wait(PATIENCE_MS / 1000) == 0
            finally:
                training.kill()
        assert page.evaluate("window.loadedOnce")
    assert [row["step"] for row in read_metrics(tmp_path / "runs" / "live")] == [1, 2, 3, 4]
