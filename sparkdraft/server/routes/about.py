"""Routes about the server itself: health, metrics and status, and the chat page. /health is for machines, /v1/status is
for people."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse

from sparkdraft import __version__
from sparkdraft.server.guards import RESTING
from sparkdraft.server.service import Service, service_of

PAGE = Path(__file__).parents[1] / "page" / "index.html"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
router = APIRouter()


# ---- GET /health, /metrics and /v1/status


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 when requests are answered, else 503 with the stage of loading, or with why the engine does not answer."""
    service = service_of(request)
    found: dict[str, Any] = {}
    if failed := service.failed_probes:
        found["canary"] = failed
    if warnings := service.watchdog.warnings:
        found["warnings"] = warnings
    if service.ready and service.gate.closed:
        wait = service.gate.retry_after(RESTING)
        return JSONResponse({"status": "overloaded"} | found, status_code=503, headers={"Retry-After": str(wait)})
    if service.ready:
        return JSONResponse({"status": "degraded" if found else "ok"} | found)
    wait = service.client.retry_after
    return JSONResponse(_state(service) | found, status_code=503, headers={"Retry-After": str(wait)})


@router.get("/metrics")
async def metrics(request: Request) -> PlainTextResponse:
    """Prometheus' text format; vLLM's names, and the same and more with the prefix sparkdraft_."""
    service = service_of(request)
    counted, engine = service.metrics, await service.engine_status()
    counted.ready.set(float(service.ready))
    counted.restarts.set(service.client.restarts)
    counted.silence.set(service.client.pulse.silent_for)
    if engine or service.client.state not in ("ready", "unresponsive"):  # a busy engine keeps its last values
        counted.running.set(engine.get("running", 0))
        counted.waiting.set(engine.get("waiting", 0))
        counted.kv_usage.set(_kv_usage(engine))
        counted.preemptions.set(engine.get("preemptions", 0))
    if errors := engine.get("kv_errors"):
        counted.coding(errors)
    counted.canary(service.canary)
    counted.watch(service.watchdog.alarms.values())
    return PlainTextResponse(counted.render(), media_type="text/plain; version=0.0.4")


@router.get("/v1/status")
async def status(request: Request) -> dict[str, Any]:
    """The resolved plan, every fallback with its reason, and live numbers."""
    service = service_of(request)
    info, engine = service.client.info, await service.engine_status()
    return _state(service) | {
        "version": __version__,
        "uptime_s": round(time.time() - service.started, 1),
        "model": service.name,
        "names": service.config.names,
        "restarts": service.client.restarts,
        "silent_s": service.client.pulse.silent_for,
        "step_s": service.client.pulse.step_for,
        "last_error": service.last_error,
        "source": info.model if info else service.config.engine.model,
        "model_type": info.model_type if info else None,
        "max_model_len": info.max_model_len if info else None,
        "plan": info.plan if info else None,
        "plan_facts": info.plan_facts if info else {},
        "fallbacks": info.fallbacks if info else [],
        "facts": service.facts,
        "canary": service.canary,
        "watchdog": service.watchdog.describe(),
        "drafter": info.drafter if info else None,
        "sampling_defaults": service.sampling if info else None,
        "queue": {"inside": service.gate.num_inside, "capacity": service.gate.capacity},
        "speculative_decoding": engine.pop("drafting", None),
        "engine": engine,
    }


def _state(service: Service) -> dict[str, Any]:
    done, total = service.client.progress
    return {
        "status": "ok" if service.ready else service.state,
        "stage": service.stage,
        "progress": {"done": done, "total": total},
        "error": None if service.ready else service.last_error,
    }


def _kv_usage(engine: dict[str, Any]) -> float:
    if engine.get("kv_usage") is not None:
        return float(engine["kv_usage"])
    total = engine.get("kv_blocks_total", 0)
    return 1 - engine["kv_blocks_free"] / total if total else 0.0


# ---- GET /


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def page() -> FileResponse:
    """The chat page: one file, which may load nothing from elsewhere."""
    return FileResponse(PAGE, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)
