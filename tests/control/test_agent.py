"""What an agent does of itself, without its workers."""

import asyncio
from types import SimpleNamespace

from paceline.control.agent import Agent
from paceline.control.messages import ReportCollectives, encode


def test_a_worker_writes_its_tracebacks_before_a_thread_of_it_reports_collectives():
    """faulthandler reads the frames of threads that run: 23 to 921 of its dumps ended a process
    with SIGSEGV where a thread began with each, none of 16,000 where all threads waited."""
    asked: list[object] = []

    async def look_closer() -> list[object]:
        asked.append("tracebacks")
        return []

    agent = object.__new__(Agent)
    agent._lookout = SimpleNamespace(look_closer=look_closer)
    agent._workers = {7: SimpleNamespace(number=7, channel=SimpleNamespace(write=asked.append))}
    asyncio.run(agent._look_closer())
    assert asked == ["tracebacks", encode(ReportCollectives())]
