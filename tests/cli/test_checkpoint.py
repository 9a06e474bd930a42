import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from tests.record.test_tensors import NAMES, write

from paceline.cli.checkpoint import command
from paceline.errors import CheckpointError, JobError
from paceline.job.packages import install_line


def call(*args):
    """Exit code and output."""
    done = CliRunner().invoke(command, [str(arg) for arg in args], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.return_value or 0, done.output


def damage(path):
    file = path / "__0_0.distcp"
    broken = bytearray(file.read_bytes())
    broken[0] ^= 1
    file.write_bytes(broken)


def test_a_gguf_file_is_refused_with_the_package_that_reads_it(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(JobError, match="needs gguf, which is not installed"):
        call("convert", file, tmp_path / "out", "--from", "gguf", "--to", "safetensors")
    assert not (tmp_path / "out").exists()


def test_ls_takes_a_run_a_folder_and_one_checkpoint(tmp_path):
    paths = [write(tmp_path / "run/checkpoints", step) for step in (10, 20)]
    (paths[1] / "COMMIT").unlink()
    for path, names in (
        (tmp_path / "run", ["step-00000020", "step-00000010"]),
        (tmp_path / "run/checkpoints", ["step-00000020", "step-00000010"]),
        (paths[0], ["step-00000010"]),
    ):
        rows = json.loads(call("ls", path, "--json")[1])
        assert [row["name"] for row in rows] == names
    lines = call("ls", tmp_path / "run")[1].splitlines()
    assert "EVAL LOSS" in lines[0]
    assert lines[1].split()[:2] == ["step-00000020", "C001"]
    assert lines[2].split()[:2] == ["step-00000010", "committed"]


def test_inspect_lists_the_tensors_of_the_newest_that_was_committed(tmp_path):
    write(tmp_path, 10)
    (write(tmp_path, 20) / "COMMIT").unlink()
    told = call("inspect", tmp_path, "--tensors")[1]
    assert "step        10" in told
    assert all(name in told for name in NAMES)
    facts = json.loads(call("inspect", tmp_path, "--json")[1])
    assert [each["name"] for each in facts["tensors"]] == NAMES


def test_verify_names_the_tensor_and_its_exit_code_says_how_many(tmp_path):
    one, two = write(tmp_path, 10), write(tmp_path, 20)
    assert call("verify", tmp_path)[0] == 0
    damage(two)
    code, told = call("verify", tmp_path)
    assert code == 1
    assert f"damaged: {NAMES[0]}" in told
    results = json.loads(call("verify", tmp_path, "--json")[1])
    assert [each["whole"] for each in results] == [False, True]
    assert results[0]["damaged_tensors"] == {"__0_0.distcp": [NAMES[0]]}
    damage(one)
    assert call("verify", tmp_path)[0] == 5


def test_ls_and_verify_take_the_url_of_a_storage(tmp_path):
    pytest.importorskip("fsspec")
    from paceline.record.remote import Remote

    url = f"file://{tmp_path}/store"
    for step in (10, 20):
        Remote(url).upload(write(tmp_path, step), "never")
    assert [row["step"] for row in json.loads(call("ls", url, "--json")[1])] == [20, 10]
    assert call("verify", url)[0] == 0
    damage(tmp_path / "store/step-00000020")
    assert call("verify", url)[0] == 1


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify"])
def test_a_path_without_a_checkpoint_is_said(tmp_path, verb):
    with pytest.raises(JobError, match="C011: there is no checkpoint at"):
        call(verb, tmp_path)
    with pytest.raises(JobError, match="C011: there is nothing at"):
        call(verb, tmp_path / "nowhere")


@pytest.mark.parametrize("verb", ["ls", "verify"])
@pytest.mark.parametrize(
    ("url", "says", "fix"),
    [
        (
            "foo://",
            "C014: foo:// is no storage: it names no place behind ://",
            "s3://bucket/prefix",
        ),
        ("foo://x", "C014: foo://x is no storage: Protocol not known: foo", "s3://bucket/prefix"),
        ("memory://empty", "C011: there is no copy of a checkpoint at memory://empty", "the run's"),
    ],
)
def test_a_url_without_copies_says_why_and_what_to_write(verb, url, says, fix):
    pytest.importorskip("fsspec")
    with pytest.raises(JobError) as refused:
        call(verb, url)
    assert says in str(refused.value)
    assert fix in refused.value.problems[0].fix
    assert refused.value.problems[0].where == url


def test_a_storage_without_its_package_names_the_extra_and_the_package(monkeypatch):
    core = pytest.importorskip("fsspec.core")

    def refuse(url):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(core, "url_to_fs", refuse)
    with pytest.raises(JobError, match="R010: s3://bucket/x cannot be reached") as refused:
        call("ls", "s3://bucket/x")
    assert refused.value.problems[0].fix == f"{install_line('storage')} s3fs"


def test_a_file_is_told_that_a_runs_checkpoint_is_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        JobError, match=r"C011: .*file is a file, and a run's checkpoint is a folder"
    ):
        call("ls", tmp_path / "file")


def test_verify_says_no_size_of_what_has_no_manifest_to_say_it(tmp_path):
    folder = write(tmp_path, 10)
    (folder / "COMMIT").unlink()
    code, told = call("verify", tmp_path)
    assert (code, told.splitlines()[0]) == (5, f"DAMAGED  {folder}  of unknown size")


def test_convert_refuses_what_is_damaged_and_writes_over_nothing(tmp_path):
    path = write(tmp_path / "here")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    with pytest.raises(JobError, match="R002"):
        call("convert", path, tmp_path / "out")
    damage(path)
    with pytest.raises(CheckpointError, match="C005"):
        call("convert", path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_convert_cannot_read_is_a_problem_and_no_traceback(tmp_path):
    pytest.importorskip("torch")
    path = write(tmp_path / "here")  # its data files are no records of torch
    with pytest.raises(CheckpointError, match=r"M012: \.metadata of step-00000050 cannot be read"):
        call("convert", path, tmp_path / "new")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/model.safetensors").write_bytes(b"nothing like it")
    with pytest.raises(CheckpointError, match="M012"):
        call("convert", tmp_path / "hf", tmp_path / "new", "--from", "safetensors")


def test_ls_needs_no_torch(tmp_path):
    write(tmp_path)
    script = "import sys; sys.modules['torch'] = None; from paceline.cli import main; main()"
    command = [sys.executable, "-c", script, "checkpoint", "verify", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
