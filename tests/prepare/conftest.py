"""Tiny tokenizers, made by the `tokenizers` library, and jobs that use them."""

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import JobError
from paceline.job import Job, parse_job
from paceline.prepare import prepared
from paceline.prepare.index import ENDS, PACK_DOCUMENTS, PACK_STARTS, TOKENS, TRAINED

TEXT = """The quick brown fox jumps over the lazy dog. What is one plus two? It is three.
user assistant system tool Hello, how are you? I am fine. def function(x): return x + 1
"""

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(folder: Path, *, template: str | None = CHATML) -> Path:
    """A byte-level tokenizer with ChatML's tokens, as transformers saves one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "additional_special_tokens": special[1:],
        **({"chat_template": template} if template else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer, made once."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def a_job(folder: Path, tokenizer: Path | str, data: str, model: str = "vocab: 512") -> Job:
    """A small decoder's job; `data` are lines below `data:`."""
    text = f"""
model:
  decoder: {{layers: 1, hidden: 8, heads: 1, {model}}}
  tokenizer: {tokenizer}
train: {{global_batch: 2, steps: 3}}
data: {{{data}}}
"""
    return parse_job(text, source="job.yaml", folder=folder)


def problem_of(job: Job) -> str:
    """Why the job's data cannot be prepared."""
    with pytest.raises(JobError) as caught:
        prepared(job)
    return str(caught.value)


def write_rows(path: Path, rows: list) -> None:
    """As jsonl."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def a_chat(question: str = "What is one plus two?", answer: str = "It is three.") -> dict:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def write_documents(folder: Path, documents, *, dtype: str, trained=None, packs=None) -> None:
    """One source's arrays as the format has them.

    Args:
        folder: The source's own.
        documents: Tokens of each.
        dtype: As in the index.
        trained: Whether each token is a target, as long as the documents; None where all are.
        packs: `(pack_starts, pack_documents)`, where samples are packs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays = [np.asarray(document, np.dtype(dtype).newbyteorder("<")) for document in documents]
    np.concatenate(arrays).tofile(folder / TOKENS)
    np.save(folder / ENDS, np.cumsum([len(array) for array in arrays], dtype=np.int64))
    if trained is not None:
        np.packbits(np.concatenate(list(trained))).tofile(folder / TRAINED)
    if packs is not None:
        np.save(folder / PACK_STARTS, packs[0].astype(np.int64))
        np.save(folder / PACK_DOCUMENTS, packs[1].astype(np.int64))
