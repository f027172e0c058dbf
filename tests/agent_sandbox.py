"""Runs a command without a network: one port of its loopback leads to a Unix socket outside.

    unshare --map-root-user --net python agent_sandbox.py SOCKET PORT COMMAND...
"""

from __future__ import annotations

import fcntl
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1


def relay(listener: socket.socket, family: socket.AddressFamily, address: object) -> None:
    """Connects each client to the address until the listener is closed."""
    while True:
        try:
            here, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_connect, args=(here, family, address), daemon=True).start()


def _connect(here: socket.socket, family: socket.AddressFamily, address: Any) -> None:
    with here, socket.socket(family) as there, suppress(OSError):
        there.connect(address)
        back = threading.Thread(target=_copy, args=(there, here), daemon=True)
        back.start()
        _copy(here, there)
        back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copies data until one side ends, then shuts down the other."""
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def main(path: str, port: str, *command: str) -> int:
    with socket.socket() as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
    listener = socket.create_server(("127.0.0.1", int(port)))
    threading.Thread(target=relay, args=(listener, socket.AF_UNIX, path), daemon=True).start()
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
