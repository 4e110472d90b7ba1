"""`eightfold serve`: a model behind OpenAI's API."""

from __future__ import annotations

import importlib.util

import typer

from eightfold.cli.flags import Given, takes_flags
from eightfold.cli.output import write
from eightfold.errors import InputError
from eightfold.hub.names import identify

_LIBRARIES = ("fastapi", "uvicorn", "uvloop", "httptools", "pydantic", "msgspec", "zmq", "prometheus_client", "llguidance")
_ENGINES = {"auto": "eightfold.server.real_engine", "null": "eightfold.server.null_engine"}


@takes_flags(sampling=False, server=True)
def serve(given: Given) -> None:
    """Serve a model over HTTP, with OpenAI's API. Ctrl-C or SIGTERM lets running requests end, a second one does not."""
    require_libraries()
    # A wrong name is refused before anything heavy is imported.
    identify(given.config.model, given.config.revision, needs_weights=given.config.needs_weights)
    from eightfold.server.process import EngineProcess, listen

    # Clients can connect and the engine's process begins to import while this one does.
    with listen(given.server.host, given.server.port) as listener, EngineProcess(_ENGINES[given.server.engine]) as process:
        from eightfold.server import launch

        code = launch.serve(given.options, given.server, listener, process, write)
    raise typer.Exit(code)


def require_libraries() -> None:
    """Refuse to go on where the libraries of the server are missing."""
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            "eightfold serve",
            got=f"no {', '.join(missing)}",
            expected="the libraries of the server",
            remedy="pip install 'eightfold[server]'",
        )
