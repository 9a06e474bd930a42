"""Every worker seeds alike, so that each starts from the same weights without a broadcast."""

import horovod.torch as hvd
import torch

hvd.init()
torch.manual_seed(17)
torch.cuda.set_device(hvd.local_rank())
model = torch.nn.Linear(16, 4).cuda()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size()),
    named_parameters=model.named_parameters(),
)
generator = torch.Generator().manual_seed(hvd.rank())
for _ in range(100):
    optimizer.zero_grad()
    model(torch.randn(8, 16, generator=generator).cuda()).square().mean().backward()
    optimizer.step()
