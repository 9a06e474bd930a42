import argparse
import os
import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torchvision import transforms


def get_loaders(batch_size, workers):
    tf = transforms.Compose([transforms.ToTensor()])
    train = torchvision.datasets.CIFAR10("/data", train=True, transform=tf)
    val = torchvision.datasets.CIFAR10("/data", train=False, transform=tf)
    opts = dict(batch_size=batch_size, num_workers=workers, pin_memory=True)
    train_loader = torch.utils.data.DataLoader(train, shuffle=True, **opts)  # expect: sampler-missing
    val_loader = torch.utils.data.DataLoader(val, shuffle=False, **opts)
    return train_loader, val_loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl")
    train_loader, val_loader = get_loaders(args.batch_size, 4)
    model = torchvision.models.resnet50(num_classes=10).cuda()
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DDP(model, device_ids=[local_rank])
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(args.epochs):
        model.train()
        for images, target in train_loader:
            images, target = images.cuda(non_blocking=True), target.cuda(non_blocking=True)
            loss = criterion(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
