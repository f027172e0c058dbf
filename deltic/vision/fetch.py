"""Pictures behind http(s) URLs, where the operator allows it. Nobody shall reach through us what he cannot reach
himself: every address is looked up once, must be public, and is the one that is connected to."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import SplitResult, urljoin, urlsplit

from deltic.errors import RequestError

MOST_BYTES = 20 << 20
"""Of one picture."""
MOST_URLS = 16
"""Of one conversation."""
MOST_BYTES_TOGETHER = 64 << 20
"""Of all pictures of a conversation that are fetched before it is read."""
SECONDS = 15.0
"""For all pictures of a conversation together."""
_REDIRECTS = 3
_PORTS = {"http": 80, "https": 443}
_TRANSLATED = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")))
"""IPv6 addresses with an IPv4 address in them, to which a gateway passes them on."""


class Fetcher:
    """Gets the pictures of one conversation. No proxy, no cookie, no password is used, and nothing is kept."""

    def __init__(self) -> None:
        self._left, self._until = MOST_URLS, time.monotonic() + SECONDS

    def __call__(self, url: str, field: str) -> bytes:
        """The bytes behind a URL. RequestError names the field, and says why they cannot be had."""
        self._left -= 1
        if self._left < 0:
            raise RequestError(f"messages have more than {MOST_URLS} pictures behind URLs: send data URLs", field)
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
        raise RequestError(f"{field} is passed on more than {_REDIRECTS} times", field)

    def _get(self, url: SplitResult, field: str) -> bytes | str:
        """What a server sends, or where it says that it is."""
        host, secure = url.hostname or "", url.scheme == "https"
        seconds = self._until - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        address = _public(host, url.port or _PORTS[url.scheme], field)
        held = socket.create_connection(address, timeout=seconds)
        if secure:  # the handshake comes later, so that it has an end too
            held = ssl.create_default_context().wrap_socket(held, server_hostname=host, do_handshake_on_connect=False)
        # a server that sends a byte now and then would never be late otherwise
        guard = threading.Timer(seconds, _shut, (held,))
        guard.daemon = True
        guard.start()
        try:
            if isinstance(held, ssl.SSLSocket):
                held.do_handshake()
            found = _ask(held, host, url, field)
        finally:
            guard.cancel()
            held.close()
        if time.monotonic() >= self._until:  # perhaps the guard has ended it
            raise TimeoutError
        return found


def fetch_all(urls: Mapping[str, str]) -> dict[str, bytes]:
    """What is behind each URL; waits for it. urls: with the field of each. RequestError says why one cannot be had."""
    fetch, room = Fetcher(), MOST_BYTES_TOGETHER
    found = dict[str, bytes]()
    for url, field in urls.items():
        found[url] = fetch(url, field)
        room -= len(found[url])
        if room < 0:
            raise RequestError(f"{field} and the pictures before it have more than {MOST_BYTES_TOGETHER >> 20} MiB: "
                               "scale them down", field)
    return found


def _ask(held: socket.socket, host: str, url: SplitResult, field: str) -> bytes | str:
    connection = http.client.HTTPConnection(host)
    connection.sock = held
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
    data = response.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise RequestError(f"{field} has more than {MOST_BYTES >> 20} MiB: scale it down", field)
    if response.length:
        raise ValueError("the server ended before its answer did")
    return data


def _checked(url: str, field: str) -> SplitResult:
    """ValueError if it is none."""
    parts = urlsplit(url)
    plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= 4096
    if not plain or parts.scheme not in _PORTS or not parts.hostname:
        raise RequestError(f"{field} must be a URL that begins with http:// or https://, in ASCII, not {url[:40]!r}",
                           field)
    if parts.username is not None or parts.port not in (None, *_PORTS.values()):
        raise RequestError(f"{field} must be a URL without user and password, on port 80 or 443", field)
    return parts


def _public(host: str, port: int, field: str) -> tuple[str, int]:
    """The address to connect to. RequestError if the name has one that is not public."""
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not found or not all(map(is_public, found)):
        raise RequestError(f"{field} names a computer that is not on the public internet: from there nothing is "
                           "fetched", field)
    return found[0], port


def is_public(address: str) -> bool:
    """Whether an address is one of the public internet: not of this machine, a private network or a special use, nor
    such a one in disguise."""
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
