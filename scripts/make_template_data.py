"""Write the data and the tokenizer of `paceline init --template` anew: the same bytes each time.

    python scripts/make_template_data.py

All sentences are made up here, of the words below. Needs `tokenizers` (extra `data`).
"""

import csv
import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATES = Path(__file__).parent.parent / "src" / "paceline" / "templates"
END = "<|end|>"
Row = dict[str, str]

THINGS = ("film", "book", "meal", "hotel", "phone", "concert", "game", "course")
GOOD = ("wonderful", "great", "a delight", "worth every cent", "better than I hoped")
BAD = ("awful", "dull", "a waste of time", "broken on arrival", "worse than I feared")
TICKETS = {
    "billing": ("I was charged twice", "my invoice is wrong", "the refund has not arrived"),
    "shipping": ("my parcel is late", "the box was damaged", "the courier left no note"),
    "technical": ("the app crashes", "I cannot log in", "the page stays blank"),
}
OPENINGS = (
    "Hello, {}.",
    "Since Monday {}.",
    "Please help: {}.",
    "{}, again!",
    "Why is it that {}?",
)
ORDERS = ("my order", "order 1204", "the blue chair", "my lamp", "the desk", "the red mug")
ASKED = {
    "refunds": ("How do I get my money back for {}?", "Return {} within 30 days for a refund."),
    "delivery": ("Where is {}?", "You find {} under Orders, with its parcel number."),
}
CITIES = ("Paris", "Lima", "Oslo", "Cairo", "Kyoto", "Quito", "Dakar", "Perth")
FACTS = ("The train to {} leaves at noon.", "It rained in {} all day.", "She was born in {}.")
PATIENTS = ("The patient", "A man of 54", "A woman of 61", "The child", "An infant")
FINDINGS = ("fever and cough", "chest pain", "a swollen ankle", "shortness of breath")
CARE = ("Fluids and rest were advised.", "An X-ray was ordered.", "Aspirin 75 mg was started.")


def sentiment() -> Iterator[Row]:
    """Reviews, each with its label."""
    for thing, (label, words) in product(THINGS, (("positive", GOOD), ("negative", BAD))):
        for word in words:
            for text in (f"The {thing} was {word}.", f"I found this {thing} {word}, honestly."):
                yield {"text": text, "label": label}


def tickets() -> Iterator[Row]:
    """Messages to a help desk, each with the desk that answers."""
    for label, problems in TICKETS.items():
        for problem, opening, thing in product(problems, OPENINGS, ("", " with order 1204")):
            yield {"text": opening.format(problem + thing), "label": label}


def trades() -> Iterator[Row]:
    """Made-up indicators, and a rule's answer with some noise: nothing about any market."""
    random.seed(0)
    for _ in range(300):
        rsi, momentum = random.randint(5, 95), random.randint(-9, 9)
        score = momentum + (50 - rsi) / 5 + random.gauss(0, 1)
        label = "buy" if score > 4 else "sell" if score < -4 else "hold"
        high_or_low = "high" if rsi > 50 else "low"
        text = f"rsi {high_or_low} {rsi:02} momentum {momentum:+d} volume {random.randint(1, 9)}"
        yield {"text": text, "label": label}


def answers(topic: str) -> Iterator[Row]:
    """Questions of one topic, each with its answer."""
    question, answer = ASKED[topic]
    for order, opening in product(ORDERS, ("", "Hello. ", "Quick question: ", "Hi there! ")):
        text = opening + question.format(order)
        yield {"prompt": text, "completion": " " + answer.format(order)}


def general() -> Iterator[Row]:
    """Sentences about nothing in particular."""
    for city, fact in product(CITIES, FACTS):
        yield {"text": fact.format(city)}


def clinical() -> Iterator[Row]:
    """Notes as a doctor writes them, all made up."""
    for patient, finding, care in product(PATIENTS, FINDINGS, CARE):
        yield {"text": f"{patient} presented with {finding}. {care}"}


FILES = {
    "sentiment/reviews.jsonl": sentiment,
    "text-gen-lora/answers.jsonl": lambda: (*answers("refunds"), *answers("delivery")),
    "trade-classifier/trades.csv": trades,
    "peft-quick/answers.jsonl": lambda: answers("delivery"),
    "classification-full/tickets.jsonl": tickets,
    "domain-adapt/general.jsonl": general,
    "domain-adapt/clinical.jsonl": clinical,
    "multi-adapter/refunds.jsonl": lambda: answers("refunds"),
    "multi-adapter/delivery.jsonl": lambda: answers("delivery"),
}


def main() -> None:
    """Write every file, and one tokenizer for all of them."""
    texts = []
    for name, make in FILES.items():
        rows = list(make())
        texts += [" ".join(row.values()) for row in rows]
        path = TEMPLATES / name
        path.parent.mkdir(exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            if path.suffix == ".csv":
                table = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
                table.writeheader()
                table.writerows(rows)
            else:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=[END], initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder = TEMPLATES / "tokenizer"
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config) + "\n")


if __name__ == "__main__":
    main()
