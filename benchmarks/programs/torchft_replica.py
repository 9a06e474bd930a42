"""Inside the replicas of `recovery.py`: the same model under torchft, each rank a replica group.

torchft's own way: survivors go on without the dead replica, and without its share of the batch, and
a new process that the supervisor starts heals from a live peer. Every replica notes when it has
committed a step, and among how many; one kills itself every so often, once all are there again.

    TORCHFT_LIGHTHOUSE=http://... torchft_replica.py OUT REPLICA NUM_REPLICAS NUM_KILLS EVERY
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from restarting import PER_RANK, SEQ_LEN, SHAPE
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from paceline.runtime.decoder import Decoder


def main() -> None:
    """One life of one replica."""
    out, replica, num_replicas, num_kills, every = Path(sys.argv[1]), *map(int, sys.argv[2:])
    life = len(list(out.glob("kill-*")))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    model = Decoder(SHAPE, SEQ_LEN)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=num_replicas - 1,
        timeout=timedelta(seconds=20),
        replica_id=f"replica_{replica}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    complete = 0
    with (out / f"steps-{replica}.jsonl").open("a", buffering=1) as log:
        while not (out / "end").exists():
            optimizer.zero_grad()
            before = manager.current_step()
            generator = torch.Generator().manual_seed(before * num_replicas + replica)
            tokens = torch.randint(0, 256, (PER_RANK, SEQ_LEN + 1), generator=generator)
            logits = wrapped(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            done = len(list(out.glob("kill-*")))
            if complete >= every and done < num_kills and done % num_replicas == replica:
                (out / f"kill-{done}").write_text(json.dumps(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            if manager.current_step() > before:
                present = manager.num_participants()
                complete = complete + 1 if present == num_replicas else 0
                log.write(json.dumps([life, before, time.monotonic(), present]) + "\n")
            if complete >= every and done == num_kills:
                (out / "end").touch()
    os._exit(0)  # its threads do not end


if __name__ == "__main__":
    main()
