"""Steps are counted on the loader before it is prepared, and the metric is cut to its length."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup


def measure(accelerator, model, held_out, right):
    seen = 0
    for number, batch in enumerate(held_out):
        with torch.no_grad():
            scores = model(**batch).logits
        predicted, labels = accelerator.gather((scores.argmax(-1), batch["labels"]))
        if number == len(held_out) - 1:
            predicted = predicted[: len(held_out.dataset) - seen]
            labels = labels[: len(held_out.dataset) - seen]
        seen += labels.shape[0]
        right.add_batch(predictions=predicted, references=labels)
    return right.compute()


def train(data, held, right, epochs=3):
    accelerator = Accelerator()
    loader, held_out = DataLoader(data, shuffle=True, batch_size=8), DataLoader(held, batch_size=8)
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    schedule = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=100, num_training_steps=len(loader) * epochs
    )
    model, optimizer, loader, held_out, schedule = accelerator.prepare(
        model, optimizer, loader, held_out, schedule
    )
    for _ in range(epochs):
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        accelerator.print(measure(accelerator, model, held_out, right))
