"""``axo litgpt serve`` on a grid: rank 0 speaks HTTP, and every rank computes each answer.

LitGPT's own API object (``SimpleLitAPI``, ``StreamLitAPI``, ``OpenAISpecLitAPI``) stands on every rank, with its model
split over the grid. On rank 0 LitServe's server and its loop over requests run in the rank's own process:

    HTTP thread: checks a request (what is wrong is a 4xx answer) and queues it, within the limits of ``serve_limits``
    main thread: takes one request at a time, tells it to all ranks, computes the answer with them

LitServe itself gives both to processes of their own; so no process and no open port outlives rank 0 here.

An answer that was begun is computed to its end even where its client has gone away, so that all ranks stay at the
same place. After each answer the ranks agree how it ended. A ValueError on every rank comes from the request: they go
on with the next. A ValueError on some ranks only, and any other error, ends the rank that has it, and with it the
server: a rank may be in the middle of an operation for which the others wait.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import uvicorn
from fastapi import HTTPException
from litserve import LitServer
from litserve.loops.base import _SENTINEL_VALUE as _END
from litserve.middlewares import MaxSizeMiddleware
from litserve.specs.openai import ChatCompletionRequest
from litserve.transport.process_transport import MPQueueTransport
from litserve.utils import WorkerSetupStatus, wrap_litserve_start

from axo.comm.connect import Communicators
from axo.errors import Error, PeerLost
from axo.integrations.litgpt.serve_limits import HTTP_LIMITS, Admission, LimitedProtocol, Requests
from axo.nn.generator import source_generator

_STOPS_WITHIN = 5.0  # seconds that the HTTP thread gets at the end
_BYTES_A_TOKEN = 64  # of a body, at most; and any body may have _SMALL_BODY
_SMALL_BODY = 1 << 20
_COLDEST, _HOTTEST = 1e-3, 100.0  # beyond, logits or their exponents may overflow, and there is nothing to draw from
_CHOICES = 8  # answers to one request, at most


class Served:
    """Stands for ``LitServer`` in ``litgpt.deploy.serve``, on every rank.

    Args:
        rank: This rank.
        host: The address that rank 0 listens on.
        api: LitGPT's API object, before its ``setup``.
        options: Of ``LitServer``.

    Raises:
        ValueError: The temperature is none.
    """

    def __init__(self, rank: int, host: str, api: Any, **options: Any) -> None:
        wrong = _wrong_temperature(api.temperature)
        if wrong is not None:
            raise ValueError(f"litgpt: --{wrong}")
        self._api, self._host = api, host
        self._server = _Server(api, **options) if rank == 0 else None

    def run(self, port: int, **options: Any) -> None:
        """Serve until a signal or an error ends the rank; rank 0 listens on ``port``.

        Raises:
            ValueError: The port is in use, or the host is no address of this machine.
            axo.errors.Error: Another rank was lost, or failed where others did not.
        """
        api = self._api
        listener = _listen(self._host, port) if self._server is not None else None
        api.setup(os.environ["LT_ACCELERATOR"])
        while self._server is None:
            request = api.llm.fabric.broadcast(None)
            if request:
                self._follow(*request)
        assert listener is not None
        self._server.serve(listener)

    def _follow(self, arguments: Any, options: Any) -> None:
        try:
            for _ in _answer(self._api, self._api.predict, arguments, options):
                pass
        except ValueError:
            pass  # of the request, on every rank; rank 0 tells the client


def _answer(api: Any, predict: Callable[..., Any], arguments: Any, options: Any) -> Iterator[Any]:
    """What ``predict`` gives, piece by piece, with random numbers that all ranks draw alike.

    To its end in any case: the ranks do it together.

    Raises:
        ValueError: Every rank raises it.
        axo.errors.Error: Only some ranks failed; or as :func:`_agree`.
    """
    fabric = api.llm.fabric
    comms = fabric.strategy.comms
    try:
        with source_generator(comms, fabric.device, all_stages=True):
            pieces = predict(*arguments, **options)
            if inspect.isgenerator(pieces):
                try:
                    # "yield from" would end it too, unfinished, when nobody asks for more.
                    for piece in pieces:  # noqa: UP028
                        yield piece
                finally:
                    for _ in pieces:
                        pass
            else:
                yield pieces
    except ValueError as error:
        _agree(comms, error)
        raise
    except GeneratorExit:  # nobody asks for more
        _agree(comms, None)
        raise
    _agree(comms, None)


def _agree(comms: Communicators, error: ValueError | None) -> None:
    """Go on only if all ranks have failed at a request, or none. Every rank comes here.

    Raises:
        PeerLost: Another rank failed, this one did not.
        axo.errors.Error: This rank failed, another did not.
    """
    everyone = comms.everyone
    failed = torch.zeros(everyone.size, dtype=torch.int32)
    failed[everyone.rank] = error is not None
    failed = everyone.all_reduce(failed.to(comms.device))
    ranks = failed.nonzero().flatten().tolist()
    if not 0 < len(ranks) < everyone.size:
        return
    if error is not None:
        raise Error(f"this rank failed at a request that others answered: {type(error).__name__}: {error}") from error
    raise PeerLost(f"rank {ranks[0]} failed at a request that this rank answered", ranks[0])


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ValueError(
            f"litgpt: --host {host} --port {port}: {error.strerror}; use an address of this machine and another port"
        ) from None


def _wrong_temperature(temperature: float | None) -> str | None:
    """What is wrong with it; 0, None: LitGPT asks the server's own, or takes the likeliest token."""
    if not temperature or _COLDEST <= temperature <= _HOTTEST:
        return None
    return f"temperature must be 0, or from {_COLDEST} to {_HOTTEST:g}, got {temperature}"


