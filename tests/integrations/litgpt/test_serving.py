"""``axo litgpt serve`` on a grid, over HTTP as its users do. Oracle: LitGPT's own API object on one device."""

import concurrent.futures
import contextlib
import http.client
import json
import math
import os
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.integrations.runs import NOT_TORCHRUN
from tests.integrations.support import LLAMA, installed
from tests.integrations.trainer import _run, chat, generate, ranks_of, write_base
from tests.launcher import Command, rank_outcomes, run_ranks

PROMPTS = ["line 7: ", "the quick brown fox", "0"]
NEW = 12


@pytest.fixture(scope="session")
def litserve():
    """The folder that holds LitServe."""
    return str(installed("serve", "serve.txt", "litserve", "--no-deps"))


@pytest.fixture(scope="session")
def base(folder):
    if not (folder / "served").exists():
        write_base(folder, "served")
    return folder / "served"


def answers(litserve, checkpoint, grid=None, **asked):
    """What the API object of ``litgpt serve`` answers to each prompt, without HTTP."""
    import sys

    sys.path.insert(0, litserve)
    import litgpt.deploy.serve as module

    made = []

    def start():
        sampling = {"temperature": 0.0, "top_k": 1, "max_new_tokens": NEW}
        api = module.SimpleLitAPI(checkpoint, precision="32-true", api_path="/predict", **sampling)
        api.setup("cpu")
        made.extend(api.predict(prompt) for prompt in PROMPTS)

    _run(start, "serve", grid, **asked)
    return made


@pytest.fixture(scope="session")
def expected(litserve, base):
    """One device's answers, which differ."""
    made = run_ranks(answers, 1, litserve, base)[0]
    assert len(set(made)) == len(PROMPTS)
    return made


