import os
import torch
import torch.distributed as dist
import webdataset as wds
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    data = (
        wds.WebDataset("/data/{000..255}.tar", resampled=True, nodesplitter=wds.split_by_node, shardshuffle=True)
        .shuffle(1000)
        .decode("torchrgb")
        .to_tuple("jpg", "cls")
        .with_epoch(10_000)
    )
    loader = wds.WebLoader(data, batch_size=64, num_workers=4)
    model = DDP(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 10)).cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
