"""Fixtures of measurements: networks of namespaces, a watch for orphans."""

import os
import shutil
import subprocess

import psutil
import pytest
from namespaces import Network


@pytest.fixture
def network():
    """Builds networks of so many namespaces, and removes them."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces need root, ip and tc")
    probe = subprocess.run(["ip", "netns", "add", f"sw{os.getpid()}-probe"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"no network namespaces here: {probe.stderr.decode().strip()}")
    subprocess.run(["ip", "netns", "del", f"sw{os.getpid()}-probe"], capture_output=True, check=False)
    built = []

    def build(count):
        built.append(Network([f"sw{os.getpid()}-{len(built)}-{place}" for place in range(count)]))
        built[-1].build()
        return built[-1]

    yield build
    for each in built:
        each.remove()


@pytest.fixture
def no_orphans():
    """No process that this one started, or that one of those started, is left behind."""
    before = _descendants()
    yield
    assert _descendants() <= before


def _descendants():
    return {process.pid for process in psutil.Process().children(recursive=True)}
