"""Check the subject of a commit message: the commit-msg hook of .pre-commit-config.yaml.

``python tools/commit_message.py FILE`` prints each problem and exits with 1. The subject has at
most 72 characters and no period at its end; the line below it is empty. Subjects that git writes
itself (merges, reverts, fixup and squash commits) are not checked."""

from __future__ import annotations

import sys
from pathlib import Path

MAX_SUBJECT_CHARACTERS = 72
WRITTEN_BY_GIT = ("Merge ", 'Revert "', "Reapply ", "fixup! ", "squash! ", "amend! ")
_SCISSORS = "# ------------------------ >8 ------------------------"


def problems(message: str) -> list[str]:
    """Return the problems of a message. Comment lines and the diff of ``git commit -v`` are
    ignored, as git ignores them."""
    text = message.split(_SCISSORS)[0]
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith("#")]
    while lines and not lines[0]:
        lines.pop(0)
    if not lines:
        return ["the message is empty"]
    subject, rest = lines[0], lines[1:]
    if subject.startswith(WRITTEN_BY_GIT):
        return []
    found = []
    if len(subject) > MAX_SUBJECT_CHARACTERS:
        found.append(
            f"the subject has {len(subject)} characters, over {MAX_SUBJECT_CHARACTERS}: move "
            "details into the body"
        )
    if subject.endswith("."):
        found.append("the subject ends with a period: remove it")
    if rest and rest[0]:
        found.append("the second line is not empty: put an empty line below the subject")
    return found


def main(arguments: list[str]) -> int:
    """Check the message in the given file. Return the exit code."""
    found = problems(Path(arguments[0]).read_text(encoding="utf-8"))
    for problem in found:
        print(problem)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
