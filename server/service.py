"""What the routes share: the loaded model, the bridge to the engine, and how a request's body is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest

from specdec.server.bridge import Bridge
from specdec.server.errors import HttpError, ModelNotFound
from specdec.server.prepare import Preparer
from specdec.server.schemas import BodyT, parse

if TYPE_CHECKING:
    from specdec.build import LoadedModel

SMALL_BODY = 64 * 1024  # bytes; parsing more would hold up the event loop


@dataclass(frozen=True, slots=True)
class Service:
    """One served model. `names` are what clients may call it; the first is what answers say."""

    loaded: LoadedModel
    bridge: Bridge
    preparer: Preparer
    names: tuple[str, ...]
    created: int
    fingerprint: str

    async def read(self, http: HttpRequest, kind: type[BodyT]) -> BodyT:
        """The body of a request. Raises `HttpError` 415, `InvalidRequest`, and `ModelNotFound`."""
        media = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":
            raise HttpError(415, f"content-type must be application/json, got {media[:64]!r}", "unsupported_media_type")
        self.bridge.check_admission()
        raw = await http.body()
        body = parse(raw, kind) if len(raw) <= SMALL_BODY else await self.preparer.texts.run(parse, raw, kind)
        if body.model is not None:
            self.check_model(body.model)
        return body

    def check_model(self, name: str) -> None:
        """Raises `ModelNotFound` for a name that is not served."""
        if name not in self.names:
            raise ModelNotFound("model", f"{name[:128]!r} is not served here; this server has {', '.join(self.names)}")
