"""``resumes.jsonl``: what a folder that somebody else wrote may contain."""

from __future__ import annotations

from pathlib import Path

from burnish.observe.resumes import RESUMES_FILE, read_resumes, record_resume


def test_resumes_read_back_and_damaged_lines_are_left_out(tmp_path: Path) -> None:
    assert read_resumes(tmp_path) == []
    record_resume(tmp_path, 3, {"train.lr": "was 0.1, now \ud800"})
    record_resume(tmp_path, 5, {})
    damaged = ["", "[", "[" * 100_000, "{}", "1", '{"step": true, "time": 1, "changes": {}}']
    damaged += [
        '{"step": 1, "time": 1e300, "changes": {}}',
        '{"step": 1, "time": 1, "changes": []}',
    ]
    with (tmp_path / RESUMES_FILE).open("a") as file:
        file.write("\n".join(damaged))
    resumes = read_resumes(tmp_path)
    assert [(r.step, list(r.changes)) for r in resumes] == [(3, ["train.lr"]), (5, [])]
