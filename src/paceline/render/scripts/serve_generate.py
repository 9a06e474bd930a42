"""The language model in a folder: what it is asked and answers, and how it is loaded."""

from pathlib import Path
from typing import Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKENS_ARE_BYTES = False
MOST_CHARACTERS = 1_000_000
"""Most characters of a text. A guess: far above what models take, and tokenized in seconds."""


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str = Field(max_length=MOST_CHARACTERS)


class Input(BaseModel):
    """A text to continue, or a conversation to answer."""

    model_config = ConfigDict(extra="forbid")

    prompt: str | None = Field(None, min_length=1, max_length=MOST_CHARACTERS)
    messages: list[Message] | None = Field(None, min_length=1)
    max_tokens: int = Field(64, ge=1, le=4096)
    temperature: float = Field(0.0, ge=0.0, le=2.0, description="0 takes the likeliest token.")

    @model_validator(mode="after")
    def one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class Output(BaseModel):
    """What the model wrote."""

    text: str
    tokens: int
    finish: Literal["end", "max_tokens"]


class Model:
    """The weights and the tokenizer."""

    task = "generate"

    def __init__(self, folder: Path) -> None:
        device = torch.accelerator.current_accelerator(check_available=True)
        module = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        self.module = module.to(device or torch.device("cpu")).eval()
        self.tokenizer = None
        if not TOKENS_ARE_BYTES:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        end = module.generation_config.eos_token_id
        self.ends = set(end if isinstance(end, list) else [] if end is None else [end])
        self.longest = getattr(module.config, "max_position_embeddings", None)

    def predict(self, inputs: list[Input]) -> list[Output]:
        """One output for each input; those with equal settings are computed together.

        Raises:
            ValueError: An input that does not fit the model.
        """
        prompts = [self.encode(place, given) for place, given in enumerate(inputs)]
        alike: dict[tuple[int, float], list[int]] = {}
        for place, given in enumerate(inputs):
            alike.setdefault((given.max_tokens, given.temperature), []).append(place)
        outputs = {}
        for (max_tokens, temperature), places in alike.items():
            written = self.write([prompts[place] for place in places], max_tokens, temperature)
            outputs |= dict(zip(places, written, strict=True))
        return [outputs[place] for place in range(len(inputs))]

    def encode(self, place: int, given: Input) -> list[int]:
        if self.tokenizer is None:
            if given.prompt is None:
                raise ValueError(f"input {place}: this model has no chat template; give prompt")
            tokens = list(given.prompt.encode())
        elif given.prompt is not None:
            tokens = self.tokenizer(given.prompt)["input_ids"]
        elif self.tokenizer.chat_template is None:
            raise ValueError(f"input {place}: this model has no chat template; give prompt")
        else:
            tokens = self.tokenizer.apply_chat_template(
                [message.model_dump() for message in given.messages or ()],
                add_generation_prompt=True,
                return_dict=True,
            )["input_ids"]
        if self.longest is not None and len(tokens) + given.max_tokens > self.longest:
            raise ValueError(
                f"input {place}: {len(tokens)} tokens and {given.max_tokens} to write are more "
                f"than the model's {self.longest}"
            )
        return tokens

    @torch.inference_mode()
    def write(self, prompts: list[list[int]], num: int, temperature: float) -> list[Output]:
        width = max(map(len, prompts))
        rows = [[0] * (width - len(tokens)) + tokens for tokens in prompts]
        mask = [[0] * (width - len(tokens)) + [1] * len(tokens) for tokens in prompts]
        how = {"do_sample": True, "temperature": temperature} if temperature else {}
        found = self.module.generate(
            torch.tensor(rows, device=self.module.device),
            attention_mask=torch.tensor(mask, device=self.module.device),
            max_new_tokens=num,
            pad_token_id=min(self.ends, default=0),
            **(how or {"do_sample": False}),
        )
        return [self.output(row) for row in found[:, width:].tolist()]

    def output(self, tokens: list[int]) -> Output:
        end = next((at for at, token in enumerate(tokens) if token in self.ends), None)
        kept = tokens[:end]
        if self.tokenizer is None:
            text = bytes(token for token in kept if token < 256).decode(errors="replace")
        else:
            text = self.tokenizer.decode(kept, skip_special_tokens=True)
        finish: Literal["end", "max_tokens"] = "max_tokens" if end is None else "end"
        return Output(text=text, tokens=len(kept), finish=finish)
