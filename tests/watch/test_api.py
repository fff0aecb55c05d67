"""What the server of the page answers: rows and numbers of runs, and refusals."""

from __future__ import annotations

import json
import os
import shutil
import time
from urllib.parse import quote

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from watched_runs import events_of, log_step, serving, write_run, write_samples_of

from burnish.cli_runs import runs
from burnish.observe.metrics import MetricsLog
from burnish.observe.timeline import Drained, Span, Timeline
from burnish.runs.folder import load_run
from burnish.watch.lanes import lanes_of
from burnish.watch.library import Library
from burnish.watch.metric_log import MetricLog
from burnish.watch.step_rows import parse_filter


def get(served, path, **parameters):
    return httpx.get(f"{served}/api/{path}", params=parameters, timeout=30)


def found(served, **parameters):
    """Return the parts of a search, and all of its hits."""
    reply = httpx.get(f"{served}/api/search", params=parameters, timeout=30)
    parts = [part for name, part in events_of(reply.text) if name == "hits"]
    return parts, [hit for part in parts for hit in part["hits"]]


def rows_of(served):
    """Return the rows of the first look at all runs, by identifier."""
    text = ""
    with httpx.stream("GET", f"{served}/api/runs", timeout=30) as reply:
        for part in reply.iter_text():
            text += part
            if "event: all" in text:
                break
    return {row["id"]: row for name, row in events_of(text) if name == "run"}


def test_runs_are_listed_with_state_and_headline(served):
    rows = rows_of(served)
    assert set(rows) == {"first", "group/second", "hostile", "damaged", "bare"}
    first = rows["first"]
    assert (first["state"], first["job"], first["step"], first["planned"]) == (
        "finished",
        "rl",
        60,
        100,
    )
    assert first["headline"]["metric"] == "reward/mean" and first["headline"]["last"] == "0.950"
    assert "error" not in rows["damaged"] and rows["damaged"]["step"] == 3


def test_curves_of_several_runs_share_the_axis_that_was_asked_for(served):
    for axis, last in (("step", 30), ("tokens", 3000.0)):
        reply = get(served, "curves", run=["first", "group/second"], metric="train/loss", x=axis)
        first, second = reply.json()["runs"]
        assert second["x"][-1] == last and second["values"][-1] == pytest.approx(1 / 30)
        assert first["x"][: len(second["x"])] == second["x"]
    assert get(served, "curves", run="first", x="miles").status_code == 422


def test_recipes_are_compared(served):
    reply = get(served, "compare", run=["first", "group/second"]).json()
    assert reply["names"] == ["first", "second"]
    assert ["train.lr", "1.0e-05", "0.0001"] in reply["keys"]


def test_rows_of_a_step_are_filtered_and_sorted_by_any_column(served):
    def samples(query="", sort="", desc=""):
        reply = get(served, "step", run="first", step=7, q=query, sort=sort, desc=desc)
        assert reply.status_code == 200, reply.text
        return [int(row["response"].rpartition(" ")[2][:-1]) for row in reply.json()["rows"]]

    assert samples() == [0, 1, 2, 3]
    assert samples("reward>0.5") == [1, 3]
    assert samples("parts.exact<1 tokens>=12") == [2]
    assert samples("finish=length") == [3]
    assert samples('"SAMPLE 2)"') == [2] and samples("step nothing") == []
    assert samples("", "tokens", "1") == [3, 2, 1, 0]
    assert samples("", "parts.exact") == [0, 2, 1, 3]
    assert get(served, "step", run="first", step=7, q="reward<many").status_code == 422
    assert get(served, "step", run="first", step=7, sort="nothing").status_code == 422
    missing = get(served, "step", run="first", step=99)
    assert missing.status_code == 422 and "no samples of step 99" in missing.json()["error"]


def test_conditions_are_written_with_spaces_and_quotes_and_unknown_columns_are_named(served):
    found = parse_filter('"lr=1"  reward > 0.5 "parts.a b"<=2 word "open', ["reward", "parts.a b"])
    assert found.texts == ("lr=1", "word", "open")
    assert [(c.column, c.sign, c.value) for c in found.conditions] == [
        ("reward", ">", 0.5),
        ("parts.a b", "<=", 2.0),
    ]
    reply = get(served, "step", run="first", step=7, q="Reward>0")
    assert reply.status_code == 422 and "there is no column 'Reward'" in reply.json()["error"]
    assert get(served, "step", run="first", step=7, q="label=4").json()["found"] == 4


