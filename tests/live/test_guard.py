"""Who may ask the live page's server: a table of requests and what becomes of them."""

import asyncio

import pytest

from paceline.live.guard import Guard, is_loopback

TOKEN = "a-secret-of-the-test"
BEARER = {"authorization": f"Bearer {TOKEN}"}
COOKIE = {"cookie": f"paceline-7341={TOKEN}"}


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"secret numbers"})


def ask(path="/", method="GET", host="127.0.0.1:7341", **headers):
    """Status, headers and body of one request."""
    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [
            (name.encode(), value.encode()) for name, value in {"host": host, **headers}.items()
        ],
    }
    sent = []

    async def send(message):
        sent.append(message)

    guard = Guard(app, token=TOKEN, port=7341, names=["gpu-head"])
    asyncio.run(guard(scope, None, send))
    given = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], given, sent[1]["body"]


@pytest.mark.parametrize(
    ("what", "status", "request_"),
    [
        ("the printed address", 200, {"path": f"/?token={TOKEN}"}),
        ("a script with the token", 200, {"path": "/api/runs", **BEARER}),
        ("the page itself", 200, {"path": "/api/runs", **COOKIE}),
        ("the far end of a tunnel at another port", 200, {"host": "localhost:9000", **BEARER}),
        ("the name it was told to serve", 200, {"host": "gpu-head:7341", **BEARER}),
        ("an address of IPv6", 200, {"host": "[::1]:7341", **BEARER}),
        ("nobody", 401, {"path": "/api/runs"}),
        ("a wrong token", 401, {"path": "/?token=wrong"}),
        ("a wrong token beside a right cookie", 401, {"path": "/?token=wrong", **COOKIE}),
        ("a part of the token", 401, {"path": f"/?token={TOKEN[:-1]}"}),
        ("a cookie of another port", 401, {"cookie": f"paceline-7342={TOKEN}"}),
        ("a cookie that is none", 401, {"cookie": 'paceline-7341="\\'}),
        ("a name that leads here (DNS rebinding)", 421, {"host": "evil.example:7341", **BEARER}),
        ("no host at all", 421, {"host": "", **BEARER}),
        ("a POST", 405, {"method": "POST", **BEARER}),
        ("a DELETE", 405, {"method": "DELETE", **BEARER}),
        ("a form of another site", 405, {"method": "POST", "origin": "http://evil", **COOKIE}),
    ],
)
def test_guard_answers(what, status, request_):
    got, headers, body = ask(**request_)
    assert got == status, what
    assert (body == b"secret numbers") == (status == 200)
    assert "script-src 'self'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers


def test_printed_address_gives_a_cookie_that_scripts_and_other_sites_do_not_get():
    _, headers, _ = ask(f"/?token={TOKEN}")
    assert headers["set-cookie"] == f"paceline-7341={TOKEN}; HttpOnly; SameSite=Strict; Path=/"
    for refused in ({"path": "/?token=wrong"}, {"path": f"/?token={TOKEN}", "host": "evil"}):
        assert "set-cookie" not in ask(**refused)[1]


def test_only_addresses_of_this_machine_are_loopback():
    local = ("127.0.0.1", "::1", "localhost", "127.8.0.1")
    assert all(map(is_loopback, local))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.5", "gpu-head")))
