import evaluate
import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup


def main():
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
    raw = load_dataset("glue", "mrpc")
    with accelerator.main_process_first():
        data = raw.map(lambda row: tokenizer(row["sentence1"], row["sentence2"], truncation=True), batched=True)
    data = data.rename_column("label", "labels")
    train = DataLoader(data["train"], shuffle=True, batch_size=16, collate_fn=tokenizer.pad)
    val = DataLoader(data["validation"], batch_size=32, collate_fn=tokenizer.pad)
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    model, optimizer, train, val = accelerator.prepare(model, optimizer, train, val)
    steps = 3 * len(train) * accelerator.num_processes
    schedule = accelerator.prepare(get_linear_schedule_with_warmup(optimizer, num_warmup_steps=100, num_training_steps=steps))
    metric = evaluate.load("glue", "mrpc")
    for epoch in range(3):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        for batch in val:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            metric.add_batch(predictions=predictions, references=references)
        accelerator.print(epoch, metric.compute())
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained("out", is_main_process=accelerator.is_main_process, save_function=accelerator.save)


if __name__ == "__main__":
    main()
