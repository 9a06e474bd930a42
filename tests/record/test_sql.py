"""The registry of runs as SQL: sqlite3 and PostgreSQL load it, and answer what the runs say."""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click import UsageError
from click.testing import CliRunner
from tests.record.made_runs import (
    AT,
    JOB,
    add_line,
    evaluated,
    finished,
    job_with,
    make_run,
    started,
)

from paceline.cli.export import command
from paceline.errors import JobError

Query = Callable[[str], list[tuple[str | None, ...]]]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, one with a name and a reason that have to be quoted, one that is damaged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "runs"
    odd = make_run(
        folder / "odd",
        job=job_with(learning_rate=1e-05) | {"name": "l'été; -- \\ $1"},
        events=[
            started(),
            evaluated(2, 2.5),
            evaluated(2, 2.25),  # again, after a recovery
            evaluated(3, None),
            finished(outcome="failed", reason='it\'s "gone"\n\\.\nNUL \0'),
        ],
        losses=[3.0, None, 2.0],
        created_at=AT,
    )
    start = {"python": "3.11.7", "packages": {"torch": "2.13.0"}, "code": {"commit": "ab12"}}
    add_line(odd / "starts.jsonl", start | {"host": "n1", "command": ["paceline", "run"]})
    make_run(folder / "torn", losses=[1.0] * 1200, created_at=AT + 1, lines={"mfu": 0.5})
    (folder / "torn/plan.json").write_text("{")
    return folder


def call(*args: object) -> str:
    """Standard output."""
    done = CliRunner().invoke(command, [str(arg) for arg in args], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.stdout


@contextlib.contextmanager
def sqlite(file: Path) -> Iterator[tuple[Callable[[Path], None], Query]]:
    with contextlib.closing(sqlite3.connect(file.with_suffix(".db"))) as base:
        base.execute("pragma foreign_keys = on")

        def query(text: str) -> list[tuple[str | None, ...]]:
            found = base.execute(text).fetchall()
            return [tuple(None if each is None else str(each) for each in row) for row in found]

        yield lambda path: base.executescript(path.read_text()), query  # type: ignore[misc]


@contextlib.contextmanager
def postgres(file: Path) -> Iterator[tuple[Callable[[Path], None], Query]]:
    """A server of its own, in a temporary folder, on a socket in it."""
    if any(shutil.which(each) is None for each in ("initdb", "pg_ctl", "psql")):
        pytest.skip("PostgreSQL is not installed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        user = {"user": "nobody"} if os.geteuid() == 0 else {}  # it refuses to run as root
        if user:
            shutil.chown(name, "nobody")

        def run(*words: str) -> str:
            done = subprocess.run(
                words, cwd=name, capture_output=True, text=True, timeout=120, check=False, **user
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        data, psql = (
            f"{name}/data",
            ("psql", "-h", name, "-U", "me", "-qX", "-v", "ON_ERROR_STOP=1"),
        )
        run("initdb", "-D", data, "-U", "me", "-A", "trust", "-E", "UTF8", "--no-locale", "-N")
        how = f"-c listen_addresses='' -c fsync=off -k {name}"
        run("pg_ctl", "-D", data, "-w", "-o", how, "-l", f"{name}/log", "start")
        try:

            def load(path: Path) -> None:
                shutil.copyfile(path, f"{name}/{path.name}")
                run(*psql, "-f", path.name, "postgres")

            def query(text: str) -> list[tuple[str | None, ...]]:
                told = run(
                    *psql, "-At", "-F\x1f", "-R\x1e", "-P", "null=\x1d", "-c", text, "postgres"
                )
                rows = told.removesuffix("\n").split("\x1e") if told.strip() else []
                return [
                    tuple(None if cell == "\x1d" else cell for cell in row.split("\x1f"))
                    for row in rows
                ]

            yield load, query
        finally:
            run("pg_ctl", "-D", data, "-m", "immediate", "stop")


@pytest.mark.parametrize("engine", [sqlite, postgres])
def test_s0_27_a_database_answers_what_the_runs_say(engine, runs: Path, tmp_path: Path):
    first = tmp_path / "first.sql"
    assert "2 runs" in call(runs, first, "--for", "sql")
    with engine(first) as (load, query):
        load(first)
        assert query("select run, name, step, loss, git_commit, host from runs order by run") == [
            ("odd", "l'été; -- \\ $1", "3", "2.0" if engine is sqlite else "2", "ab12", "n1"),
            ("torn", "tiny", "1200", "1.0" if engine is sqlite else "1", None, None),
        ]
        assert query("select reason from runs where state = 'failed'") == [
            ('it\'s "gone"\n\\.\nNUL \ufffd',)
        ]
        ((damage,),) = query("select damage from runs where run = 'torn'")
        assert damage is not None
        assert damage.startswith("plan.json cannot be read")
        settings = "from run_settings where name = 'train.learning_rate' and run = 'odd'"
        assert query(f"select value {settings}") == [("1e-05",)]
        assert query("select name, version from run_packages order by name") == [
            ("python", "3.11.7"),
            ("torch", "2.13.0"),
        ]
        assert query(
            "select step, name, value is null from run_metrics where run = 'odd' and "
            "name in ('train/loss', 'eval/loss') order by step, name"
        ) == [
            (step, name, {"f": "0", "t": "1"}[null] if engine is sqlite else null)
            for step, name, null in (
                *(("1", "train/loss", "f"), ("2", "eval/loss", "f"), ("2", "train/loss", "t")),
                *(("3", "eval/loss", "t"), ("3", "train/loss", "f")),
            )
        ]
        assert query("select count(*) from run_metrics where name = 'speed/mfu'") == [("1200",)]
        joined = (
            "select runs.run from runs join run_metrics on run_metrics.run = runs.run "
            "where run_metrics.name = 'eval/loss' and value < 2.3"
        )
        assert query(joined) == [("odd",)]

        shutil.rmtree(runs / "torn")
        add_line(runs / "odd/metrics.jsonl", {"step": 4, "generation": 1, "at": AT, "loss": 1.5})
        make_run(runs / "new", job=JOB, losses=[4.0], created_at=AT + 2)
        second = tmp_path / "second.sql"
        call(runs, second, "--for", "sql")
        load(second)
        assert query("select run, step from runs order by run") == [
            ("new", "1"),
            ("odd", "4"),
            ("torn", "1200"),  # of another time, and still in the database
        ]
        losses = "select count(*) from run_metrics where run = 'odd' and name = 'train/loss'"
        assert query(losses) == [("4",)]


def test_s0_27_what_is_no_folder_of_runs_is_refused(runs: Path, tmp_path: Path):
    with pytest.raises(
        JobError, match=rf"odd is one run.*\n.*\n.*paceline export {runs} --for sql"
    ):
        call(runs / "odd", "--for", "sql")
    with pytest.raises(JobError, match="is no folder"):
        call(tmp_path / "nothing", "--for", "sql")
    with pytest.raises(UsageError, match="leave out --best"):
        call(runs, "--best", "--for", "sql")
    (tmp_path / "there").write_text("mine")
    with pytest.raises(JobError, match="R002"):
        call(runs, tmp_path / "there", "--for", "sql")
    assert call(runs, "--for", "sql").startswith("BEGIN;\nCREATE TABLE")
    (tmp_path / "empty").mkdir()
    with pytest.raises(JobError, match=r"R003: there is no run in .*empty"):
        call(tmp_path / "empty", tmp_path / "empty.sql", "--for", "sql")
    assert not (tmp_path / "empty.sql").exists()