class _Server(LitServer):
    """LitServe's server whose HTTP is a thread, and whose loop over requests is the thread that calls ``serve``."""

    _failure: Exception | None  # ends the loop

    def serve(self, listener: socket.socket) -> None:
        """Answer requests until something goes wrong, which is raised."""
        api = self.lit_api
        self._predict, self._failure = api.predict, None
        # LitServe reads the names of its arguments
        api.predict = functools.update_wrapper(functools.partial(self._told), api.predict)
        self.app.add_middleware(Admission, wrong=self._wrong, answers=self.response_buffer)
        most = max(_SMALL_BODY, _BYTES_A_TOKEN * api.llm.config.block_size)
        self.app.add_middleware(MaxSizeMiddleware, max_size=most)  # around the other
        os.environ["LITSERVE_WORKER_ID"] = "0"
        with wrap_litserve_start(self):
            config = uvicorn.Config(
                self.app, http=LimitedProtocol, log_level="info", timeout_graceful_shutdown=1, **HTTP_LIMITS
            )
            http = uvicorn.Server(config)
            thread = threading.Thread(target=http.run, args=([listener],), daemon=True)
            thread.start()
            try:
                api.loop(
                    api, "cpu", 0, self._requests, self._transport, self.workers_setup_status, self._callback_runner
                )
            finally:
                http.should_exit = True
                thread.join(_STOPS_WITHIN)
        if self._failure is not None:
            raise self._failure

    def _init_manager(self, num_api_servers: int) -> Any:
        api = self.lit_api
        self._requests = Requests(lambda: api.llm.fabric.broadcast(()))
        self._transport = MPQueueTransport(None, [queue.Queue() for _ in range(num_api_servers)])
        self.workers_setup_status = {api.api_path: WorkerSetupStatus.READY}
        self._shutdown_event = threading.Event()
        paths = (api.api_path, *([api.spec.api_path] if api.spec else []))
        self.litapi_request_queues = dict.fromkeys(paths, self._requests)
        return SimpleNamespace(shutdown=lambda: None)  # what LitServe shuts down at its end: there are no processes

    def launch_inference_worker(self, lit_api: Any) -> list[Any]:
        if lit_api.spec:
            lit_api.spec.setup(self)
        return []

    def _told(self, *arguments: Any, **options: Any) -> Any:
        """What stands for the API's ``predict``."""
        pieces = self._pieces(arguments, options)
        if self.lit_api.stream:
            return pieces
        [answer] = pieces
        return answer

    def _pieces(self, arguments: Any, options: Any) -> Iterator[Any]:
        api, told = self.lit_api, False
        try:
            api.llm.fabric.broadcast((arguments, options))
            told = True
            yield from _answer(api, self._predict, arguments, options)
        except Exception as error:
            if told and isinstance(error, ValueError):
                raise HTTPException(400, str(error)) from None
            self._failure = error  # LitServe's loop would go on
            self._requests.put(_END)
            raise HTTPException(500, str(error)) from None

    def _wrong(self, body: bytes) -> str | None:
        """What is wrong with a request; None: nothing, or what LitServe itself finds."""
        try:
            return self._found_wrong(body)
        except Exception as error:  # of a chat template, a tokenizer, a parser: it reads what the client sent
            return f"the request cannot be read: {type(error).__name__}: {error}"

    def _found_wrong(self, body: bytes) -> str | None:
        api, llm = self.lit_api, self.lit_api.llm
        try:
            given = json.loads(body)
        except ValueError as error:
            return f"the request is not JSON: {error}"
        new = api.max_new_tokens
        if api.spec is not None:
            try:
                given = ChatCompletionRequest.model_validate(given)
            except ValueError:
                return None
            new = given.max_completion_tokens or new
            wrong = _wrong_temperature(given.temperature)
            if wrong is not None:
                return wrong
            if given.n is None or not 1 <= given.n <= _CHOICES:
                return f"n must be from 1 to {_CHOICES}, got {given.n}"
            if given.top_p is not None and not 0 <= given.top_p <= 1:
                return f"top_p must be in [0, 1], got {given.top_p}"
        elif not isinstance(given, dict) or "prompt" not in given:
            return 'the request has no prompt; send {"prompt": "..."}'
        tokens = len(llm.preprocessor.encode(llm.prompt_style.apply(api.decode_request(given))))
        longest = llm.config.block_size
        if new < 1 or not 0 < tokens <= longest - new + 1:
            return f"the prompt has {tokens} tokens, and {new} new ones are wanted; the model takes {longest} in all"
        return None
