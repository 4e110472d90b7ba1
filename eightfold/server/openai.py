"""The routes of OpenAI's generation endpoints."""

from __future__ import annotations

from uuid import uuid4

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from eightfold.server.chat import ChatReply
from eightfold.server.completion import CompletionReply
from eightfold.server.context import describe, serving_of, stall_seconds
from eightfold.server.protocol import ChatBody, CompletionBody, parse_body
from eightfold.server.sending import EventStream, documented, whole_response

router = APIRouter()


@router.post("/v1/completions", openapi_extra=documented(CompletionBody))
async def completions(request: Request) -> Response:
    """Go on from a prompt: a text, token ids, or a list of either."""
    serving = serving_of(request)
    body = parse_body(await request.body(), CompletionBody)
    return await _send(request, body.stream, await CompletionReply.prepare(serving, body, f"cmpl-{uuid4().hex}"))


@router.post("/v1/chat/completions", openapi_extra=documented(ChatBody))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    serving = serving_of(request)
    body = parse_body(await request.body(), ChatBody)
    return await _send(request, body.stream, await ChatReply.prepare(serving, body, f"chatcmpl-{uuid4().hex}"))


async def _send(request: Request, streams: bool, reply: CompletionReply | ChatReply) -> Response:
    if streams:
        return EventStream(reply.stream(), describe=describe, stall_seconds=stall_seconds(request))
    return await whole_response(request, reply.whole())
