import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.cuda.set_device(hvd.local_rank())
net = torch.nn.Linear(8, 8).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
opt = hvd.DistributedOptimizer(opt, named_parameters=net.named_parameters())
hvd.broadcast_parameters(net.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(opt, root_rank=0)
data = torch.utils.data.TensorDataset(torch.randn(512, 8))
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, sampler=sampler, batch_size=16)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        opt.zero_grad()
        net(x.cuda()).square().mean().backward()
        opt.step()