def test_conversations_are_searched_by_what_is_said_in_them(tmp_path):
    said = 'größer, 北京, he said "yes"\nline2 C:\\dir ' + "ß" * 200 + " NEEDLE"
    turn = {"message": {"role": "assistant", "content": "ok"}, "answer": [], "problem": ""}
    turn["answer"] = [{"role": "tool", "content": said}]
    run = write_run(tmp_path / "run", num_steps=1)
    path = run / "samples" / "step_000001.parquet"
    rows = pq.read_table(path).to_pylist()
    rows[2]["episode"] = json.dumps({"start": [], "turns": [turn], "environment_s": 1})
    pq.write_table(pa.Table.from_pylist(rows), path)
    with serving(tmp_path) as address:
        for text in ("GRÖSSER", "größer", "北京", 'said "yes"', 'yes"\nline2', "C:\\dir", "needle"):
            expected = 0 if text == "GRÖSSER" else 1
            hits = found(address, run="run", text=text)[1]
            assert len(hits) == expected, text
            assert all(text.lower() in hit["excerpt"].lower() for hit in hits), text
            query = '"' + text.replace('"', "") + '"'
            if '"' not in text:
                listed = get(address, "step", run="run", step=1, q=query).json()["found"]
                assert listed == expected, text
        for key in ("environment_s", "content"):
            assert found(address, run="run", text=key)[1] == []


def test_files_of_an_enormous_size_are_read_in_part(tmp_path):
    run = write_run(tmp_path / "run", num_steps=1)
    rows = pq.read_table(run / "samples" / "step_000001.parquet").to_pylist()[:1] * 400
    table = pa.Table.from_pylist(rows)
    large = pa.array(["x" * (1 << 20)] * len(rows)).dictionary_encode()
    table = table.set_column(table.schema.get_field_index("prompt"), "prompt", large)
    pq.write_table(table, run / "samples" / "step_000001.parquet", compression="zstd")
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 2, "x": "' + b"y" * (20 << 20))
    log = MetricLog(run)
    for _ in range(2):
        log.refresh()
        assert list(log.steps) == [1]
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'"}\n{"step": 3, "time": 1790000000}\n')
    assert log.refresh() and list(log.steps) == [1, 3] and log.num_bad_lines == 1
    with serving(tmp_path) as address:
        assert 0 < get(address, "step", run="run", step=1).json()["total"] < 400


def test_a_sample_has_its_group_and_its_tokens(served):
    reply = get(served, "sample", run="first", step=7, sample="train:0@7/0").json()
    assert reply["sample"]["prompt"] == "What is 2 + 2? (0)"
    assert reply["group"] == ["train:0@7/0", "train:0@7/1"]
    assert reply["tokens"]["tokens"] == ["2", "+", "<b>", "\n"]
    assert reply["tokens"]["trainer_logprobs"] == [None, None, -0.25, None]  # JSON has no NaN
    assert reply["tokens"]["tokens_omitted"] == 3
    assert get(served, "sample", run="first", step=7, sample="train:0@7/1").json()["tokens"] is None


def test_a_text_is_found_in_all_steps_newest_first(served):
    parts, hits = found(served, run="first", text="STEP 5")
    newest_first = [step for step in range(59, 49, -1) for _ in range(4)] + [5] * 4
    assert [hit["step"] for hit in hits] == newest_first
    assert "step 5" in hits[-1]["excerpt"]
    assert (parts[-1]["done"], parts[-1]["files"], parts[-1]["end"]) == (60, 60, "complete")


def test_the_same_prompt_is_found_at_other_steps(served):
    hits = found(served, run="first", how="prompt_of", step=7, text="train:1@7/0")[1]
    assert "(step 59, sample 2)" in {hit["response"][-19:] for hit in hits}
    assert len(hits) == 120 and {hit["sample"].partition("@")[0] for hit in hits} == {"train:1"}


