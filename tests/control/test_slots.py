"""The shared memory between a worker and its agent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.control.slots import NUM_DURATIONS, Phase, SlotFile, SlotWriter, create_slot
from paceline.runtime.progress import Progress


@pytest.fixture
def slot():
    made = create_slot(3)
    yield made
    made.close()


def test_a_new_slot_says_that_the_worker_is_starting_and_has_never_ticked(slot: SlotFile):
    reading = slot.read()
    assert (reading.worker, reading.phase) == (3, Phase.STARTING)
    assert (reading.progress, reading.liveness_ns, reading.stacks_ready) == (0, 0, False)


def test_the_agent_reads_what_the_worker_wrote_last(slot: SlotFile):
    writer = SlotWriter(slot.fd)
    writer.begin(5, training_thread=77)
    writer.enter(Phase.FORWARD, 11, 2, True)
    writer.tick(78)
    reading = slot.read()
    assert (reading.generation, reading.step, reading.phase) == (5, 11, Phase.FORWARD)
    assert (reading.micro_batch, reading.is_first_step) == (2, True)
    assert (reading.training_thread, reading.liveness_thread) == (77, 78)
    assert reading.progress == 1
    assert reading.liveness_ns > 0
    assert not reading.is_torn
    writer.close()


def test_a_file_that_is_no_slot_is_refused(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"\0" * 4096)
    with path.open("r+b") as file, pytest.raises(ValueError, match="not a slot"):
        SlotWriter(file.fileno())


def test_every_phase_that_ended_is_learned_once(slot: SlotFile):
    writer = SlotWriter(slot.fd)
    writer.enter(Phase.FORWARD, 1, 0, True)
    writer.enter(Phase.BACKWARD, 1, 0, False)
    found = slot.take_durations()
    assert [(one.phase, one.is_first_step) for one in found] == [
        (Phase.STARTING, False),
        (Phase.FORWARD, True),
    ]
    assert all(0 <= one.seconds < 60 for one in found)
    assert slot.take_durations() == []
    writer.enter(Phase.VOTE, 1)
    assert [one.phase for one in slot.take_durations()] == [Phase.BACKWARD]
    writer.close()


def test_a_phase_that_was_cut_short_teaches_nothing(slot: SlotFile):
    writer = SlotWriter(slot.fd)
    writer.enter(Phase.BACKWARD, 1)
    writer.abandon(Phase.PARKED, 1)
    writer.enter(Phase.JOINING, 1)
    assert [one.phase for one in slot.take_durations()] == [Phase.STARTING, Phase.PARKED]
    writer.close()


def test_a_reader_that_comes_late_gets_the_newest_phases(slot: SlotFile):
    writer = SlotWriter(slot.fd)
    for step in range(10 * NUM_DURATIONS):
        writer.enter(Phase.FORWARD, step)
    assert len(slot.take_durations()) == NUM_DURATIONS - 1
    writer.close()


def test_a_reader_never_sees_half_of_two_places(slot: SlotFile):
    program = (
        "import sys\n"
        "from paceline.control.slots import Phase, SlotWriter\n"
        "writer, step = SlotWriter(int(sys.argv[1])), 0\n"
        "while True:\n"
        "    step += 1\n"
        "    writer.enter(Phase.FORWARD, step, step)\n"
        "    sum(range(100))\n"
    )
    command = [sys.executable, "-c", program, str(slot.fd)]
    worker = subprocess.Popen(command, pass_fds=[slot.fd])
    try:
        while not slot.read().progress:
            pass
        readings = [slot.read() for _ in range(20_000)]
    finally:
        worker.kill()
        worker.wait()
    whole = [one for one in readings if not one.is_torn]
    assert len(whole) > 100
    assert all(one.step == one.micro_batch for one in whole)


def test_a_worker_without_a_slot_works_all_the_same():
    progress = Progress(None)
    progress.begin(1)
    progress.watch()
    progress.begin_step(1)
    progress.enter(Phase.FORWARD)
    assert progress.step_done() is None
    progress.interrupted()


def test_no_segment_is_left_when_a_worker_and_its_agent_are_killed():
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    program = (
        "import subprocess, sys\n"
        "from paceline.control.slots import create_slot\n"
        "slot = create_slot(0)\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " pass_fds=[slot.fd])\n"
        "print(worker.pid, flush=True)\n"
        "worker.wait()\n"
    )
    agent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    worker = int(agent.stdout.readline())
    links = [os.readlink(link) for link in Path(f"/proc/{worker}/fd").iterdir()]
    assert any("paceline-slot" in link for link in links)
    agent.kill()
    os.kill(worker, signal.SIGKILL)
    agent.communicate()
    after = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    assert not [name for name in after - before if "paceline" in name]
