"""The server put together: routes, error handlers, the guard, and a process that drains when it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import specdec
from specdec.errors import ConfigError, SpecdecError
from specdec.server import health
from specdec.server.bridge import Bridge
from specdec.server.chat import chat_completions
from specdec.server.completions import completions
from specdec.server.errors import HttpError
from specdec.server.guard import Guard
from specdec.server.prepare import Preparer
from specdec.server.schemas import Body, ChatBody, CompletionBody
from specdec.server.service import Service

if TYPE_CHECKING:
    from specdec.build import LoadedModel

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 * 1024
KEEP_ALIVE = 5  # seconds an idle connection stays open
LAST_WRITES = 5  # seconds for clients to read what is finished, at the very end


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The options of the server. `served_model_names` empty means the model's own name. Times are in seconds.

    Raises `ConfigError` that names the option.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 1024 * 1024
    body_timeout: float = 30.0
    shutdown_timeout: float = 60.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        if self.log_level not in uvicorn.config.LOG_LEVELS:
            raise ConfigError(
                f"log_level must be one of {', '.join(uvicorn.config.LOG_LEVELS)}, got {self.log_level!r}"
            )
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("api_keys must hold keys of visible ASCII characters")
        for name in self.served_model_names:
            if not name or not name.isprintable():
                raise ConfigError(f"served_model_names must hold printable names, got {name!r}")
        for option in ("max_body_bytes", "body_timeout"):
            if getattr(self, option) <= 0:
                raise ConfigError(f"{option} must be above 0, got {getattr(self, option)}")
        if self.shutdown_timeout < 0:
            raise ConfigError(f"shutdown_timeout must be at least 0, got {self.shutdown_timeout}")


def create_app(loaded: LoadedModel, config: ServerConfig) -> FastAPI:
    """The application for one model. Its lifespan starts and stops the thread that runs the model's engine."""
    engine = loaded.engine
    names = config.served_model_names or (loaded.name,)
    telemetry = health.Telemetry(engine.metrics, names[0])
    bridge = Bridge(engine, telemetry)
    preparer = Preparer(loaded, max_pending=engine.config.max_waiting)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        bridge.start()
        yield
        await bridge.stop()
        preparer.close()

    app = FastAPI(
        title="specdec",
        version=specdec.__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.state.service = Service(
        loaded,
        bridge,
        preparer,
        names,
        created=int(time.time()),
        fingerprint=f"specdec-{specdec.__version__}",
    )
    app.state.telemetry = telemetry
    app.add_exception_handler(SpecdecError, _refused)
    app.add_exception_handler(HTTPException, _unroutable)
    app.add_middleware(
        Guard, api_keys=config.api_keys, max_body_bytes=config.max_body_bytes, body_timeout=config.body_timeout
    )
    _route(app, "/v1/chat/completions", chat_completions, ChatBody)
    _route(app, "/v1/completions", completions, CompletionBody)
    app.get("/v1/models")(health.models)
    app.get("/v1/models/{name:path}")(health.model)
    app.get("/health")(health.health)
    app.get("/version")(health.version)
    app.get("/metrics")(health.metrics)
    return app


def _route(app: FastAPI, path: str, endpoint: Any, kind: type[Body]) -> None:
    """A POST route that reads its own body; its schema goes into the description under /openapi.json."""
    pointer = path.replace("/", "~1")
    place = f"#/paths/{pointer}/post/requestBody/content/application~1json/schema/$defs/{{model}}"
    content = {"application/json": {"schema": kind.model_json_schema(ref_template=place)}}
    app.post(path, openapi_extra={"requestBody": {"required": True, "content": content}})(endpoint)


async def _refused(_: HttpRequest, error: Exception) -> Response:
    return health.refusal(error)


async def _unroutable(http: HttpRequest, error: Exception) -> Response:
    """404 and 405 of the router, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    place = f"{http.method} {http.scope['path'][:128]!a}"
    if error.status_code == 405:
        message, code = f"{place}: this route does not take {http.method}", "method_not_allowed"
    elif error.status_code == 404:
        message, code = f"{place}: no such route", "not_found"
    else:
        message, code = f"{place}: {error.detail}", "bad_request"
    return health.refusal(HttpError(error.status_code, message, code, error.headers))


def serve(app: FastAPI, config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT; then refuse what is new, finish what runs (at most `shutdown_timeout` seconds),
    and return. A second signal ends it at once. Raises `ConfigError` if the port cannot be had.

    What is there now stays: the garbage collector does not look at it again, which would stop all for 0.1 seconds."""
    gc.collect()
    gc.freeze()
    asyncio.run(_serve(app, config, _listen(config.host, config.port)))


async def _serve(app: FastAPI, config: ServerConfig, listener: socket.socket) -> None:
    bridge: Bridge = app.state.service.bridge
    loop = asyncio.get_running_loop()
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http="h11",
            loop="asyncio",
            lifespan="on",
            log_level=config.log_level,
            access_log=False,  # the guard writes one that knows when clients leave
            server_header=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=LAST_WRITES,
        )
    )
    draining: list[asyncio.Task[None]] = []

    def stop(sig: int, _: FrameType | None) -> None:
        # uvicorn's own handler closes the port first; then clients would see no 503 but refused connections.
        loop.call_soon_threadsafe(on_signal, sig)

    def on_signal(sig: int) -> None:
        if draining:
            logger.warning("%s again: stopping at once", signal.Signals(sig).name)
            bridge.abort_all()
            server.should_exit = server.force_exit = True
        else:
            logger.info("%s: finishing %d requests, taking no new ones", signal.Signals(sig).name, bridge.num_requests)
            draining.append(loop.create_task(drain()))

    async def drain() -> None:
        bridge.drain()
        try:
            async with asyncio.timeout(config.shutdown_timeout):
                await bridge.drained()
        except TimeoutError:
            logger.warning("%d requests are not finished after %g s", bridge.num_requests, config.shutdown_timeout)
            bridge.abort_all()
        server.should_exit = True

    server.handle_exit = stop  # type: ignore[method-assign, assignment]
    try:
        with listener:
            await server.serve([listener])
    finally:
        await bridge.stop()


def _listen(host: str, port: int) -> socket.socket:
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"port {port} of host {host!r} cannot be had: {error.strerror}") from error
    logger.info("serving on http://%s:%d", host, listener.getsockname()[1])
    return listener
