"""The operator's console: static files, and the policy under which their scripts run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from gateway.errors import NotFound

FOLDER = Path(__file__).parent
PAGE = "index.html"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; worker-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Scripts and styles come from files alone, and no script makes markup or code of text."""
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".mjs": "text/javascript",
    ".txt": "text/plain",
    ".json": "application/json",
}
_HEADERS = {
    "content-security-policy": POLICY,
    "permissions-policy": "microphone=(self)",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@final
@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    media_type: str
    etag: str


@cache
def _files() -> Mapping[str, _File]:
    """Every file by its path below the folder, read once."""
    found = {}
    for path in FOLDER.rglob("*"):
        if path.suffix in _TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            found[path.relative_to(FOLDER).as_posix()] = _File(body, _TYPES[path.suffix], etag)
    return found


def console_response(request: Request, name: str = PAGE) -> Response:
    """Answers one file, or 304 if the browser has it already. The folder itself leads to the page. Raises NotFound if
    there is no such file."""
    if not name:
        return RedirectResponse("../")
    file = _files().get(name)
    if file is None:
        raise NotFound(f"the console has no file {name[:100]!r}")
    headers = {**_HEADERS, "etag": file.etag}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)
