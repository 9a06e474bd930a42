"""Who may ask the page's server for what. What is not allowed here is refused.

An ASGI wrapper. It checks, in this order: the host asked for is ours (DNS rebinding), the method
only reads (nothing can be changed through this server), and whoever asks has the token (localhost
is not private where several people are logged in).
"""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

Message = MutableMapping[str, Any]
App = Callable[[Message, Any, Any], Awaitable[None]]

LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """Lets reading requests through that name us as host and carry the token."""

    def __init__(self, app: App, *, token: str, port: int, names: Iterable[str]) -> None:
        """Args:
        app: What answers a request that is allowed.
        token: A secret that the printed address carries.
        port: Where the server listens: part of the cookie's name, as a browser shares cookies
            between all ports of a host.
        names: Host names to answer for, besides those of this machine's loopback.
        """
        self._app = app
        self._token = token
        self._cookie = f"paceline-{port}"
        self._names = {*LOCAL_NAMES, *names}

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] != "http":  # no websockets, and nothing to start or stop
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        refusal = self._refusal(scope["method"], headers, asked)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                if refusal is None and asked:
                    more.append((b"set-cookie", self._set_cookie().encode()))
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        if refusal is None:
            await self._app(scope, receive, guarded)
            return
        status, text = refusal
        plain = [(b"content-type", b"text/plain; charset=utf-8")]
        await guarded({"type": "http.response.start", "status": status, "headers": plain})
        await guarded({"type": "http.response.body", "body": text.encode()})

    def _refusal(self, method: str, headers: dict[str, str], asked: str) -> tuple[int, str] | None:
        """Status and reason; None where the request is allowed."""
        if _name_of(headers.get("host", "")) not in self._names:
            return 421, "this server does not answer for that host"
        if method not in ("GET", "HEAD"):
            return 405, "this server only reads"
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        given = (asked,) if asked else (bearer, self._of_cookie(headers))
        if not any(map(self._is_token, given)):
            return 401, "open the address that `paceline watch` printed"
        return None

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _of_cookie(self, headers: dict[str, str]) -> str:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return ""
        return found.value if found else ""

    def _set_cookie(self) -> str:
        return f"{self._cookie}={self._token}; HttpOnly; SameSite=Strict; Path=/"


def _name_of(host: str) -> str:
    """The name in a Host header, without its port: an ssh tunnel may end at another one."""
    name, _, port = host.rpartition(":")
    name = name if name and port.isdigit() else host
    return name.removeprefix("[").removesuffix("]").lower()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
