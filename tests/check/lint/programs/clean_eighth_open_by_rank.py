import os, json, tempfile, torch
import torch.distributed as dist
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel as DDP
OUT = Path("out")
def main(dl, log=None):
    gpu = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(gpu); dist.init_process_group("nccl")
    rank = dist.get_rank()
    m = DDP(torch.nn.Linear(4, 4).cuda(), device_ids=[gpu]); o = torch.optim.AdamW(m.parameters())
    with open(f"out/rank{rank}.json", "w") as f: json.dump({}, f)
    with open(os.devnull, "w") as f: print("x", file=f)
    with open(tempfile.mkstemp()[1], "w") as f: print("x", file=f)
    with open("out/a.json") as f: json.load(f)
    with open("/dev/null", "w") as f: print("x", file=f)
    log = open(OUT / "log.txt", "w") if rank == 0 else None
    if rank == 0:
        (OUT / "config.json").write_text("{}")
    (Path("/tmp") / f"r{gpu}.txt").write_text("{}")
    for x in dl:
        m(x.cuda()).mean().backward(); o.step(); o.zero_grad()
main(None)
