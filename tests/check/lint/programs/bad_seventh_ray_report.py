import os, tempfile
import ray.train
import torch
from ray.train import Checkpoint, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, TensorDataset


def loop(config):
    model = prepare_model(torch.nn.Linear(4, 2))
    opt = torch.optim.SGD(model.parameters(), lr=config["lr"])
    data = TensorDataset(torch.zeros(100, 4), torch.zeros(100).long())
    loader = prepare_data_loader(DataLoader(data, 8, shuffle=True))
    rank = ray.train.get_context().get_world_rank()
    for epoch in range(config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
        with tempfile.TemporaryDirectory() as d:
            ck = None
            if rank == 0:
                torch.save(model.module.state_dict(), os.path.join(d, "m.pt"))
                ck = Checkpoint.from_directory(d)
                ray.train.report({"loss": loss.item()}, checkpoint=ck)  # expect: rank0-only-collective-save


TorchTrainer(loop, train_loop_config={"lr": 0.1, "epochs": 2}, scaling_config=ScalingConfig(4, use_gpu=True)).fit()
