"""Continue prompts with an exported model: request on stdin, answer on stdout, both JSON.

    python -m paceline.runtime.generate < request.json

A process of its own, on one device: the model is what transformers loads from the folder.
"""

from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline.job.prompts import Prompt
from paceline.record.outputs import Generation
from paceline.runtime.answer import answer
from paceline.runtime.huggingface import import_transformers


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be generated."""

    folder: str
    """With config.json and weights, or an adapter of peft."""

    tokenizer: str | None = None
    """Folder of the tokenizer, unless tokens are bytes; None is the same folder."""

    prompts: tuple[Prompt, ...]
    num_tokens: int
    is_bytes: bool


class _Bytes:
    """One token a byte."""

    eos_token_id = None

    def encode(self, prompt: Prompt) -> list[int]:
        return list(prompt.shown.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(each for each in ids if each < 256).decode(errors="replace")


class _Tokenizer:
    """The folder's own."""

    def __init__(self, folder: str) -> None:
        transformers = import_transformers("transformers", "generating needs transformers")
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True
        )
        self.eos_token_id = self._tokenizer.eos_token_id

    def encode(self, prompt: Prompt) -> list[int]:
        if prompt.messages is None:
            return list(self._tokenizer(prompt.text)["input_ids"])
        found = self._tokenizer.apply_chat_template(
            prompt.messages, add_generation_prompt=True, return_dict=True
        )
        return list(found["input_ids"])

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def generate(asked: Request) -> list[Generation]:
    """The likeliest continuation of each prompt, up to the end of its text."""
    assert Path(asked.folder).is_dir(), "the exported folder is there"
    transformers = import_transformers("transformers", "generating needs transformers")
    found_device = torch.accelerator.current_accelerator(check_available=True)
    device = found_device or torch.device("cpu")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        asked.folder, local_files_only=True
    )
    model = model.to(device).eval()
    words = _Bytes() if asked.is_bytes else _Tokenizer(asked.tokenizer or asked.folder)
    found = []
    for prompt in asked.prompts:
        ids = torch.tensor([words.encode(prompt)], device=device)
        with torch.no_grad():
            whole = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=asked.num_tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=words.eos_token_id or 0,
            )
        new = whole[0, ids.shape[1] :].tolist()
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        is_cut = len(new) == asked.num_tokens and new[-1] not in ends
        found.append(Generation(prompt=prompt.shown, text=words.decode(new), is_cut=is_cut))
    return found


if __name__ == "__main__":
    answer(Request, generate)
