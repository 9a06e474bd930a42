import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader


def evaluate(model, test_set):
    accelerator = Accelerator()
    loader = DataLoader(test_set, batch_size=64)
    model, loader = accelerator.prepare(model, loader)
    model.eval()
    right, total = 0, 0
    for images, labels in loader:
        with torch.no_grad():
            guesses = model(images).argmax(dim=1)
        all_guesses, all_labels = accelerator.gather((guesses, labels))  # expect: eval-duplicates
        right += (all_guesses == all_labels).sum().item()
        total += all_labels.numel()
    accelerator.print(right / total)
