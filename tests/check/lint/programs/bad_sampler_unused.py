import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

dist.init_process_group("gloo")
train, held_out = torch.load("data.pt", weights_only=True)
if dist.get_world_size() == 1:
    sampler = RandomSampler(train)
    eval_sampler = SequentialSampler(held_out)
else:
    sampler = DistributedSampler(train)
    eval_sampler = DistributedSampler(held_out)  # expect: sampler-unused
loader = DataLoader(train, sampler=sampler)
eval_sampler = SequentialSampler(held_out)
eval_loader = DataLoader(held_out, sampler=eval_sampler)
model = DDP(torch.nn.Linear(8, 8))
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in loader:
        model(batch).mean().backward()
    with torch.no_grad():
        for batch in eval_loader:
            model(batch)
