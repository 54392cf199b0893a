"""GET /v1/models and /v1/models/{name}: what is served, under which names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from sparkdraft.server.service import Service, service_of

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The model that is served, under each of its names."""
    service = service_of(request)
    return {"object": "list", "data": [_card(service, name) for name in service.config.names]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """The model under one of its names."""
    service = service_of(request)
    service.check_model(name)
    return _card(service, name)


def _card(service: Service, name: str) -> dict[str, Any]:
    info = service.client.info
    card: dict[str, Any] = {"id": name, "object": "model", "owned_by": "sparkdraft"}
    card["created"] = info.created if info else int(service.started)
    card["max_model_len"] = info.max_model_len if info else None
    return card | {"sampling_defaults": service.sampling if info else None}
