"""The index of runs: always right, whatever became of it, and of the runs."""

import multiprocessing
import os
from pathlib import Path

import pytest
from tests.record.made_runs import AT, add_line, finished, job_with, make_run, started

from paceline.errors import JobError
from paceline.record import registry
from paceline.record.ownership import claim_control
from paceline.record.registry import list_runs, run_folder


@pytest.fixture
def runs(tmp_path) -> Path:
    for number in range(3):
        events = [started(), finished()]
        make_run(tmp_path / f"runs/r{number}", events=events, created_at=AT + number, losses=[2.0])
    return tmp_path / "runs"


def read_again(monkeypatch) -> list[str]:
    """Names of the runs whose files are read from now on."""
    real, found = registry.read_files, []

    def reading(folder):
        found.append(folder.name)
        return real(folder)

    monkeypatch.setattr(registry, "read_files", reading)
    return found


def names(runs: Path, cache: Path) -> list[str]:
    return [row.run for row in list_runs(runs, cache=cache).rows]


def test_runs_are_listed_oldest_first_and_read_once(runs, tmp_path, monkeypatch):
    read = read_again(monkeypatch)
    first = list_runs(runs, cache=tmp_path / "cache")
    assert [row.run for row in first.rows] == ["r0", "r1", "r2"]
    assert sorted(read) == ["r0", "r1", "r2"]
    assert list_runs(runs, cache=tmp_path / "cache").rows == first.rows
    assert len(read) == 3


def test_only_a_run_that_grew_is_read_again(runs, tmp_path, monkeypatch):
    list_runs(runs, cache=tmp_path / "cache")
    read = read_again(monkeypatch)
    add_line(runs / "r1/metrics.jsonl", {"step": 2, "at": AT, "loss": 1.5})
    rows = list_runs(runs, cache=tmp_path / "cache").rows
    assert (rows[1].step, rows[1].loss) == (2, 1.5)
    assert read == ["r1"]


