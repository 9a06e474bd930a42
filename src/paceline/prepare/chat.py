"""Which tokens of a conversation are trained on: the assistant's turns, in any chat template.

A template with `{% generation %}` marks them itself. Others are rendered message by message: where
the text of the messages before a turn, with a generation prompt, begins the text with the turn, and
that begins the whole text, what lies between is the turn, up to its end-of-turn token. The whole
text is tokenized once, as every server does, and a token that lies across the edge of a turn is not
trained on. A template that changes what it wrote before is refused.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from paceline.prepare.template import ChatTemplate, Message, Span, TemplateFailed

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class LeftOutError(ValueError):
    """A conversation that is not trained on, with the reason; others may be."""


class NotMaskable(ValueError):
    """The template does not show which text is the assistant's."""


_CALL = "function_call"
"""LLaMA-Factory's role of a turn whose text is the assistant's calls, as JSON."""

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    _CALL: "assistant",
    "observation": "tool",
    "ipython": "tool",
}
"""Role in rows of ShareGPT, LLaMA-Factory and Llama 3 -> role in templates."""

_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of OpenAI's messages. A template may print any other one, but no turn of it is found."""

_THOUGHT = ("reasoning_content", "reasoning", "thinking")
"""Keys of what the assistant thought before it answered: DeepSeek's and Qwen's, OpenRouter's,
gpt-oss's."""

_OTHER = "~"
"""Is added to a text to see whether a template writes it."""


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
        if content not in turn and not turn.keys() & {"tool_calls", "function_call"}:
            raise ValueError(f"message {number} has no {content}")
        message = {key: value for key, value in turn.items() if value is not None}
        name = message.pop(role)
        message["role"] = ROLES.get(name, name)
        if message["role"] not in _KNOWN_ROLES:
            known = ", ".join(_KNOWN_ROLES)
            raise ValueError(f"message {number} has the role {name!r:.40}, none of {known}")
        said = message.pop(content, "")
        if name == _CALL:
            message["tool_calls"], said = _calls_in(said, number), ""
        message["content"] = _text_of(said, number)
        _check_weight(message, number)
        if not message.get("tool_calls", True):
            del message["tool_calls"]
        messages.append(message)
    return messages


def messages_in(name: str, turns: Any) -> list[Message]:
    """The turns in a column of that name.

    Raises:
        ValueError: They are no conversation, with the column and the reason.
    """
    try:
        return messages_of(turns)
    except ValueError as error:
        raise ValueError(f"its {name}: {error}") from None


def completed(prompt: Any, completion: Any) -> list[Message]:
    """A prompt's messages, or its text as the user's, and those that are trained on.

    Raises:
        ValueError: One of them is no conversation, with the reason.
        LeftOutError: The completion has no turn of the assistant.
    """
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    before = messages_in("prompt", asked)
    after = messages_in("completion", completion)
    if not any(message["role"] == "assistant" for message in after):
        raise LeftOutError("no turn of the assistant in the completion")
    return [*({**message, "train": False} for message in before), *after]


def history_of(history: Any) -> list[Message]:
    """The turns of Alpaca's `history`, which has a question and an answer in each item.

    Raises:
        ValueError: It is something else.
    """
    messages: list[Message] = []
    for pair in history or ():
        if not isinstance(pair, list) or [type(text) for text in pair] != [str, str]:
            raise ValueError("its history is no list of questions, each with its answer")
        messages.append({"role": "user", "content": pair[0]})
        messages.append({"role": "assistant", "content": pair[1]})
    return messages


def with_system(messages: list[Message], system: Any) -> list[Message]:
    """A conversation that begins with the system prompt of a column of its own.

    Raises:
        ValueError: The prompt is not text, or the conversation begins with another one.
    """
    if not isinstance(system or "", str):
        raise ValueError(f"its system prompt is {type(system).__name__}, not text")
    if not (system or "").strip():
        return messages
    if messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"] != system:
        raise ValueError("its messages begin with another system prompt than its own column has")
    return messages


def _check_weight(message: Message, number: int) -> None:
    """A turn is trained on or it is not: there is nothing between."""
    train, weight = message.get("train", True), message.get("weight", 1)
    if not isinstance(train, bool):
        raise ValueError(f"message {number} has train {train!r:.40}, neither true nor false")
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ValueError(f"message {number} has the weight {weight!r:.40}, neither 0 nor 1")


def _calls_in(text: Any, number: int) -> list[Any]:
    """The calls of a turn that has them in place of its text: one, or a list of them."""
    with suppress(TypeError, ValueError):
        text = json.loads(text)
    calls = text if isinstance(text, list) else [text]
    if calls and all(isinstance(c, dict) and {"name", "arguments"} <= set(c) for c in calls):
        return [{"type": "function", "function": call} for call in calls]
    raise ValueError(f"message {number} is a {_CALL} without its name and arguments as JSON")


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
        if is_text and not content.strip() and not message.keys() & {"tool_calls", "function_call"}:
            raise LeftOutError(f"an empty turn of the {message['role']}")
        text = content if is_text else json.dumps(content, ensure_ascii=False)
        if found := special.search(text):
            raise LeftOutError(f"a message holds the special token {found[0]}")


def check_written(
    template: ChatTemplate, text: str, messages: Sequence[Message], tools: Sequence[Any] | None
) -> None:
    """Tools, calls and what is neither the user's nor the assistant's are in the rendered text.

    Raises:
        ValueError: The template leaves one of them out, which another one would have changed.
    """
    for name, other_messages, other_tools in _others(messages, tools):
        try:
            other, _ = template.render(other_messages, tools=other_tools)
        except TemplateFailed:
            continue  # it reads what it fails for
        if other == text:
            raise ValueError(f"the chat template does not write {name}")


def _others(
    messages: Sequence[Message], tools: Sequence[Any] | None
) -> Iterator[tuple[str, Sequence[Message], Sequence[Any] | None]]:
    """What may be left out, and the conversation with something else in its place."""
    if tools:
        yield "the row's tools", messages, None
    for key in _THOUGHT:
        if any(isinstance(message.get(key), str) and message[key] for message in messages):
            others = [
                {**each, key: f"{each[key]}{_OTHER}"} if key in each else each for each in messages
            ]
            yield f"{key} of any message", others, tools
    for number, message in enumerate(messages, 1):
        before, after = messages[: number - 1], messages[number:]
        for key, calls in _calls_of(message, number):
            yield (
                f"the calls of message {number}",
                [*before, {**message, key: calls}, *after],
                tools,
            )
        content = message["content"]
        if message["role"] not in ("user", "assistant") and content:
            other = content + _OTHER if isinstance(content, str) else {_OTHER: content}
            name = f"message {number}, which is of the role {message['role']}"
            yield name, [*before, {**message, "content": other}, *after], tools


def _calls_of(message: Message, number: int) -> Iterator[tuple[str, Any]]:
    """Key of a message's calls -> the calls with another function in one of them."""
    if "function_call" in message:
        yield "function_call", _renamed(message["function_call"], number)
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls of message {number} is {type(calls).__name__}, not a list")
    for place, call in enumerate(calls):
        yield "tool_calls", [*calls[:place], _renamed(call, number), *calls[place + 1 :]]


def _renamed(call: Any, number: int) -> Any:
    """A call of another function."""
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        return {**call, "name": call["name"] + _OTHER}
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        return {**call, "function": _renamed(call["function"], number)}
    raise ValueError(f"a call of message {number} has no name of a function")


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
