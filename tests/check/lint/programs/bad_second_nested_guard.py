import logging
import os

import torch
from torch import distributed


class Checkpointer:
    def __init__(self, folder):
        self.folder = folder
        self.rank = distributed.get_rank()

    def save(self, state, step):
        if self.rank == 0:
            logging.info("saving")
            tmp = os.path.join(self.folder, "tmp.pt")
            torch.save(state, tmp)
            self._publish(tmp, step)

    def _publish(self, tmp, step):
        os.replace(tmp, os.path.join(self.folder, f"{step}.pt"))


def run(model, steps):
    distributed.init_process_group("gloo")
    ckpt = Checkpointer("out")
    for step in range(steps):
        if step % 10 == 0:
            ckpt.save(model.state_dict(), step)
            if ckpt.rank == 0:
                distributed.barrier()  # expect: collective-mismatch
