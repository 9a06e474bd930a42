"""Prints what the model answers before and after: `python compare.py work/model work/merged`."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = """Write the docstring of this Python function.

def count_words(path, *, at_least=1):
    words = collections.Counter(open(path).read().split())
    return {word: number for word, number in words.items() if number >= at_least}"""
"""A function that is in no file that the model was trained on."""


def main() -> None:
    """Greedy answers of each model, so that they can be compared."""
    for folder in sys.argv[1:]:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": PROMPT}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        tokens = model.generate(**asked, max_new_tokens=40, do_sample=False)
        new = tokens[0, asked["input_ids"].shape[1] :]
        answer = tokenizer.decode(new, skip_special_tokens=True)
        print(f"\n{folder}\n  {answer.strip()}")


if __name__ == "__main__":
    main()
