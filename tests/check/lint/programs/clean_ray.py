import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model


def loop(config):
    model = prepare_model(torch.nn.Linear(4, 1))
    data = torch.utils.data.TensorDataset(torch.randn(256, 4), torch.randn(256, 1))
    loader = prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=16, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(config["epochs"]):
        for x, y in loader:
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ray.train.report({"loss": loss.item()})


TorchTrainer(loop, train_loop_config={"epochs": 3}, scaling_config=ScalingConfig(num_workers=4)).fit()
