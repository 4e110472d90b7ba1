"""The routes beside generation: is it alive, what does it serve, and what an operator or a trainer tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from eightfold._version import __version__
from eightfold.errors import InputError
from eightfold.requests import make_request
from eightfold.server.config import ServerConfig
from eightfold.server.metrics import CONTENT_TYPE
from eightfold.server.protocol import ControlBody, UnknownModelError, check_body, decode_json
from eightfold.server.sending import documented, json_response
from eightfold.server.state import AppState, state_of
from eightfold.server.token_stream import EngineDiedError
from eightfold.server.wire import model_from
from eightfold.types import SamplingParams

router = APIRouter()
"""Routes that answer at any time."""
model_router = APIRouter()
"""Routes that need a model."""

_SECRETS = ("api_key", "admin_api_key")


class NothingBody(ControlBody):
    """The body of the routes that need none: nothing, or an empty object."""


class PauseBody(ControlBody):
    """The body of `/pause_generation`."""

    mode: Literal["abort", "in_place"] = Field(
        "abort", description='"abort", which ends all requests first, or "in_place", which keeps them where they are'
    )


class AbortBody(ControlBody):
    """The body of `/abort_request`."""

    rid: str = Field("", description="the id of an answer")
    abort_all: bool = Field(False, description="true or false")


class UpdateWeightsBody(ControlBody):
    """The body of `/update_weights_from_disk`, with SGLang's fields. Those without an effect here pass at their default."""

    model_path: str = Field(description="a folder, a hub id or an alias of a checkpoint of the same shapes")
    load_format: Literal["auto", "safetensors"] = Field("auto", description='"auto" or "safetensors"')
    abort_all_requests: bool = Field(False, description="true or false")
    weight_version: str | None = Field(None, description="a name for the new weights")
    flush_cache: Literal[True] = Field(True, description="true: what is cached belongs to the old weights")
    is_async: Literal[False] = Field(False, description="false: the answer comes when the weights are in place")
    keep_pause: bool = Field(False, description="true or false")
    torch_empty_cache: bool = Field(False, description="true or false")
    recapture_cuda_graph: Literal[False] = Field(False, description="false: there are no CUDA graphs")
    token_step: Literal[0] = Field(0, description="0")


@router.get("/health")
async def health(request: Request) -> Response:
    """Whether the server is alive: 200 while it loads, serves or leaves, 503 where its engine is gone or stands still."""
    state = state_of(request)
    is_well = state.phase != "dead" and not state.is_stalled
    told = {
        "status": "ok" if is_well else "failing",
        "state": "stalled" if state.is_stalled else state.phase,
        "running": state.client.snapshot.running,
        "waiting": state.client.num_waiting,
        "silent_seconds": round(state.client.silent_seconds, 3),
    }
    return _with_status(told, 200 if is_well else 503)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Whether requests are answered: 503 while the model loads, and once the server is about to leave."""
    state = state_of(request)
    _ = state.serving  # raises what is told where there is none
    if state.is_stalled:
        raise EngineDiedError(f"the engine was not heard of for {state.client.silent_seconds:.0f} seconds")
    return json_response({"status": "ready"})


@router.get("/version")
async def version() -> Response:
    """The server's version."""
    return json_response({"version": __version__})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Numbers for Prometheus."""
    return Response(state_of(request).metrics.render(), media_type=CONTENT_TYPE)


@model_router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """Whether the engine generates: one token, within the time after which it counts as standing still."""
    state = state_of(request)
    facts = state.serving.facts
    prompt = make_request(
        f"health-{state.next_number()}",
        [0],
        SamplingParams(max_tokens=1, temperature=0.0),
        context_length=facts.context_length,
        vocab_size=facts.vocab_size,
        sampling_defaults={},
        seed=0,
    )
    stream = state.client.submit(prompt)
    try:
        async with asyncio.timeout(state.config.health_stall_seconds):
            await anext(stream)
    finally:
        stream.abort()
    return json_response({"status": "ok"})


@model_router.get("/v1/models")
async def models(request: Request) -> Response:
    """The names of the model."""
    state = state_of(request)
    return json_response({"object": "list", "data": [_model_card(state, name) for name in state.names]})


@model_router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """One name of the model."""
    state = state_of(request)
    if name not in state.names:
        raise UnknownModelError("model", got=repr(name), expected=" or ".join(state.names))
    return json_response(_model_card(state, name))


@model_router.get("/model_info")
@model_router.get("/get_model_info", include_in_schema=False)
async def model_info(request: Request) -> Response:
    """The model, every tensor's quantization, and the backends in use."""
    state = state_of(request)
    model = state.model
    return json_response(
        {
            "model_path": model.model_path,
            "tokenizer_path": model.model_path,
            "served_model_name": state.names[0],
            "is_generation": True,
            "weight_version": state.weight_version,
            "max_model_len": model.context_length,
            "vocab_size": model.vocab_size,
            "eos_token_ids": model.eos_token_ids,
            "preferred_sampling_params": model.sampling_defaults,
            "quantization": model.quantization,
            "backends": model.backends,
        }
    )


