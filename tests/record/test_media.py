"""Pictures and texts of a run: files with bounds, and a line for each."""

import json

import numpy as np
import pytest

from paceline.record import media
from paceline.record.media import MediaLog, png_of


def test_a_picture_is_a_png_that_others_read(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    for shown in (pixels, pixels[:, :, :3], pixels[:, :, 0]):
        file = tmp_path / "a.png"
        file.write_bytes(png_of(shown))
        with image.open(file) as found:
            assert np.asarray(found).tolist() == shown.tolist()


def test_each_is_a_file_of_its_step_and_a_line(tmp_path):
    log = MediaLog(tmp_path)
    assert log.write(5, 2, 1.0, {"a/../b": "x" * (2 * media.MOST_TEXT_BYTES)}) is None
    log.close()
    line = json.loads((tmp_path / "media.jsonl").read_text())
    assert line["file"] == "media/step-00000005/a__..__b.txt"
    assert (line["step"], line["generation"], line["name"]) == (5, 2, "a/../b")
    assert (tmp_path / line["file"]).stat().st_size == media.MOST_TEXT_BYTES


def test_a_run_keeps_so_many_and_the_reason_is_given_once(tmp_path, monkeypatch):
    monkeypatch.setattr(media, "MOST_FILES", 2)
    first = MediaLog(tmp_path)
    assert first.write(1, 1, 1.0, {"a": "x"}) is None
    first.close()
    log = MediaLog(tmp_path)  # of a run that was resumed
    assert log.write(2, 1, 1.0, {"a": "x"}) is None
    reason = log.write(3, 1, 1.0, {"a": "x"})
    assert reason is not None
    assert "a run keeps 2 of them" in reason
    assert log.write(4, 1, 1.0, {"a": "x"}) is None
    log.close()
    assert len((tmp_path / "media.jsonl").read_text().splitlines()) == 2


def test_a_disk_that_refuses_is_no_error_of_the_step(tmp_path):
    (tmp_path / "media").write_text("in the way")
    reason = MediaLog(tmp_path).write(1, 1, 1.0, {"a": "x"})
    assert reason is not None
    assert "not kept" in reason
