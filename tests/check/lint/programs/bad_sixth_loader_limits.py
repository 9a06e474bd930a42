import requests
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer


class Pages(Dataset):
    def __init__(self, urls):
        self.urls = urls

    def __len__(self):
        return len(self.urls)

    def __getitem__(self, index):
        return len(requests.get(self.urls[index]).text)


tokenizer = AutoTokenizer.from_pretrained("gpt2")
names = tokenizer(["one", "two"])  # expect: tokenizers-fork
pages = Pages(["http://localhost/a"])
slow = DataLoader(pages, batch_size=4, num_workers=8)  # expect: dataloader-timeout
alone = DataLoader(pages, batch_size=4, timeout=60)  # expect: dataloader-timeout
hasty = DataLoader(pages, batch_size=4, num_workers=2, timeout=5)  # expect: dataloader-timeout
eager = DataLoader(pages, 4, num_workers=32, prefetch_factor=32)  # expect: too-many-open-files
for batch in slow:
    print(torch.as_tensor(batch).sum())
