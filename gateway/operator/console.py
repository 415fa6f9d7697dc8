"""The operator's console: one page that runs nothing but its own script, and loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import Response


def console_response() -> Response:
    """The page. It asks the routes beside it, with the token that is typed into it where one is demanded."""
    return Response(_PAGE, headers=_HEADERS, media_type="text/html")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _inside(element: str) -> str:
    """What stands in the page's one element of that name, whose hash is its permission (CSP level 3, section 6.7.3)."""
    (text,) = re.findall(f"<{element}>(.*?)</{element}>", _PAGE, re.DOTALL)
    return str(text)


_PAGE = (Path(__file__).parent / "console.html").read_text(encoding="utf-8")
_POLICY = (
    f"default-src 'none'; script-src {_hash(_inside('script'))}; style-src {_hash(_inside('style'))}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
