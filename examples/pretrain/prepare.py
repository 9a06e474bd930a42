"""The two sources and the tokenizer of this example, from what every Python has: no download.

    python examples/pretrain/prepare.py            writes work/*.parquet and work/tokenizer

The code is Python's own standard library (PSF licence), one row a file, about 11 MB; the docs are
the docstrings in it, one row each. The tokenizer is a byte-level BPE of 4,096 entries.
"""

import ast
import json
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FOLDER = Path(__file__).parent / "work"
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
VOCAB, END = 4096, "<|end|>"
LEAST_DOCSTRING = 80
"""Characters: shorter ones say what the function's name says."""

FOR_TOKENIZER = 4
"""The tokenizer learns from every fourth row of both sources."""


def main() -> None:
    """Write both sources and the tokenizer anew."""
    FOLDER.mkdir(exist_ok=True)
    files = dict(python_files())
    docs = list(dict.fromkeys(docstrings(files.values())))
    write_rows(FOLDER / "code.parquet", {"file": list(files), "source": list(files.values())})
    write_rows(FOLDER / "docs.parquet", {"text": docs})
    texts = [*list(files.values())[::FOR_TOKENIZER], *docs[::FOR_TOKENIZER]]
    write_tokenizer(FOLDER / "tokenizer", texts)
    print(f"{len(files):,} files and {len(docs):,} docstrings in {FOLDER}")


def python_files() -> Iterator[tuple[str, str]]:
    """Name and text of each file of the standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not LEFT_OUT & set(name.parts):
            try:
                yield str(name), path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def docstrings(sources: Iterable[str]) -> Iterator[str]:
    """The docstring of every module, class and function that has a long enough one."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for source in sources:
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text and len(text) >= LEAST_DOCSTRING:
                yield text


def write_rows(path: Path, columns: dict[str, list[str]]) -> None:
    """Write columns as a parquet file."""
    parquet.write_table(pyarrow.table(columns), path)


def write_tokenizer(folder: Path, texts: Iterable[str]) -> None:
    """Train a byte-level BPE, and save it as transformers reads it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
