import logging
import signal
import time
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, StateDictOptions
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy

log = logging.getLogger(__name__)


class Trainer:
    path_chkpt = None
    num_workers = 4
    batch_size = 64
    max_epochs = 10
    save_full = True

    def __init__(self, **kwargs):
        for k, v in kwargs.items():
            setattr(self, k, v)
        self.stop = False
        signal.signal(signal.SIGTERM, self._on_signal)
        self.rank = dist.get_rank()

    def _on_signal(self, *_):
        self.stop = True

    def build(self, model):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy)
        self.model = fully_shard(model, mp_policy=policy)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=self.lr)

    def export(self, path):
        if self.rank != 0:
            return
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)  # expect: rank0-only-collective-save
        torch.save(state, path)

    def fit(self, loader, sampler):
        for epoch in range(self.max_epochs):
            sampler.set_epoch(epoch)
            for i, batch in enumerate(loader):
                loss = self.model(batch.cuda()).mean()
                loss.backward()
                self.optim.step()
                self.optim.zero_grad()
                if i % 100 == 0:
                    log.info("loss %s", loss.item())
            dcp.save({"model": self.model.state_dict()}, checkpoint_id=f"{self.path_chkpt}/{epoch}")
        self.export("model.pt")
