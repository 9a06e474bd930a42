"""Numbers of TRL's DPOTrainer for a few pairs and a tiny model: `dpo_golden.json`.

    python -m tests.runtime.dpo_golden    # needs trl 1.16, datasets 5.2, transformers 5.23

The model's weights are sines, and the tokenizer has no merges: neither depends on a version. The
tests compute the same on prepared data (`test_preference.py`).
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

FILE = Path(__file__).with_suffix(".json")

BETA = 0.1

ROWS = [
    {
        "prompt": "What is two and two?",
        "chosen": " Four.",
        "rejected": " I do not know, maybe five or so.",
    },
    {"prompt": "Name a colour.", "chosen": " Blue is a colour.", "rejected": " No."},
    {"prompt": "Say hello.", "chosen": " Why should I?", "rejected": " Hello there!"},
]
"""TRL's standard form with a prompt of its own."""

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": True,  # so that transformers builds it, and not the built-in decoder
}

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def fill(model: nn.Module, seed: int) -> None:
    """Weights that follow from their names alone, and a little from `seed`."""
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            at = torch.arange(weight.numel(), dtype=torch.float64) + sum(map(ord, name))
            values = 0.2 * torch.sin(at * 1.7) + 0.02 * torch.sin(seed * at * 0.9)
            if weight.dim() == 1 and "norm" in name:
                values = 1.0 + 0.1 * values
            weight.copy_(values.view(weight.shape))


def save_tokenizer(folder: Path) -> Path:
    """One token a byte, and an end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def from_trl(folder: Path) -> dict[str, Any]:
    """Loss, accuracy and the gradient's norm of one batch with all pairs, by TRL."""
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer

    config = LlamaConfig(**{key: value for key, value in CONFIG.items() if key != "model_type"})
    reference, policy = LlamaForCausalLM(config), LlamaForCausalLM(config)
    fill(reference, 0)
    fill(policy, 1)
    trainer = DPOTrainer(
        model=policy,
        ref_model=reference,
        processing_class=AutoTokenizer.from_pretrained(str(save_tokenizer(folder / "tokenizer"))),
        train_dataset=Dataset.from_list(ROWS),
        args=DPOConfig(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=len(ROWS),
            beta=BETA,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_dropout=True,
            max_length=None,
        ),
    )
    loader = torch.utils.data.DataLoader(
        trainer.train_dataset, batch_size=len(ROWS), collate_fn=trainer.data_collator
    )
    batch = next(iter(loader))
    policy.train()
    loss = trainer.compute_loss(policy, batch)
    loss.backward()
    norms = [p.grad.double().norm().item() ** 2 for p in policy.parameters() if p.grad is not None]
    metrics = trainer._metrics["train"]
    return {
        "loss": loss.item(),
        "grad_norm": math.sqrt(sum(norms)),
        "accuracy": metrics["rewards/accuracies"][-1],
        "margin": metrics["rewards/margins"][-1],
        "tokens": batch["input_ids"].tolist(),
        "trained": batch["completion_mask"].tolist(),
    }


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        FILE.write_text(json.dumps(from_trl(Path(name))) + "\n")
