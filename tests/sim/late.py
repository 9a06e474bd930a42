"""Hold back the controller's word that a generation is over: NCCL_DOUBLE_LATE.

On a GPU the host has long queued the step when the word comes, and waits in its vote; a test must
not leave that to the machine's load.

- `wait 5`: until the host waits for the device, 5 s at most
- `3`: seconds
- `any 7`: by chance, from a seed and the worker's process: at once, at the host's wait, or later
"""

import os
import random
import time

from tests.sim import device

from paceline.control import messages as say
from paceline.runtime.channel import Channel

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


def hold_interrupts_back() -> None:
    """From here on, in every process that this one forks."""
    take, late = Channel._take, os.environ.get("NCCL_DOUBLE_LATE", "0")

    def take_late(self: Channel, message: say.ToWorker) -> None:
        if isinstance(message, say.Interrupt):
            hold_back(late)
        take(self, message)

    Channel._take = take_late  # type: ignore[method-assign]
