"""Whether nodes reach each other: one listens and says a word, another calls and hears it."""

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from paceline.topology.node.facts import Peer, Reached
from paceline.topology.node.probe_network import resolve

CALL_S = 3.0
"""To connect and be answered; a packet that is dropped in silence costs this. A guess."""

_MOST_AT_ONCE = 32
_PAYLOAD = 256 * 1024
"""Sent back and forth after the greeting: packets of full size show a wrong MTU, which a greeting
does not."""


class Listener:
    """Answers whoever knows the word, on all addresses of this machine, until it is closed."""

    def __init__(self, word: str) -> None:
        self._word = word.encode()
        self._socket = socket.create_server(("0.0.0.0", 0), backlog=512)
        self.port: int = self._socket.getsockname()[1]

    def start(self) -> None:
        """Answer from now on, in a thread that ends with the process."""
        threading.Thread(target=self._serve, name="paceline-listener", daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._socket.close()

    def _serve(self) -> None:
        with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
            while True:
                try:
                    caller, _ = self._socket.accept()
                except OSError:  # closed
                    return
                pool.submit(self._answer, caller)

    def _answer(self, caller: socket.socket) -> None:
        with caller, contextlib.suppress(OSError):
            caller.settimeout(CALL_S)
            said = _receive(caller, len(self._word))
            if hmac.compare_digest(said, self._word):
                caller.sendall(self._word[::-1])
                caller.sendall(_receive(caller, _PAYLOAD))


def call_all(peers: Sequence[Peer], *, source: str | None) -> list[Reached]:
    """Resolve and call every peer, several at a time.

    Args:
        peers: Everybody else.
        source: Address of this machine to call from, where a variable names an interface.
    """
    if not peers:
        return []
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(peers))) as pool:
        return list(pool.map(lambda peer: _call(peer, source), peers))


def free_port() -> int:
    """A TCP port that nobody has now."""
    with socket.create_server(("0.0.0.0", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a TCP port of this machine can be taken now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _call(peer: Peer, source: str | None) -> Reached:
    name = peer.name.rpartition("@")[2]
    resolved = resolve(name)
    if not peer.addresses:
        return Reached(peer=peer.name, resolved=resolved, why_not="it has no address to call")
    unreached: list[str] = []
    why = ""
    for address in peer.addresses:
        began = time.monotonic()
        try:
            _greet(address, peer.port, peer.word.encode(), source)
        except OSError as error:
            why = why or f"{address} port {peer.port}: {error.strerror or error}"
            unreached.append(address)
            continue
        return Reached(
            peer=peer.name,
            resolved=resolved,
            address=address,
            seconds=time.monotonic() - began,
            unreached=tuple(unreached),
        )
    return Reached(peer=peer.name, resolved=resolved, why_not=why, unreached=tuple(unreached))


def _greet(address: str, port: int, word: bytes, source: str | None) -> None:
    with socket.create_connection(
        (address, port), timeout=CALL_S, source_address=(source, 0) if source else None
    ) as line:
        line.settimeout(CALL_S)
        line.sendall(word)
        if _receive(line, len(word)) != word[::-1]:
            raise OSError("somebody else answers there")
        try:
            line.sendall(bytes(_PAYLOAD))
            echoed = _receive(line, _PAYLOAD)
        except TimeoutError:
            echoed = b""
        if len(echoed) != _PAYLOAD:
            raise OSError(
                "it greets, and large packets do not come through: the MTU differs on the way"
            )


def _receive(line: socket.socket, num_bytes: int) -> bytes:
    parts: list[bytes] = []
    missing = num_bytes
    while missing:
        part = line.recv(min(missing, 65536))
        if not part:
            break
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
