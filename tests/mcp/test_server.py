"""The server as a client of the protocol meets it, over stdin and stdout: one for all tests."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.mcp.made import make_folder

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mcp") is None,
    reason="NOT TESTED: the SDK of the protocol is not installed: pip install '.[mcp]'",
)

READS = [
    "plan",
    "prove",
    "lint",
    "diagnose",
    "explain",
    "runs",
    "compare",
    "curve",
    "status",
    "logs",
    "events",
]
CALLS: dict[str, dict[str, Any]] = {
    "plan": {"path": "job.yaml"},
    "lint": {"paths": ["train.py"]},
    "diagnose": {"logs": ["mine"]},
    "explain": {"codes": ["P001"]},
    "runs": {},
    "compare": {"runs": ["mine", "mine"]},
    "curve": {"run": "mine", "metrics": ["train/loss"]},
    "status": {"run": "mine"},
    "logs": {"run": "mine", "rank": 0},
    "events": {"run": "mine"},
}
REFUSED: dict[str, dict[str, Any]] = {
    "status": {"run": "../../etc"},
    "plan": {"path": "/etc/passwd"},
    "explain": {"codes": ["nothing-is-called-so"]},
    "run_stop": {"run": "mine"},
}


async def talk(root, *flags: str) -> dict[str, Any]:
    """Everything that one client asks of one server."""
    from mcp import Client, StdioServerParameters

    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "paceline", "mcp", "--runs", "runs", *flags],
        cwd=root,
        env={"PYTHONPATH": ":".join(each for each in sys.path if each)},
    )
    async with Client(server) as client:
        tools = (await client.list_tools()).tools
        answers = {name: await client.call_tool(name, asked) for name, asked in CALLS.items()}
        refused = {name: await client.call_tool(name, asked) for name, asked in REFUSED.items()}
        return {"tools": tools, "answers": answers, "refused": refused}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    root = tmp_path_factory.mktemp("work")
    make_folder(root)
    return asyncio.run(talk(root, "--control"))


def test_tools_say_whether_they_only_read(said):
    tools = {tool.name: tool for tool in said["tools"]}
    assert set(READS) | {"run_start", "run_stop"} <= set(tools)
    reading = {name for name, tool in tools.items() if tool.annotations.read_only_hint}
    assert reading == set(tools) - {"run_start", "run_stop"}
    assert all(tool.description for tool in tools.values())
    assert "path" in tools["plan"].input_schema["properties"]
    assert "self" not in tools["plan"].input_schema["properties"]


@pytest.mark.parametrize("name", CALLS)
def test_each_tool_answers_with_structure(said, name):
    answer = said["answers"][name]
    assert not answer.is_error, answer.content
    assert isinstance(answer.structured_content, dict)
    assert answer.structured_content


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_a_problem_and_no_traceback(said, name):
    answer = said["refused"][name]
    assert answer.is_error
    text = answer.content[0].text
    assert "Traceback" not in text
    problems = json.loads(text[text.index("{") :])["problems"]
    assert {"code", "what", "where", "fix"} == set(problems[0])


def test_without_control_nothing_can_be_started():
    from paceline.mcp.server import build

    server = build(Path("."), Path("runs"), may_control=False)
    names = {tool.name for tool in asyncio.run(server.list_tools())}
    assert names
    assert not names & {"run_start", "run_stop"}


def test_the_server_says_how_its_package_is_installed(monkeypatch):
    from paceline.errors import JobError
    from paceline.mcp import server

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(JobError, match=r"pip install '.*\[mcp\]'"):
        server.serve(Path("."), Path("runs"), may_control=False)
