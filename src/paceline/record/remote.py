"""Copies of checkpoints in another storage, by fsspec: file, S3, GCS, SFTP, whatever has a URL.

    s3://bucket/prefix/
      step-00000050/
        __0_0.distcp ...   as they are, or compressed (`byte_shuffle.py`), then named `.planes`
        .metadata, tensors.json, manifest.json
        copy.json          which object holds which file, and how
        COMMIT             last: without it there is no copy

A copy is what its manifest says, or it is refused: what is read back or downloaded is hashed like
a local checkpoint. Needs fsspec, and what its URL needs (s3fs for s3://); both are extras.
"""

import importlib.util
import io
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import xxhash

from paceline.errors import JobError, Problem, reason_of
from paceline.record.byte_shuffle import compressed, decompressed, spans_of
from paceline.record.checkpoints import (
    COMMIT,
    MANIFEST,
    FileRecord,
    Manifest,
    checkpoint_step,
    parse_manifest,
    read_manifest,
    verify_checkpoint,
)
from paceline.record.events import CheckpointCopied
from paceline.record.tensors import read_tensors
from paceline.units import format_bytes

INDEX = "copy.json"
Compress = Literal["auto", "never", "always"]

_PLANES = "planes-zstd"
_CHUNK_BYTES = 4 << 20
_SAMPLE_BYTES = 16 << 20
"""What link and compressor are measured with. A guess: 0.2 s of a link of 100 MB/s."""

_NEAR = frozenset({"file", "local", "memory"})
"""Where reading back costs no transfer: all is read back and hashed. Elsewhere every object's size
is compared, and what is at most `_SMALL_BYTES` is read back."""

_SMALL_BYTES = 1 << 20
_NO_FOLDERS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "r2"})
"""Object stores: a folder is a part of a name there and not made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """One object of a copy."""

    stored: str
    size: int
    xxh3_128: str
    codec: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One copy, seen from outside."""

    name: str
    url: str
    step: int
    manifest: Manifest | None
    """None where there is no COMMIT, or it is not the manifest's."""

    files: Mapping[str, _Stored] = field(default_factory=dict)


def check_remote(url: str, where: str) -> Iterator[Problem]:
    """`R010` where a package for this URL is missing. Whether the place answers is not asked."""
    try:
        _fsspec(url, where).get_filesystem_class(_protocol(url))
    except ImportError as error:
        yield from _missing(str(error), url, where).problems
    except JobError as error:
        yield from error.problems


