"""Machines within this one: network namespaces with names, joined by a slow network. Needs root, on Linux.

Each namespace has a tun device, whose sending is held to a rate by tc's token bucket (tbf). What is sent comes to a process of
this file, which hands it to the device of its destination after a delay: kernels often lack netem, which could do both. MPI starts
its processes there through a launcher script in the place of ssh. Each has the host's name of its namespace, so that neither MPI
nor barellm takes the ranks for neighbours with common memory.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
MTU = 65000  # bytes of a packet: few packets, for they go through Python
HOSTS = Path("/etc/netns")


@dataclass(frozen=True)
class Network:
    """`count` machines named scale0, scale1, ... Each sends `rate` bit/s at most (as tc writes it); what it sends arrives `delay_s`
    later."""

    count: int
    rate: str
    delay_s: float

    def names(self) -> list[str]:
        return [f"scale{i}" for i in range(self.count)]

    @contextmanager
    def up(self) -> Iterator[Path]:
        """While entered, the machines are there. Gives the launcher for `mpiexec -launcher-exec`."""
        if os.geteuid() != 0 or sys.platform != "linux":
            raise SystemExit("network namespaces need root, on Linux")
        names, relay = self.names(), 0
        with tempfile.TemporaryDirectory(prefix="barellm-net-") as folder:
            try:
                relay = self._join(names)
                yield _launcher(Path(folder), names)
            finally:
                if relay:
                    os.kill(relay, signal.SIGTERM)
                    os.waitpid(relay, 0)
                for name in names:
                    subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
                    shutil.rmtree(HOSTS / name, ignore_errors=True)

    def _join(self, names: Sequence[str]) -> int:
        """Make the namespaces and their devices; the process that carries packets from one to the other."""
        table = "127.0.0.1 localhost\n" + "".join(f"{address(i)} {name}\n" for i, name in enumerate(names))
        devices = []
        for name in names:  # of a run that was killed
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
        for i, name in enumerate(names):
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
            devices.append(device)
            run("ip", "netns", "add", name)
            run("ip", "link", "set", name, "netns", name)
            inside = ("ip", "-n", name)
            run(*inside, "addr", "add", f"{address(i)}/24", "dev", name)
            run(*inside, "link", "set", name, "mtu", str(MTU), "txqueuelen", "5000", "up")
            run(*inside, "link", "set", "lo", "up")
            if self.rate:
                bucket = ("rate", self.rate, "burst", "160kb", "latency", "500ms")
                run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", name, "root", "tbf", *bucket)
            (HOSTS / name).mkdir(parents=True, exist_ok=True)
            (HOSTS / name / "hosts").write_text(table)
        if child := os.fork():
            for device in devices:
                os.close(device)
            return child
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))  # it must not wait for the ranks' threads
        _carry(devices, self.delay_s)
        os._exit(1)


def address(number: int) -> str:
    return f"10.77.0.{number + 1}"


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def _carry(devices: Sequence[int], delay_s: float) -> None:
    """Packets that are read from one device are written to that of their destination, `delay_s` later."""
    due: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait = max(0.0, due[0][0] - time.monotonic()) if due else None
        ready, _, _ = select.select(devices, [], [], wait)
        now = time.monotonic()
        for device in ready:
            packet = os.read(device, MTU + 100)
            to = packet[19] - 1 if packet[0] >> 4 == 4 else -1  # the last byte of an IPv4 address
            if 0 <= to < len(devices):
                due.append((now + delay_s, devices[to], packet))
        while due and due[0][0] <= time.monotonic():
            _, device, packet = due.popleft()
            os.write(device, packet)


def _launcher(folder: Path, names: Sequence[str]) -> Path:
    """A script that is called as ssh is, and runs a command in the namespace of that name, on a core of its own."""
    script, cores = folder / "launch", sorted(os.sched_getaffinity(0))
    choice = " ".join(f"{name}) core={cores[i % len(cores)]};;" for i, name in enumerate(names))
    script.write_text(
        "#!/bin/bash\n"
        'while [ "${1#-}" != "$1" ]; do shift; done\n'
        "host=$1; shift\n"
        f"case $host in {choice} esac\n"
        'exec ip netns exec $host unshare --uts bash -c "hostname $host; exec taskset -c $core $*"\n'
    )
    script.chmod(0o755)
    return script


def command(launcher: Path, names: Sequence[str], words: Sequence[str]) -> list[str]:
    """What runs `words` as one MPI process on each machine."""
    from barellm.distributed.launch import mpiexec

    mpi = [mpiexec(), "-hosts", ",".join(names), "-launcher", "ssh", "-launcher-exec", str(launcher), "-ppn", "1"]
    return [str(launcher), names[0], *mpi, "-n", str(len(names)), *words]
