"""Handlers of the routes that tell about the server: whether it is ready, and what it serves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from serving.http.request import HttpRequest

if TYPE_CHECKING:
    from serving.app import App

CREATED = int(time.time())


async def send_state(app: App, http: HttpRequest) -> None:
    """Send the server's state, such as "ready", with status 200 if it takes requests, else 503."""
    await http.json({"status": app.state}, 200 if app.state == "ready" else 503)


async def send_models(app: App, http: HttpRequest) -> None:
    """Send the served model's JSON object, in a list for `/v1/models`; `ApiError` (503) if not ready."""
    card = {
        "id": app.model.name,
        "object": "model",
        "created": CREATED,
        "owned_by": "inference-ladder",
        "max_model_len": app.ready().max_len,
    }
    if app.model.defaults:
        card["default_sampling_params"] = dict(app.model.defaults)
    every = {"object": "list", "data": [card]}
    await http.json(every if http.path == "/v1/models" else card)
