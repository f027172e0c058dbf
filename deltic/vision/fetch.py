"""Downloads pictures from http(s) URLs, if the operator allows it.

Against server-side request forgery, every host name is resolved once, its addresses must be public, and the connection
uses the checked address.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final
from urllib.parse import SplitResult, urljoin, urlsplit

from deltic.errors import RequestError

MAX_BYTES: Final = 20 << 20
"""Maximum bytes of one picture."""
MAX_URLS: Final = 16
MAX_TOTAL_BYTES: Final = 64 << 20
"""Maximum bytes of all fetched pictures of a conversation."""
SECONDS: Final = 15.0
"""Maximum seconds for all pictures of a conversation."""
_REDIRECTS: Final = 3
_PORTS: Final = {"http": 80, "https": 443}
_TRANSLATED: Final = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")))
"""IPv6 networks whose addresses gateways translate to IPv4 addresses."""


class Fetcher:
    """Downloads the pictures of one conversation, without proxy, cookies, passwords or cache."""

    def __init__(self) -> None:
        self._left, self._until = MAX_URLS, time.monotonic() + SECONDS

    def __call__(self, url: str, field: str) -> bytes:
        """Returns the bytes of a URL. Raises RequestError with the field."""
        self._left -= 1
        if self._left < 0:
            raise RequestError(f"messages have more than {MAX_URLS} pictures behind URLs: send data URLs", field)
        try:
            for _ in range(_REDIRECTS + 1):
                found = self._get(_checked(url, field), field)
                if isinstance(found, bytes):
                    return found
                url = urljoin(url, found)
        except RequestError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = "it takes too long" if time.monotonic() > self._until else type(error).__name__
            raise RequestError(f"{field} cannot be fetched ({reason}): send the picture as a data URL",
                               field) from error
        raise RequestError(f"{field} is redirected more than {_REDIRECTS} times", field)

    def _get(self, url: SplitResult, field: str) -> bytes | str:
        """Returns the response body, or the location of a redirect."""
        host, secure = url.hostname or "", url.scheme == "https"
        seconds = self._until - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        address = _public(host, url.port or _PORTS[url.scheme], field)
        sock = socket.create_connection(address, timeout=seconds)
        if secure:  # the handshake runs under the timer below
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
        # socket timeouts restart with every byte
        timer = threading.Timer(seconds, _shut, (sock,))
        timer.daemon = True
        timer.start()
        try:
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            found = _ask(sock, host, url, field)
        finally:
            timer.cancel()
            sock.close()
        if time.monotonic() >= self._until:  # the timer may have cut the response off
            raise TimeoutError
        return found


def fetch_all(urls: Mapping[str, str]) -> dict[str, bytes]:
    """Downloads all URLs; `urls` maps each to its field. Raises RequestError."""
    fetch, room = Fetcher(), MAX_TOTAL_BYTES
    found = dict[str, bytes]()
    for url, field in urls.items():
        found[url] = fetch(url, field)
        room -= len(found[url])
        if room < 0:
            raise RequestError(f"{field} and the pictures before it have more than {MAX_TOTAL_BYTES >> 20} MiB: "
                               "scale them down", field)
    return found


def _ask(sock: socket.socket, host: str, url: SplitResult, field: str) -> bytes | str:
    connection = http.client.HTTPConnection(host)
    connection.sock = sock
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    connection.request("GET", target, headers={"Host": url.netloc, "User-Agent": "deltic", "Accept": "image/*",
                                               "Accept-Encoding": "identity", "Connection": "close"})
    with connection.getresponse() as response:
        return _body(response, field)


def _body(response: http.client.HTTPResponse, field: str) -> bytes | str:
    if response.status in (301, 302, 303, 307, 308):
        return response.getheader("Location") or ""
    if response.status != 200:
        raise RequestError(f"{field} cannot be fetched: the server answers with status {response.status}", field)
    data = response.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise RequestError(f"{field} has more than {MAX_BYTES >> 20} MiB: scale it down", field)
    if response.length:
        raise ValueError("the server ended before its answer did")
    return data


def _checked(url: str, field: str) -> SplitResult:
    """Parses a URL. Raises ValueError or RequestError."""
    parts = urlsplit(url)
    plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= 4096
    if not plain or parts.scheme not in _PORTS or not parts.hostname:
        raise RequestError(f"{field} must be a URL that begins with http:// or https://, in ASCII, not {url[:40]!r}",
                           field)
    if parts.username is not None or parts.port not in (None, *_PORTS.values()):
        raise RequestError(f"{field} must be a URL without user and password, on port 80 or 443", field)
    return parts


def _public(host: str, port: int, field: str) -> tuple[str, int]:
    """Resolves a host. Raises RequestError if it has an address that is not public."""
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not found or not all(map(is_public, found)):
        raise RequestError(f"{field} names a host that is not on the public internet, which is never fetched", field)
    return found[0], port


def is_public(address: str) -> bool:
    """Returns True for an address of the public internet, including one embedded in another address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return is_public(str(parsed.ipv4_mapped))
        if any(parsed in network for network in _TRANSLATED):
            return False
    return parsed.is_global and not parsed.is_multicast and not parsed.is_reserved


def _shut(plain: socket.socket) -> None:
    with suppress(OSError):
        plain.shutdown(socket.SHUT_RDWR)
