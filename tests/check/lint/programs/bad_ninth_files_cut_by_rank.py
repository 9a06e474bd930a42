import glob
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __init__(self, files):
        self.files = files

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return torch.load(self.files[index], weights_only=True)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    files = sorted(glob.glob("data/*.pt"))
    files = files[rank::world]  # expect: uneven-inputs-hang
    loader = DataLoader(Rows(files), batch_size=8)
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(20):
        for x in loader:
            opt.zero_grad()
            model(x).mean().backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
