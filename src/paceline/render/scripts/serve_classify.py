"""The classifier in a folder: what it is asked and answers, and how it is loaded."""

from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MOST_CHARACTERS = 1_000_000
"""Most characters of a text. A guess: far above what models take, and tokenized in seconds."""


class Input(BaseModel):
    """A text to label."""

    model_config = ConfigDict(extra="forbid")

    text: str = Field(min_length=1, max_length=MOST_CHARACTERS)


class Output(BaseModel):
    """The likeliest label, and the share of each."""

    label: str
    scores: dict[str, float]


class Model:
    """The weights and the tokenizer."""

    task = "classify"

    def __init__(self, folder: Path) -> None:
        device = torch.accelerator.current_accelerator(check_available=True)
        module = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True)
        self.module = module.to(device or torch.device("cpu")).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.labels = [module.config.id2label[place] for place in range(module.config.num_labels)]
        self.longest = getattr(module.config, "max_position_embeddings", None)

    @torch.inference_mode()
    def predict(self, inputs: list[Input]) -> list[Output]:
        """One output for each input, computed together.

        Raises:
            ValueError: An input that does not fit the model.
        """
        texts = [self.tokenizer(given.text)["input_ids"] for given in inputs]
        for place, tokens in enumerate(texts):
            if self.longest is not None and len(tokens) > self.longest:
                raise ValueError(
                    f"input {place}: {len(tokens)} tokens are more than the model's {self.longest}"
                )
        fed = self.tokenizer.pad({"input_ids": texts}, return_tensors="pt").to(self.module.device)
        shares = self.module(**fed).logits.float().softmax(-1).tolist()
        return [
            Output(
                label=self.labels[max(range(len(row)), key=row.__getitem__)],
                scores=dict(zip(self.labels, row, strict=True)),
            )
            for row in shares
        ]
