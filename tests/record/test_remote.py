import io
import os
import random
import shutil
import socket
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.record.test_tensors import NAMES, write

from paceline.errors import JobError
from paceline.job.packages import install_line
from paceline.record import remote as remote_module
from paceline.record.byte_shuffle import compressed, decompressed
from paceline.record.checkpoints import verify_checkpoint
from paceline.record.remote import Remote, check_remote

pytest.importorskip("fsspec")
pytest.importorskip("zstandard")


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    """A place of each kind, empty."""
    if request.param == "file":
        return f"file://{tmp_path}/store/job"
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    return "memory://store/job"


def test_s4_13_a_storage_whose_package_is_missing_is_known_before_a_run_starts(monkeypatch):
    assert list(check_remote("file:///mnt/nas", "checkpoint.copy_to")) == []
    monkeypatch.setitem(sys.modules, "s3fs", None)
    (problem,) = check_remote("s3://bucket/runs", "checkpoint.copy_to, job.yaml line 8")
    assert problem.code == "R010"
    assert problem.where == "checkpoint.copy_to, job.yaml line 8"
    assert problem.fix == f"{install_line('storage')} s3fs"


@pytest.mark.parametrize("compress", ["never", "always", "auto"])
def test_a_copy_comes_back_the_same_to_the_byte(url, tmp_path, compress):
    path = write(tmp_path / "here")
    remote = Remote(url)
    done = remote.upload(path, compress)
    assert (done.step, done.checked) == (50, "hash")
    (copy,) = Remote(url).copies()
    assert (copy.name, copy.manifest.step) == ("step-00000050", 50)
    assert remote.verify(copy) is None
    (tmp_path / "there").mkdir()
    found = remote.download(copy, tmp_path / "there")
    assert verify_checkpoint(found) is None
    for file in path.iterdir():
        assert (found / file.name).read_bytes() == file.read_bytes()


def test_a_copy_without_commit_is_none_and_a_damaged_one_is_refused(tmp_path):
    url = f"file://{tmp_path}/store"
    remote, path = Remote(url), write(tmp_path / "here")
    remote.upload(path, "never")
    there = tmp_path / "store" / path.name
    shard = there / "__1_0.distcp"
    broken = bytearray(shard.read_bytes())
    broken[7] ^= 1
    shard.write_bytes(broken)
    (copy,) = remote.copies()
    assert remote.verify(copy).code == "C005"
    problem = remote.download(copy, tmp_path / "here")
    assert problem.code == "C005"
    assert NAMES[3] in problem.what
    (there / "COMMIT").unlink()
    (copy,) = remote.copies()
    assert copy.manifest is None
    assert remote.verify(copy).code == "C001"


def test_s4_13_the_newest_copies_are_kept_and_what_never_finished_goes(url, tmp_path):
    remote = Remote(url)
    for step in (10, 20, 30, 40):
        remote.upload(write(tmp_path, step), "never")
    remote._fs.rm(f"{remote._root}/step-00000020/COMMIT")
    assert remote.prune(2) == ["step-00000020", "step-00000010"]
    assert [copy.step for copy in remote.copies()] == [40, 30]


def test_an_empty_place_has_no_copies(url):
    assert Remote(url).copies() == []


def test_an_unknown_storage_and_a_missing_package_are_said():
    with pytest.raises(JobError, match="C014"):
        Remote("nothing-like-it://bucket/x")


def test_compression_is_used_only_where_it_beats_the_link(tmp_path, monkeypatch):
    path, url = write(tmp_path), f"file://{tmp_path}/store"
    times = iter([0.0, 0.0, 1.0, 1.0, 1.1, 2.0])  # packing takes 1 s, sending 0.1 s
    monkeypatch.setattr(remote_module.time, "perf_counter", lambda: next(times))
    done = Remote(url).upload(path, "auto")
    assert done.note.startswith("not compressed: ")
    zeros = iter([0.0, 0.0, 0.001, 1.0, 9.0, 10.0])
    monkeypatch.setattr(remote_module.time, "perf_counter", lambda: next(zeros))
    monkeypatch.setattr(remote_module, "compressed", lambda file, spans: iter([file.read(9)]))
    assert Remote(url)._measure(path, remote_module.read_manifest(path))[0]


@given(
    st.binary(max_size=300), st.lists(st.tuples(st.integers(1, 90), st.sampled_from([1, 2, 4, 8])))
)
def test_what_is_compressed_comes_back(content, drawn):
    spans, left = [], len(content)
    for length, width in drawn:
        if length <= left:
            spans.append((length, width))
            left -= length
    spans += [(left, 1)] if left else []
    packed = b"".join(compressed(io.BytesIO(content), spans))
    assert b"".join(decompressed(io.BytesIO(packed))) == content


def test_large_spans_come_apart_and_back(monkeypatch):
    content = random.Random(0).randbytes(3 << 20)
    spans = [(1 << 20, 4), (100, 2), ((2 << 20) - 100, 2)]
    packed = b"".join(compressed(io.BytesIO(content), spans))
    assert b"".join(decompressed(io.BytesIO(packed))) == content
    for end in (3, 20, len(packed) - 1):
        with pytest.raises(OSError, match=r"cut off|not of the compressed|does not decompress"):
            list(decompressed(io.BytesIO(packed[:end])))


def moto():
    """A program that speaks S3, where one is installed."""
    found = shutil.which("moto_server")
    done = subprocess.run([found, "--help"], capture_output=True) if found else None
    return found if done is not None and done.returncode == 0 else None


@pytest.mark.slow
def test_copies_in_s3_come_back(tmp_path, monkeypatch):
    server = moto()
    if server is None:
        pytest.skip("SKIPPED S3 TEST: moto_server is not installed")
    pytest.importorskip("s3fs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    process = subprocess.Popen(
        [server, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=-3
    )
    try:
        end = time.monotonic() + 300
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        script = f"""
import sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
import s3fs
from tests.record.test_tensors import write
from paceline.record.remote import Remote, check_remote
from paceline.record.checkpoints import verify_checkpoint
s3fs.S3FileSystem().mkdir("bucket")
folder, remote = Path({str(tmp_path)!r}), Remote("s3://bucket/jobs/one")
for step in (10, 20, 30):
    done = remote.upload(write(folder / "here", step), "always" if step == 30 else "never")
    assert done.checked == "size", done
assert remote.prune(2) == ["step-00000010"]
newest = Remote("s3://bucket/jobs/one").copies()[0]
assert newest.step == 30 and remote.verify(newest) is None
(folder / "there").mkdir()
assert verify_checkpoint(remote.download(newest, folder / "there")) is None
print("came back")
"""
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ)
        )
        assert done.stdout.strip() == "came back", done.stderr
    finally:
        process.kill()
        process.wait()
