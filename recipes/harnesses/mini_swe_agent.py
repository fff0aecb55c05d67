"""mini-swe-agent: ``episodes.command: [python, recipes/harnesses/mini_swe_agent.py]``."""

import sys

from task_folder import address, program, run

mini = program("mini", "pip install mini-swe-agent, in an environment of its own that is in PATH")
run(
    [
        *(mini, "-y", "--exit-immediately", "-m", f"openai/{address('BURNISH_MODEL')}"),
        *(*sys.argv[1:], "-t", "{prompt}"),
    ],
    environment={
        "OPENAI_API_BASE": address("BURNISH_BASE_URL"),
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",  # (of 10; it retries every error but some)
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
)
