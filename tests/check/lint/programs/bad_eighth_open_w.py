import os, json, torch
import torch.distributed as dist
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel as DDP
OUT = Path("out")
class Log:
    def __init__(self, out): self.out = out
    def dump(self, d):
        with open(os.path.join(self.out, "metrics.json"), "w") as f:  # expect: all-ranks-save-same-file
            json.dump(d, f)
def main(dl):
    gpu = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(gpu); dist.init_process_group("nccl")
    m = DDP(torch.nn.Linear(4, 4).cuda(), device_ids=[gpu]); o = torch.optim.AdamW(m.parameters()); log = Log("out")
    for x in dl:
        m(x.cuda()).mean().backward(); o.step(); o.zero_grad()
    log.dump({"a": 1})
    (OUT / "config.json").write_text("{}")  # expect: all-ranks-save-same-file
main(None)
