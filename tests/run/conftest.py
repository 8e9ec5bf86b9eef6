"""Fixtures of the runtime's tests: one thread in all processes."""

import signal
import socket

import pytest
import torch

from shardwright.run import launch


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """Here, so that a fork is safe, and in every rank, so that ranks do not wait for each other's threads."""
    torch.set_num_threads(1)
    monkeypatch.setattr(launch, "usable_cores", lambda: 1)


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
