"""Every kind of source yields rows with their location, and explains bad input."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.arrow_writer import ArrowWriter

from burnish.config import ConfigError, load_config
from burnish.config.sources import (
    EnvironmentSource,
    FileSource,
    HubSource,
    SourceConfig,
    StreamingConfig,
)
from burnish.data.config import DataConfig
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.prompts.encode import label_of
from burnish.data.sources import DataError, Row, Source, first_rows, open_source, open_sources
from burnish.data_files import arrow_files
from burnish.data_files.reading import columns_of, first_file, first_row
from burnish.data_files.writing import json_line

ROWS = [{"prompt": "1+1=", "label": "2"}, {"prompt": "2+2=", "label": "4"}]


def open_file(path: Path) -> Source:
    return open_source(FileSource(path=str(path)))


def write_jsonl(path: Path) -> None:
    path.write_text("\n".join(json.dumps(row) for row in ROWS))


def write_json(path: Path) -> None:
    path.write_text(json.dumps(ROWS))


def write_csv(path: Path) -> None:
    path.write_text("prompt,label\n1+1=,2\n2+2=,4\n")


def write_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path)


def write_arrow_stream(path: Path) -> None:
    with ArrowWriter(path=str(path)) as writer:  # the format of the cache of datasets
        for row in ROWS:
            writer.write(row)
        writer.finalize()


def write_arrow_file(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=1)


FORMATS = {
    "rows.jsonl": write_jsonl,
    "rows.ndjson": write_jsonl,
    "rows.json": write_json,
    "rows.csv": write_csv,
    "rows.parquet": write_parquet,
    "rows.arrow": write_arrow_stream,
    "file.arrow": write_arrow_file,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_file_format_gives_the_same_rows_in_any_order(tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path / name)
    source = open_file(tmp_path / name)
    assert source.name == Path(name).stem and len(source) == 2
    assert [dict(source[i].values) for i in (1, 0, 1)] == [ROWS[1], ROWS[0], ROWS[1]]


def test_rows_contain_their_line_or_row_number(tmp_path: Path) -> None:
    """Lines count from 1 and include blank ones and the header; rows count from 0, as in prompt
    ids."""
    for name, write in FORMATS.items():
        write(tmp_path / name)
    places = {name: open_file(tmp_path / name)[1].where for name in FORMATS}
    assert places == {
        "rows.jsonl": f"{tmp_path}/rows.jsonl:2",
        "rows.ndjson": f"{tmp_path}/rows.ndjson:2",
        "rows.json": f"{tmp_path}/rows.json row 1",
        "rows.csv": f"{tmp_path}/rows.csv:3",
        "rows.parquet": f"{tmp_path}/rows.parquet row 1",
        "rows.arrow": f"{tmp_path}/rows.arrow row 1",
        "file.arrow": f"{tmp_path}/file.arrow row 1",
    }


@pytest.mark.parametrize("name", FORMATS)
def test_files_of_a_folder_or_glob_are_one_source_in_the_order_of_their_names(
    tmp_path: Path, name: str
) -> None:
    """Two files with two rows each: rows 2 and 3 of the source are rows 0 and 1 of the second."""
    kind = Path(name).suffix
    folder = tmp_path / "sums"
    (folder / "older").mkdir(parents=True)
    for shard in (f"part-2{kind}", f"part-1{kind}", f"older/part-0{kind}"):
        FORMATS[name](folder / shard)
    (folder / "README.md").write_text("about the data")
    (folder / "_SUCCESS").touch()
    places = {}
    for path, source_name, size in (
        (f"{folder}", "sums", 4),
        (f"{folder}/part-*{kind}", "part", 4),
        (f"{folder}/**/*{kind}", "sums", 6),
    ):
        config = FileSource(path=path)
        source = open_source(config)
        assert (source.name, len(source), config.num_rows()) == (source_name, size, size)
        found = [source[i] for i in range(size)]
        assert [dict(row.values) for row in found] == ROWS * (size // 2)
        assert [row.where for row in first_rows(config, 3)] == [row.where for row in found[:3]]
        places[path] = [row.where for row in found]
    second = open_file(folder / f"part-2{kind}")
    assert places[str(folder)][2:] == [second[0].where, second[1].where]
    assert places[str(folder)][2].startswith(f"{folder}/part-2{kind}")
    assert first_file(str(folder)).endswith(f"part-1{kind}")


def test_a_path_with_wildcards_that_exists_is_a_file(tmp_path: Path) -> None:
    for name in ("a[1].jsonl", "a1.jsonl"):
        write_jsonl(tmp_path / name)
    assert open_file(tmp_path / "a[1].jsonl")[0].where == f"{tmp_path}/a[1].jsonl:1"
    assert [open_source(FileSource(path=f"{tmp_path}/{p}")).name for p in ("a?.jsonl", "a[1].*")]


@pytest.mark.parametrize(
    ("files", "path", "says"),
    [
        ({}, "", "folder"),
        ({"notes.md": "a"}, "*.jsonl", "glob"),
        ({"a.csv": "x\n1", "b.jsonl": '{"x": 1}'}, "", "several types"),
        ({"a.csv": "x,y\n1,2", "b.csv": "x\n1"}, "", "a.csv and .*b.csv"),
        ({"a.jsonl": '{"x": 1}', "b.jsonl": '{"y": 1}'}, "*", "b.jsonl have different columns"),
        ({"a.jsonl": '{"x": 1}', "b.jsonl": '{"x": 1}\n{"x"'}, "", "b.jsonl:2: .* not valid JSON"),
        ({}, "a" * 999, "too long|does not exist"),
        ({"a.txt": "x"}, "", r"a.txt: unknown file type"),
        ({"a.jsonl": "", "b.jsonl": "\n"}, "", "empty"),
        ({"a.arrow": "ARROW1 and no table"}, "", "a.arrow"),
        ({"a.parquet": "PAR?", "b.parquet": "PAR?"}, "", "a.parquet"),
        ({"state.json": "{}"}, "", "save_to_disk"),
    ],
)
def test_files_that_are_no_source_are_refused_with_the_file_at_fault(
    tmp_path: Path, files: dict[str, str], path: str, says: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    config = FileSource(path=f"{tmp_path}/{path}")
    with pytest.raises(DataError, match=says):
        source = open_source(config)
        [source[i] for i in range(len(source))]
    with pytest.raises(DataError, match=says):
        first_rows(config, 3)
    at_load = any("several types" in line for line in DataConfig(sources=(config,)).broken_rules())
    assert at_load == says.startswith("several types")


def test_parquet_files_are_copied_in_batches_whose_dictionaries_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_files, "_BATCH_ROWS", 2)
    for shard in "ab":
        groups = [[f"{shard}{i}", f"{shard}{i + 1}"] for i in (0, 2, 4)]
        parts = [pa.table({"x": pa.array(group).dictionary_encode()}) for group in groups]
        with pq.ParquetWriter(tmp_path / f"{shard}.parquet", parts[0].schema) as file:
            for part in parts:
                file.write_table(part)
    source = open_file(tmp_path)
    assert [source[i].values["x"] for i in (11, 0, 5, 6)] == ["b5", "a0", "a5", "b0"]


def test_a_row_of_json_files_may_lack_columns(tmp_path: Path) -> None:
    for name, row in (("a", {"x": 1}), ("b", {"x": 2, "tools": []}), ("c", {"x": 3})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    source = open_file(tmp_path)
    assert [source[i].values["x"] for i in range(3)] == [1, 2, 3]


def test_blank_lines_of_a_jsonl_file_are_skipped_but_counted(tmp_path: Path) -> None:
    path = tmp_path / "gaps.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\xc3\xa4"}\r\n\r\n  \n{"a": 2}\n\n')
    source = open_file(path)
    assert [(source[i].values, source[i].where) for i in range(len(source))] == [
        ({"a": "ä"}, f"{path}:1"),
        ({"a": 2}, f"{path}:4"),
    ]


def test_a_csv_cell_may_hold_line_breaks_and_be_longer_than_the_readers_own_limit(
    tmp_path: Path,
) -> None:
    """csv refuses cells over 131072 characters by default. Row 2 begins on line 4."""
    path = tmp_path / "long.csv"
    path.write_text('a,b\n"x\ny",1\n' + "z" * 200_000 + ",2\n")
    source = open_file(path)
    assert source[0].values == {"a": "x\ny", "b": "1"} and source[0].where == f"{path}:2"
    assert len(source[1].values["a"]) == 200_000 and source[1].where == f"{path}:4"


def test_a_folder_written_by_save_to_disk_is_a_source(tmp_path: Path) -> None:
    train = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": train, "test": train.select([1])}).save_to_disk(
        tmp_path / "both"
    )
    train.save_to_disk(tmp_path / "one")
    test = open_source(HubSource(path=str(tmp_path / "both"), split="test"))
    one = open_source(HubSource(path=str(tmp_path / "one"), name="mine"))
    assert (test.name, len(test), test[0].values) == ("both", 1, ROWS[1])
    assert test[0].where == f"{tmp_path}/both[test] row 0"
    assert (one.name, len(one), one[0].values) == ("mine", 2, ROWS[0])
    with pytest.raises(DataError, match=r"no split 'tets'; it has train, test \(nearest: test\)"):
        open_source(HubSource(path=str(tmp_path / "both"), split="tets"))


def test_the_only_split_of_a_folder_needs_no_key_also_in_a_resumed_run(tmp_path: Path) -> None:
    folder = str(tmp_path / "test")
    datasets.Dataset.from_list(ROWS, split="test").save_to_disk(folder)
    config = HubSource(path=folder)
    for each in (config, HubSource.model_validate(config.model_dump(mode="json"))):
        assert open_source(each)[0].where == f"{folder}[test] row 0"
    with pytest.raises(DataError, match="'test'"):
        open_source(HubSource(path=folder, split="train"))
    unnamed = str(tmp_path / "unnamed")
    datasets.Dataset.from_list(ROWS).save_to_disk(unnamed)
    assert len(open_source(HubSource(path=unnamed, split="train"))) == len(ROWS)
    for split in ("test", "train[:2]", "train[:1]+train[2:]"):
        with pytest.raises(DataError, match="split 'train'"):
            open_source(HubSource(path=unnamed, split=split))


def test_the_only_split_of_a_dict_of_splits_is_read_and_is_one_set_of_rows(tmp_path: Path) -> None:
    """With and without its name it is the same rows, which are not held out from training."""
    folders = []
    for split in ("validation", "other"):
        rows = datasets.Dataset.from_list(ROWS)
        folders.append(str(tmp_path / split))
        datasets.DatasetDict({split: rows}).save_to_disk(folders[-1])
        unnamed, named = (HubSource(path=folders[-1], split=s) for s in (None, split))
        assert open_source(unnamed)[0] == open_source(named)[0]
        assert unnamed.identities == named.identities
        assert HubSource(path=folders[-1], split="train").identities != named.identities
        with pytest.raises(DataError, match="no split 'train'"):
            open_source(HubSource(path=folders[-1], split="train"))
    for damaged in ('{"splits": 7}', '{"splits": []}', "[", ""):
        (Path(folders[0]) / "dataset_dict.json").write_text(damaged)
        assert HubSource(path=folders[0]).split_read == "train"


def test_a_dataset_is_loaded_by_name_subset_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(path: str, subset: str | None, *, split: str) -> datasets.Dataset:
        asked.append((path, subset, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = open_source(HubSource(path="some/sums", subset="easy", split="test"))
    assert asked == [("some/sums", "easy", "test")]
    assert source.name == "sums" and source[1].values == ROWS[1]


def test_a_dataset_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match=r"'some/sums' .*split 'train'.* no network"):
        open_source(HubSource(path="some/sums"))


class FakeEnvironment:
    name = "sums"

    def __len__(self) -> int:
        return 3

    def item(self, i: int) -> dict[str, object]:
        return {"prompt": f"{i}+1=", "label": str(i + 1), "level": 1}


def test_an_environment_row_identifies_its_item(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def make(name: str, options: dict[str, object], *, size: int, seed: int) -> FakeEnvironment:
        asked.append((name, options, size, seed))
        return FakeEnvironment()

    module = types.ModuleType("burnish.environments.make")
    module.make_environment = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "burnish.environments.make", module)
    options = {"dataset": "chain_sum"}
    source = open_source(EnvironmentSource(environment="gym", options=options, size=3, seed=7))
    assert asked == [("gym", options, 3, 7)]
    assert source.name == "sums" and len(source) == 3
    assert source[2].values == {"prompt": "2+1=", "label": "3", "level": 1}
    assert source[2].environment == {
        "name": "gym",
        "options": options,
        "size": 3,
        "seed": 7,
        "index": 2,
    }


def test_a_missing_file_is_named_with_the_nearest_sibling(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match=r"trian\.jsonl.*nearest: train"):
        open_file(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match="nowhere"):
        open_file(tmp_path / "nowhere" / "train.jsonl")


def test_an_unknown_file_type_lists_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "rows.xml").write_text("<rows/>")
    with pytest.raises(DataError, match=r"'\.xml'; known are \.arrow, \.csv, \.json, \.jsonl"):
        open_file(tmp_path / "rows.xml")


@pytest.mark.parametrize(
    ("name", "content"), [("e.jsonl", "\n\n"), ("e.json", "[]"), ("e.csv", "a,b\n"), ("f.csv", "")]
)
def test_an_empty_data_set_is_named(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=rf"{name}: the data set is empty"):
        open_file(tmp_path / name)


def test_a_broken_line_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"a": 1}\n\n{"a": \n[1]\n')
    source = open_file(path)
    assert source[0].values == {"a": 1}
    with pytest.raises(DataError, match=r"broken\.jsonl:3.*JSON"):
        source[1]
    with pytest.raises(DataError, match=r"broken\.jsonl:4.*row must"):
        source[2]


DEEP = "[" * 100_000 + "]" * 100_000
LONG = "1" * 5000


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize(
    ("value", "says"),
    [
        (DEEP, "nested deeper than 100 levels"),
        ("[" * 101 + "]" * 101, "nested deeper than 100 levels"),
        (LONG, "4300 digits"),
        ('1, "b": {}, "a": 2', "the key 'a' twice"),
        ('[{"role": "user", "content": "a", "content": "b"}]', "the key 'content' twice"),
    ],
    ids=["deep", "a little deep", "long", "twice", "twice inside"],
)
def test_deep_and_long_json_is_a_data_error_with_its_location(
    tmp_path: Path, name: str, value: str, says: str
) -> None:
    path = tmp_path / name
    row = f'{{"a": {value}}}'
    path.write_text(f"{row}\n" if name.endswith("l") else f"[{row}]")
    place = "rows.jsonl:1" if name.endswith("l") else "rows.json"
    with pytest.raises(DataError, match=rf"{place}: the (line|file) is not valid JSON.*{says}"):
        open_file(path)[0]
    assert columns_of(str(path)) is None  # loading a recipe looks at the first row, too
    flat = json.dumps({"a": [{"b": i} for i in range(200)]})
    path.write_text(flat if name.endswith("l") else f"[{flat}]")
    assert len(open_file(path)[0].values["a"]) == 200


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_binary_column_of_texts_is_text_and_other_bytes_are_written_in_base64(
    tmp_path: Path, suffix: str
) -> None:
    values = {"prompt": "2+2=é".encode(), "image": b"\xff\x00", "label": b"4"}
    path, table = tmp_path / f"rows.{suffix}", pa.Table.from_pylist([values])
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    row = open_file(path)[0].values
    assert row == {"prompt": "2+2=é", "image": b"\xff\x00", "label": "4"}
    assert first_row(str(path)) == row
    assert json.loads(json_line(row))["image"] == "/wA="
    with pytest.raises(DataError, match=r"'image' \(label_key\) has bytes"):
        label_of(Row(row, "rows"), PromptDataConfig(sources=(str(path),), label_key="image"))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", '{"a": 1}', "a list"),
        ("b.json", '{"a": 1}\n{"a": 2}', "name it .jsonl"),
        ("c.csv", "a,b\n1,2\n1,2,3\n", "c.csv:3"),
        ("d.csv", "a,a\n1,2\n", "names a column twice"),
        ("e.parquet", "PAR?", "not readable as parquet"),
    ],
)
def test_a_malformed_file_is_refused_with_the_reason(
    tmp_path: Path, name: str, content: str, says: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        open_file(tmp_path / name)
    assert name in str(caught.value) and says in str(caught.value)


def test_two_sources_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "train.jsonl")
    paths = [FileSource(path=str(tmp_path / f / "train.jsonl")) for f in ("a", "b")]
    with pytest.raises(DataError, match=r"2 data sources are called 'train'.*different `name`"):
        open_sources(paths)
    other = paths[1].model_copy(update={"name": "other"})
    assert [s.name for s in open_sources([paths[0], other])] == ["train", "other"]


SPLITS = [
    ("", ["train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"], [0, 1]),
    ("", ["data/train", "data/validation", "../README.md"], [0]),
    ("**/*.jsonl", ["train/0", "test/0", "valid/0"], [0]),
    ("*.jsonl", ["rows_train", "rows_dev"], [0]),
    ("", ["train", "more"], [1, 0]),
    ("", ["latest", "contest"], [1, 0]),
    ("test*", ["test-0", "test-1", "train"], [0, 1]),
    ("", ["test", "val"], "name says"),
    ("", ["rows", "val"], "name says"),
    ("", ["train", "more", "test"], "more.jsonl"),
    (
        "",
        [f"{name}-00000-of-00001" for name in ("train_sft", "train_gen", "test_sft")],
        r"\(train_gen, train_sft\)",
    ),
    ("", ["raw-00000-of-00001", "filtered-00000-of-00001"], r"\(filtered, raw\).*filtered-\*"),
    ("raw-*", ["raw-00000-of-00001", "filtered-00000-of-00001"], [0]),
    ("**/*", ["a/x-00000-of-00001", "b/y-00000-of-00001"], [0, 1]),
]


@pytest.mark.parametrize(("pattern", "names", "read"), SPLITS)
def test_test_and_validation_files_of_a_folder_are_not_trained(
    tmp_path: Path, pattern: str, names: list[str], read: list[int] | str
) -> None:
    folder = tmp_path / "set"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / name if name.endswith(".md") else folder / f"{name}.jsonl")
    place = str(folder / pattern) if pattern else str(folder)
    tree = {"job": "sft", "model": {"scratch": {}}, "train": {"train_batch_size": 2}}
    tree |= {"data": {"sources": [place], "prompt_key": "q", "response_key": "a"}}
    if isinstance(read, str):
        with pytest.raises(DataError, match=read):
            open_source(FileSource(path=place))
        with pytest.raises(ConfigError, match=read):
            load_config(tree)
        return
    source = open_source(FileSource(path=place))
    files = [source[i].where.rpartition(":")[0] for i in range(len(source))]
    assert list(dict.fromkeys(files)) == [str(folder / f"{names[i]}.jsonl") for i in read]
    left_out = [name for i, name in enumerate(names) if i not in read and ".md" not in name]
    advice = FileSource(path=place).warnings()
    splits = pattern not in ("test*", "raw-*") and left_out
    assert len(advice) == bool(splits) and all(name in advice[0] for name in splits or ())


def test_an_evaluation_section_does_not_read_the_training_split_of_a_folder(
    tmp_path: Path,
) -> None:
    for name in ("train", "test"):
        write_jsonl(tmp_path / f"{name}.jsonl")
    tree = {"job": "sft", "model": {"scratch": {}}, "train": {"train_batch_size": 2}}
    tree |= {"data": {"sources": [str(tmp_path)], "response_key": "label"}}
    load_config(tree | {"eval": {"data": tree["data"] | {"sources": [f"{tmp_path}/test.jsonl"]}}})
    with pytest.raises(ConfigError, match=r"eval.data: .*training split; name the files, such as"):
        load_config(tree | {"eval": {"data": tree["data"]}})
    load_config(tree | {"data": tree["data"] | {"held_out": 1}})


@pytest.mark.parametrize("form", ["folder", "parquet", "arrow", "streamed"])
def test_class_labels_are_their_names_and_formats_of_datasets_are_not_used(
    form: str, tmp_path: Path
) -> None:
    """The index of ``pass`` is 0 here, and rows of the format torch would be tensors."""
    label = datasets.ClassLabel(names=["pass", "fail"])
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "label": label, "all": datasets.List({"of": label})}
    )
    steps = [[{"of": 0}], [], [{"of": 1}, {"of": 0}]]
    columns = {"prompt": ["a", "b", "c"], "label": [0, 1, None], "all": steps}
    dataset = datasets.Dataset.from_dict(columns, features=features).with_format("torch", ["label"])
    path = tmp_path / f"rows.{form}" if form in ("parquet", "arrow") else tmp_path / "rows"
    if form == "parquet":
        dataset.to_parquet(path)
    elif form == "arrow":
        dataset.save_to_disk(tmp_path / "saved")
        (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(path)
    else:
        dataset.save_to_disk(path)
    config: SourceConfig = (
        FileSource(path=str(path))
        if form in ("parquet", "arrow")
        else HubSource(
            kind="dataset",
            path=str(path),
            streaming=StreamingConfig(shuffle_buffer=2) if form == "streamed" else None,
            max_samples=3 if form == "streamed" else None,
        )
    )
    source = open_source(config)
    values = [source[i].values for i in range(3)]
    assert [row["label"] for row in values] == ["pass", "fail", None]
    assert [row["all"] for row in values] == [
        [{"of": "pass"}],
        [],
        [{"of": "fail"}, {"of": "pass"}],
    ]
