import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.randn(4, 8)
dist.all_reduce(x.t())  # expect: tensors-not-contiguous
dist.destroy_process_group()
