"""Inside the ranks of `recovery.py`: plain DDP that saves often and is restarted by torchrun.

What a person writes by hand: build, load the newest checkpoint, train, save from rank 0. One rank
kills itself at planned steps; every rank notes when it has finished a step.

    torchrun --nproc-per-node 4 --max-restarts 99 restarting.py OUT NUM_KILLS EVERY
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from paceline.profile import DecoderShape
from paceline.runtime.decoder import Decoder

SHAPE = DecoderShape(
    layers=3,
    hidden=128,
    heads=4,
    kv_heads=4,
    head_dim=32,
    ffn=352,
    vocab=256,
    tied_embeddings=False,
)
SEQ_LEN, PER_RANK = 128, 2


def main() -> None:
    """One life of one rank."""
    out, num_kills, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = Decoder(SHAPE, SEQ_LEN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step, saved = 0, out / "state.pt"
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    wrapped = DistributedDataParallel(model)
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    kill_at, victim = every * (life + 1), life % world
    with (out / f"steps-{rank}.jsonl").open("a", buffering=1) as log:
        while step < every * num_kills + 5:
            step += 1
            generator = torch.Generator().manual_seed(step * world + rank)
            tokens = torch.randint(0, 256, (PER_RANK, SEQ_LEN + 1), generator=generator)
            logits = wrapped(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            if life < num_kills and step == kill_at and rank == victim:
                (out / f"kill-{life}").write_text(json.dumps(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log.write(json.dumps([life, step, time.monotonic()]) + "\n")
            if rank == 0 and step % 5 == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step}, out / "state.tmp")
                (out / "state.tmp").rename(saved)
    dist.barrier()


if __name__ == "__main__":
    main()