class Remote:
    """A place where copies are kept."""

    def __init__(self, url: str, *, where: str = "checkpoint.copy_to") -> None:
        """
        Args:
            url: As fsspec has it.
            where: Who named it, for messages.

        Raises:
            JobError: `R010`, a package for this URL is missing; `C014`, fsspec knows no such URL.
        """
        self.url, self._where = url.rstrip("/"), where
        if not url.partition("://")[2].strip("/"):
            raise JobError(_no_place(url, "it names no place behind ://", where))
        fsspec = _fsspec(url, where)
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            raise _missing(str(error), url, where) from None
        except ValueError as error:
            raise JobError(_no_place(url, str(error), where)) from None
        protocol = self._fs.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self._is_near = bool(protocols & _NEAR)
        self._has_folders = not protocols & _NO_FOLDERS
        self._decision: tuple[bool, str] | None = None

    def copies(self) -> list[Copy]:
        """Every copy, newest first; also what has no COMMIT.

        Raises:
            JobError: `C014`, the storage refused.
        """
        try:
            self._fs.invalidate_cache()
            names = [each.rstrip("/").rpartition("/")[2] for each in self._ls(self._root)]
            steps = [(checkpoint_step(name), name) for name in names]
            found = sorted(((s, n) for s, n in steps if s is not None), reverse=True)
            return [self._copy(name, step) for step, name in found]
        except Exception as error:  # noqa: BLE001 - every storage has its own
            raise JobError(_problem(self.url, reason_of(error), self._where)) from None

    def upload(self, path: Path, compress: Compress) -> CheckpointCopied:
        """Copy a committed checkpoint; COMMIT is written last.

        Raises:
            OSError: The local folder is not whole any more.
            Exception: Whatever the storage raises; there is no copy then.
        """
        start = time.perf_counter()
        manifest = read_manifest(path)
        if isinstance(manifest, Problem):
            raise OSError(manifest.what)
        is_packed, note = self._decide(path, manifest, compress)
        target = f"{self._root}/{path.name}"
        if self._has_folders:
            self._fs.makedirs(target, exist_ok=True)
        table = read_tensors(path) or {}
        index: dict[str, _Stored] = {}
        for name, record in sorted(manifest.files.items()):
            packs = is_packed and name.endswith(".distcp")
            with (path / name).open("rb") as file:
                pieces = (
                    compressed(file, spans_of(name, record.size, table))
                    if packs
                    else iter(lambda file=file: file.read(_CHUNK_BYTES), b"")  # type: ignore[misc]
                )
                stored = f"{name}.planes" if packs else name
                index[name] = self._send(target, stored, pieces, _PLANES if packs else "")
        for name, content in (
            (MANIFEST, (path / MANIFEST).read_bytes()),
            (INDEX, msgspec.json.encode(index)),
            (COMMIT, (path / COMMIT).read_bytes()),
        ):
            self._send(target, name, iter([content]), "")
        return CheckpointCopied(
            step=manifest.step,
            url=f"{self.url}/{path.name}",
            num_bytes=manifest.num_bytes,
            stored_bytes=sum(each.size for each in index.values()),
            seconds=time.perf_counter() - start,
            checked="hash" if self._is_near else "size",
            note=note,
        )

    def download(self, copy: Copy, folder: Path) -> Path | Problem:
        """A copy as a local checkpoint again, verified; or why it cannot be."""
        tmp, final = folder / f"{copy.name}.d0.tmp", folder / copy.name
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
        try:
            for name, stored in copy.files.items():
                with self._open(copy, stored.stored) as source, (tmp / name).open("wb") as file:
                    for piece in _unpacked(source, stored.codec):
                        file.write(piece)
            for name in (MANIFEST, COMMIT):
                (tmp / name).write_bytes(self._read(copy, name))
        except Exception as error:  # noqa: BLE001 - every storage has its own
            shutil.rmtree(tmp, ignore_errors=True)
            return _problem(copy.url, reason_of(error), self._where)
        problem = verify_checkpoint(tmp, name=copy.name)
        if problem is not None:
            shutil.rmtree(tmp, ignore_errors=True)
            return problem
        tmp.rename(final)
        return final

    def verify(self, copy: Copy) -> Problem | None:
        """Download every byte and compare it with the manifest; nothing is kept."""
        if copy.manifest is None:
            what = f"{copy.name} has no COMMIT: its copy never finished"
            return Problem(code="C001", what=what, where=copy.url, fix="nothing to do")
        for name, expected in sorted(copy.manifest.files.items()):
            where = f"{copy.url}/{name}"
            stored = copy.files.get(name)
            try:
                if stored is None:
                    raise FileNotFoundError(f"{INDEX} does not have it")
                with self._open(copy, stored.stored) as source:
                    found = _hash(_unpacked(source, stored.codec))
            except Exception as error:  # noqa: BLE001 - every storage has its own
                what = f"{name} in {copy.name} cannot be read: {reason_of(error)}"
                return Problem(code="C003", what=what, where=where, fix="use another copy")
            if found != expected:
                what = f"{name} in {copy.name} is not what was written: its hash differs"
                return Problem(code="C005", what=what, where=where, fix="use another copy")
        return None

    def prune(self, keep: int) -> list[str]:
        """Delete all but the newest committed copies, and what is older and has no COMMIT."""
        copies = self.copies()
        whole = [copy for copy in copies if copy.manifest is not None]
        kept = {copy.name for copy in whole[: max(1, keep)]}
        newest = whole[0].step if whole else -1
        doomed = [each for each in copies if each.name not in kept and each.step <= newest]
        for copy in doomed:
            if copy.manifest is not None:  # first, so that half a removal leaves no copy
                self._fs.rm(f"{self._root}/{copy.name}/{COMMIT}")
            self._fs.rm(f"{self._root}/{copy.name}", recursive=True)
        return [copy.name for copy in doomed]

    def _decide(self, path: Path, manifest: Manifest, compress: Compress) -> tuple[bool, str]:
        if compress == "never":
            return False, "not compressed: checkpoint.compress is never"
        if importlib.util.find_spec("zstandard") is None:
            return False, "not compressed: zstandard is not installed"
        if compress == "always":
            return True, "compressed: checkpoint.compress is always"
        if self._decision is None:
            self._decision = self._measure(path, manifest)
        return self._decision

    def _measure(self, path: Path, manifest: Manifest) -> tuple[bool, str]:
        """Whether compressing and sending less is faster than sending all, by trying both."""
        data = {n: each.size for n, each in manifest.files.items() if n.endswith(".distcp")}
        name = max(data, key=data.__getitem__)
        with (path / name).open("rb") as file:
            sample = file.read(_SAMPLE_BYTES)
        b"".join(compressed(io.BytesIO(), []))  # its import is not its speed
        spans = _first(spans_of(name, data[name], read_tensors(path) or {}), len(sample))
        start = time.perf_counter()
        packed = sum(map(len, compressed(io.BytesIO(sample), spans)))
        packing_s = time.perf_counter() - start
        probe = f"{self._root}/probe"
        if self._has_folders:
            self._fs.makedirs(self._root, exist_ok=True)
        start = time.perf_counter()
        with self._fs.open(probe, "wb") as file:
            file.write(sample)
        link_s = time.perf_counter() - start
        self._fs.rm(probe)
        ratio = len(sample) / max(1, packed)
        packed_s = packing_s + link_s / ratio
        is_faster = packed_s < link_s
        size = len(sample)
        told = (
            f"{'compressed' if is_faster else 'not compressed'}: {format_bytes(size)} took "
            f"{link_s:.3f} s as they are ({format_bytes(size / max(link_s, 1e-9))}/s), "
            f"{packed_s:.3f} s compressed {ratio:.2f} times "
            f"({format_bytes(size / max(packing_s, 1e-9))}/s)"
        )
        return is_faster, told

    def _send(self, target: str, name: str, pieces: Iterator[bytes], codec: str) -> _Stored:
        digest, size = xxhash.xxh3_128(), 0
        with self._fs.open(f"{target}/{name}", "wb") as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                size += len(piece)
        found = self._fs.info(f"{target}/{name}")["size"]
        if found != size:
            raise OSError(f"{name} has {found} bytes there, {size} were sent")
        if self._is_near or size <= _SMALL_BYTES:
            with self._fs.open(f"{target}/{name}", "rb") as file:
                there = _hash(_unpacked(file, ""))
            if there.xxh3_128 != digest.hexdigest():
                raise OSError(f"{name} reads back as something else")
        return _Stored(stored=name, size=size, xxh3_128=digest.hexdigest(), codec=codec)

    def _copy(self, name: str, step: int) -> Copy:
        url = f"{self.url}/{name}"
        copy = Copy(name=name, url=url, step=step, manifest=None)
        try:
            sealed = self._read(copy, COMMIT).decode("ascii").strip()
            manifest = parse_manifest(self._read(copy, MANIFEST), sealed, name=name, where=url)
            files = msgspec.json.decode(self._read(copy, INDEX), type=dict[str, _Stored])
        except (FileNotFoundError, UnicodeDecodeError, msgspec.DecodeError):
            return copy
        if isinstance(manifest, Problem):
            return copy
        return Copy(name=name, url=url, step=step, manifest=manifest, files=files)

    def _ls(self, path: str) -> list[str]:
        try:
            return [str(each) for each in self._fs.ls(path, detail=False)]
        except FileNotFoundError:
            return []

    def _read(self, copy: Copy, name: str) -> bytes:
        content: bytes = self._fs.cat_file(f"{self._root}/{copy.name}/{name}")
        return content

    def _open(self, copy: Copy, name: str) -> Any:
        return self._fs.open(f"{self._root}/{copy.name}/{name}", "rb")


