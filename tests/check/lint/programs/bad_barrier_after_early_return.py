import torch
import torch.distributed as dist


def setup():
    dist.init_process_group(backend="gloo")
    return dist.get_rank(), dist.get_world_size()


def save_checkpoint(model, rank, path):
    if rank != 0:
        return
    torch.save(model.state_dict(), path)
    dist.barrier()  # expect: collective-mismatch


def main():
    rank, world_size = setup()
    model = torch.nn.Linear(8, 8)
    save_checkpoint(model, rank, "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
