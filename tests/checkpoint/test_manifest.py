"""A manifest finds every changed byte of the folder it describes, its own bytes included."""

from __future__ import annotations

import hashlib
import json

import pytest

from burnish.checkpoint.errors import CheckpointError
from burnish.checkpoint.manifest import MANIFEST, read_manifest, verify, write_manifest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "policy" / "rank0").mkdir(parents=True)
    (tmp_path / "state.json").write_bytes(b"{}")
    (tmp_path / "policy" / "rank0" / "weights.bin").write_bytes(bytes(range(50)))
    (tmp_path / "empty").write_bytes(b"")
    write_manifest(tmp_path, extra={"metric": 0.25, "note": "é"}, step=7)
    return tmp_path


def test_a_written_folder_verifies_and_its_manifest_lists_its_contents(folder):
    manifest = read_manifest(folder)
    assert verify(folder) == []
    assert list(manifest.files) == ["empty", "policy/rank0/weights.bin", "state.json"]
    record = manifest.files["policy/rank0/weights.bin"]
    assert record.num_bytes == 50
    assert record.sha256 == hashlib.sha256(bytes(range(50))).hexdigest()
    assert manifest.step == 7
    assert manifest.extra == {"metric": 0.25, "note": "é"}


def test_extra_that_json_changes_still_verifies(tmp_path):
    """JSON turns tuples into lists and int keys into text; the checksum is of the parsed value."""
    write_manifest(tmp_path, extra={"shape": (1, 2), "by_rank": {10: 1, 9: 2}})
    assert verify(tmp_path) == []
    assert read_manifest(tmp_path).extra == {"shape": [1, 2], "by_rank": {"10": 1, "9": 2}}


def test_extra_with_nan_is_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_manifest(tmp_path, extra={"metric": float("nan")})


@pytest.mark.parametrize("flip", [0x01, 0x20])
def test_a_flip_of_any_byte_that_changes_the_manifests_content_is_found(folder, flip):
    """The one flip without effect: 00e9 -> 00E9, a hexadecimal digit of an escaped letter."""
    unseen = []
    path = folder / MANIFEST
    whole = path.read_bytes()
    for i in range(len(whole)):
        changed = bytearray(whole)
        changed[i] ^= flip
        with open(path, "r+b") as file:  # in place: cutting a file to nothing first is slow
            file.write(changed)
        if not verify(folder, checksums=False):
            assert json.loads(changed) == json.loads(whole), f"byte {i} went unseen"
            unseen.append(whole[i - 4 : i + 2])
    assert unseen == ([rb"\u00e9"] if flip == 0x20 else [])


def test_a_flip_of_any_byte_of_a_file_is_found(folder):
    path = folder / "policy" / "rank0" / "weights.bin"
    for i in range(50):
        changed = bytearray(range(50))
        changed[i] ^= 0x80
        path.write_bytes(changed)
        assert verify(folder) == [f"{path} is corrupted (its SHA-256 differs from the manifest's)"]


def test_wrong_size_and_absence_have_different_problems(folder):
    (folder / "state.json").write_bytes(b"{")
    (folder / "empty").unlink()
    assert verify(folder, checksums=False) == [
        f"{folder / 'empty'} is missing",
        f"{folder / 'state.json'} has 1 bytes, but 2 in the manifest",
    ]


def test_a_folder_without_manifest_is_incomplete(folder):
    (folder / MANIFEST).unlink()
    assert verify(folder) == [f"{folder / MANIFEST} is missing: the folder is incomplete"]


def test_another_format_version_is_refused_by_number(folder):
    body = json.loads((folder / MANIFEST).read_bytes())
    (folder / MANIFEST).write_text(json.dumps(body | {"format": 99}))
    (problem,) = verify(folder)
    assert "format version 99" in problem


@pytest.mark.parametrize("text", [b"", b"[1]", b"nan", b'{"format": 1}', b"\xff\xfe", b"[" * 10**5])
def test_an_invalid_manifest_is_reported_as_a_problem(folder, text):
    (folder / MANIFEST).write_bytes(text)
    assert len(verify(folder)) == 1
    with pytest.raises(CheckpointError, match=rf"{MANIFEST} .*(use another folder|read it with)"):
        read_manifest(folder)


def test_a_file_that_is_not_in_the_manifest_is_ignored(folder):
    (folder / "notes.txt").write_text("kept by hand")
    assert verify(folder) == []
