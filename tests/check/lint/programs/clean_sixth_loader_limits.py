import os

import requests
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer

os.environ["TOKENIZERS_PARALLELISM"] = "false"


class Pages(Dataset):
    def __init__(self, urls):
        self.urls = urls

    def __len__(self):
        return len(self.urls)

    def __getitem__(self, index):
        return len(requests.get(self.urls[index], timeout=30).text)


def main(workers=8):
    tokenizer = AutoTokenizer.from_pretrained("gpt2")
    names = tokenizer(["one", "two"])
    pages = Pages(["http://localhost/a"])
    loader = DataLoader(pages, batch_size=4, num_workers=workers, timeout=300, prefetch_factor=4)
    for batch in loader:
        print(torch.as_tensor(batch).sum(), names)


main()
