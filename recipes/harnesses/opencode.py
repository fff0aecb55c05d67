"""opencode: ``episodes.command: [python, recipes/harnesses/opencode.py]``.

Its first call asks for a title of the conversation.
"""

import json
import sys

from task_folder import address, program, run

MODEL = address("BURNISH_MODEL")
LIMIT = {"context": int(address("BURNISH_MAX_TOKENS")), "output": 4096}
CONFIG = {
    "provider": {
        "burnish": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {
                "baseURL": address("BURNISH_BASE_URL"),
                "apiKey": address("BURNISH_API_KEY"),
            },
            "models": {MODEL: {"limit": LIMIT}},
        }
    },
    "model": f"burnish/{MODEL}",
    "small_model": f"burnish/{MODEL}",
    "autoupdate": False,
    "share": "disabled",
    "permission": {"edit": "allow", "bash": "allow", "webfetch": "deny"},
}
opencode = program("opencode", "npm install --global opencode-ai@1.18.33")
run(
    [opencode, "run", *sys.argv[1:], "{prompt}"],
    environment={
        "OPENCODE_CONFIG_CONTENT": json.dumps(CONFIG),
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    },
)
