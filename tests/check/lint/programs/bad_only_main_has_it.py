import copy
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Speaker(torch.nn.Linear):
    def inference(self, x):
        return self(x).argmax(-1)


def main(batches):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    model = Speaker(8, 8).cuda()
    average = torch.optim.swa_utils.AveragedModel(model) if rank == 0 else None
    spare = copy.deepcopy(model) if rank == 0 else None
    model = DDP(model)
    for batch in batches:
        model(batch.cuda()).mean().backward()
        average.update_parameters(model)  # expect: main-process-only-value
        print(rank, model.inference(batch.cuda()))  # expect: ddp-method-missing
        print(rank, model.module.inference(batch.cuda()))
        if spare is not None:
            spare.load_state_dict(model.module.state_dict())


main([])
