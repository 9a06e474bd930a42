"""A process with a slot that gets stuck as it is told: python stuck_program.py FD KIND."""

import ctypes
import sys
import threading
import time

from paceline.control.slots import Phase, SlotWriter
from paceline.runtime.progress import Progress


def main() -> None:
    fd, kind = int(sys.argv[1]), sys.argv[2]
    progress = Progress(SlotWriter(fd))
    progress.begin(1)
    progress.watch()
    progress.begin_step(1)
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.VOTE):
        progress.enter(phase)
    match kind:
        case "runs":
            while True:
                progress.enter(Phase.FORWARD)
                time.sleep(0.02)
        case "sleeps":
            time.sleep(600)
        case "loops":
            while True:
                pass
        case "deadlocks":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case "holds the interpreter asleep":
            ctypes.PyDLL(None).sleep(600)
        case "holds the interpreter busy":
            import re

            re.match(r"(a+)+$", "a" * 60 + "b")


if __name__ == "__main__":
    main()
