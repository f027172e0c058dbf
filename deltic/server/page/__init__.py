"""The chat page at `/`, and its files under `/page/`. They need no API key; the page asks for one if /v1 needs it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FILES = Path(__file__).parent / "static"
_TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml",
          ".js": "text/javascript; charset=utf-8", ".woff2": "font/woff2"}
"""Media types by suffix. Files with other suffixes are not served."""
_POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self' data:; "
           "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
           "require-trusted-types-for 'script'; trusted-types 'none'")
"""Content security policy. It allows only the page's own files. The last two directives make browsers refuse
`innerHTML` and similar ways to turn text into HTML."""
_HEADERS = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin", "cross-origin-resource-policy": "same-origin"}
_FOREVER = "public, max-age=31536000, immutable"
_ASK = "no-cache"  # browsers revalidate the file at each load


@dataclass(frozen=True, slots=True)
class _StaticFile:
    data: bytes
    headers: dict[str, str]


def routes() -> list[Route]:
    return [Route("/", _index), Route("/page/{name:path}", _file)]


@cache
def _files() -> dict[str, _StaticFile]:
    """Returns all files by their path under `static`. They are read once, and no other path can be read."""
    return {path.relative_to(_FILES).as_posix(): _read(path) for path in _FILES.rglob("*") if path.suffix in _TYPES}


def _read(path: Path) -> _StaticFile:
    data = path.read_bytes()
    # library file names contain versions, so these files never change
    caching = _FOREVER if _FILES / "vendor" in path.parents else _ASK
    return _StaticFile(data, {**_HEADERS, "content-type": _TYPES[path.suffix], "cache-control": caching,
                        "etag": f'"{sha256(data).hexdigest()[:32]}"'})


async def _index(request: Request) -> Response:
    return _response(request, "index.html")


async def _file(request: Request) -> Response:
    return _response(request, request.path_params["name"])


def _response(request: Request, name: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise HTTPException(404, "there is no such file")
    known = request.headers.get("if-none-match", "").replace("W/", "").split(",")
    if file.headers["etag"] in [tag.strip() for tag in known]:
        return Response(status_code=304, headers=file.headers)
    return Response(file.data, headers=file.headers)
