"""Codex: ``episodes.command: [python, recipes/harnesses/codex.py]``.

Codex ignores OPENAI_BASE_URL, so its provider is in a settings file. It speaks the Responses API.
Sub-agents: add ``-c features.multi_agent=true``.
"""

import sys

from task_folder import address, program, run

SETTINGS = f"""
model = "{address("BURNISH_MODEL")}"
model_provider = "burnish"
model_context_window = {address("BURNISH_MAX_TOKENS")}
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.burnish]
name = "burnish"
base_url = "{address("BURNISH_BASE_URL")}"
env_key = "BURNISH_API_KEY"
wire_api = "responses"

[analytics]
enabled = false

[features]
multi_agent = false
"""
codex = program("codex", "npm install --global @openai/codex@0.171.0")
run(
    [
        *(codex, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *(*sys.argv[1:], "{prompt}"),
    ],
    home_files={".codex/config.toml": SETTINGS},
)