class Server:
    """``axo litgpt serve`` as a process, ready to answer."""

    def __init__(self, litserve, checkpoint, grid, *more):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        given = ["--temperature", "0", "--top_k", "1", "--max_new_tokens", str(NEW), "--precision", "32-true"]
        places = os.pathsep.join([os.environ.get("PYTHONPATH", ""), litserve])
        with pytest.MonkeyPatch.context() as environment:
            for name in NOT_TORCHRUN:
                environment.delenv(name, raising=False)
            environment.setenv("PYTHONPATH", places)
            environment.syspath_prepend(litserve)
            words = ["litgpt", "serve", str(checkpoint), "--grid", grid, "--port", str(self.port), *given, *more]
            self.command = Command("axo.cli", *words)
        limit = time.monotonic() + 60 * float(os.environ.get("AXO_TEST_SLOWNESS", "1"))
        while True:
            assert self.command.poll() is None and time.monotonic() < limit, self.command.communicate(timeout=1)
            with contextlib.suppress(OSError):
                if self.get("/health") == (200, "ok"):
                    return
            time.sleep(0.1)

    def get(self, path):
        return self._said("GET", path, None)

    def post(self, body, path="/predict"):
        return self._said("POST", path, body if isinstance(body, bytes) else json.dumps(body))

    def _said(self, method, path, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        said = answer.status, answer.read().decode()
        connection.close()
        return said

    def leave(self, body):
        """Ask, and go away before the answer comes."""
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            body = json.dumps(body).encode()
            head = f"POST /predict HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)

    def ranks(self):
        path = Path(f"/proc/{self.command.pid}/task/{self.command.pid}/children")
        return [int(child) for child in path.read_text().split()]

    def ended(self):
        """What it printed. All its processes are gone, and so is the port."""
        printed = self.command.communicate(timeout=60)
        with pytest.raises(OSError):
            self.get("/health")
        return printed


def text_of(said):
    status, body = said
    assert status == 200, body
    return json.loads(body)["output"]


@pytest.mark.parametrize("grid", ["2x1x1x1", pytest.param("2x2x2x1", marks=pytest.mark.soak)])
def test_a_server_on_a_grid_answers_as_stock_litgpt(litserve, base, expected, grid):
    """Also after wrong requests (4xx) and clients that went away, and several at once; SIGTERM ends all of it."""
    server = Server(litserve, base, grid)
    assert [text_of(server.post({"prompt": prompt})) for prompt in PROMPTS] == expected
    for body, words in (
        (b"{", "not JSON"),
        (b"[1]", "no prompt"),
        ({"question": "what?"}, "no prompt"),
        ({"prompt": "x" * 300}, f"the model takes {LLAMA['block_size']} in all"),
        ({"prompt": "\ud800"}, "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
    ):
        status, answer = server.post(body)
        assert status == 400 and words in answer
    assert server.post({"prompt": "x" * (1 << 20)})[0] == 413
    assert server.get("/nothing")[0] == 404
    for prompt in PROMPTS:
        server.leave({"prompt": prompt})
    with concurrent.futures.ThreadPoolExecutor(6) as clients:
        many = list(clients.map(lambda prompt: text_of(server.post({"prompt": prompt})), PROMPTS * 2))
    assert many == expected * 2
    os.kill(server.command.pid, signal.SIGTERM)
    assert "Traceback" not in server.ended()
    assert server.command.returncode == 128 + signal.SIGTERM


def test_a_server_streams_and_ends_when_a_rank_dies(litserve, base, expected):
    """One line says which."""
    server = Server(litserve, base, "2x1x1x1", "--stream", "true")
    status, body = server.post({"prompt": PROMPTS[0]})
    pieces = [json.loads(piece)["output"] for piece in body.replace("}{", "}\n{").splitlines()]
    assert status == 200 and len(pieces) > 1 and "".join(pieces) == expected[0]
    server.leave({"prompt": PROMPTS[1]})
    assert server.post(b"{")[0] == 400
    os.kill(server.ranks()[1], signal.SIGKILL)
    printed = server.ended()
    assert server.command.returncode == 1 and "Traceback" not in printed
    assert "rank 1 was killed by SIGKILL" in printed


def follow(litserve, errors):
    """What a rank makes of a request at which rank r fails with errors[r], and of the next one."""
    import sys

    import torch

    import axo

    sys.path.insert(0, litserve)
    from axo.integrations.litgpt.serving import Served

    comms = axo.connect("2x1x1x1")

    def predict(asked):
        error = errors[comms.rank] if asked == "first" else None
        if error is not None:
            raise error
        if not isinstance(errors[1], ValueError):
            comms.x.all_reduce(torch.ones(1))  # for which the rank that fails does not come
        return asked

    strategy = SimpleNamespace(comms=comms)
    llm = SimpleNamespace(fabric=SimpleNamespace(strategy=strategy, device=torch.device("cpu")))
    served = Served(1, SimpleNamespace(llm=llm, predict=predict))
    for asked in ("first", "second"):
        served._follow((asked,), {})
    return comms.rank


@pytest.mark.parametrize(
    "errors, ends",
    [
        ([ValueError("top_p"), ValueError("top_p")], None),
        ([None, ValueError("odd")], ["PeerLost", "Error"]),
        ([None, MemoryError("no more")], ["PeerLost", "MemoryError"]),
    ],
)
def test_what_one_rank_alone_fails_at_ends_all(litserve, errors, ends, monkeypatch):
    """At once and with its cause. What every rank fails at is of the request."""
    monkeypatch.syspath_prepend(litserve)
    outcomes = rank_outcomes(follow, 2, litserve, errors, preload=("fastapi", "uvicorn", "zmq"))
    assert [outcome.error or None for outcome in outcomes] == (ends or [None, None])
    if ends:
        assert "rank 1" in outcomes[0].message and outcomes[0].seconds < 60
        assert str(errors[1]) in outcomes[1].message


def keyless(litserve):
    """Answers to a client with another key and to one with the server's."""
    import asyncio
    import sys

    sys.path.insert(0, litserve)
    from axo.integrations.litgpt import serving

    serving.LIT_SERVER_API_KEY = "secret"

    async def body():
        return b"x"

    async def call_next(request):
        return SimpleNamespace(status_code=200)

    async def answers():
        server = SimpleNamespace(_wrong=lambda body: None)
        for headers in ({}, {"X-API-Key": "other"}, {"X-API-Key": "secret"}):
            read = body if headers.get("X-API-Key") == "secret" else None  # else it must not be read
            request = SimpleNamespace(method="POST", headers=headers, body=read)
            yield (await serving._Server._checked(server, request, call_next)).status_code

    async def collect():
        return [status async for status in answers()]

    return asyncio.run(collect())


def test_a_client_without_the_key_is_refused_before_its_body_is_read(litserve):
    assert run_ranks(keyless, 1, litserve) == [[401, 401, 200]]


@pytest.mark.soak
def test_a_server_speaks_openais_language(litserve, base):
    """Ctrl-C ends it. Each request may ask for its own number of tokens."""
    server = Server(litserve, base, "2x1x1x1", "--openai_spec", "true")
    question = {"model": "small", "messages": [{"role": "user", "content": "line 7: "}], "max_completion_tokens": 5}
    path = "/v1/chat/completions"
    said = [server.post(question, path) for _ in range(2)]
    assert said[0][0] == 200 and json.loads(said[0][1])["choices"][0]["message"]["content"]
    assert json.loads(said[0][1])["choices"] == json.loads(said[1][1])["choices"]
    assert server.post({"model": "small"}, path)[0] == 422
    status, answer = server.post(question | {"top_p": 7}, path)
    assert status == 400 and "top_p must be in [0, 1], got 7" in answer
    assert server.post(question | {"temperature": 1e-40}, path)[0] == 400
    assert server.post(question | {"max_completion_tokens": -3}, path)[0] in (400, 422)
    assert server.post(question, path)[0] == 200
    os.kill(server.command.pid, signal.SIGINT)
    assert "Traceback" not in server.ended() and server.command.returncode == 128 + signal.SIGINT


def caches(command, *args, **asked):
    """(shape, bytes) of the caches of keys or values that this rank used in a command."""
    import litgpt.model

    used = set()
    stock = litgpt.model.KVCache.forward

    def forward(self, *given):
        used.update((tuple(cache.shape), cache.untyped_storage().nbytes()) for cache in (self.k, self.v))
        return stock(self, *given)

    litgpt.model.KVCache.forward = forward
    command(*args, **asked)
    return used


@pytest.mark.parametrize("command", [generate, chat, answers])
def test_a_rank_keeps_keys_and_values_of_its_own_heads(litserve, base, command):
    """n/x groups a rank, n/y with Tesseract, and no memory for others."""
    args = (litserve, base) if command is answers else (base,)
    asked = {"algorithm": "tesseract"} if command is generate else {}
    grid = "2x2x1x1" if asked else "2x1x1x1"
    ranks, environment = ranks_of(grid)
    for used in run_ranks(with_options, ranks, asked, command, *args, grid, env=environment):
        assert used and {shape[:2] for shape, _ in used} == {(1, LLAMA["n_query_groups"] // 2)}
        assert all(size == 4 * math.prod(shape) for shape, size in used)


def with_options(options, *args):
    return caches(*args, **options)
