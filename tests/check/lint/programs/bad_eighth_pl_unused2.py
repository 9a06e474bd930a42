import pytorch_lightning as pl
pl.Trainer(devices=8, strategy="ddp_find_unused_parameters_true")  # expect: ddp-find-unused-overhead
