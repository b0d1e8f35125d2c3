"""The guards of tests/conftest.py do guard."""

from __future__ import annotations

import socket

import pytest
from hypothesis import settings

from tests.conftest import NetworkUsed


def test_a_connection_out_is_refused() -> None:
    with socket.socket() as s, pytest.raises(NetworkUsed, match=r"203\.0\.113\.1"):
        s.connect(("203.0.113.1", 80))


def test_a_name_look_up_is_refused() -> None:
    with pytest.raises(NetworkUsed, match=r"example\.org"):
        socket.create_connection(("example.org", 80))


def test_this_machine_may_be_reached() -> None:
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen()
        client.connect(server.getsockname())


def test_generated_examples_are_the_same_everywhere() -> None:
    assert settings.default is not None
    assert settings.default.derandomize
    assert settings.default.database is None
