"""Networks of known shape: namespaces, each two joined by a cable of its own, which `tc` can limit."""

import ctypes
import multiprocessing
import os
import subprocess
import traceback
from itertools import combinations

from shardwright.measure.links import measure_links

NEW_NETWORK = 0x40000000  # CLONE_NEWNET of <sched.h>


def run(*command):
    """A command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def enter(namespace):
    """Move this process into a network namespace (os.setns: Python 3.12)."""
    with open(f"/var/run/netns/{namespace}") as file:
        assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NEW_NETWORK) == 0


class Network:
    """Namespaces, each two joined by a cable of its own; a namespace has one address on all its cables."""

    def __init__(self, names):
        self.names = names

    def address(self, place):
        return f"10.213.77.{place + 1}"

    def cable(self, a, b):
        """Name of the end in namespace ``a`` of its cable to ``b``."""
        return f"to{b}"

    def build(self):
        for name in self.names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        for a, b in combinations(range(len(self.names)), 2):
            ends = ((a, b), (b, a))
            pair = [("name", self.cable(x, y), "netns", self.names[x]) for x, y in ends]
            run("ip", "link", "add", *pair[0], "type", "veth", "peer", *pair[1])
            for x, y in ends:
                device = ("dev", self.cable(x, y))
                run("ip", "-n", self.names[x], "link", "set", *device, "up")
                address = (self.address(x), "peer", f"{self.address(y)}/32")
                run("ip", "-n", self.names[x], "addr", "add", *address, *device)

    def shape(self, a, b, megabits):
        """Limit the cable between ``a`` and ``b`` both ways; bursts are short beside what is sent."""
        for x, y in ((a, b), (b, a)):
            limit = ("tbf", "rate", f"{megabits}mbit", "burst", "16kb", "latency", "100ms")
            run("tc", "-n", self.names[x], "qdisc", "add", "dev", self.cable(x, y), "root", *limit)

    def shape_inside(self, megabits):
        """Limit what processes of a namespace send to each other, both ways together."""
        for name in self.names:
            limit = ("tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "100ms")
            run("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", *limit)

    def cut(self, a, b):
        """Have what ``a`` sends to ``b`` vanish without a word: the neighbour's hardware address is wrong."""
        wrong = ("lladdr", "02:00:00:00:00:99", "dev", self.cable(a, b), "nud", "permanent")
        run("ip", "-n", self.names[a], "neigh", "replace", self.address(b), *wrong)

    def remove(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def ranks(self, places, function, *args):
        """``function(*args)`` by one rank in each namespace of ``places``, as torchrun would start them; what
        rank 0 returned."""
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        processes = []
        for rank, place in enumerate(places):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_RANK": str(places[:rank].count(place)),
                "MASTER_ADDR": self.address(places[0]),
                "MASTER_PORT": "29511",
                "GLOO_SOCKET_IFNAME": self.cable(place, 1 if place == 0 else 0),
            }
            arguments = (self.names[place], environment, theirs if rank == 0 else None, function, args)
            processes.append(context.Process(target=_rank, args=arguments))
            processes[-1].start()
        theirs.close()
        try:
            return ours.recv()
        finally:
            for process in processes:
                process.join(10)
                process.kill()


def _rank(namespace, environment, answer, function, args):
    try:
        os.environ.update(environment)
        enter(namespace)
        found = function(*args)
        if answer is not None:
            answer.send(found)
    except BaseException:  # noqa: BLE001  (the process ends here, and its reason belongs on stderr)
        traceback.print_exc()
    finally:
        os._exit(0)


def measured(seconds, max_size=None, output=None):
    """What `map` measures on ranks that are there."""
    return measure_links(None, seconds, max_size, None, output, lambda line: None)
