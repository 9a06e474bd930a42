import os
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


class Trainer:
    def __init__(self, model):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        torch.cuda.set_device(self.local_rank)
        self.model = model.cuda()
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, batch):
        loss = self.model(batch.cuda()).mean()
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()

    def save(self, path):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        torch.save(state, path)


def main(model, loader):
    dist.init_process_group("nccl")
    trainer = Trainer(model)
    for i, batch in enumerate(loader):
        trainer.step(batch)
        if i % 1000 == 0 and trainer.global_rank == 0:
            trainer.save(f"step{i}.pt")  # expect: rank0-only-collective-save
    dist.destroy_process_group()