def _unpacked(source: BinaryIO, codec: str) -> Iterator[bytes]:
    if codec == _PLANES:
        return decompressed(source)
    if codec:
        raise OSError(f"it is stored as {codec}, which this Paceline does not know")
    return iter(lambda: source.read(_CHUNK_BYTES), b"")


def _hash(pieces: Iterator[bytes]) -> FileRecord:
    digest, size = xxhash.xxh3_128(), 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
    return FileRecord(size=size, xxh3_128=digest.hexdigest())


def _first(spans: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    first, left = [], size
    for length, width in spans:
        if left <= 0:
            break
        first.append((min(length, left), width))
        left -= length
    return first


def _fsspec(url: str, where: str) -> Any:
    try:
        import fsspec
    except ImportError:
        raise _missing("fsspec is not installed", url, where) from None
    return fsspec


_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("abfs", "abfss", "az"), "adlfs"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
}
"""What fsspec needs beside itself."""


def _protocol(url: str) -> str:
    return url.partition("://")[0].rpartition("::")[2]


def _missing(what: str, url: str, where: str) -> JobError:
    from paceline.job.packages import install_line  # not in each rank's writer of checkpoints

    package = _PACKAGES.get(_protocol(url), "")
    return JobError.of(
        code="R010",
        what=f"{url} cannot be reached: {what}",
        where=where,
        fix=f"{install_line('storage')} {package}".strip(),
    )


def _no_place(url: str, reason: str, where: str) -> Problem:
    return Problem(
        code="C014",
        what=f"{url} is no storage: {reason}",
        where=where,
        fix="write it like s3://bucket/prefix, gs://bucket/prefix, sftp://host/folder or "
        "file:///mnt/nas/jobs",
    )


def _problem(url: str, reason: str, where: str) -> Problem:
    more = "; training goes on without it" if where == "checkpoint.copy_to" else ""
    return Problem(
        code="C014",
        what=f"the storage {url} refused: {reason}",
        where=where,
        fix=f"see whether it is there, and who may read and write it{more}",
    )
