import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler


def collate(rows):
    return pad_sequence(rows, batch_first=True)  # expect: compile-recompile-limit


def main(rows):
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    layer = torch.nn.TransformerEncoderLayer(64, 4).cuda()
    model = DDP(torch.compile(layer))  # expect: compile-rank-skew
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(rows)
    loader = DataLoader(rows, 8, sampler=sampler, collate_fn=collate)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = model(batch.cuda()).pow(2).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
            optimizer.zero_grad()


main([])
