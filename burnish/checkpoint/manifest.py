"""The manifest of a folder, written last. A folder without a valid manifest is incomplete.

``manifest.json`` lists size and checksum of every file below the folder, and contains its own
checksum, so that any changed byte is detected. Checkpoints have SHA-256. Files of weight transfers,
which are written and read once per step, have XXH3, computed while they are written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from burnish.checkpoint.errors import CheckpointError
from burnish.small_files import read_small

MANIFEST = "manifest.json"
_SCRATCH = f".{MANIFEST}.tmp"
FORMAT_VERSION = 1
_PIECE_BYTES = 1 << 20
"""Bytes hashed at once, which stay in the cache."""


class FileRecord(BaseModel):
    """Size and checksum of one file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_bytes: int
    sha256: str
    """64 hexadecimal digits"""

    def problem(self, path: Path) -> str | None:
        """Return the difference of a file's bytes, or None."""
        return None if _sha256(path) == self.sha256 else _differs(path, "SHA-256")


class TransferRecord(BaseModel):
    """Size and checksum of one file of a weight transfer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_bytes: int
    xxh3: str
    """128-bit XXH3, 32 hexadecimal digits"""

    def problem(self, path: Path) -> str | None:
        """Return the difference of a file's bytes, or None."""
        return None if _xxh3(path) == self.xxh3 else _differs(path, "XXH3")


Record = FileRecord | TransferRecord


