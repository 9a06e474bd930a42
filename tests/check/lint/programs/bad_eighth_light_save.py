import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
import lightning.pytorch as pl
class Cb(pl.Callback):
    def on_train_end(self, trainer, module):
        if trainer.global_rank == 0:
            trainer.save_checkpoint("x.ckpt")  # expect: rank0-only-collective-save
t = pl.Trainer(callbacks=[Cb()], strategy="fsdp", devices=8)
