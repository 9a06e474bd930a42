"""Eight workers of a GPU each on a local cluster of four."""

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def work(config):
    print(config)


ray.init(num_gpus=4)
scaling = ScalingConfig(num_workers=8, use_gpu=True)  # expect: ray-unsatisfiable-resources
TorchTrainer(work, scaling_config=scaling).fit()
