"""What a client of ``axo litgpt serve`` may do: limits of number, size and time, and the server's key.

The libraries' own limits where they have them: uvicorn's of connections (503), headers and idle connections, LitServe's
of a body (413) and of the time in the queue (504). What they lack is here:

    LimitedProtocol   a request comes whole, and its answer is read, within TRANSFER_SECONDS; a connection that has sent
                      no whole request makes room for a new one
    Admission         the key, on every path (401); at most CLIENTS at a time (429); a client that leaves is forgotten
    Requests          a request whose client has left is dropped before its turn

Not here: what is wrong with a request's text (``serving``), and limits for each address.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from litserve.server import LIT_SERVER_API_KEY
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from axo.integrations.litgpt.conversation import TOLD_EVERY

CONNECTIONS = 256  # open at a time
CLIENTS = 64  # whose requests are checked, wait or are computed at a time
TRANSFER_SECONDS = 20.0  # for a whole request, and for an answer that the client does not read
HTTP_LIMITS: dict[str, Any] = {  # of uvicorn.Config
    "limit_concurrency": CONNECTIONS + 1,
    "h11_max_incomplete_event_size": 16 << 10,  # bytes of a header
    "timeout_keep_alive": 5,  # seconds
    "ws": "none",
}


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with limits of time, which makes room for new connections."""

    _transfer: asyncio.TimerHandle  # ends the connection
    _since: float  # seconds, of the loop's clock

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= CONNECTIONS:
            idle = [other for other in self.connections if isinstance(other, LimitedProtocol) and other._awaited()]
            if idle:
                oldest = min(idle, key=lambda other: other._since)
                self.connections.discard(oldest)
                oldest.transport.abort()
        super().connection_made(transport)
        self._await_request()

    def _awaited(self) -> bool:
        """Whether the client has still to send a request, or the rest of one."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _await_request(self) -> None:
        self._since = self.loop.time()
        self._transfer = self.loop.call_later(TRANSFER_SECONDS, self._abort_awaited)

    def _abort_awaited(self) -> None:
        if self._awaited():
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._awaited() and self.conn.trailing_data[0]:
            self.transport.abort()  # a second request: uvicorn would read no further, and not see the client leave

    def on_response_complete(self) -> None:
        self._transfer.cancel()
        super().on_response_complete()
        self._await_request()

    def pause_writing(self) -> None:  # the client does not read
        super().pause_writing()
        self._transfer.cancel()
        self._transfer = self.loop.call_later(TRANSFER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._transfer.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transfer.cancel()
        super().connection_lost(exc)


@dataclass(eq=False)
class Client:
    """One that has sent a request and waits for the answer.

    Attributes:
        departed: It has left.
        requests: LitServe's names of what was queued for it.
    """

    departed: bool = False
    requests: list[Any] = field(default_factory=list)


_client: contextvars.ContextVar[Client | None] = contextvars.ContextVar("client", default=None)


class Requests(queue.Queue[Any]):
    """What the HTTP thread hands to the main thread of rank 0; ``tell`` says to the other ranks that it waits."""

    def __init__(self, tell: Callable[[], Any]) -> None:
        super().__init__()
        self._tell, self._told = tell, time.monotonic()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        client = _client.get()
        if client is not None:
            client.requests.append(item[1])
        super().put((client, item), block, timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next request whose client is there.

        Raises:
            queue.Empty: There was none within ``timeout`` seconds.
        """
        while True:
            try:
                client, item = super().get(block, timeout)
            except queue.Empty:
                if time.monotonic() - self._told > TOLD_EVERY:
                    self._tell()
                    self._told = time.monotonic()
                raise
            if client is None or not client.departed:
                return item


class Admission:
    """ASGI middleware: lets requests of clients that may ask, one whole body each, through to ``app``.

    Args:
        app: LitServe's application.
        wrong: Says what is wrong with the body of a POST; None: nothing. It runs in a thread.
        answers: LitServe's table of awaited answers, by the name of the request.
    """

    def __init__(self, app: ASGIApp, *, wrong: Callable[[bytes], str | None], answers: dict[Any, Any]) -> None:
        self.app = app
        self._wrong, self._answers = wrong, answers
        self._clients: set[Client] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = LIT_SERVER_API_KEY
        if scope["type"] != "http":  # LitServe's own start and end
            await self.app(scope, receive, send)
        elif key and not secrets.compare_digest(dict(scope["headers"]).get(b"x-api-key", b""), key.encode()):
            await _refuse(401, "the header X-API-Key is not there, or not the server's key")(scope, receive, send)
        elif scope["method"] != "POST":
            await self.app(scope, receive, send)
        else:
            try:
                body = await Request(scope, receive).body()
            except ClientDisconnect:
                return
            except HTTPException as error:  # the body is too large
                await _refuse(error.status_code, error.detail)(scope, receive, send)
                return
            await self._admit(scope, body, receive, send)

    async def _admit(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        if len(self._clients) >= CLIENTS:
            await _refuse(429, f"{CLIENTS} clients wait for answers; ask again later", 1)(scope, receive, send)
            return
        client = Client()
        self._clients.add(client)
        answering = asyncio.create_task(self._answer(client, scope, body, send))
        leaving = asyncio.create_task(_departure(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            client.departed = not answering.done()
            answering.cancel()
            leaving.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
            self._clients.discard(client)
            for request in client.requests:
                self._answers.pop(request, None)

    async def _answer(self, client: Client, scope: Scope, body: bytes, send: Send) -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Future()  # cancelled where the client leaves

        wrong = await run_in_threadpool(self._wrong, body)
        _client.set(client)
        # What is said may quote what cannot be sent.
        app = self.app if wrong is None else _refuse(400, wrong.encode(errors="backslashreplace").decode())
        await app(scope, receive, send)


def _refuse(status: int, detail: str, seconds: int | None = None) -> JSONResponse:
    headers = None if seconds is None else {"Retry-After": str(seconds)}
    return JSONResponse({"detail": detail}, status, headers)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
