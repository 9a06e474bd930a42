"""An agent's fork server whose workers compute on one device, all of them, over gloo alone.

    PACELINE_FORK_SERVER=tests.gpu.gloo_fork_server PACELINE_KIT_DEVICE=cuda paceline run job.yaml

(cluster.accelerator: cpu.) Everything but NCCL is what runs on a GPU: the device's tensors, its
streams, recovery's copies. Messages from rank to rank go through the host: gloo's cannot be read
from a GPU's memory. Each simulated node has one rank, so that every local rank is 0.
"""

import os
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline.runtime import fork_server
from paceline.runtime.devices import DEVICES, Device


class _Arriving:
    """A message that comes to the host and is then copied to where it was wanted."""

    def __init__(self, work: dist.Work, near: Tensor, wanted: Tensor) -> None:
        self._work, self._near, self._wanted = work, near, wanted

    def wait(self) -> None:
        self._work.wait()
        self._wanted.copy_(self._near)


def through_host(messages: list[dist.P2POp]) -> list[Any]:
    """`dist.batch_isend_irecv` with a copy in the host's memory for each message."""
    works: list[Any] = []
    for each in messages:
        near = (
            each.tensor.cpu()
            if each.op is dist.isend
            else each.tensor.new_empty(each.tensor.shape, device="cpu")
        )
        work = each.op(near, each.peer, each.group)
        works.append(work if each.op is dist.isend else _Arriving(work, near, each.tensor))
    return works


def main() -> None:
    """Entry point of the fork server's process."""
    DEVICES["gloo"] = Device(os.environ["PACELINE_KIT_DEVICE"], "gloo")
    dist.batch_isend_irecv = through_host
    fork_server.main()


if __name__ == "__main__":
    main()
