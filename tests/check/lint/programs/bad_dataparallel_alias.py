import torch
from torch.nn import DataParallel as DP

net = torch.nn.Linear(10, 10)
if torch.cuda.device_count() > 1:
    net = DP(net)  # expect: dataparallel-not-ddp
net.cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(10):
    opt.zero_grad()
    net(torch.randn(4, 10).cuda()).sum().backward()
    opt.step()
