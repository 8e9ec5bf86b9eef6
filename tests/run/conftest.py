"""Fixtures of the runtime's tests: a port, and Ctrl-C."""

import signal
import socket

import pytest


@pytest.fixture
def free_port():
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def ctrl_c():
    """SIGINT interrupts this process, also where it was started in the background and would ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
