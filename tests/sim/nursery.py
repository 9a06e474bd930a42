"""An agent's nursery whose workers compute on the device `sim` over the double of NCCL.

    PACELINE_NURSERY=tests.sim.nursery paceline run job.yaml      (cluster.accelerator: cpu)

Beside the double's own settings (`backend.py`): NCCL_DOUBLE_LATE holds back the controller's word
that a generation is over. On a GPU the host has long queued the step when it comes, and waits in
its vote; a test must not leave that to the machine's load.

- `wait 5`: until the host waits for the device, 5 s at most
- `3`: seconds
- `any 7`: by chance, from a seed and the worker's process: at once, at the host's wait, or later

NCCL_DOUBLE_DIE_SENDING names a file: who sends a device tensor while it is not there makes it and
dies, so that a receiver waits for what never comes.
"""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from tests.sim import backend, device

from paceline.control import messages as say
from paceline.runtime import channel, nursery
from paceline.runtime.devices import DEVICES, Device

LATEST_S = 0.5
"""How late a word by chance is at most, beyond the host's wait. A guess."""


def hold_back(late: str) -> None:
    """Wait as the setting says."""
    how, _, number = late.rpartition(" ")
    if how == "any":
        drawn = random.Random(f"{number} {os.getpid()} {time.monotonic()}").random()
        if drawn < 1 / 3:
            return
        device.host_waits.wait(LATEST_S)
        if drawn > 2 / 3:
            time.sleep((3 * drawn - 2) * LATEST_S)
    elif how == "wait":
        device.host_waits.wait(float(number))
    else:
        time.sleep(float(number))


def main() -> None:
    backend.install()
    DEVICES["gloo"] = Device(device.NAME, "nccl_double_gloo")
    take, late = channel.Channel._take, os.environ.get("NCCL_DOUBLE_LATE", "0")

    def take_late(self: channel.Channel, message: say.ToWorker) -> None:
        if isinstance(message, say.Interrupt):
            hold_back(late)
        take(self, message)

    channel.Channel._take = take_late  # type: ignore[method-assign]
    mark = os.environ.get("NCCL_DOUBLE_DIE_SENDING")
    if mark is not None:
        backend.Group.send = _die_once(backend.Group.send, Path(mark))
    nursery.main()


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
