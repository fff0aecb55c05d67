"""Qwen Code: ``episodes.command: [python, recipes/harnesses/qwen_code.py]``. It needs node 22."""

import json
import sys

from task_folder import address, program, run

SETTINGS = {
    "security": {"auth": {"selectedType": "openai"}},
    "privacy": {"usageStatisticsEnabled": False},
    "general": {"disableAutoUpdate": True, "disableUpdateNag": True},
    "telemetry": {"enabled": False},
}
qwen = program("qwen", "npm install --global @qwen-code/qwen-code@0.24.4")
run(
    [qwen, "--yolo", *sys.argv[1:], "-p", "{prompt}"],
    environment={"OPENAI_MODEL": address("BURNISH_MODEL")},
    home_files={".qwen/settings.json": json.dumps(SETTINGS)},
)
