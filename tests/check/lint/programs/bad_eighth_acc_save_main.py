import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from accelerate import Accelerator
def on_main(acc, fn, *a):
    if acc.is_main_process: fn(*a)  # expect: rank0-only-collective-save
def main(m, dl):
    acc = Accelerator(); m, dl = acc.prepare(m, dl)
    for b in dl: acc.backward(m(**b).loss)
    on_main(acc, acc.save_state, "ck")
main(nn.Linear(4, 4), DataLoader([1], 2))
