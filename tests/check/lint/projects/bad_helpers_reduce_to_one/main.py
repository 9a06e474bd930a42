import argparse
import os
import torch
import comm
from engine import evaluate, train_one_epoch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, BatchSampler, SequentialSampler, TensorDataset


def init_distributed_mode(args):
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        args.rank = int(os.environ["RANK"])
        args.world_size = int(os.environ["WORLD_SIZE"])
        args.gpu = int(os.environ["LOCAL_RANK"])
    elif "SLURM_PROCID" in os.environ:
        args.rank = int(os.environ["SLURM_PROCID"])
        args.gpu = args.rank % torch.cuda.device_count()
    else:
        args.distributed = False
        return
    args.distributed = True
    torch.cuda.set_device(args.gpu)
    torch.distributed.init_process_group(backend="nccl", init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    torch.distributed.barrier()
    comm.setup_for_distributed(args.rank == 0)


def main(args):
    init_distributed_mode(args)
    device = torch.device(args.device)
    torch.manual_seed(args.seed + comm.get_rank())
    model = torch.nn.Linear(4, 2).to(device)
    bare = model
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
        bare = model.module
    optimizer = torch.optim.AdamW([{"params": [p for p in bare.parameters() if p.requires_grad]}], lr=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    train, val = TensorDataset(torch.zeros(100, 4), torch.zeros(100).long()), TensorDataset(torch.zeros(100, 4), torch.zeros(100).long())
    if args.distributed:
        sampler_train, sampler_val = DistributedSampler(train), DistributedSampler(val, shuffle=False)
    else:
        sampler_train, sampler_val = RandomSampler(train), SequentialSampler(val)
    batches = BatchSampler(sampler_train, args.batch_size, drop_last=True)
    loader_train = DataLoader(train, batch_sampler=batches, num_workers=2)
    loader_val = DataLoader(val, args.batch_size, sampler=sampler_val, num_workers=2)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu")
        bare.load_state_dict(checkpoint["model"])
        if not args.eval and "optimizer" in checkpoint:
            optimizer.load_state_dict(checkpoint["optimizer"])
            scheduler.load_state_dict(checkpoint["scheduler"])
            args.start_epoch = checkpoint["epoch"] + 1
    if args.eval:
        print(evaluate(model, loader_val, device))
        return
    for epoch in range(args.start_epoch, args.epochs):
        if args.distributed:
            sampler_train.set_epoch(epoch)
        train_one_epoch(model, torch.nn.functional.cross_entropy, loader_train, optimizer, device, epoch)
        scheduler.step()
        comm.save_on_master({"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "epoch": epoch}, os.path.join(args.out, f"checkpoint{epoch:04}.pth"))
        stats = evaluate(model, loader_val, device)
        if comm.is_main_process():
            with open("log.txt", "a") as f:
                f.write(f"{stats}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--start_epoch", type=int, default=0)
    parser.add_argument("--resume", default="")
    parser.add_argument("--out", default="")
    parser.add_argument("--eval", action="store_true")
    parser.add_argument("--dist_url", default="env://")
    main(parser.parse_args())
