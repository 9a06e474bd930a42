"""Put a Paceline from before `runtime/devices.py` on the double: its names are replaced where a
fork server starts. For `double_soak.py --source`.
"""

import sys

if any("paceline.runtime.fork_server" in each for each in getattr(sys, "orig_argv", [])):
    import torch
    import torch.distributed as dist
    from tests.sim import backend, device, late

    import paceline.runtime.recovery.groups as groups
    import paceline.runtime.recovery.member as member
    from paceline.runtime import worker
    from paceline.runtime.checkpoint import _staging as stage

    copy = stage.Stage.copy

    def copied(self, share):
        starts = copy(self, share)
        device.synchronize()
        return starts

    def abort():
        for group in list(dist.distributed_c10d._world.pg_map):
            group._get_backend(torch.device(device.NAME)).abort()

    backend.install()
    late.hold_interrupts_back()
    worker.transports = lambda kind, layout: backend.MIXED
    member._device = lambda kind, local_rank: torch.device(device.NAME, 0)
    groups._abort_nccl = abort
    stage.Stage.copy = copied
