"""Fine-tune a causal language model with a loop of our own."""

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, get_linear_schedule_with_warmup

SEED = 11
EPOCHS = 2
BATCH_SIZE = 4
GRADIENT_ACCUMULATION = 2
MAX_LENGTH = 12


def make_examples(n):
    generator = torch.Generator().manual_seed(SEED)
    starts = torch.randint(0, 40, (n, 1), generator=generator)
    ids = (starts + 3 * torch.arange(MAX_LENGTH)) % 64
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def collate(examples):
    return {key: torch.stack([e[key] for e in examples]) for key in examples[0]}


def main():
    torch.manual_seed(SEED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.to(device)
    model.train()

    train_dataloader = DataLoader(
        make_examples(28), batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate
    )
    eval_dataloader = DataLoader(make_examples(8), batch_size=BATCH_SIZE, collate_fn=collate)

    optimizer = AdamW(model.parameters(), lr=5e-3)
    num_steps = EPOCHS * len(train_dataloader) // GRADIENT_ACCUMULATION
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, 1, num_steps)

    completed_steps = 0
    for epoch in range(EPOCHS):
        model.train()
        epoch_loss = 0
        for step, batch in enumerate(train_dataloader):
            batch = {k: v.to(device) for k, v in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss
            epoch_loss += loss.detach().float()
            loss = loss / GRADIENT_ACCUMULATION
            loss.backward()
            if (step + 1) % GRADIENT_ACCUMULATION == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                completed_steps += 1

        model.eval()
        losses = []
        for batch in eval_dataloader:
            batch = {k: v.to(device) for k, v in batch.items()}
            with torch.no_grad():
                outputs = model(**batch)
            losses.append(outputs.loss.item())
        print(
            f"epoch {epoch}: train {epoch_loss.item() / len(train_dataloader):.6f} "
            f"eval {sum(losses) / len(losses):.6f} steps {completed_steps}"
        )

    print("parameters", model.num_parameters())
    model.save_pretrained("finetuned")


if __name__ == "__main__":
    main()
