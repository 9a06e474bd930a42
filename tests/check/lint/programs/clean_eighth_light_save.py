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
        if True:
            trainer.save_checkpoint("x.ckpt")
t = pl.Trainer(callbacks=[Cb()], strategy="fsdp", devices=8)
