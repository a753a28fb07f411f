"""Two hosts: network namespaces with a link between them, and a job with one rank in each."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import Pool

ROOT = Path(__file__).parents[2]
NAMES = re.compile(r"^fpipe-(\d+)-\d+-\w+", re.MULTILINE)  # the process that made the namespace
STEADY = (  # what TCP sends at once depends on neither what the link was like before nor pauses
    "reno > /proc/sys/net/ipv4/tcp_congestion_control",
    "0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle",
)
serial = itertools.count()


class Unavailable(Exception):
    """Network namespaces can't be made here: why."""


def made(kind: Callable[[], Any]) -> Iterator[Any]:
    """Hosts or a network for a fixture: closed after the test, which is skipped where they can't be made."""
    try:
        hosts = kind()
    except Unavailable as error:
        pytest.skip(f"two hosts need network namespaces: {error}")
    yield hosts
    hosts.close()


def run(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        raise Unavailable(f"there is no {words[0]!r}: install iproute2") from None
    if done.returncode:
        raise Unavailable(f"{' '.join(words)!r} gives {(done.stdout + done.stderr).strip()!r}")
    return done.stdout


class Network:
    """Two namespaces, each with an `eth0`, 10.0.0.1 and 10.0.0.2, joined by a veth pair.

    Where the kernel has no netem, the pair is cut, and `tests/support/cable.py` in a third namespace joins the ends.
    """

    def __init__(self) -> None:
        remove_stale()
        name = f"fpipe-{os.getpid()}-{next(serial)}"
        self.hosts, self.between = [f"{name}-a", f"{name}-b"], f"{name}-between"
        self.cable: subprocess.Popen[str] | None = None
        try:
            for each in (*self.hosts, self.between):
                run("ip", "netns", "add", each)
            self._join()
            for i, host in enumerate(self.hosts):
                run("ip", "-n", host, "address", "add", f"10.0.0.{i + 1}/24", "dev", "eth0")
                run("ip", "-n", host, "link", "set", "dev", "lo", "up")
                run("ip", "-n", host, "link", "set", "dev", "eth0", "up")
                for setting in STEADY:
                    run("ip", "netns", "exec", host, "sh", "-c", f"echo {setting}")
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        a, b = self.hosts
        try:
            run("tc", "-n", a, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
            run("tc", "-n", a, "qdisc", "delete", "dev", "lo", "root")
            run("ip", "link", "add", "eth0", "netns", a, "type", "veth", "peer", "name", "eth0", "netns", b)
        except Unavailable:
            ends = ["cable0", "cable1"]
            for host, end in zip(self.hosts, ends, strict=True):
                peer = ("peer", "name", end, "netns", self.between)
                run("ip", "link", "add", "eth0", "netns", host, "type", "veth", *peer)
                run("ip", "-n", self.between, "link", "set", "dev", end, "up")
            words = ["ip", "netns", "exec", self.between, sys.executable, str(ROOT / "tests/support/cable.py"), *ends]
            self.cable = subprocess.Popen(words, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def slow(self, milliseconds: float, megabits: float) -> None:
        """Each frame comes that much later, and each direction carries no more a second."""
        if self.cable is not None and self.cable.stdin is not None:
            self.cable.stdin.write(f"{milliseconds / 1e3} {megabits * 1e6}\n")
            self.cable.stdin.flush()
            return
        for host in self.hosts:
            how = ("delay", f"{milliseconds}ms", "rate", f"{megabits}mbit", "limit", "100000")
            run("tc", "-n", host, "qdisc", "replace", "dev", "eth0", "root", "netem", *how)

    def unplug(self) -> None:
        """Nothing comes through for longer than any test, and nobody is told."""
        self.slow(milliseconds=1e5, megabits=1000)

    def close(self) -> None:
        for name in (self.between, *self.hosts):
            remove(name)
        if self.cable is not None and self.cable.stdin is not None:
            self.cable.stdin.close()
            self.cable.wait(10)


def kill(namespace: str) -> None:
    """End every process of a namespace, as when a host goes down."""
    for pid in run("ip", "netns", "pids", namespace).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue


def remove(namespace: str) -> None:
    if re.search(rf"^{namespace}\b", run("ip", "netns", "list"), re.MULTILINE):
        kill(namespace)
        run("ip", "netns", "delete", namespace)


def remove_stale() -> None:
    """What a killed test run has left."""
    for found in NAMES.finditer(run("ip", "netns", "list")):
        if not Path("/proc", found[1]).exists():
            remove(found[0])


class Hosts(Pool):
    """A pool of two processes, one on each host, with the environment that `torchrun --nnodes 2` sets."""

    def __init__(self) -> None:
        self.network = Network()
        try:
            self._start([partial(enter, host) for host in self.network.hosts], "10.0.0.1")
        except BaseException:
            self.close()
            raise

    def end(self, rank: int) -> None:
        """One host goes down, with all its processes."""
        kill(self.network.hosts[rank])

    def close(self) -> None:
        super().close()
        self.network.close()


def enter(host: str) -> None:
    """Move this process, which has no threads, to a host."""
    with Path("/run/netns", host).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"can't enter {host}")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
