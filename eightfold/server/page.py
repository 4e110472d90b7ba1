"""The chat page at `/`: one static file, which the browser may run and nothing else.

Its script and its style stand in the file. The Content-Security-Policy names them by their hashes, so that a text from a model
that found its way into the page as HTML would still not run, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from fastapi import APIRouter
from starlette.responses import Response

from eightfold.errors import InputError


def page_router() -> APIRouter:
    """The route of the page. It needs no API key: the page asks for one where the API does."""
    text = resources.files("eightfold.server").joinpath("static/index.html").read_text(encoding="utf-8")
    body = text.encode()
    headers = {
        "Content-Security-Policy": content_security_policy(text),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(body, media_type="text/html; charset=utf-8", headers=headers)

    return router


def content_security_policy(html: str) -> str:
    """What a page may do: run its own script, use its own style, and talk to its own server.

    Args:
        html: with one `<script>` and one `<style>` without attributes.
    """
    sources = {}
    for tag in ("script", "style"):
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        if len(found) != 1:
            raise InputError("the chat page", got=f"{len(found)} of <{tag}>", expected="one")
        digest = base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode()
        sources[tag] = f"'sha256-{digest}'"
    return (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
