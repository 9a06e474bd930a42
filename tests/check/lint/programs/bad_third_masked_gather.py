import torch
import torch.distributed as dist


def hard_examples(loss, ids):
    picked = ids[loss > loss.mean()]
    out = [torch.empty_like(picked) for _ in range(dist.get_world_size())]
    dist.all_gather(out, picked)  # expect: gloo-size-mismatch
    return torch.cat(out)


def main(loss, ids):
    dist.init_process_group("gloo")
    print(hard_examples(loss, ids))
    dist.destroy_process_group()