@model_router.get("/server_info")
@model_router.get("/get_server_info", include_in_schema=False)
async def server_info(request: Request) -> Response:
    """Every decided value with its origin, and the numbers of this moment."""
    state = state_of(request)
    settings = {item.name: getattr(state.config, item.name) for item in fields(ServerConfig) if item.name not in _SECRETS}
    return json_response(
        {
            "version": __version__,
            "state": state.phase,
            "server": settings,
            "engine": state.model.config,
            "snapshot": state.client.snapshot,
            "open_requests": state.client.num_open,
            "finished": state.client.finished,
        }
    )


@model_router.get("/flush_cache")
@model_router.post("/flush_cache")
async def flush_cache(request: Request) -> Response:
    """Forget all cached prefixes. Requests that run go on."""
    check_body(await _optional_json(request), NothingBody)
    await state_of(request).client.control("flush_cache")
    return _done("the cache is empty")


@model_router.post("/abort_request", openapi_extra=documented(AbortBody))
async def abort_request(request: Request) -> Response:
    """End a request by its id, or all of them. Each gets a last piece with the finish reason "abort"."""
    state, body = state_of(request), check_body(await _optional_json(request), AbortBody)
    if bool(body.rid) == body.abort_all:
        got = "both" if body.rid else "neither"
        raise InputError("rid", got=f"{got} of rid and abort_all", expected="one of the two")
    count = state.client.abort_all() if body.abort_all else state.client.abort(body.rid)
    return _done(f"{count} aborted", num_aborted=count)


@model_router.post("/pause_generation", openapi_extra=documented(PauseBody))
async def pause_generation(request: Request) -> Response:
    """Take no further step. New requests wait."""
    body = check_body(await _optional_json(request), PauseBody)
    result = await state_of(request).client.control("pause", abort=body.mode == "abort")
    return _done("generation is paused", **result)


@model_router.post("/continue_generation")
async def continue_generation(request: Request) -> Response:
    """Go on where `/pause_generation` stopped."""
    check_body(await _optional_json(request), NothingBody)
    await state_of(request).client.control("continue")
    return _done("generation goes on")


@model_router.post("/update_weights_from_disk", openapi_extra=documented(UpdateWeightsBody))
async def update_weights_from_disk(request: Request) -> Response:
    """Put the weights of another checkpoint of the same shapes in the place of these, quantized as these were."""
    state, body = state_of(request), check_body(decode_json(await request.body()), UpdateWeightsBody)
    try:
        result = await state.client.control("update_weights", model=body.model_path, abort=body.abort_all_requests)
    except InputError as error:
        return _with_status({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
    state.replace_model(model_from(result["model"]))
    state.weight_version = body.weight_version or state.weight_version
    if state.client.snapshot.is_paused and not body.keep_pause:
        await state.client.control("continue")
    return _done(f"the weights are those of {body.model_path}", num_paused_requests=0)


async def _optional_json(request: Request) -> object:
    """The body's JSON; without a body, an object without fields."""
    raw = await request.body()
    return decode_json(raw) if raw else {}


def _model_card(state: AppState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "eightfold",
        "root": state.model.model_path,
        "max_model_len": state.model.context_length,
    }


def _done(message: str, **more: Any) -> Response:
    return json_response({"success": True, "message": message, **more})


def _with_status(told: Mapping[str, Any], status: int) -> Response:
    return Response(msgspec.json.encode(told), status, media_type="application/json")
