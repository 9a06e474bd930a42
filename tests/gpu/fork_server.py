"""An agent's fork server whose workers compute on the first GPU, all of them, over NCCL.

    PACELINE_FORK_SERVER=tests.gpu.fork_server paceline run job.yaml      (cluster.accelerator: cpu)

Two ranks on one GPU: the plan must not know of GPUs, as it gives each rank one of its own. NCCL
allows it from 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1. Each simulated node has one rank, so that
every local rank is 0.
"""

from paceline.runtime import fork_server
from paceline.runtime.devices import DEVICES


def main() -> None:
    """Entry point of the fork server's process."""
    DEVICES["gloo"] = DEVICES["nccl"]
    fork_server.main()


if __name__ == "__main__":
    main()
