"""The live page's server: answers for runs that it follows by their files.

It keeps nothing that the files do not have, and can change nothing. Who may ask is `guard.py`'s.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline.errors import JobError
from paceline.launch.logs import last_lines
from paceline.live.watched import Watched
from paceline.record.compare import compare_settings
from paceline.record.gather import gather
from paceline.record.run import RunFolder
from paceline.record.run_files import RunFiles
from paceline.record.run_row import RunRow
from paceline.record.sanitize import plain
from paceline.report.curves import BUCKETS, names_of, table, tables_of
from paceline.report.page import ASSETS, asset, render_live_page, render_tables
from paceline.report.picture import happened, head, picture
from paceline.report.view import RunView

_LOOK_S = 0.25
"""Between two looks at a run's files."""

_KEEP_S = 15.0
"""A comment is sent so often where nothing is new: proxies end silent connections."""

_MOST_LINES = 200
"""Lines of a log. A guess: what a person reads on a page."""

_MOST_RUNS = 20
"""Runs over each other. A guess: more lines than colours."""

FindRuns = Callable[[], Mapping[str, RunRow]]
"""Key -> run, newest first. A run is only ever found by one of these keys."""


class Live:
    """Answers about runs."""

    def __init__(self, find_runs: FindRuns) -> None:
        """Args:
        find_runs: The runs there are, each time it is asked.
        """
        self._find_runs = find_runs
        self._watched: dict[str, Watched] = {}

    def app(self) -> Starlette:
        """The server's routes."""
        return Starlette(
            routes=[
                Route("/", self.page),
                Route("/static/{name}", self.static),
                Route("/api/runs", self.runs),
                Route("/api/live", self.live),
                Route("/api/compare", self.compare),
                Route("/api/run/{key}", self.first),
                Route("/api/run/{key}/curves", self.curves),
                Route("/api/run/{key}/tables", self.tables),
                Route("/api/run/{key}/log/{rank:int}", self.log),
            ]
        )

    async def page(self, request: Request) -> Response:
        """The page, the same for every run."""
        return HTMLResponse(render_live_page())

    async def static(self, request: Request) -> Response:
        """A file by a table: no path is made of what was asked."""
        name = request.path_params["name"]
        if name not in ASSETS:
            raise HTTPException(404)
        return Response(asset(name), media_type=ASSETS[name])

    async def runs(self, request: Request) -> Response:
        """Key and state of every run, newest first."""
        return await _answer(
            lambda: [{"key": key, "state": row.state} for key, row in self._find_runs().items()]
        )

    async def first(self, request: Request) -> Response:
        """Everything that the page draws first."""
        watched = self._watch(request.path_params["key"])
        return await _answer(
            lambda: _shown(watched, lambda view: {**picture(view), "seen": Seen.of(watched)})
        )

    async def curves(self, request: Request) -> Response:
        """The tables of some steps."""
        watched = self._watch(request.path_params["key"])
        first = _number(request, "first", -math.inf)
        last = _number(request, "last", math.inf)
        return await _answer(
            lambda: _shown(watched, lambda view: tables_of(view, first=first, last=last))
        )

    async def tables(self, request: Request) -> Response:
        """The part of the page below the events."""
        run = self._watch(request.path_params["key"]).run
        try:
            return HTMLResponse(await asyncio.to_thread(lambda: render_tables(gather(run))))
        except (JobError, OSError) as error:
            raise HTTPException(409, plain(str(error))) from None

    async def log(self, request: Request) -> Response:
        """The last lines of one rank's log. The rank is a number: it cannot climb."""
        run = self._watch(request.path_params["key"]).run
        lines = await asyncio.to_thread(_last_lines, run, request.path_params["rank"])
        return _json({"lines": lines})

    async def compare(self, request: Request) -> Response:
        """Settings that differ between runs."""
        watched = self._asked(request)
        return await _answer(lambda: _differences([each.run.path for each in watched.values()]))

    async def live(self, request: Request) -> Response:
        """What is new in some runs, as it comes."""
        return StreamingResponse(
            self._stream(request, self._asked(request)),
            media_type="text/event-stream",
            headers={"x-accel-buffering": "no"},
        )

    async def _stream(self, request: Request, asked: dict[str, Watched]) -> AsyncIterator[bytes]:
        seen = _seen(request, asked)
        quiet_s = 0.0
        yield b"retry: 1000\n\n"
        while not await request.is_disconnected():
            for key, watched in asked.items():
                await asyncio.to_thread(watched.look)
                now = Seen.of(watched)
                if now != seen[key]:
                    content = await asyncio.to_thread(news_since, key, watched, seen[key])
                    yield b"event: news\ndata: " + msgspec.json.encode(content) + b"\n\n"
                    seen[key], quiet_s = now, 0.0
            if quiet_s >= _KEEP_S:
                yield b": nothing new\n\n"
                quiet_s = 0.0
            await asyncio.sleep(_LOOK_S)
            quiet_s += _LOOK_S

    def _asked(self, request: Request) -> dict[str, Watched]:
        keys = [key for key in request.query_params.get("runs", "").split(",") if key]
        return {key: self._watch(key) for key in keys[:_MOST_RUNS]}

    def _watch(self, key: str) -> Watched:
        """A run by its key, followed from now on."""
        if key not in self._watched:
            row = self._find_runs().get(key)
            if row is None:
                raise HTTPException(404)
            self._watched[key] = Watched(RunFolder(Path(row.folder)))
        return self._watched[key]


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """How far somebody has seen a run; sent as a list."""

    num_rows: int
    num_cuts: int
    num_events: int
    num_begun: int
    num_samples: int
    is_running: bool

    @staticmethod
    def of(watched: Watched) -> "Seen":
        """As far as it was looked at."""
        series = watched.series
        return Seen(
            series.num,
            len(series.cuts),
            len(watched.events),
            watched.num_begun,
            watched.machines.num,
            watched.is_running,
        )


