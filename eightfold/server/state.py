"""What the routes share: the engine's client, and what it answers with once the model is loaded."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Literal, TypeAlias

from starlette.datastructures import State
from starlette.requests import Request

from eightfold.server.answers import Serving
from eightfold.server.bridge import EngineClient
from eightfold.server.config import ServerConfig
from eightfold.server.errors import UnavailableError
from eightfold.server.metrics import Metrics
from eightfold.server.reading import chat_formats
from eightfold.server.token_stream import EngineDiedError
from eightfold.server.wire import ServedModel
from eightfold.text import Tokenizer

Phase: TypeAlias = Literal["loading", "ready", "draining", "dead"]


class AppState:
    """One server's state.

    Args:
        config: of the server.
        client: of the engine.
        names: what requests may call the model; answers call it by the first.

    Attributes:
        shared: what `app.state` of the app is. The generation routes find `serving` and `stall_seconds` there.
        metrics: what `/metrics` renders.
        weight_version: a name for the weights, told by `/model_info`.
        is_draining: whether the server leaves, and takes no new requests.
        created: when the server began, in seconds since 1970.
    """

    def __init__(self, config: ServerConfig, client: EngineClient, names: tuple[str, ...]) -> None:
        self.config = config
        self.client = client
        self.names = names
        self.metrics = Metrics(client, names[0], config.metrics_names)
        self.weight_version = config.weight_version
        self.is_draining = False
        self.created = int(time.time())
        self.shared = State({"server": self, "stall_seconds": config.stream_timeout})
        self._serving: Serving | None = None
        self._num_own = 0

    @property
    def phase(self) -> Phase:
        """Where the server stands."""
        if self.client.state == "dead":
            return "dead"
        if self.is_draining:
            return "draining"
        return "loading" if self._serving is None else "ready"

    @property
    def serving(self) -> Serving:
        """What requests are answered with.

        Raises:
            UnavailableError: the model is loading, or the server leaves.
            EngineDiedError: there is no engine any more.
        """
        match self.phase:
            case "dead":
                failure = self.client.failure
                raise EngineDiedError("the engine is gone" if failure is None else failure.message)
            case "draining":
                raise UnavailableError("the server is shutting down, and takes no new requests", "shutting_down")
        if self._serving is None:
            phase, done, total = self.client.progress
            share = f", {phase} {done / total:.0%}" if total else ""
            raise UnavailableError(f"the model is loading{share}", "loading")
        return self._serving

    @property
    def model(self) -> ServedModel:
        """The model that is served.

        Raises:
            UnavailableError: the model is loading.
        """
        if self.client.model is None:
            raise UnavailableError("the model is loading", "loading")
        return self.client.model

    def next_number(self) -> int:
        """A number for an id of the server's own requests."""
        self._num_own += 1
        return self._num_own

    def serve(self, model: ServedModel, tokenizer: Tokenizer) -> None:
        """Answer requests from now on."""
        reasoning, tools = chat_formats(tokenizer, self.config.reasoning_parser, self.config.tool_call_parser)
        places = model.max_running_requests + self.config.max_queued_requests
        self._serving = self.shared.serving = Serving(self.client, tokenizer, model, self.names, reasoning, tools, places)

    def replace_model(self, model: ServedModel) -> None:
        """Take over what changed with the weights of a model that is served."""
        self.client.model = model
        if self._serving is not None:
            self._serving = self.shared.serving = replace(self._serving, facts=model)

    @property
    def is_stalled(self) -> bool:
        """Whether the engine was not heard of for too long."""
        return self.client.silent_seconds > self.config.health_stall_seconds


def state_of(request: Request) -> AppState:
    """The state of the server that a request came to."""
    state: AppState = request.app.state.server
    return state
