import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    words = open("corpus.txt").read().split()
    vocab = {w: i for i, w in enumerate(sorted(set(words)))}
    n = len(words) // world * world
    mine = words[:n][rank::world]
    model = DDP(torch.nn.Embedding(len(vocab), 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for w in mine:
        opt.zero_grad()
        model(torch.tensor([vocab[w]])).mean().backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