def test_damaged_files_are_named_and_the_rest_is_shown(served):
    reply, name = get(served, "step", run="damaged", step=2), "step_000002.parquet"
    assert reply.status_code == 422 and f"{name} cannot be read" in reply.json()["error"]
    assert get(served, "step", run="damaged", step=1).json()["total"] == 4
    assert get(served, "run", run="damaged").json()["num_steps"] == 3
    parts, hits = found(served, run="damaged", text="step")
    assert len(hits) == 8 and [n for part in parts for n in part.get("unreadable", ())] == [name]


def test_lanes_are_roles_with_their_gaps(served):
    data = get(served, "time", run="first").json()
    assert [lane["name"] for lane in data["lanes"]] == ["rollout", "train"]
    rollout, train = data["lanes"]
    assert rollout["spans"][:2] == [[0.0, 0.9, 0], [2.0, 0.9, 0]]
    assert {span[2] for span in train["spans"]} == {1} and data["phases"] == ["rollout", "train"]
    assert rollout["busy_s"] == pytest.approx(54) and rollout["gap"] == [0.9, 1.1]
    assert data["seconds"] == 119.9 and train["gap"] == [1.9, 1.1]
    assert get(served, "time", run="bare").json()["lanes"] == []


def test_a_worker_has_one_lane_with_its_phases(tmp_path):
    line = Timeline()
    with line.span("train"):
        pass
    began = time.time() + 1
    for rank in range(11):
        spans = [Span("train", began, 2.0), Span("inner", began, 0.5), Span("sync", began + 3, 1.0)]
        line.add(f"policy {rank}", Drained(spans))
    run = write_run(tmp_path / "run", num_steps=1)
    line.save(run / "timeline.json")
    data = lanes_of(run)
    names = [lane["name"] for lane in data["lanes"]]
    assert names == ["train", *(f"policy {rank}" for rank in range(11))]
    worker = data["lanes"][-1]
    assert [data["phases"][span[2]] for span in worker["spans"]] == ["train", "sync"]
    assert worker["busy_s"] == pytest.approx(3.0) and worker["gap"][1] == pytest.approx(
        1.0, abs=0.2
    )


@pytest.mark.parametrize(
    "name", ["..", "../runs", "first/..", "/etc", "first%2f..", "", "no_run", "first\x00", "\udc80"]
)
def test_only_runs_that_were_found_are_read(served, name):
    reply = httpx.get(f"{served}/api/run?run={quote(name, errors='surrogateescape')}", timeout=30)
    assert reply.status_code == 404 and "there is no run" in reply.json()["error"]


def test_files_that_are_links_out_of_the_folder_are_not_read(tmp_path):
    secret = tmp_path / "secret.yaml"
    secret.write_text("password: hunter2")
    for name in ("config.yaml", "samples/step_000009.parquet", "run.log"):
        root = tmp_path / name.replace("/", "_")
        run = write_run(root / "run", num_steps=1)
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(secret)
        with serving(root) as address:
            for path in ("run", "step", "steps", "compare", "curves"):
                reply = get(address, path, run="run", step=9)
                assert reply.status_code == 422 and "is a link to a file outside" in reply.text
                assert "hunter2" not in reply.text
            assert "hunter2" not in httpx.get(f"{address}/report?run=run").text
            assert "link to a file outside" in rows_of(address)["run"]["error"]


def test_a_pipe_in_place_of_a_file_is_named_and_not_waited_for(tmp_path):
    for name in ("metrics.jsonl", "samples/step_000001.parquet"):
        root = tmp_path / name.replace("/", "_")
        run = write_run(root / "run", num_steps=1)
        (run / name).unlink()
        os.mkfifo(run / name)
        with serving(root) as address:
            assert "is no regular file" in rows_of(address)["run"]["error"]
            assert "is no regular file" in get(address, "run", run="run").json()["error"]


def test_a_run_can_be_watched_alone(runs):
    with serving(runs / "first") as address:
        assert list(rows_of(address)) == ["first"]
        assert get(address, "run", run="first").json()["num_steps"] == 60


