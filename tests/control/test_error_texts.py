"""Whose fault an error's text is."""

import pytest

from paceline.control.error_texts import names_lost_peer


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("[gloo/transport/tcp/pair.cc:547] Connection refused", True),
        ("[gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:3", True),
        ("ConnectionRefusedError: [Errno 111] Connection refused", False),  # the program's own
        ("RuntimeError: shape '[2]' is invalid", False),
    ],
)
def test_a_rank_that_is_gone_is_named_by_torchs_transports_alone(text, is_lost):
    assert names_lost_peer(text) is is_lost
