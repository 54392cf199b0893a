"""The API as one ASGI application: routes, the middleware before them, and one place that turns errors into answers.

    Linger -> RequestLog -> CORS -> Errors -> Hosts -> Auth -> BodyLimit -> a route

Whatever the middleware or a route raises becomes OpenAI's error body in `Errors`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware import Middleware
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparkdraft import __version__
from sparkdraft.core import UserError
from sparkdraft.server.config import ServerConfig
from sparkdraft.server.engine_client import EngineClient, EngineError
from sparkdraft.server.guards import Auth, BodyLimit, Hosts, Linger, accepted_hosts, check_head, cors_options
from sparkdraft.server.keys import Keys
from sparkdraft.server.metrics import Metrics
from sparkdraft.server.prompts import ModelText
from sparkdraft.server.protocol import anthropic, ollama
from sparkdraft.server.protocol.shapes import Json, dumps
from sparkdraft.server.protocol.validation import ApiError, as_sentence, from_validation, unreadable
from sparkdraft.server.request_log import RequestLog, record_of
from sparkdraft.server.routes import ROUTERS
from sparkdraft.server.service import Service, as_api_error
from sparkdraft.util.names import alike

log = logging.getLogger(__name__)
LONGEST_PATH = 100  # characters of a wrong route that are shown and compared with the routes
WARM_UP_SECONDS = 10.0  # if they are not enough, the first user waits for the rest
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 12}
WARM_UP_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}}),
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 12, "stream": True}),
]

# beginning of a path -> the body of an error; else OpenAI's
ERRORS: dict[str, Callable[[ApiError], Json]] = {
    "/api/": ollama.error_body,
    "/v1/messages": anthropic.error_body,
}


def create_app(config: ServerConfig, client: EngineClient, warms_up: bool = True) -> FastAPI:
    """Make the application. It owns the client: both start and stop together. warms_up: send warm-up requests first."""
    service = Service(config, client)
    service.metrics.model_name = service.name
    guards = [Middleware(Linger), Middleware(RequestLog, form=config.request_log)]
    if config.origins:
        guards.append(Middleware(CORSMiddleware, **cors_options(config.origins)))
    guards.append(Middleware(Errors, metrics=service.metrics))
    if (accepted := accepted_hosts(config)) is not None:
        guards.append(Middleware(Hosts, accepted=accepted))
    if config.needs_key:
        guards.append(Middleware(Auth, keys=Keys(config.api_key, config.api_keys_file)))
    guards.append(Middleware(BodyLimit, max_body=config.max_body))
    app = FastAPI(
        title="Sparkdraft",
        version=__version__,
        docs_url=None,  # both pages load their scripts from elsewhere
        redoc_url=None,
        middleware=guards,
        lifespan=_lifespan,
        responses={"4XX": {"description": "OpenAI's error object"}, "503": {"description": "Not ready, or draining"}},
    )
    app.state.service, app.state.warms_up = service, warms_up
    for router in ROUTERS:
        app.include_router(router)
    for kind in (RequestValidationError, HTTPException, UserError, EngineError):
        app.add_exception_handler(kind, _reraise)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service

    async def warm_up(text: ModelText) -> None:
        if app.state.warms_up:
            own: dict[str, Any] = {"request_log": "off", "log_prompts": 0}
            own |= {"api_key": "", "api_keys_file": "", "allow_public": True}
            beside = create_app(replace(service.config, **own), service.client)
            beside.state.service.text = text
            await send_warm_up_requests(beside, None)
            beside.state.service.close()
            service.client.count_anew()

    await service.client.start()
    tasks = [asyncio.create_task(service.follow(warm_up))]
    if service.config.watchdog:
        tasks.append(asyncio.create_task(service.watchdog.run()))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        service.draining = True
        service.close()
        await service.client.stop(0.0)


async def send_warm_up_requests(app: ASGIApp, api_key: str | None) -> None:
    """Send real requests through the whole path of a user's request, before /health says ready.

    They pay for compiling the template, for the first use of routes and parsers, and for the template's opening, which
    stays in the prefix cache. They go to a second application, so that its counters are separate. Answers are dropped.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        with suppress(TimeoutError):
            async with asyncio.timeout(WARM_UP_SECONDS):
                for path, body in WARM_UP_REQUESTS:
                    await client.post(path, json=body)


class Errors:
    """Middleware: turns an exception into an answer, and counts every answer."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started = False

        async def counting(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self.metrics.http.add(label=str(message["status"]))
            await send(message)

        try:
            check_head(scope)
            await self.app(scope, receive, counting)
        except Exception as error:
            failure = record_of(scope).error = as_error(error)
            if started:
                raise
            body = error_body(failure, scope["path"])
            if "request_id" in body:  # Anthropic's
                body["request_id"] = record_of(scope).id
            answer = Response(dumps(body), failure.status, failure.headers, "application/json")
            await answer(scope, receive, counting)


def error_body(error: ApiError, path: str) -> Json:
    """The error in the form of the API that the path belongs to."""
    return next((shape(error) for prefix, shape in ERRORS.items() if path.startswith(prefix)), error.body())


def as_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return from_validation(error.errors(), error.body)
    if isinstance(error, EngineError):
        return as_api_error(error)
    if isinstance(error, UserError):
        return ApiError(400, as_sentence(str(error)))
    if isinstance(error, HTTPException):
        if error.status_code == 400:  # FastAPI raises it only for a body that it could not read
            return unreadable(error.__cause__)
        return ApiError(error.status_code, as_sentence(str(error.detail)), headers=error.headers)
    log.error("a request failed because of a bug in the server", exc_info=error)
    return ApiError(500, "An internal error occurred; see the server's log.", code="internal_error")


async def _reraise(request: Request, error: Exception) -> Response:
    """Pass an exception on: FastAPI would answer some of them itself, but answers to errors are made in `Errors`."""
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        raise wrong_route(request.method, request.url.path, error) from None
    raise as_error(error) from None


def wrong_route(method: str, path: str, error: HTTPException) -> ApiError:
    """404 or 405 with the route that was probably meant."""
    path = path if len(path) <= LONGEST_PATH else f"{path[:LONGEST_PATH]}..."
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return ApiError(405, f"{path} does not take {method}; use {allowed}.", headers=error.headers)
    every = [route for router in ROUTERS for route in router.routes]
    routes = {r.path: r for r in every if isinstance(r, APIRoute) and "{" not in r.path}
    near = alike(path, routes, near=0.5)
    verb = "POST" if near and "POST" in (routes[near].methods or ()) else "GET"
    meant = f"did you mean {verb} {near}?" if near else "/openapi.json lists the routes."
    return ApiError(404, f"There is no route {path}; {meant}")
