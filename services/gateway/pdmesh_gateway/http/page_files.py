"""Files of a web page, which are stored in a folder of this package."""

from __future__ import annotations

from importlib.resources import files

from pdmesh.errors import RequestRejected
from pdmesh_gateway.http.http_exchange import Exchange

#: Nothing from elsewhere, no frame around it, no guessing of types.
_HEADERS = [
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]

_TYPES = {"html": b"text/html", "css": b"text/css", "js": b"text/javascript", "svg": b"image/svg+xml"}


class PageFiles:
    """Handlers of the files in one folder, which are read once."""

    def __init__(self, folder: str) -> None:
        entries = files("pdmesh_gateway").joinpath(folder).iterdir()
        self._files = {entry.name: entry.read_bytes() for entry in entries if entry.is_file()}

    async def index(self, exchange: Exchange) -> None:
        await self.send(exchange, "index.html")

    async def named(self, exchange: Exchange) -> None:
        """Send the file that the path names. Raises RequestRejected (404)."""
        name = exchange.scope["path_params"]["name"]
        if name not in self._files:
            raise RequestRejected(f"The page has no file {name[:100]!r}.", status=404, code="not_found")
        await self.send(exchange, name)

    async def send(self, exchange: Exchange, name: str) -> None:
        content_type = _TYPES[name.rpartition(".")[2]] + b"; charset=utf-8"
        await exchange.respond(self._files[name], content_type=content_type, headers=list(_HEADERS))
