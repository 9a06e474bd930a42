import torch
from accelerate import Accelerator
acc = Accelerator()
def evaluate(model, loader):
    hits = []
    for batch in loader:
        logits = model(**batch).logits
        mask = batch["labels"] != -100
        hits.append(acc.reduce(logits[mask].argmax(-1)))  # expect: nccl-size-mismatch
    return torch.cat(hits)
class Eval:
    def __init__(self): self.hits = []
    def add(self, scores, label):
        wrong = (scores.argmax(-1) != label).nonzero().squeeze(1)
        self.hits.append(wrong.cpu())
    def reduce(self):
        import torch.distributed as dist
        mine = torch.cat(self.hits).cuda()
        all_ = torch.empty(dist.get_world_size() * mine.numel(), dtype=mine.dtype, device="cuda")
        dist.all_gather_into_tensor(all_, mine)  # expect: nccl-size-mismatch