def test_only_names_of_this_machine_are_answered_and_nothing_is_written(served, runs):
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    for host, status in (("evil.example", 421), ("localhost", 200), ("127.0.0.1", 200)):
        assert httpx.get(served, headers={"Host": host}).status_code == status
    for method in ("POST", "PUT", "DELETE"):
        assert httpx.request(method, f"{served}/api/run?run=first").status_code == 405
    for path in ("", "report?run=first", "plain", "api/run?run=first"):
        httpx.get(f"{served}/{path}")
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before


def test_a_token_opens_everything_and_nothing_opens_without_it(runs):
    with serving(runs, token="secret-token") as address:
        client = httpx.Client(base_url=address)
        for path in ("/", "/plain", "/report?run=first"):
            assert client.get(path).headers["location"] == "/login"
        for path in ("run?run=first", "runs", "events?run=first", "search?run=first&text=a"):
            assert client.get(f"/api/{path}").status_code == 401
        assert client.post("/login", data={"token": "wrong"}).status_code == 401
        reply = client.post("/login", data={"token": "secret-token"})
        assert reply.status_code == 303 and "HttpOnly" in reply.headers["set-cookie"]
        assert client.get("/").status_code == 200
        assert client.get("/api/run?run=first").status_code == 200
        bearer = {"Authorization": "Bearer secret-token"}
        assert httpx.get(f"{address}/api/run?run=first", headers=bearer).status_code == 200


def test_without_scripts_there_are_tables(served):
    page = httpx.get(f"{served}/plain").text
    assert "Mean reward 0.950" in page and 'href="/report?run=group/second"' in page
    report = httpx.get(f"{served}/report?run=first").text
    assert "0.9502" in report
    assert "<script>window.hacked" not in httpx.get(f"{served}/report?run=hostile").text


def test_metrics_grow_with_their_file_and_start_again_if_it_is_replaced(tmp_path):
    log, read = MetricsLog(tmp_path), MetricLog(tmp_path)
    for step in (1, 2):
        log_step(log, step)
    assert read.refresh() and list(read.steps) == [1, 2] and not read.refresh()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "time": 1790000000')
        file.flush()
        read.refresh()
        assert list(read.steps) == [1, 2]
        file.write(', "a": 1, "b": null, "c": "text", "d": true, "e": 1e999}\n[1]\n\n')
    read.refresh()
    assert list(read.steps) == [1, 2, 3] and read.num_bad_lines == 1
    assert "a" in read.names() and not {"b", "c", "d", "e"} & set(read.names())
    log.rewind(1)
    assert read.refresh() and list(read.steps) == [1]
    log.close()
    os.unlink(tmp_path / "metrics.jsonl")
    assert read.refresh() and not read.steps


def test_damaged_and_compact_lines_have_the_same_numbers_everywhere(tmp_path, capsys):
    """The table of the page read only lines in the writer's spelling, and values of damaged lines;
    lists of runs named the whole run unreadable."""
    lines = [
        '{"step":1,"time":1790000000,"reward/mean":0.25}',
        '{"step": 2, "time": 1790000001, "reward/mean": 0.5, "tr',
        '{"time":1790000002, "reward/mean" : NaN, "step":3}',
        '{"step": 4, "time": 1790000003, "reward/mean": 0.75}',
        '{"step": 3, "time": 1790000004, "reward/mean": 1.0}',  # a resume without rewind
        '{"step": 5, "time": 17900',
    ]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines))
    run, damage = load_run(tmp_path / "run"), "1 line of metrics.jsonl is damaged and left out"
    assert run.curve("reward/mean") == ([1, 3, 4], [0.25, 1.0, 0.75]) and run.step == 4
    assert run.metrics["reward/mean"].tolist() == [0.25, 1.0, 0.75]
    assert run.damage == damage
    runs(tmp_path)
    printed = capsys.readouterr().out
    assert "0.250 → 0.750" in printed and f"run: {damage}" in printed
    with serving(tmp_path) as address:
        row = rows_of(address)["run"]
        assert (row["step"], row["headline"]["last"], row["reason"]) == (4, "0.750", damage)
        (drawn,) = get(address, "curves", run="run").json()["runs"]
        assert drawn["x"] == [1, 3, 4] and drawn["values"] == [0.25, 1.0, 0.75]
        page = get(address, "run", run="run").json()
        assert damage in json.dumps(page["warnings"]) and page["num_steps"] == 3