def _seen(request: Request, asked: dict[str, Watched]) -> dict[str, Seen]:
    """How far the page has seen each run, as its pictures said: nothing between is left out."""
    try:
        given = msgspec.json.decode(request.query_params.get("seen", ""), type=list[Seen])
    except msgspec.DecodeError:
        given = []
    if len(given) == len(asked):
        return dict(zip(asked, given, strict=True))
    return {key: Seen.of(watched) for key, watched in asked.items()}


def news_since(key: str, watched: Watched, seen: Seen) -> dict[str, Any]:
    """What somebody who has seen a run so far has to be sent."""
    return watched.show(lambda view: _news(key, view, seen, Seen.of(watched)))


def _news(key: str, view: RunView, seen: Seen, now: Seen) -> dict[str, Any]:
    news: dict[str, Any] = {"key": key, "head": head(view), "happened": None, "rows": None}
    is_anew = now.num_begun != seen.num_begun
    if (now.num_events, now.num_begun, now.num_samples, now.is_running) != (
        *(seen.num_events, seen.num_begun, seen.num_samples, seen.is_running),
    ):
        news["happened"] = {**happened(view), "tables": tables_of(view)[1:]}
    start = 0 if is_anew else min([seen.num_rows, *view.series.cuts[seen.num_cuts : now.num_cuts]])
    if start < now.num_rows:
        news["rows"] = table(view.series, slice(start, now.num_rows), names_of(view), BUCKETS)
    return news


def _last_lines(run: RunFolder, rank: int) -> list[str] | None:
    """The end of a rank's log; None where it has none."""
    try:
        ((_, lines),) = last_lines(run, rank=rank, tail=_MOST_LINES)
    except JobError:
        return None
    return [plain(line) for line in lines]


def _shown(watched: Watched, make: Callable[[RunView], Any]) -> Any:
    watched.look()
    return watched.show(make)


async def _answer(make: Callable[[], Any]) -> Response:
    """JSON of what is made in a thread; a run that cannot be read is 409, with its reason."""
    try:
        return _json(await asyncio.to_thread(make))
    except (JobError, OSError) as error:
        raise HTTPException(409, plain(str(error))) from None


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _number(request: Request, name: str, otherwise: float) -> float:
    try:
        value = float(request.query_params[name])
    except (KeyError, ValueError):
        return otherwise
    return otherwise if math.isnan(value) else value


def _differences(folders: list[Path]) -> dict[str, Any]:
    """Settings of the jobs that are not the same in all."""
    differing, num_same = compare_settings([RunFiles(folder).settings() for folder in folders])
    return {
        "runs": [folder.name for folder in folders],
        "differ": {one.name: one.values for one in differing},
        "same": num_same,
    }
