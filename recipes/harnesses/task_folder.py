"""The folder in which a coding agent works on a task, and its score. All launchers here use it.

A row of data has ``prompt`` (text, or messages, of which the last one counts). It may have
``files`` (path -> text), which are written before the program starts, and ``test``, a shell command
that is run in the folder behind it: the reward is 1 if its exit code is 0, else 0. Without ``test``
another reward scores the episode.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

TEST_S = 60


def program(name, install):
    """Return the path of a program. Ends with an error that names how to install it."""
    path = shutil.which(name)
    if path is None:
        sys.exit(f"{sys.argv[0]}: there is no program {name!r} in PATH; {install}")
    return path


def address(name):
    """Return a variable of the run, such as BURNISH_BASE_URL. Ends with an error if it is unset."""
    value = os.environ.get(name)
    if not value:
        sys.exit(f"{sys.argv[0]}: {name} is not set; start it with episodes.command, not by hand")
    return value


def prompt_text(prompt):
    """Return the text of a prompt: of messages, that of the last one."""
    if isinstance(prompt, list):
        content = prompt[-1]["content"]
        prompt = content if isinstance(content, str) else "".join(p["text"] for p in content)
    # (Programs would read a list in Markdown as an option.)
    return f"\n{prompt}" if prompt.startswith("-") else prompt


def run(command, *, environment=None, home_files=None):
    """Run ``command`` in the folder of the task, then its test; exit as the command does.

    ``command``: a list, in which ``{prompt}`` is the prompt. ``home_files``: path in the home
    folder -> text of a settings file. The home folder is empty otherwise.
    """
    work = Path(address("BURNISH_WORKDIR"))
    task = json.loads(Path(address("BURNISH_TASK")).read_text(encoding="utf-8"))
    home, folder = work / "home", work / "task"
    for parent, files in ((home, home_files or {}), (folder, task.get("files") or {})):
        parent.mkdir(exist_ok=True)
        for name, text in files.items():
            path = (parent / name).resolve()
            if not path.is_relative_to(parent.resolve()):
                sys.exit(f"{sys.argv[0]}: the file {name!r} is outside of the folder of the task")
            path.parent.mkdir(parents=True, exist_ok=True)
            if text is not None:  # (a column of other rows)
                path.write_text(text, encoding="utf-8")
    variables = {**os.environ, "HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config")}
    # (PWD: some programs believe it more than their working folder.)
    variables |= {"XDG_DATA_HOME": str(home / ".local/share"), "PWD": str(folder)}
    variables |= environment or {}
    prompt = prompt_text(task["prompt"])
    command = [prompt if word == "{prompt}" else word for word in command]
    code = subprocess.run(command, cwd=folder, env=variables, stdin=subprocess.DEVNULL).returncode
    if task.get("test"):
        try:
            test = subprocess.run(task["test"], shell=True, cwd=folder, timeout=TEST_S)
            passed = test.returncode == 0
        except subprocess.TimeoutExpired:
            passed = False
        Path(address("BURNISH_REWARD")).write_text(str(float(passed)))
    sys.exit(code if code >= 0 else 128 - code)