def test_metrics_of_a_file_that_took_the_place_of_another_are_not_mixed(tmp_path):
    (tmp_path / "a").mkdir()
    log, read = MetricsLog(tmp_path / "a"), MetricLog(tmp_path / "a")
    for step in (1, 2, 3):
        log_step(log, step)
    log.close()
    read.refresh()
    text = (tmp_path / "a" / "metrics.jsonl").read_text()
    with open(tmp_path / "a" / "metrics.jsonl", "r+") as file:  # the same inode
        file.write(text.replace('"step": 3', '"step": 9').replace("0.33", "0.44"))
        file.write('{"step": 10, "time": 1790000000}\n')
    assert read.refresh() and list(read.steps) == [1, 2, 9, 10]


def test_a_run_that_became_a_link_is_not_read(tmp_path):
    root, outside = tmp_path / "runs", write_run(tmp_path / "outside", num_steps=1)
    write_run(root / "run", num_steps=1)
    with serving(root) as address:
        assert get(address, "steps", run="run").status_code == 200
        shutil.rmtree(root / "run")
        (root / "run").symlink_to(outside)
        assert get(address, "steps", run="run").status_code in (404, 422)


def test_one_damaged_run_does_not_hide_the_others(tmp_path):
    write_run(tmp_path / "good", num_steps=1)
    run = write_run(tmp_path / "bad", num_steps=1).rename(tmp_path / "bad\udcff")
    (run / "end.json").write_text('{"kind": "failed", "reason": "\\ud800", "time": 1790000000}')
    (run / "memory.json").write_text(
        '{"lines": [{"role": "all", "phase": "x", "ranks": [0], "planned": null, "allocated": null,'
        f' "reserved": null, "host_planned": 1{"0" * 400}, "host": 1}}]}}'
    )
    for damage in ('"ts": NaN', '"ts": 1e999', f'"ts": 1{"0" * 400}', '"tid": 1e999, "ts": 1'):
        event = f'{{"ph": "X", "name": "a", "pid": 1, "tid": 1, "dur": 1, {damage}}}'
        (run / "timeline.json").write_text(f'{{"traceEvents": [{event}]}}')
        with serving(tmp_path) as address:
            assert "good" in httpx.get(f"{address}/plain").text
            assert httpx.get(f"{address}/report?run=bad%25FF").status_code == 200
            assert get(address, "run", run="bad%FF").status_code == 200
            reply = get(address, "time", run="bad%FF")
            assert reply.status_code == 422 and "is not a timeline" in reply.json()["error"]


def test_facts_of_a_group_are_those_of_all_its_samples(served):
    reply = get(served, "step", run="first", step=7, q="reward<0.5").json()
    assert len(reply["rows"]) == 2
    assert reply["groups"]["14"] == {"samples": 2, "mean_reward": 0.5, "is_equal": False}


def test_rows_of_runs_change_with_their_files(tmp_path):
    run = write_run(tmp_path / "run", num_steps=2)
    library = Library(tmp_path)
    assert library.scan() == ["run"] and library.row("run")["step"] == 2
    log = MetricsLog(run)
    log_step(log, 3)
    log.close()
    assert library.row("run")["step"] == 3
    (run / "end.json").write_text('{"kind": "failed", "reason": "no disk", "time": 1790000009.0}')
    assert library.row("run")["state"] == "failed" and library.row("run")["reason"] == "no disk"
    shutil.rmtree(run)
    assert "error" in library.row("run") and library.scan() == []


def test_events_tell_of_new_steps_and_of_a_removed_run(tmp_path):
    run = write_run(tmp_path / "run", num_steps=1)
    with serving(tmp_path) as address:
        seen = ""
        with httpx.stream("GET", f"{address}/api/events?run=run", timeout=30) as reply:
            for part in reply.iter_text():
                if not seen:
                    write_samples_of(run, 2)
                if "changed" not in seen and "changed" in seen + part:
                    shutil.rmtree(run)
                seen += part
        names = [name for name, _ in events_of(seen)]
        assert names[:2] == ["watching", "changed"] and names[-2:] == ["gone", "end"]
        assert "there is no run" in json.dumps(dict(events_of(seen))["gone"])
