"""One end of a plain TCP transfer, both ways at once: the capacity of a link, without any library.

Started as `bulk.py ADDRESS BYTES TURNS CORE [PORT]`. Without PORT it listens and prints the port. At the end it prints
the seconds of each turn, in which it has sent and received BYTES. If BYTES is 0, a turn is one byte there and back.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

PIECE_BYTES = 256 << 10
# Timeout in seconds, in case the other end has died.
LIMIT_S = 60


def main() -> None:
    """Connects to the other end, runs all turns and prints their seconds."""
    address, count, turns, core = sys.argv[1], *map(int, sys.argv[2:5])
    os.sched_setaffinity(0, [core])
    other = connect(address, int(sys.argv[5])) if len(sys.argv) > 5 else accept(address)
    other.settimeout(LIMIT_S)
    other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    first = len(sys.argv) > 5
    print(json.dumps([turn(other, count) if count else there_and_back(other, first) for _ in range(turns)]))


def accept(address: str) -> socket.socket:
    """Listens and returns the first connection."""
    with socket.create_server((address, 0)) as listener:
        listener.settimeout(LIMIT_S)
        print(listener.getsockname()[1], flush=True)
        return listener.accept()[0]


def connect(address: str, port: int) -> socket.socket:
    """Connects to the listening end."""
    return socket.create_connection((address, port), timeout=LIMIT_S)


def turn(other: socket.socket, count: int) -> float:
    """Returns the seconds until everything is sent and received. Before the clock starts, both ends exchange a byte."""
    receive(other, 1, lambda: send(other, 1))
    begin = time.monotonic()
    receive(other, count, lambda: send(other, count))
    return time.monotonic() - begin


def there_and_back(other: socket.socket, first: bool) -> float:
    """Returns the seconds of one exchange: from sending a byte to its return or, at the other end, from waiting for it
    to sending it back."""
    begin = time.monotonic()
    if first:
        other.sendall(b"x")
    if not other.recv(1):
        raise EOFError("the other end has disconnected")
    if not first:
        other.sendall(b"x")
    return time.monotonic() - begin


def send(other: socket.socket, count: int) -> None:
    """Sends `count` bytes."""
    piece = memoryview(bytes(PIECE_BYTES))
    while count:
        count -= other.send(piece[:count])


def receive(other: socket.socket, count: int, meanwhile) -> None:
    """Receives `count` bytes, while another thread runs `meanwhile`."""
    runner = threading.Thread(target=meanwhile, daemon=True)
    runner.start()
    piece = bytearray(PIECE_BYTES)
    while count:
        got = other.recv_into(memoryview(piece)[:count])
        if not got:
            raise EOFError("the other end has disconnected")
        count -= got
    runner.join()


if __name__ == "__main__":
    main()
