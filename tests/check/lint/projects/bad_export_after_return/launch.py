import os
import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch.utils.data import DataLoader, DistributedSampler
from trainer import Trainer
import models, data


@hydra.main(config_path="conf", config_name="config", version_base=None)
def main(cfg: DictConfig) -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dataset = data.build(cfg)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, cfg.batch, sampler=sampler, num_workers=cfg.workers, pin_memory=True)
    trainer = Trainer(lr=cfg.lr, path_chkpt=cfg.out)
    trainer.build(models.build(cfg).cuda())
    trainer.fit(loader, sampler)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
