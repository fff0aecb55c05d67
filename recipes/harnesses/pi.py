"""pi: ``episodes.command: [python, recipes/harnesses/pi.py]``. It needs node 22.19 or newer."""

import json
import sys

from task_folder import address, program, run

MODELS = {
    "providers": {
        "burnish": {
            "baseUrl": address("BURNISH_BASE_URL"),
            "apiKey": address("BURNISH_API_KEY"),
            "api": "openai-completions",
            "models": [
                {
                    "id": address("BURNISH_MODEL"),
                    "contextWindow": int(address("BURNISH_MAX_TOKENS")),
                    "maxTokens": 4096,
                }
            ],
        }
    }
}
pi = program("pi", "npm install --global @earendil-works/pi-coding-agent@1.6.0")
run(
    [
        *(pi, "--provider", "burnish", "--model", address("BURNISH_MODEL")),
        *(*sys.argv[1:], "-p", "{prompt}"),
    ],
    environment={"PI_OFFLINE": "1"},
    home_files={".pi/agent/models.json": json.dumps(MODELS)},
)
