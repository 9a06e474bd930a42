"""How long an assistant waits for `paceline mcp`: the list of tools, each answer cold and warm.

    python benchmarks/mcp_answers.py FOLDER RUN    # FOLDER has job.yaml and runs/RUN

Needs the extra `mcp`. Prints a line of JSON for each round: seconds from request to answer.
"""

import asyncio
import json
import sys
import time
from typing import Any

from mcp import Client, StdioServerParameters

ROUNDS = 3


async def measure(folder: str, run: str) -> dict[str, Any]:
    """Seconds of one server's life, by what was asked."""
    began = time.perf_counter()
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "paceline", "mcp"],
        cwd=folder,
        env={"PYTHONPATH": ":".join(each for each in sys.path if each)},
    )
    calls: list[tuple[str, dict[str, Any]]] = [
        ("runs", {}),
        ("status", {"run": run}),
        ("explain", {"codes": ["P001"]}),
        ("logs", {"run": run}),
        ("plan", {"path": "job.yaml"}),
        ("compare", {"runs": [run, run]}),
        ("curve", {"run": run}),
    ]
    found: dict[str, Any] = {}
    async with Client(server) as client:
        await client.list_tools()
        found["tools listed"] = time.perf_counter() - began
        for name, asked in calls:
            for way in ("cold", "warm"):
                asked_at = time.perf_counter()
                answer = await client.call_tool(name, asked)
                assert not answer.is_error, answer.content
                found[f"{name}, {way}"] = time.perf_counter() - asked_at
    return found


if __name__ == "__main__":
    for _ in range(ROUNDS):
        measured = asyncio.run(measure(*sys.argv[1:3]))
        print(json.dumps({name: round(seconds, 3) for name, seconds in measured.items()}))
