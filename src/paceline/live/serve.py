"""Starts the live page's server, and says where it is."""

import errno
import secrets
import socket
from collections.abc import Callable, Sequence
from urllib.parse import quote

import uvicorn

from paceline.errors import JobError
from paceline.live.guard import Guard, is_loopback
from paceline.live.server import FindRuns, Live

_PORT = 7341
_TRIES = 20
"""Ports that are tried from `_PORT` on. A guess: more people than that share no login node."""


def serve(
    find_runs: FindRuns,
    *,
    shown: Sequence[str],
    host: str,
    port: int | None,
    write: Callable[[str], None],
) -> None:
    """Serve until Ctrl-C.

    Args:
        find_runs: See `Live`.
        shown: Whether runs were named, and are shown at once.
        host: Address to listen on.
        port: Where; 0 is any free one, None the usual one or the next that is free.
        write: Prints a line.

    Raises:
        JobError: `R002`, the address cannot be listened on.
    """
    listener = _listen(host, port)
    number = listener.getsockname()[1]
    token = secrets.token_urlsafe(24)
    names = {host.lower(), socket.gethostname().lower(), *_own_addresses(host)}
    guard = Guard(Live(find_runs).app(), token=token, port=number, names=names)
    at = "127.0.0.1" if is_loopback(host) else socket.gethostname()
    runs = ",".join(quote(key, safe="") for key in find_runs()) if shown else ""
    address = f"http://{at}:{number}/?token={token}{'#' + runs if runs else ''}"
    write(f"page        {address}")
    if is_loopback(host):
        tunnel = f"ssh -N -L {number}:127.0.0.1:{number} {socket.gethostname()}"
        write(f"from afar   {tunnel}   then open the same address")
    else:
        write(
            f"warning     {host} can be reached from other machines; whoever has the address reads"
        )
    write("stop        Ctrl-C; the runs go on")
    config = uvicorn.Config(
        guard,
        log_level="warning",
        access_log=False,  # its lines would hold the token
        lifespan="off",
        timeout_graceful_shutdown=1,
        server_header=False,
    )
    uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    wanted = range(_PORT, _PORT + _TRIES) if port is None else [port]
    for number in wanted:
        try:
            return socket.create_server((host, number), family=family)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port is None:
                continue
            raise JobError.of(
                code="R002",
                what=f"{host} port {number} cannot be listened on: {error.strerror}",
                where="--port" if error.errno == errno.EADDRINUSE else "--host",
                fix="leave out --port to have a free one found",
            ) from None
    return socket.create_server((host, 0), family=family)


def _own_addresses(host: str) -> set[str]:
    """Addresses of this machine, where it listens on all of them."""
    if host not in ("0.0.0.0", "::"):
        return set()
    found = socket.getaddrinfo(socket.gethostname(), None)
    return {str(entry[4][0]).lower() for entry in found}