def test_a_file_that_was_replaced_by_one_of_its_size_and_time_is_read_again(runs, tmp_path):
    list_runs(runs, cache=tmp_path / "cache")
    old = runs / "r1/job.yaml"
    stat, text = old.stat(), old.read_text()
    new = runs / "r1/new"
    new.write_text(text.replace("steps: 100", "steps: 900"))
    os.utime(new, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    new.rename(old)
    assert list_runs(runs, cache=tmp_path / "cache").rows[1].num_steps == 900


def test_a_deleted_run_is_gone_and_a_new_one_is_there(runs, tmp_path):
    list_runs(runs, cache=tmp_path / "cache")
    (runs / "r0").rename(tmp_path / "elsewhere")
    make_run(runs / "r9", created_at=AT + 9)
    assert names(runs, tmp_path / "cache") == ["r1", "r2", "r9"]
    assert names(runs, tmp_path / "cache") == ["r1", "r2", "r9"]


def test_another_folder_of_runs_has_another_index(runs, tmp_path):
    make_run(tmp_path / "others/r0", created_at=AT, losses=[9.0], events=[started()])
    list_runs(runs, cache=tmp_path / "cache")
    (row,) = list_runs(tmp_path / "others", cache=tmp_path / "cache").rows
    assert row.loss == 9.0
    assert len(list((tmp_path / "cache").glob("*.json"))) == 2


def test_another_version_of_the_code_has_another_index(runs, tmp_path, monkeypatch):
    list_runs(runs, cache=tmp_path / "cache")
    changed = tmp_path / "changed.py"
    changed.write_text("another reading")
    monkeypatch.setattr(registry.history, "__file__", str(changed))
    read = read_again(monkeypatch)
    list_runs(runs, cache=tmp_path / "cache")
    assert len(read) == 3


def test_whether_a_run_lives_is_asked_each_time(tmp_path):
    run = make_run(tmp_path / "runs/r0", events=[started()])
    states = []
    with claim_control(run, patience_s=0.0):
        states.append(list_runs(tmp_path / "runs", cache=tmp_path / "cache").rows[0].state)
    states.append(list_runs(tmp_path / "runs", cache=tmp_path / "cache").rows[0].state)
    assert states == ["running", "crashed"]


@pytest.mark.parametrize("content", [b"no JSON", b"", b'{"r1": 5}', b"[]"])
def test_a_damaged_index_is_thrown_away_and_made_anew(runs, tmp_path, content, monkeypatch):
    first = list_runs(runs, cache=tmp_path / "cache")
    (index,) = (tmp_path / "cache").glob("*.json")
    index.write_bytes(content)
    again = list_runs(runs, cache=tmp_path / "cache")
    assert (again.rows, again.note) == (first.rows, None)
    read = read_again(monkeypatch)
    list_runs(runs, cache=tmp_path / "cache")
    assert read == []


@pytest.mark.parametrize("place", ["/proc/nothing", "a file"])
def test_without_a_cache_folder_every_run_is_read_and_the_reason_is_given(runs, tmp_path, place):
    cache = Path(place)
    if place == "a file":
        cache = tmp_path / "file"
        cache.write_text("")
    listing = list_runs(runs, cache=cache)
    assert len(listing.rows) == 3
    assert "the index of runs is not kept" in listing.note


def test_an_index_that_cannot_be_written_is_read_and_the_reason_is_given(
    runs, tmp_path, monkeypatch
):
    list_runs(runs, cache=tmp_path / "cache")

    def refuse(path, data):
        raise OSError("read-only file system")

    monkeypatch.setattr(registry, "write_cached", refuse)
    add_line(runs / "r1/metrics.jsonl", {"step": 2, "at": AT, "loss": 1.5})
    read = read_again(monkeypatch)
    listing = list_runs(runs, cache=tmp_path / "cache")
    assert listing.rows[1].loss == 1.5
    assert read == ["r1"]
    assert "read-only" in listing.note


def _list(runs: Path, cache: Path, answers) -> None:
    answers.put(names(runs, cache))


def test_two_processes_may_make_the_index_at_once(runs, tmp_path):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    both = [
        context.Process(target=_list, args=(runs, tmp_path / "cache", answers)) for _ in range(2)
    ]
    for process in both:
        process.start()
    assert [answers.get(timeout=120) for _ in both] == [["r0", "r1", "r2"]] * 2
    for process in both:
        process.join()
    assert names(runs, tmp_path / "cache") == ["r0", "r1", "r2"]


def test_a_damaged_run_is_listed_and_not_kept(runs, tmp_path, monkeypatch):
    (runs / "r1/run.json").write_text("{")
    list_runs(runs, cache=tmp_path / "cache")
    read = read_again(monkeypatch)
    states = {row.run: row.state for row in list_runs(runs, cache=tmp_path / "cache").rows}
    assert states == {"r0": "finished", "r1": "damaged", "r2": "finished"}
    assert read == ["r1"]


def test_the_index_is_not_written_again_where_only_a_damaged_run_is_read_again(
    runs, tmp_path, monkeypatch
):
    (runs / "r1" / "plan.json").write_text("{")
    first = list_runs(runs, cache=tmp_path / "cache")
    assert [row.state for row in first.rows].count("damaged") == 1
    written: list[Path] = []
    monkeypatch.setattr(registry, "write_cached", lambda path, data: written.append(path))
    list_runs(runs, cache=tmp_path / "cache")
    assert written == []


def test_a_folder_that_is_not_there_has_no_runs(tmp_path):
    assert list_runs(tmp_path / "none", cache=tmp_path / "cache").rows == []


def test_settings_come_from_the_index_too(tmp_path):
    for rate in (0.1, 0.2):
        make_run(tmp_path / f"runs/{rate}", job=job_with(learning_rate=rate))
    for _ in range(2):
        listing = list_runs(tmp_path / "runs", settings=True, cache=tmp_path / "cache")
        rates = {name: job["train.learning_rate"] for name, job in listing.settings.items()}
        assert rates == {"0.1": 0.1, "0.2": 0.2}


def test_an_index_that_nobody_wrote_to_for_long_is_removed_with_the_next_new_one(runs, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    old, other = cache / "runs-old.json", cache / "other.json"
    for path in (old, other):
        path.touch()
        os.utime(path, (1.0, 1.0))
    list_runs(runs, cache=cache)
    assert (old.exists(), other.exists()) == (False, True)


def test_a_run_is_found_by_path_name_and_the_id_of_its_queue(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (runs / "r1/place.json").write_text('{"place": "slurm", "job_id": "4711"}')
    found = [run_folder(named, runs) for named in (str(runs / "r1"), "r1", "4711")]
    assert found == [runs / "r1"] * 3
    for named in ("nothing", "x" * 5000, "a\0b"):
        with pytest.raises(JobError, match="W015"):
            run_folder(named, runs)
