"""Which tokens of a conversation are trained on: the assistant's turns, in any chat template.

A template with `{% generation %}` marks them itself. Others are rendered message by message: where
the text of the messages before a turn, with a generation prompt, begins the text with the turn, and
that begins the whole text, what lies between is the turn, up to its end-of-turn token. The whole
text is tokenized once, as every server does, and a token that lies across the edge of a turn is not
trained on. A template that changes what it wrote before is refused.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.prepare.template import ChatTemplate, Message, Span

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class LeftOutError(ValueError):
    """A conversation that is not trained on, with the reason; others may be."""


class NotMaskable(ValueError):
    """The template does not show which text is the assistant's."""


ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "bard": "assistant"}
"""Role in `conversations` rows (ShareGPT) -> role in templates."""


def messages_of(turns: Any, *, role: str = "role", content: str = "content") -> list[Message]:
    """The turns of a row, checked.

    Raises:
        ValueError: They are no conversation, with the reason.
    """
    if not isinstance(turns, list) or not turns:
        raise ValueError("it has no list of messages")
    messages: list[Message] = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get(role), str):
            raise ValueError(f"message {number} has no {role}")
        if content not in turn and "tool_calls" not in turn:
            raise ValueError(f"message {number} has no {content}")
        message = {key: value for key, value in turn.items() if value is not None}
        name = message.pop(role)
        message["role"] = ROLES.get(name, name)
        message["content"] = _text_of(message.pop(content, ""), number)
        messages.append(message)
    return messages


def _text_of(content: Any, number: int) -> Any:
    """Parts that are all text as one: a template that knows no parts would print the list."""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        texts = [part.get("text") for part in content if part.get("type") == "text"]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(texts)
    if isinstance(content, str | dict):  # what a tool returned may be a table of values
        return content
    raise ValueError(f"the content of message {number} is {type(content).__name__}, not text")


def check_conversation(messages: Sequence[Message], special: re.Pattern[str]) -> None:
    """
    Raises:
        LeftOutError: A side says nothing, or a text would become a special token.
    """
    roles = {message["role"] for message in messages}
    for role in ("user", "assistant"):
        if role not in roles:
            raise LeftOutError(f"no turn of the {role}")
    for message in messages:
        content = message["content"]
        is_text = isinstance(content, str)
        if is_text and not content.strip() and "tool_calls" not in message:
            raise LeftOutError(f"an empty turn of the {message['role']}")
        text = content if is_text else json.dumps(content, ensure_ascii=False)
        if found := special.search(text):
            raise LeftOutError(f"a message holds the special token {found[0]}")


def find_turns(
    template: ChatTemplate,
    text: str,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    *,
    last_only: bool,
) -> list[Span]:
    """Characters of the assistant's turns in the rendered text.

    Raises:
        NotMaskable: The template does not keep what it wrote before.
        TemplateFailed: The template raised.
    """
    numbers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    if last_only:
        numbers = numbers[-1:]
    spans = []
    for number in numbers:
        if not _is_trained(messages[number]):
            continue
        before, _ = template.render(messages[:number], tools=tools, add_generation_prompt=True)
        after, _ = template.render(messages[: number + 1], tools=tools)
        if not after.startswith(before):
            raise NotMaskable(
                f"with message {number + 1} the template does not continue the text before it"
            )
        if not text.startswith(after):
            raise NotMaskable(f"what follows message {number + 1} changes how it is written")
        spans.append((len(before), len(after.rstrip())))
    return spans


def marked_turns(
    spans: Sequence[Span], messages: Sequence[Message], *, last_only: bool
) -> list[Span]:
    """Those of the spans that `{% generation %}` marked on which the model is trained.

    Raises:
        NotMaskable: There is not one for each turn, and not all are wanted.
    """
    turns = [message for message in messages if message["role"] == "assistant"]
    wanted = [_is_trained(turn) for turn in turns]
    if last_only:
        wanted[:-1] = [False] * (len(wanted) - 1)
    if all(wanted):
        return list(spans)
    if len(spans) != len(turns):
        raise NotMaskable(
            f"the template marks {len(spans)} generations of {len(turns)} turns, and not all of "
            "them are to be trained on"
        )
    return [span for span, is_wanted in zip(spans, wanted, strict=True) if is_wanted]


def marks_generations(template: str) -> bool:
    """Whether a template says itself which text is the assistant's."""
    return _GENERATION.search(template) is not None


def _is_trained(message: Mapping[str, Any]) -> bool:
    """Unless the row says otherwise: `train: false`, or OpenAI's `weight: 0`."""
    return message.get("train") is not False and message.get("weight") != 0
