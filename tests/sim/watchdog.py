"""The watchdog of a double's group: what ProcessGroupNCCL's does at an error or a time limit.

Source: torch 2.13, `ProcessGroupNCCL::Watchdog::runLoop`.
"""

import os
import signal
import time

from torch._C._distributed_c10d import ErrorType

_WATCH_S = 0.1


def watch(group):
    """Look every 100 ms; note the error, sleep, then end the process where the mode says so."""
    while not group.aborted.wait(_WATCH_S):
        group.works = [work for work in group.works if not work.is_completed()]
        late = any(time.monotonic() > work.deadline for work in group.works)
        if not late and not (group.works and _notices_death() and _has_lost_one(group)):
            continue
        if group.error == ErrorType.SUCCESS:
            group.error = ErrorType.TIMEOUT if late else ErrorType.COMM_ERROR
        dump = int(os.environ.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000"))
        time.sleep(4 * dump / 1000)  # in every mode, even where nothing follows
        if group.handling in (1, 2):
            group.abort()
        if group.handling in (1, 3):
            print(f"watchdog: {group.error}; taking the process down", flush=True)
            os.kill(os.getpid(), signal.SIGABRT)
        return


def _notices_death():
    """`hang`, as over NVLink: nobody notices. `error`: an asynchronous error, as from a network."""
    return os.environ.get("NCCL_DOUBLE_PEER_DEATH", "hang") == "error"


def _has_lost_one(group):
    store = group.wire.store
    return any(
        store.check([f"pid/{rank}"]) and not _lives(store.get(f"pid/{rank}").decode())
        for rank in range(group.size())
    )


def _lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
