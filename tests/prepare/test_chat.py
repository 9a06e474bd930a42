"""Chat templates render as in transformers, and the assistant's turns alone are trained on."""

import json
import re

import pytest
from tests.prepare.conftest import CHATML, a_chat, a_job, make_tokenizer, write_rows

from paceline.prepare.chat import (
    NotMaskable,
    check_written,
    find_turns,
    marked_turns,
    messages_of,
)
from paceline.prepare.template import ChatTemplate, TemplateFailed
from paceline.prepare.tokenize import not_maskable

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim "
    "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != "
    "(loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not "
    "supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') "
    "%}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
PHI = (
    "{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}"
    "{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}"
    "{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{message['content'] + '<|im_end|>'}}"
    "{% endgeneration %}{% else %}{{message['content'] + '<|im_end|>'}}{% endif %}{{'\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETS = (  # as Qwen3's, which leaves out the thinking of earlier turns
    "{% for message in messages %}{% if loop.last or message.role == 'user' %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHELF = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "qwen": QWEN,
    "phi": PHI,
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

TURNS = [
    {"role": "user", "content": " Hi, 你好 "},
    {"role": "assistant", "content": "Hello, naïve wörld 🙂!"},
    {"role": "user", "content": "Again <b>?"},
    {"role": "assistant", "content": "line one\nline two"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}, *TURNS]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
TOOL_TURNS = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def of_transformers(template, messages, **options) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template([messages], chat_template=template, **TOKENS, **options)
    return text


@pytest.mark.parametrize("name", SHELF)
@pytest.mark.parametrize("prompt", [False, True])
def test_a_template_renders_as_in_transformers(name: str, prompt: bool):
    template = ChatTemplate(SHELF[name], TOKENS)
    shelf = [TURNS] if name in ("mistral", "gemma") else [TURNS, SYSTEM]
    for messages in shelf:
        text, _ = template.render(messages, add_generation_prompt=prompt)
        expected = of_transformers(SHELF[name], messages, add_generation_prompt=prompt)
        assert text == expected


def test_tools_render_as_in_transformers():
    text, _ = ChatTemplate(QWEN, TOKENS).render(TOOL_TURNS, tools=TOOLS)
    assert text == of_transformers(QWEN, TOOL_TURNS, tools=TOOLS)
    assert '"arguments": {"a": 1, "b": "é"}' in text


@pytest.mark.parametrize("name", SHELF)
def test_the_assistants_turns_are_found_with_their_end(name: str):
    template = ChatTemplate(SHELF[name], TOKENS)
    text, _ = template.render(TURNS)
    spans = find_turns(template, text, TURNS, None, last_only=False)
    ends = {"llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>", "phi": "<|end|>"}
    wanted = [turn["content"] + ends.get(name, "<|im_end|>") for turn in TURNS[1::2]]
    assert [text[start:stop] for start, stop in spans] == wanted


def test_calls_of_tools_are_the_assistants_and_answers_are_not():
    template = ChatTemplate(QWEN, TOKENS)
    text, _ = template.render(TOOL_TURNS, tools=TOOLS)
    spans = find_turns(template, text, TOOL_TURNS, TOOLS, last_only=False)
    found = [text[start:stop] for start, stop in spans]
    assert found[0].startswith("<tool_call>") or found[0].startswith("\n<tool_call>")
    assert found[1] == "It is 2.<|im_end|>"
    assert not any("<tool_response>" in part for part in found)


def test_marked_generations_are_those_of_the_prefix_rule():
    marked, plain = ChatTemplate(MARKED, TOKENS), ChatTemplate(CHATML, TOKENS)
    text, spans = marked.render(TURNS)
    assert text == plain.render(TURNS)[0]
    assert spans == find_turns(plain, text, TURNS, None, last_only=False)
    assert marked_turns(spans, TURNS, last_only=True) == spans[-1:]


def test_a_turn_that_the_row_takes_out_is_not_trained_on():
    turns = [TURNS[0], {**TURNS[1], "train": False}, *TURNS[2:]]
    plain, marked = ChatTemplate(CHATML, TOKENS), ChatTemplate(MARKED, TOKENS)
    text, spans = marked.render(turns)
    assert find_turns(plain, text, turns, None, last_only=False) == spans[1:]
    assert marked_turns(spans, turns, last_only=False) == spans[1:]


def test_a_template_that_forgets_is_refused_with_the_message():
    template = ChatTemplate(FORGETS, TOKENS)
    text, _ = template.render(TURNS)
    with pytest.raises(NotMaskable, match="message 2"):
        find_turns(template, text, TURNS, None, last_only=False)
    assert find_turns(template, text, TURNS, None, last_only=True)


def test_a_template_cannot_reach_python():
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(TemplateFailed):
        ChatTemplate(escape, TOKENS).render(TURNS)


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ("hello", "no list of messages"),
        ([{"content": "x"}], "message 1 has no role"),
        ([{"role": "user"}], "message 1 has no content"),
        ([*TURNS, {"role": "bot", "content": "x"}], "message 5 has the role 'bot', none of system"),
        ([{"role": "User", "content": "x"}], "message 1 has the role 'User', none of system"),
        ([{"role": "function_call", "content": "add(1)"}], "message 1 is a function_call without"),
        ([{"role": "function_call", "content": '{"name": "a"}'}], "a function_call without its"),
        ([{**TURNS[1], "weight": 0.5}], "message 1 has the weight 0.5, neither 0 nor 1"),
        ([{**TURNS[1], "weight": -1}], "message 1 has the weight -1, neither 0 nor 1"),
        ([{**TURNS[1], "weight": "0"}], "message 1 has the weight '0', neither 0 nor 1"),
        ([{**TURNS[1], "train": "false"}], "message 1 has train 'false', neither true nor false"),
    ],
)
def test_what_is_no_conversation_is_named(turns, words):
    with pytest.raises(ValueError, match=words):
        messages_of(turns)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_roles_weights_and_no_calls_are_taken_as_they_are_known(role):
    given = {"role": role, "content": "x", "weight": 1.0, "train": True, "tool_calls": []}
    assert messages_of([given])[0] == {key: given[key] for key in given if key != "tool_calls"}
    assert messages_of([{"from": "gpt", "value": "x"}], role="from", content="value") == [
        {"role": "assistant", "content": "x"}
    ]


