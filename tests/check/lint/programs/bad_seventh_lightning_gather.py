import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def training_step(self, batch, i):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, i):
        x, y = batch
        self.log("val", torch.nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def on_validation_epoch_end(self):
        if self.trainer.is_global_zero:
            total = self.all_gather(torch.ones(1))
            print(total)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


data = TensorDataset(torch.zeros(100, 4), torch.zeros(100).long())
trainer = pl.Trainer(devices=8, strategy="ddp", max_epochs=3)
trainer.fit(Lit(), DataLoader(data, 8, shuffle=True), DataLoader(data, 8))
if trainer.global_rank == 0:
    trainer.save_checkpoint("last.ckpt")  # expect: rank0-only-collective-save
