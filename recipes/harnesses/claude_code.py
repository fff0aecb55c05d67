"""Claude Code: ``episodes.command: [python, recipes/harnesses/claude_code.py]``.

It speaks Anthropic's API. Without IS_SANDBOX it refuses to skip permissions as root.
"""

import sys

from task_folder import address, program, run

claude = program("claude", "npm install --global @anthropic-ai/claude-code@2.1.332")
run(
    [
        *(claude, "--model", address("BURNISH_MODEL"), "--dangerously-skip-permissions"),
        *(*sys.argv[1:], "-p", "{prompt}"),
    ],
    environment={
        "ANTHROPIC_BASE_URL": address("ANTHROPIC_BASE_URL"),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    },
)
