"""Conversations as text, by a chat template as transformers renders it, without transformers.

A template is a program of strangers: it runs in jinja2's sandbox and sees plain values alone.
`{% generation %}` marks what the model is to say; its spans come back with the text.

Source: `transformers.utils.chat_template_utils` 5.23.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from paceline.job.packages import import_package

Span = tuple[int, int]
Message = Mapping[str, Any]

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that a message's reasoning goes by; templates read the first, gpt-oss' the second."""


FAILS = "the chat template fails: "
"""Begins the reason of a row for which the template raised."""


class TemplateFailed(Exception):
    """The template raised for these messages: its own reason."""


class ChatTemplate:
    """A compiled template with the tokenizer's special tokens."""

    def __init__(self, text: str, special_tokens: Mapping[str, Any]) -> None:
        need = "chat templates are rendered by jinja2"
        jinja2 = import_package("jinja2", need, where="data.kind")
        self._environment = _environment()
        try:
            self._template = self._environment.from_string(text)
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"{FAILS}{error}") from None
        self._special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> tuple[str, list[Span]]:
        """The text, and the spans of characters that `{% generation %}` marks.

        Raises:
            TemplateFailed: The template raised.
        """
        blocks: list[str] = []
        spans: list[Span] = []
        given = {
            **self._special_tokens,
            "messages": [_with_reasoning(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with self._environment.track(blocks, spans):
                for block in self._template.generate(given):
                    blocks.append(block)  # noqa: PERF402  # its length is asked meanwhile
        except Exception as error:  # noqa: BLE001 - a program of strangers may raise anything
            raise TemplateFailed(f"{FAILS}{error}") from None
        return "".join(blocks), spans


def _with_reasoning(message: Message) -> dict[str, Any]:
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _environment() -> Any:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **more: Any) -> str:
        """jinja2's own escapes the characters of HTML."""
        return json.dumps(value, ensure_ascii=ensure_ascii, **more)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_generation_extension(), "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _generation_extension() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}`: notes where in the text its body stands."""

        tags = {"generation"}  # noqa: RUF012  # jinja2 reads it so

        def __init__(self, environment: Any) -> None:
            super().__init__(environment)
            environment.extend(track=self.track)
            self._blocks: list[str] = []
            self._spans: list[Span] = []

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_note")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _note(self, caller: Any) -> str:
            text: str = caller()
            start = sum(map(len, self._blocks))
            self._spans.append((start, start + len(text)))
            return text

        @contextmanager
        def track(self, blocks: list[str], spans: list[Span]) -> Iterator[None]:
            self._blocks, self._spans = blocks, spans
            yield

    return Generation