@pytest.mark.parametrize("asked", [CALL["function"], [CALL["function"]]])
@pytest.mark.parametrize("said", [json.dumps, lambda call: call])
@pytest.mark.parametrize("answers", ["observation", "ipython", "tool"])
def test_calls_and_answers_under_other_names_are_written_as_those_of_tools(asked, said, answers):
    rows = [
        {"from": "human", "value": TOOL_TURNS[0]["content"]},
        {"from": "function_call", "value": said(asked)},
        {"from": answers, "value": TOOL_TURNS[2]["content"]},
        *({"from": "gpt", "value": turn["content"]} for turn in TOOL_TURNS[3:]),
    ]
    template = ChatTemplate(QWEN, TOKENS)
    found = messages_of(rows, role="from", content="value")
    text, _ = template.render(found)
    assert text == template.render(messages_of(TOOL_TURNS))[0]
    check_written(template, text, found, None)


NO_TOOLS = [{**turn, "tool_calls": None} for turn in TOOL_TURNS]
FIRST_CALL = QWEN.replace("in message.tool_calls", "in message.tool_calls[:1]")
BRIEF = [{"role": "developer", "content": "Be brief."}, *TURNS]
OLD_CALL = [TURNS[0], {"role": "assistant", "content": "", "function_call": CALL["function"]}]


