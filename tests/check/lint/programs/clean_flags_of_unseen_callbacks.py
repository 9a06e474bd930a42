"""What callbacks of a library decide is not seen: nothing shows that ranks differ in it."""

import torch
import torch.distributed as dist
from callbacks import CallbackHandler
from torch.nn.parallel import DistributedDataParallel


def train(model, loader):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler = CallbackHandler()
    info = {"save": 10}
    for batch in loader:
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        info.update({"loss": loss.item()})
        control = handler.on_step_end(loss)
        if control.should_save:
            dist.barrier()
        if info["save"] > 5:
            dist.barrier()
