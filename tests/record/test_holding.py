"""Who may control a run that another command has, or had until now."""

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from paceline.errors import JobError
from paceline.record.holding import (
    InCharge,
    claim_control,
    claim_from_another,
    publish_controller,
)

PATIENCE_S = 5.0


def in_charge(folder: Path, pid: int) -> None:
    publish_controller(folder, InCharge(pid=pid, epoch=1, host="127.0.0.1", port=1))


def test_a_controller_at_work_is_not_waited_for(tmp_path):
    in_charge(tmp_path, os.getpid())
    began = time.monotonic()
    with claim_control(tmp_path, patience_s=0.0), pytest.raises(JobError, match="R004"):
        claim_from_another(tmp_path, patience_s=PATIENCE_S, is_over=lambda since_s: False)
    assert time.monotonic() - began < PATIENCE_S / 2


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
