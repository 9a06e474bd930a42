"""Who may control a run that another command has, or had until now."""

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import JobError
from paceline.record.ownership import (
    OWNER_FILE,
    InCharge,
    claim_control,
    claim_from_another,
    find_controller,
    hold_agents,
    hold_alone,
    is_held,
    machine,
    publish_controller,
)

PATIENCE_S = 120.0


def in_charge(folder: Path, pid: int) -> None:
    publish_controller(folder, InCharge(pid=pid, epoch=1, host="127.0.0.1", port=1))


def test_only_the_process_that_controls_a_run_is_interrupted(tmp_path):
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it\n"
        "from pathlib import Path\n"
        "from paceline.record.ownership import InCharge, publish_controller\n"
        "here = InCharge.here(epoch=1, host='127.0.0.1', port=1)\n"
        "publish_controller(Path(sys.argv[1]), here)\n"
        "try:\n    print('ready', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    sys.exit(7)\n"
    )
    words = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        published = find_controller(tmp_path)
        assert published is not None
        # Its id alone is not enough: another process may have it by now.
        assert not replace(published, started=published.started + 1).interrupt()
        assert not replace(published, started=0).interrupt()
        assert other.poll() is None
        assert published.interrupt()
        assert other.wait(timeout=60) == 7
    assert not published.interrupt()


def test_a_controller_at_work_is_not_waited_for(tmp_path):
    in_charge(tmp_path, os.getpid())
    began = time.monotonic()
    with claim_control(tmp_path, patience_s=0.0), pytest.raises(JobError, match="R004"):
        claim_from_another(tmp_path, patience_s=120.0, is_over=lambda since_s: False)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("is_over", [False, True])
def test_what_is_left_of_a_dead_controller_and_an_end_are_waited_for(tmp_path, is_over):
    if is_over:
        pid = os.getpid()
    else:
        dead = subprocess.Popen(["true"])
        dead.wait()
        pid = dead.pid
    in_charge(tmp_path, pid)
    held = claim_control(tmp_path, patience_s=0.0)
    release = threading.Timer(1.2, held.close)
    release.start()
    claim_from_another(
        tmp_path, patience_s=PATIENCE_S, is_over=lambda since_s: is_over and since_s < time.time()
    ).close()
    release.join()
    assert held.closed


def test_a_process_id_of_another_machine_says_nothing_here(tmp_path):
    in_charge(tmp_path, os.getpid())
    held = claim_control(tmp_path, patience_s=0.0)
    release = threading.Timer(1.2, held.close)
    release.start()
    claim_from_another(
        tmp_path, patience_s=PATIENCE_S, is_over=lambda since_s: False, is_here=False
    ).close()
    release.join()
    assert held.closed


def without_locks(monkeypatch, folder: Path, number: int) -> None:
    """Have the file system of a folder answer every lock with this error."""
    real = fcntl.flock

    def flock(file, kind):
        if Path(file.name).parent == folder:
            raise OSError(number, os.strerror(number))
        return real(file, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(tempfile, "tempdir", str(folder.with_name("machine")))


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_run_begins_where_the_file_system_has_no_locks_and_is_held_once(
    monkeypatch, tmp_path, capsys, number
):
    folder = tmp_path / "run"
    folder.mkdir()
    without_locks(monkeypatch, folder, number)
    held = claim_control(folder, patience_s=0.0)
    assert os.strerror(number).lower() in capsys.readouterr().err
    with pytest.raises(JobError, match="R004: another process is running"):
        claim_control(folder, patience_s=0.0)
    agents = hold_alone(folder, patience_s=0.0)
    hold_agents(folder).close()
    with pytest.raises(JobError, match="R004"):
        hold_alone(folder, patience_s=0.0)
    held.close()
    agents.close()
    del held
    assert not (folder / OWNER_FILE).exists()
    assert not is_held(folder)


def test_without_locks_a_run_that_another_machine_claimed_is_refused_with_its_owner(
    monkeypatch, tmp_path
):
    folder = tmp_path / "run"
    folder.mkdir()
    without_locks(monkeypatch, folder, errno.ENOSYS)
    (folder / OWNER_FILE).write_text('{"host": "node-3", "pid": 77, "machine": "another"}')
    with pytest.raises(JobError, match="process 77 on node-3 claimed") as refused:
        claim_control(folder, patience_s=0.0)
    assert "-o flock" in str(refused.value)
    (folder / OWNER_FILE).unlink()
    claim_control(folder, patience_s=0.0).close()


def test_without_locks_what_a_dead_process_of_this_machine_left_is_taken_over(
    monkeypatch, tmp_path
):
    folder = tmp_path / "run"
    folder.mkdir()
    without_locks(monkeypatch, folder, errno.ENOSYS)
    left = f'{{"host": "here", "pid": 1, "machine": "{machine()}"}}'
    (folder / OWNER_FILE).write_text(left)
    held = claim_control(folder, patience_s=0.0)
    assert str(os.getpid()) in (folder / OWNER_FILE).read_text()
    held.close()


def test_a_lock_that_the_system_refuses_is_said_in_its_words(monkeypatch, tmp_path):
    without_locks(monkeypatch, tmp_path, errno.EIO)
    with pytest.raises(JobError, match="cannot be locked: input/output error"):
        claim_control(tmp_path, patience_s=5.0)
