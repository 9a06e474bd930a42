"""An agent's fork server whose workers compute on the device `sim` over the double of NCCL.

    PACELINE_FORK_SERVER=tests.sim.fork_server paceline run job.yaml      (cluster.accelerator: cpu)

Its settings are `NCCL_DOUBLE_...` in the environment: see `backend.py`, `watchdog.py`, `late.py`.
NCCL_DOUBLE_DIE_SENDING names a file: who sends a device tensor while it is not there makes it and
dies, so that a receiver waits for what never comes.
"""

import os
import signal
from pathlib import Path
from typing import Any

from tests.sim import backend, device, late

from paceline.runtime import fork_server
from paceline.runtime.devices import DEVICES, Device


def main() -> None:
    backend.install()
    DEVICES["gloo"] = Device(device.NAME, backend.MIXED)
    late.hold_interrupts_back()
    mark = os.environ.get("NCCL_DOUBLE_DIE_SENDING")
    if mark is not None:
        backend.Group.send = _die_once(backend.Group.send, Path(mark))
    fork_server.main()


def _die_once(send: Any, mark: Path) -> Any:
    def die(*args: Any, **kwargs: Any) -> Any:
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return send(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    return die


if __name__ == "__main__":
    main()
