import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
pl.Trainer(devices=8, strategy=DDPStrategy(find_unused_parameters=True))  # expect: ddp-find-unused-overhead