class Manifest(BaseModel):
    """The content of ``manifest.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int
    """Version of the manifest format; other versions are rejected."""
    burnish: str
    """Version of burnish that wrote the folder; informational."""
    created: str
    """UTC time of writing, ISO 8601"""
    step: int | None
    """Training step; None if the folder does not belong to a step"""
    extra: dict[str, Any]
    """Additional JSON values of the writer (a checkpoint store writes ``metric``)"""
    files: dict[str, Record]
    """File records by POSIX path relative to the folder, sorted"""
    sha256: str = ""
    """SHA-256 of all other fields"""

    def own_sha256(self) -> str:
        """Return the SHA-256 of the sorted JSON of all other fields.

        Raises ValueError for NaN or infinity.
        """
        body = self.model_dump(exclude={"sha256"})
        text = json.dumps(body, sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


def write_manifest(
    folder: Path,
    *,
    extra: Mapping[str, Any],
    step: int | None = None,
    records: Mapping[str, Record] = MappingProxyType({}),
) -> Manifest:
    """Hash every file below ``folder``, then write and fsync its manifest. Call this last.
    ``records``: those of files that were hashed while they were written, by POSIX path relative to
    the folder.

    Raises OSError if a file cannot be read or written. Raises ValueError or TypeError if ``extra``
    contains values that JSON cannot represent, such as NaN and infinity.
    """
    names = [path.relative_to(folder).as_posix() for path in _files_below(folder)]
    with ThreadPoolExecutor() as pool:
        files = list(pool.map(lambda name: records.get(name) or _record(folder / name), names))
    manifest = Manifest(
        format=FORMAT_VERSION,
        burnish=_burnish_version(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        step=step,
        extra=json.loads(json.dumps(dict(extra), allow_nan=False)),
        files=dict(zip(names, files, strict=True)),
    )
    return _replace(folder, manifest)


def rewrite_manifest(folder: Path, *, drop: Collection[str], extra: Mapping[str, Any]) -> Manifest:
    """Remove the files ``drop`` from the folder's manifest and add ``extra`` to its values, in one
    atomic write.

    The files themselves are unchanged. Raises CheckpointError if the manifest is missing or
    corrupted, OSError if it cannot be written.
    """
    old = read_manifest(folder)
    files = {name: record for name, record in old.files.items() if name not in drop}
    return _replace(
        folder, old.model_copy(update={"files": files, "extra": {**old.extra, **extra}})
    )


def _replace(folder: Path, manifest: Manifest) -> Manifest:
    body = manifest.model_dump() | {"sha256": manifest.own_sha256()}
    scratch = folder / _SCRATCH
    scratch.unlink(missing_ok=True)  # in a folder of others it may be a link to any file
    flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY
    with open(os.open(scratch, flags, 0o666), "w", encoding="utf-8") as file:
        json.dump(body, file, indent=2, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, folder / MANIFEST)
    return Manifest.model_validate(body)


def read_manifest(folder: Path) -> Manifest:
    """Read the folder's manifest and check its own checksum.

    Raises CheckpointError if it is missing, corrupted, or of another version.
    """
    return _read(folder / MANIFEST, advice="; use another folder, such as an earlier checkpoint")


def _read(path: Path, *, advice: str) -> Manifest:
    """Return a manifest. ``advice``: end of the messages of errors that another folder solves."""
    try:
        body = json.loads(read_small(path), parse_constant=_no_constant)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: the folder is incomplete{advice}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}){advice}") from error
    if not isinstance(body, dict):
        raise CheckpointError(f"{path} is corrupted (it is not a JSON object){advice}")
    version = body.get("format")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version!r}, but this burnish reads {FORMAT_VERSION}: "
            "read it with the burnish version that wrote it"
        )
    try:
        manifest = Manifest.model_validate(body, strict=True)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise CheckpointError(f"{path} is corrupted ({problem}){advice}") from error
    if manifest.sha256 != manifest.own_sha256():
        raise CheckpointError(f"{path} is corrupted (its own checksum differs){advice}")
    return manifest


def verify(folder: Path, *, checksums: bool = True) -> list[str]:
    """Return the problems of ``folder``, one line each; an empty list if it is good.

    ``checksums=False`` only compares names and sizes, which reads no file except the manifest.
    Files that are not in the manifest are ignored. Does not raise for a corrupted folder. The lines
    do not say what to do, which depends on the kind of folder.
    """
    try:
        manifest = _read(folder / MANIFEST, advice="")
    except CheckpointError as error:
        return [str(error)]

    def check(item: tuple[str, Record]) -> str | None:
        name, record = item
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            return f"{folder / MANIFEST} lists {name!r}, which is outside the folder"
        return _problem(folder / name, record, checksums=checksums)

    with ThreadPoolExecutor() as pool:
        return [problem for problem in pool.map(check, manifest.files.items()) if problem]


def sync_tree(folder: Path) -> None:
    """Fsync ``folder`` and every file and folder below it. Raises OSError."""
    for path in _files_below(folder):
        fsync(path)
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder, folder / MANIFEST):
        fsync(path)


def fsync(path: Path) -> None:
    """Fsync one file or folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network file systems reject fsync on a folder; there, renames are durable without it
        if not (error.errno == errno.EINVAL and path.is_dir()):
            raise
    finally:
        os.close(descriptor)


def _files_below(folder: Path) -> list[Path]:
    """Return every file below ``folder`` except its manifest, sorted by path."""
    excluded = {folder / MANIFEST, folder / _SCRATCH}
    return sorted(p for p in folder.rglob("*") if p.is_file() and p not in excluded)


def _record(path: Path) -> FileRecord:
    return FileRecord(num_bytes=path.stat().st_size, sha256=_sha256(path))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _xxh3(path: Path) -> str:
    digest, piece = xxhash.xxh3_128(), bytearray(_PIECE_BYTES)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(memoryview(piece)[:count])
    return digest.hexdigest()


def _differs(path: Path, kind: str) -> str:
    return f"{path} is corrupted (its {kind} differs from the manifest's)"


def _problem(path: Path, record: Record, *, checksums: bool) -> str | None:
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # reading a pipe or a device may block forever
            return f"{path} is not a regular file"
        num_bytes = about.st_size
        if num_bytes != record.num_bytes:
            return f"{path} has {num_bytes} bytes, but {record.num_bytes} in the manifest"
        if checksums:
            return record.problem(path)
    except FileNotFoundError:
        return f"{path} is missing"
    except (OSError, ValueError) as error:
        return f"{path} cannot be read ({error})"
    return None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _burnish_version() -> str:
    try:
        return metadata.version("burnish")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"
