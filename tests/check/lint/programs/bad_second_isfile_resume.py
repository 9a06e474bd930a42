import os
import torch
import torch.distributed as dist


def sync_model(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


def restore(model, ckpt_path):
    found = os.path.isfile(ckpt_path)
    if not found:  # expect: divergent-filesystem-branch
        print("starting from scratch")
    else:
        model.load_state_dict(torch.load(ckpt_path, weights_only=True))
        sync_model(model)


def main():
    dist.init_process_group("gloo")
    restore(torch.nn.Linear(2, 2), "/nfs/run/ckpt.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
