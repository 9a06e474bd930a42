"""Rows with a chosen and a rejected answer, as two texts or conversations that begin alike.

The forms are TRL's: texts or lists of messages, the prompt in a column of its own or as what both
sides begin with.
"""

from itertools import takewhile
from typing import Any

from paceline.prepare.chat import messages_in
from paceline.prepare.template import Message


def text_pair(prompt: Any, chosen: Any, rejected: Any) -> tuple[str, str, str]:
    """Prompt, chosen and rejected answer of a row of texts.

    Without a prompt it is the words that both begin with, up to a space or the end of a line.

    Raises:
        ValueError: They are no pair, with the reason.

    >>> text_pair(None, "Say yes. Yes.", "Say yes. No.")
    ('Say yes. ', 'Yes.', 'No.')
    """
    for name, text in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected)):
        if not isinstance(text, str) and (name != "prompt" or text is not None):
            raise ValueError(f"its {name} is {type(text).__name__}, not text")
    _check_differ(chosen, rejected)
    if prompt is None:
        same = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
        shared = "".join(character for character, _ in same)
        prompt = shared[: 1 + max(shared.rfind(" "), shared.rfind("\n"))]
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if not prompt.strip():
        raise ValueError("it has no prompt")
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if not text.strip():
            raise ValueError(f"its {name} answer is empty")
    return prompt, chosen, rejected


def chat_pair(prompt: Any, chosen: Any, rejected: Any) -> tuple[list[Message], list[Message]]:
    """Both conversations of a row of messages. Messages before the answers are not trained on.

    Raises:
        ValueError: They are no pair, with the reason.
    """
    sides = [messages_in("chosen", chosen), messages_in("rejected", rejected)]
    _check_differ(*sides)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
        if any(message["role"] == "user" for message in sides[0]):
            prompt = None  # the sides hold it: rows of UltraFeedback have both
    if prompt is not None:
        before = messages_in("prompt", prompt)
        sides = [before + side for side in sides]
        shared = len(before)
    else:
        pairs = zip(*sides, strict=False)
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    if not shared:
        raise ValueError("chosen and rejected do not begin with the same prompt")
    for name, side in zip(("chosen", "rejected"), sides, strict=True):
        if not any(_answers(message) for message in side[shared:]):
            raise ValueError(f"its {name} answer is empty")
        side[:shared] = [{**message, "train": False} for message in side[:shared]]
    return sides[0], sides[1]


def _check_differ(chosen: Any, rejected: Any) -> None:
    if chosen == rejected:
        raise ValueError("chosen and rejected are the same")


def _answers(message: Message) -> bool:
    is_empty = isinstance(message["content"], str) and not message["content"].strip()
    return message["role"] == "assistant" and (not is_empty or "tool_calls" in message)
