"""What a worker says about where it is, into the slot its agent made for it.

The training thread calls `enter` at every change of phase. A second thread ticks ten times a
second: it needs the interpreter to do so, and thereby shows that nobody else holds it for long.
Tracebacks of all threads are written by `faulthandler` when the agent asks with a signal; that
needs neither thread.
"""

import faulthandler
import os
import threading
import time

from paceline.control.slots import STACKS_SIGNAL, TICK_S, Phase, SlotWriter


class Progress:
    """This worker's writer of its slot; without a slot, every call does nothing."""

    def __init__(self, slot: SlotWriter | None) -> None:
        self._slot = slot
        self._thread = 0
        self._at = self._before_compiling = (Phase.STARTING, 0)
        self._step = 0
        self._is_first = False
        self._first_step = 0
        self._runnable_fd = -1
        self._runnable_ns = 0
        self._late_ns = 0
        self._seen_late_ns = 0

    def begin(self, generation: int) -> None:
        """The calling thread is the training thread, in this generation from now on."""
        if self._slot is None:
            return
        self._thread = threading.get_native_id()
        self._slot.begin(generation, training_thread=self._thread)
        self._first_step = 0
        self._open_runnable()

    def watch(self) -> None:
        """Start the second thread, and be ready to write tracebacks."""
        if self._slot is None:
            return
        faulthandler.register(STACKS_SIGNAL, file=self._slot.fd, all_threads=True)
        self._slot.stacks_ready()
        threading.Thread(target=self._tick, name="paceline-liveness", daemon=True).start()

    def enter(self, phase: Phase, micro_batch: int = 0) -> None:
        """The training thread goes on to this phase, of the step in work."""
        if self._slot is not None:
            self._at = phase, micro_batch
            self._slot.enter(phase, self._step, micro_batch, self._is_first)

    def begin_step(self, step: int) -> None:
        """The training thread goes on to this step."""
        self._first_step = self._first_step or step
        self._step, self._is_first = step, step == self._first_step
        self._lap_runnable()

    def step_done(self) -> float | None:
        """Seconds of the step in work in which this rank was not waiting; None where the system
        does not say."""
        own_ns = self._lap_runnable()
        if self._slot is None or own_ns is None:
            return None
        return own_ns / 1e9

    def interrupted(self, phase: Phase = Phase.PARKED) -> None:
        """The phase in work was cut short."""
        if self._slot is not None:
            self._is_first = False
            self._slot.abandon(phase, self._step)

    def tell_of_compiling(self) -> None:
        """Call it once torch is there: torch.compile compiles whenever it meets something new, and
        that is no part of the phase it happens in."""
        if self._slot is None:
            return
        from paceline.runtime._torch_private import on_compiling

        on_compiling(self._compiling, self._compiled)

    def _compiling(self) -> None:
        if threading.get_native_id() == self._thread:
            self._before_compiling = self._at
            self.enter(Phase.COMPILING)

    def _compiled(self) -> None:
        if threading.get_native_id() == self._thread:
            self.enter(*self._before_compiling)

    def _tick(self) -> None:
        slot = self._slot
        assert slot is not None
        thread, due_ns = threading.get_native_id(), time.monotonic_ns()
        while True:
            slot.tick(thread)
            due_ns += round(TICK_S * 1e9)
            wait_ns = due_ns - time.monotonic_ns()
            if wait_ns > 0:
                time.sleep(wait_ns / 1e9)
            late_ns = time.monotonic_ns() - due_ns
            if late_ns > _LATE_NS:  # stopped for a while: time that no counter of the kernel has
                self._late_ns += late_ns
                due_ns += late_ns

    def _open_runnable(self) -> None:
        if self._runnable_fd >= 0:
            os.close(self._runnable_fd)
            self._runnable_fd = -1
        try:
            self._runnable_fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return  # not Linux, or a kernel without scheduler statistics
        self._lap_runnable()

    def _lap_runnable(self) -> int | None:
        """Nanoseconds since the last call in which the training thread ran or wanted to run, and
        those in which the whole process was stopped.

        The first two numbers of schedstat are the time on a core and the time waiting for one
        (Documentation/scheduler/sched-stats.rst); a thread that waits for other ranks sleeps, and
        is in neither.
        """
        if self._runnable_fd < 0:
            return None
        on_core, for_core, *_ = os.pread(self._runnable_fd, 64, 0).split()
        runnable, late = int(on_core) + int(for_core), self._late_ns
        lap = runnable - self._runnable_ns + late - self._seen_late_ns
        self._runnable_ns, self._seen_late_ns = runnable, late
        return lap


_LATE_NS = 20_000_000
"""A tick that comes this much too late counts as time in which the process was stopped. A guess:
four of the interpreter's switch intervals, which a busy training thread makes it wait."""


def open_progress(slot_fd: int | None) -> Progress:
    """The writer for the slot that the agent handed over; None is no slot."""
    return Progress(SlotWriter(slot_fd) if slot_fd is not None else None)
