"""GGUF files as `model.pretrained`: their header, and what they are converted into, once."""

import json
import os
import struct
from pathlib import Path

import pytest

from paceline.errors import JobError
from paceline.job import Job, parse_job
from paceline.job.gguf import converted_folder, read_gguf_header
from paceline.job.pretrained import find_gguf, find_pretrained
from paceline.launch import gguf as launch_gguf
from paceline.record.conversion import Conversion

NAME = "tiny.Q4_1.gguf"


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(licence: str = "apache-2.0") -> bytes:
    """Of a file with two tensors of 6 and 5 values, and fields of several types."""
    fields = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("general.license") + struct.pack("<I", 8) + text(licence),
        text("llama.block_count") + struct.pack("<II", 4, 2),
        text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"),
        text("scores") + struct.pack("<IIQff", 9, 6, 2, 0.5, 1.5),
    ]
    tensors = [
        text("a") + struct.pack("<IQQIQ", 2, 2, 3, 0, 0),
        text("b") + struct.pack("<IQIQ", 1, 5, 3, 32),
    ]
    counts = struct.pack("<IQQ", 3, len(tensors), len(fields))
    return b"GGUF" + counts + b"".join(fields) + b"".join(tensors)


def job(folder: Path, pretrained: str = NAME) -> Job:
    text = (
        f"model: {{pretrained: {pretrained}}}\ndata: {{path: x, seq_len: 16}}\n"
        "train: {global_batch: 1, steps: 1}\n"
    )
    return parse_job(text, source="job.yaml", folder=folder)


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was converted; a folder with a config and weights is written without reading any."""
    done: list[str] = []

    def convert(asked: Conversion) -> None:
        done.append(Path(asked.source).name)
        out = Path(asked.out)
        out.mkdir()
        (out / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (out / "model.safetensors").write_bytes(b"")
        (out / "tokenizer.json").write_text("{}")

    monkeypatch.setattr(launch_gguf, "convert", convert)
    monkeypatch.setattr(launch_gguf, "need_packages", lambda *forms: None)
    return done


def test_the_header_has_the_fields_and_the_number_of_parameters(tmp_path: Path):
    (tmp_path / NAME).write_bytes(header())
    found = read_gguf_header(tmp_path / NAME)
    assert found.num_parameters == 11
    assert found.fields == {
        "general.architecture": "llama",
        "general.license": "apache-2.0",
        "llama.block_count": 2,
    }


def test_a_file_that_is_cut_off_or_of_another_form_is_refused_at_every_length(tmp_path: Path):
    whole = header()
    for content in (b"", b"safetensors", b"GGUF" + struct.pack("<I", 9), *cuts(whole)):
        (tmp_path / NAME).write_bytes(content)
        with pytest.raises(ValueError, match=r"cut off|no GGUF|length of|type"):
            read_gguf_header(tmp_path / NAME)


def cuts(whole: bytes) -> list[bytes]:
    return [whole[:length] for length in range(5, len(whole), 7)]


def test_a_gguf_file_is_converted_once_and_then_found_as_a_folder(
    tmp_path: Path, conversions: list[str]
):
    file = tmp_path / NAME
    file.write_bytes(header())
    asked = job(tmp_path)
    with pytest.raises(JobError, match="not converted to safetensors yet"):
        find_pretrained(asked)
    lines: list[str] = []
    for _ in range(2):
        launch_gguf.convert_gguf(asked, lines.append)
    assert conversions == [NAME]
    assert len(lines) == 1
    assert f"{NAME} (11 parameters) to float32 safetensors, once" in lines[0]
    found = find_pretrained(asked)
    assert found is not None
    assert found.folder.parent == tmp_path / ".paceline/models"
    assert found.folder.name.startswith("tiny.Q4_1-")
    assert found.tokenizer == found.folder
    assert "license: apache-2.0" in (found.folder / "README.md").read_text()


def test_a_file_that_moved_is_not_converted_again_and_one_that_changed_is(
    tmp_path: Path, conversions: list[str]
):
    file = tmp_path / NAME
    file.write_bytes(header())
    launch_gguf.convert_gguf(job(tmp_path), print)
    first = converted_folder(job(tmp_path), file)
    (tmp_path / "moved").mkdir()
    file.rename(tmp_path / "moved" / NAME)
    moved = job(tmp_path, "moved")  # the folder, with no other weights in it
    launch_gguf.convert_gguf(moved, print)
    assert conversions == [NAME]
    found = find_pretrained(moved)
    assert found is not None
    assert found.folder == first
    (tmp_path / "moved" / NAME).write_bytes(header(licence="mit"))
    launch_gguf.convert_gguf(moved, print)
    assert conversions == [NAME] * 2


def test_what_cannot_be_converted_is_named(
    tmp_path: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / NAME
    file.write_bytes(b"not at all")
    with pytest.raises(JobError, match=r"M012: .*no GGUF file"):
        launch_gguf.convert_gguf(job(tmp_path), print)
    (tmp_path / "other.gguf").touch()
    with pytest.raises(JobError, match=r"M011: .* has 2 GGUF files and no safetensors"):
        find_gguf(job(tmp_path, "."))
    (tmp_path / "big-00001-of-00002.gguf").touch()
    with pytest.raises(JobError, match="one part of a model"):
        find_gguf(job(tmp_path, "big-00001-of-00002.gguf"))
    file.write_bytes(header())
    monkeypatch.setattr(launch_gguf, "_MEMORY_A_PARAMETER", 1 << 60)
    with pytest.raises(JobError, match=r"M017: .*11 parameters, float32\) takes about .*of memory"):
        launch_gguf.convert_gguf(job(tmp_path), print)
    assert not conversions


def test_a_conversion_that_fails_leaves_nothing(
    tmp_path: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / NAME).write_bytes(header())

    def fails(asked: Conversion) -> None:
        os.mkdir(asked.out)
        raise JobError.of(code="C012", what="it failed", where="x", fix="y")

    monkeypatch.setattr(launch_gguf, "convert", fails)
    with pytest.raises(JobError, match="it failed"):
        launch_gguf.convert_gguf(job(tmp_path), print)
    assert not [path for path in (tmp_path / ".paceline/models").iterdir() if path.is_dir()]
