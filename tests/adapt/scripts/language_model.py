# A small transformer on characters. Gradient accumulation, cosine schedule with warmup.
import math
import os
import time

import torch
from torch import nn
from torch.utils.data import Dataset, DataLoader

# ---- settings
block_size = 16
batch_size = 4
grad_accum_steps = 4
max_epochs = 2
learning_rate = 3e-3
warmup_steps = 3
max_grad_norm = 1.0
out_dir = "lm-out"

torch.manual_seed(1337)
device = "cuda" if torch.cuda.is_available() else "cpu"

TEXT = "the quick brown fox jumps over the lazy dog and runs away from it. " * 20
chars = sorted(set(TEXT))
stoi = {c: i for i, c in enumerate(chars)}


class CharDataset(Dataset):
    def __init__(self, text):
        self.ids = torch.tensor([stoi[c] for c in text])

    def __len__(self):
        return (len(self.ids) - 1) // block_size

    def __getitem__(self, i):
        chunk = self.ids[i * block_size : (i + 1) * block_size + 1]
        return chunk[:-1], chunk[1:]


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, vocab, dim=32, heads=2, layers=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(block_size, dim)
        self.blocks = nn.ModuleList([Block(dim, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        n = ids.shape[1]
        mask = torch.triu(torch.ones(n, n, dtype=torch.bool, device=ids.device), 1)
        x = self.tok(ids) + self.pos(torch.arange(n, device=ids.device))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


dataset = CharDataset(TEXT)
loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)

model = LanguageModel(len(chars))
model.to(device)
decay = [p for n, p in model.named_parameters() if p.dim() >= 2]
no_decay = [p for n, p in model.named_parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
    lr=learning_rate,
    betas=(0.9, 0.95),
)
total_steps = max_epochs * math.ceil(len(loader) / grad_accum_steps)


def lr_at(step):
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_at)

global_step = 0
t0 = time.time()
for epoch in range(max_epochs):
    model.train()
    total_loss = 0.0
    optimizer.zero_grad(set_to_none=True)
    for step, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        logits = model(x)
        loss = nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
        loss = loss / grad_accum_steps
        loss.backward()
        total_loss += loss.item() * grad_accum_steps

        # step at the end of each group, and after the last (maybe shorter) one
        if (step + 1) % grad_accum_steps == 0 or (step + 1) == len(loader):
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            global_step += 1
            print(
                f"step {global_step} lr {scheduler.get_last_lr()[0]:.6f} norm {grad_norm.item():.6f}"
            )
    ppl = math.exp(total_loss / len(loader))
    print(f"epoch {epoch} loss {total_loss / len(loader):.6f} ppl {ppl:.5f}")

os.makedirs(out_dir, exist_ok=True)
torch.save({"model": model.state_dict(), "step": global_step}, os.path.join(out_dir, "last.pt"))
