"""A long, narrow cable between two network interfaces, for kernels without netem: `cable.py ONE OTHER`.

Each line on the standard input sets the delay, in seconds, and the rate, in bits a second; its end is the cable's.
"""

import contextlib
import os
import select
import socket
import sys
import time
from collections import deque

SOL_PACKET, PACKET_VNET_HDR, ETH_P_ALL = 263, 15, 3  # linux/if_packet.h, linux/if_ether.h
SO_RCVBUFFORCE = 33


def opened(interface: str) -> socket.socket:
    """Frames as the kernel has them: large, and with the checksums that the far end need not compute."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    made.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 26)
    made.bind((interface, 0))
    return made


def carry(ends: list[socket.socket]) -> None:
    delay, rate = 0.0, 1e12
    free = [0.0, 0.0]  # when each direction has sent what it has
    late: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    while True:
        first = min((queue[0][0] for queue in late if queue), default=None)
        wait = None if first is None else max(0.0, first - time.monotonic())
        ready = select.select([*ends, sys.stdin], [], [], wait)[0]
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return
            delay, rate = map(float, line.split())
        for side, end in enumerate(ends):
            if end in ready:
                frame = end.recv(1 << 17)
                free[side] = max(free[side], time.monotonic()) + 8 * len(frame) / rate
                late[side].append((free[side] + delay, frame))
        for side, queue in enumerate(late):
            while queue and queue[0][0] <= time.monotonic():
                ends[1 - side].send(queue.popleft()[1])


if __name__ == "__main__":
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # on time also where all cores are busy
    carry([opened(name) for name in sys.argv[1:]])
