"""The app: its routes, its layers, and what they share."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from eightfold._version import __version__
from eightfold.errors import InputError
from eightfold.server import control, native, openai
from eightfold.server.errors import BodyTooLargeError, ErrorAnswer, UnavailableError, answer_to
from eightfold.server.middleware import Guarded, Identified, Keyed, Limited, SameOrigin, Timed, wrapped
from eightfold.server.page import page_router
from eightfold.server.state import AppState
from eightfold.server.token_stream import EngineDiedError

_CLIENT_GONE = 499


@dataclass(frozen=True, slots=True)
class App:
    """A server's app.

    Attributes:
        asgi: what a web server calls.
        requests: the layer that counts those which are open.
    """

    asgi: ASGIApp
    requests: Identified


def make_app(state: AppState) -> App:
    """The app over a state."""
    config = state.config
    app = FastAPI(
        title="Eightfold",
        version=__version__,
        docs_url=None if config.disable_docs else "/docs",
        openapi_url=None if config.disable_docs else "/openapi.json",
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state = state.shared
    for router in (openai.router, native.router, control.model_router):
        app.include_router(router, dependencies=[Depends(_admit)])
    app.include_router(control.router)
    app.include_router(page_router())
    for kind in (InputError, UnavailableError, EngineDiedError, BodyTooLargeError, TimeoutError, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    layers: list[Callable[[ASGIApp], ASGIApp]] = [Guarded, partial(Limited, max_bytes=config.max_request_bytes)]
    if config.request_timeout is not None:
        layers.append(partial(Timed, seconds=config.request_timeout))
    if config.api_key is not None:
        layers.append(partial(Keyed, api_key=config.api_key, admin_api_key=config.admin_api_key))
    layers.append(partial(SameOrigin, allowed=config.allowed_origins))
    if config.allowed_origins:
        origins = list(config.allowed_origins)
        layers.append(partial(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
    requests = Identified(wrapped(app, layers), log_bodies=config.log_requests)
    return App(requests, requests)


async def _admit(request: Request) -> None:
    """Refuse what cannot be answered at this time."""
    _ = request.app.state.server.serving


async def _on_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return answer_to(error).response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    """No such route, or not with this method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(getattr(error, "headers", None) or {})
    path = request.url.path
    if status == 404:
        near = difflib.get_close_matches(path, request.app.openapi()["paths"], n=1)
        remedy = f". Did you mean {near[0]}?" if near else ""
        message = f"path: got {path}, which is no route; expected one that /docs lists{remedy}"
    elif status == 405:
        message = f"method: got {request.method} for {path}; expected {headers.get('allow', headers.get('Allow', 'another'))}"
    else:
        message = str(getattr(error, "detail", error))
    code = {404: "unknown_route", 405: "method_not_allowed"}.get(status)
    return ErrorAnswer(status, message, "invalid_request_error", code=code, headers=headers).response()


async def _on_validation_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return ErrorAnswer(400, str(error), "invalid_request_error").response()


async def _on_disconnect(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return Response(status_code=_CLIENT_GONE)