@pytest.mark.parametrize(
    ("template", "turns", "tools", "left_out"),
    [
        (QWEN, TOOL_TURNS, TOOLS, None),
        (QWEN, BRIEF, None, None),
        (CHATML, SYSTEM, None, None),
        (CHATML, NO_TOOLS, None, None),
        (CHATML, NO_TOOLS, TOOLS, "the row's tools"),
        (CHATML, TOOL_TURNS, None, "the calls of message 2"),
        (CHATML, OLD_CALL, None, "the calls of message 2"),
        (
            FIRST_CALL,
            [TURNS[0], {**TOOL_TURNS[1], "tool_calls": [CALL, CALL]}],
            None,
            "the calls of message 2",
        ),
        (PHI, BRIEF, None, "message 1, which is of the role developer"),
        (PHI, NO_TOOLS, None, "message 3, which is of the role tool"),
    ],
)
def test_what_a_template_does_not_write_is_named(template, turns, tools, left_out):
    compiled, messages = ChatTemplate(template, TOKENS), messages_of(turns)
    text, _ = compiled.render(messages, tools=tools)
    if left_out is None:
        check_written(compiled, text, messages, tools)
        return
    with pytest.raises(ValueError, match=f"the chat template does not write {left_out}"):
        check_written(compiled, text, messages, tools)


def test_an_empty_turn_whose_calls_are_not_written_is_not_trained_on(tmp_path):
    from paceline.errors import JobError
    from paceline.prepare import prepared

    folder = make_tokenizer(tmp_path / "tokenizer")
    write_rows(tmp_path / "a.jsonl", [a_chat(), {"messages": TOOL_TURNS, "tools": TOOLS}])
    job = a_job(tmp_path, folder, "path: a.jsonl, seq_len: 256, held_out: 0")
    with pytest.raises(JobError, match=r"D013: (.|\n)*line 2: the chat template does not write"):
        prepared(job)


def test_the_mask_of_tokens_is_that_of_transformers(tmp_path):
    """Through the whole preparation, beside `return_assistant_tokens_mask`."""
    import numpy as np
    from transformers import PreTrainedTokenizerFast

    from paceline.prepare import open_index, prepared

    folder = make_tokenizer(tmp_path / "tokenizer", template=MARKED)
    chats = [a_chat(), {"messages": SYSTEM}]
    write_rows(tmp_path / "a.jsonl", chats)
    ready = prepared(a_job(tmp_path, folder, "path: a.jsonl, seq_len: 256, held_out: 0"))
    (source,) = open_index(ready).train
    tokens = np.fromfile(ready / source.folder / "tokens.bin", "<u2")
    bits = np.fromfile(ready / source.folder / "trained.bin", np.uint8)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    ids, mask = [], []
    for chat in chats:
        out = tokenizer.apply_chat_template(
            chat["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        ids += out["input_ids"]
        mask += out["assistant_masks"]
    assert tokens.tolist() == ids
    assert np.unpackbits(bits, count=len(tokens)).tolist() == mask


def test_a_template_that_cannot_be_masked_stops_with_file_and_line(tmp_path):
    from paceline.errors import JobError
    from paceline.prepare import prepared

    folder = make_tokenizer(tmp_path / "tokenizer", template=FORGETS)
    write_rows(tmp_path / "a.jsonl", [a_chat(), {"messages": TURNS}])
    job = a_job(tmp_path, folder, "path: a.jsonl, seq_len: 256, held_out: 0")
    with pytest.raises(JobError, match=r"D014: (.|\n)*a.jsonl line 2") as caught:
        prepared(job)
    assert re.search(r"train_on: last", str(caught.value))
    (if_last,) = not_maskable("a.jsonl", "jsonl", "last", 2, "why").problems
    assert "set data.train_on: all" in if_last.fix


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_what_the_assistant_thought_is_not_left_out_in_silence(key):
    messages = messages_of([TURNS[0], {**TURNS[1], key: "Hm."}])
    compiled = ChatTemplate(CHATML, TOKENS)
    with pytest.raises(ValueError, match=f"does not write {key} of any message"):
        check_written(compiled, compiled.render(messages)[0], messages, None)
    text = CHATML.replace("message['content']", f"message.get('{key}', '') + message['content']")
    writes = ChatTemplate(text, TOKENS)
    check_written(writes, writes.render(messages)[0], messages, None)
