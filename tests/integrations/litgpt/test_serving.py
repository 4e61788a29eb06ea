"""``axo litgpt serve`` on a grid, over HTTP as its users do. Oracle: LitGPT's own API object on one device."""

import concurrent.futures
import contextlib
import http.client
import json
import math
import os
import random
import signal
import socket
import threading
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

    def __init__(self, litserve, checkpoint, grid, *more, key=""):
        self.headers = {"Content-Type": "application/json"} | ({"X-API-Key": key} if key else {})
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        given = ["--temperature", "0", "--top_k", "1", "--max_new_tokens", str(NEW), "--precision", "32-true"]
        places = os.pathsep.join([os.environ.get("PYTHONPATH", ""), litserve])
        with pytest.MonkeyPatch.context() as environment:
            for name in NOT_TORCHRUN:
                environment.delenv(name, raising=False)
            environment.setenv("PYTHONPATH", places)
            environment.setenv("LIT_SERVER_API_KEY", key)
            environment.syspath_prepend(litserve)
            words = ["litgpt", "serve", str(checkpoint), "--grid", grid, "--port", str(self.port), *given, *more]
            self.command = Command("axo.cli", *words)
        limit = time.monotonic() + 200 * float(os.environ.get("AXO_TEST_SLOWNESS", "1"))
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
        connection.request(method, path, body, self.headers)
        answer = connection.getresponse()
        said = answer.status, answer.read().decode()
        connection.close()
        return said

    def leave(self, body):
        """Ask, and go away before the answer comes."""
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            client.sendall(self.request(json.dumps(body).encode(), "/predict"))

    def request(self, body, path):
        """The bytes of a request."""
        headers = {"Host": "here", "Content-Length": len(body), **self.headers}
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        return "\r\n".join(lines).encode() + body

    def answer(self):
        """What it says to ``QUESTION``, asked again while there is no room."""
        limit = time.monotonic() + 60 * float(os.environ.get("AXO_TEST_SLOWNESS", "1"))
        while True:
            status, body = self.post(QUESTION, CHAT)
            if status == 200:
                return json.loads(body)["choices"][0]["message"]["content"]
            assert status in (429, 503) and time.monotonic() < limit, (status, body)
            time.sleep(0.01)

    def drained(self):
        """A function that gives what it prints until its end, all of which is read meanwhile."""
        printed = []
        reader = threading.Thread(target=lambda: printed.append(self.command.communicate(timeout=3000)), daemon=True)
        reader.start()

        def text():
            reader.join(60)
            return printed[0]

        return text

    def ranks(self):
        path = Path(f"/proc/{self.command.pid}/task/{self.command.pid}/children")
        return [int(child) for child in path.read_text().split()]

    def ended(self):
        """What it printed. All its processes are gone, and so is the port."""
        printed = self.command.communicate()
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
    api = SimpleNamespace(llm=llm, predict=predict, temperature=0.8)
    served = Served(1, "127.0.0.1", api)
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


def admitted(litserve):
    """What LitServe's application gets to see of clients: statuses of answers, and what is left in the queue."""
    import asyncio
    import sys

    sys.path.insert(0, litserve)
    from axo.integrations.litgpt import serve_limits

    serve_limits.LIT_SERVER_API_KEY, serve_limits.CLIENTS = "secret", 2
    requests, answers = serve_limits.Requests(lambda: None), {}

    async def litserves(scope, receive, send):
        if scope["method"] == "POST":
            body = (await receive())["body"]
            requests.put((0, body, 0.0, None))
            answers[body] = "awaited"
            await asyncio.Future()
        await send({"type": "http.response.start", "status": 200})

    admission = serve_limits.Admission(litserves, wrong=lambda body: None, answers=answers)

    class Asking:
        """A client whose body is ``body``; None: it must not be read."""

        def __init__(self, body=None, key=b"secret", method="POST", path="/predict"):
            self.statuses, self.left = [], asyncio.Event()
            self.messages = [] if body is None else [{"type": "http.request", "body": body}]
            headers = [(b"x-api-key", key)] if key else []
            scope = {"type": "http", "method": method, "path": path, "headers": headers}
            self.task = asyncio.create_task(admission(scope, self.receive, self.send))

        async def receive(self):
            if self.messages:
                return self.messages.pop()
            await self.left.wait()
            return {"type": "http.disconnect"}

        async def send(self, message):
            self.statuses += [message["status"]] if "status" in message else []

    async def until(condition):
        while not condition():
            await asyncio.sleep(0)

    async def play():
        others = [Asking(None, key, method, path) for key, method, path in KEYLESS]
        await asyncio.gather(*(asking.task for asking in others))
        welcome = Asking(None, method="GET", path="/docs")
        await welcome.task
        first, second = Asking(b"first"), Asking(b"second")
        await until(lambda: len(answers) == 2)
        third = Asking(b"third")
        await third.task
        first.left.set()
        await first.task
        fourth = Asking(b"fourth")
        await until(lambda: b"fourth" in answers)
        left = [requests.get(timeout=0.1)[1] for _ in range(2)]
        state = [asking.statuses for asking in (*others, welcome, third)], left, requests.qsize(), sorted(answers)
        for asking in (second, fourth):
            asking.left.set()
            await asking.task
        return *state, len(answers)

    return asyncio.run(play())


KEYLESS = [(b"", "POST", "/predict"), (b"other", "POST", "/predict"), (b"", "GET", "/docs"), (b"", "GET", "/info")]


def test_only_clients_that_may_ask_and_are_there_reach_the_queue(litserve):
    """The key is asked for on every path, before a body is read. One that leaves makes room, and is not answered."""
    statuses, left, more, awaited, at_the_end = run_ranks(admitted, 1, litserve)[0]
    assert statuses == [[401]] * len(KEYLESS) + [[200], [429]]
    assert left == [b"second", b"fourth"] and more == 0
    assert awaited == [b"fourth", b"second"] and at_the_end == 0


def ended(litserve):
    """Whose connection has ended, of clients that have sent what stands beside them, once limits are over."""
    import asyncio
    import sys

    sys.path.insert(0, litserve)
    import uvicorn
    from uvicorn.server import ServerState

    from axo.integrations.litgpt import serve_limits

    serve_limits.TRANSFER_SECONDS, serve_limits.CONNECTIONS = 0.0, 4

    async def app(scope, receive, send):
        if scope["path"] == "/done":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        else:
            await asyncio.Future()

    class Transport:
        aborted = False

        def abort(self):
            self.aborted = True

        def is_closing(self):
            return self.aborted

        def __getattr__(self, name):  # all else does nothing
            return lambda *_: None

    async def turns():
        for _ in range(20):
            await asyncio.sleep(0)

    async def play():
        config, state = uvicorn.Config(app, log_level="critical"), ServerState()
        config.load()

        def connect(sent=b""):
            client = serve_limits.LimitedProtocol(config, state, {})
            client.connection_made(Transport())
            client.data_received(sent) if sent else None
            return client

        found = {}
        for name, sent in SENT.items():
            first, *more = sent if isinstance(sent, list) else [sent]
            client = connect(first)
            await turns()
            for piece in more:
                client.data_received(piece)
            await turns()
            if name == "an answer that is not read":
                client.pause_writing()
                await turns()
            found[name] = client.transport.aborted
            client.connection_lost(None)
        serve_limits.TRANSFER_SECONDS = 1e6
        asking, idle, half = connect(WHOLE), connect(), connect(b"POST / HT")
        clients = [asking, idle, half, *(connect(WHOLE) for _ in range(3))]
        found["for others"] = [client.transport.aborted for client in clients]
        for client in clients:
            client.connection_lost(None)
        for task in state.tasks:
            task.cancel()
        return found

    return asyncio.run(play())


WHOLE = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx"
SENT = {
    "nothing": b"",
    "half a header": WHOLE[:20],
    "half a body": WHOLE[:-1],
    "a request": WHOLE,
    "an answer that is not read": WHOLE,
    "two requests at once": WHOLE * 2,
    "a request that was answered, and half of the next": [WHOLE.replace(b"/ ", b"/done ", 1), WHOLE[:20]],
}


def test_a_connection_ends_that_sends_no_whole_request_or_does_not_read(litserve):
    """Or when others want its place; never while an answer is computed."""
    found = run_ranks(ended, 1, litserve)[0]
    assert found.pop("for others") == [False, True, True, False, False, False]
    assert found == {name: name != "a request" for name in SENT}


def refusals(litserve):
    """What a server says to an address that is not here, to one that is none, and to temperatures."""
    import sys

    sys.path.insert(0, litserve)
    from axo.integrations.litgpt import serving

    said = []
    for host, temperature in (("192.0.2.1", 1.0), ("no such host", 1.0), ("::1", 1e39), ("::1", math.nan)):
        try:
            serving.Served(1, host, SimpleNamespace(temperature=temperature))
            serving._listen(host, 0)
        except ValueError as error:
            said.append(str(error))
    serving._listen("127.0.0.1", 0).close()
    return said


def test_a_server_says_where_it_cannot_listen_and_what_is_no_temperature(litserve):
    here, none, *temperatures = run_ranks(refusals, 1, litserve)[0]
    assert "--host 192.0.2.1 --port 0: Cannot assign requested address" in here and "use an address" in here
    assert "--host no such host" in none and "use an address" in none
    assert temperatures == [
        f"litgpt: --temperature must be 0, or from 0.001 to 100, got {value}" for value in ("1e+39", "nan")
    ]


ODD = [
    None,
    True,
    -1,
    0,
    1000,
    2**70,
    1e39,
    1e308,
    1e-40,
    math.nan,
    math.inf,
    -0.5,
    "",
    "x" * 3000,
    "\ud800",
    [],
    [[]],
    {},
]
CHAT = "/v1/chat/completions"
QUESTION = {"messages": [{"role": "user", "content": "line 7: "}], "max_completion_tokens": 3, "temperature": 0}
FIELDS = [*QUESTION, "model", "top_p", "n", "max_tokens", "stop", "stream", "tools", "response_format", "user"]
BROKEN = [
    b"\x16\x03\x01 hello",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcd",
    b"POST %b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /" + b"a" * 70_000,
    b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000,
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 20,
]


def odd_body(draw):
    """A chat request with one to three odd fields, some of them in its message; sometimes no JSON."""
    body = json.loads(json.dumps(QUESTION))
    for _ in range(draw.randint(1, 3)):
        value = draw.choice(ODD)
        if draw.random() < 0.2:
            body["messages"][0][draw.choice(["role", "content", "name", "tool_calls"])] = value
        else:
            body[draw.choice(FIELDS)] = value
        if body["messages"] is value or not isinstance(body["messages"], list):
            break
    text = json.dumps(body).encode()
    return text[: draw.randrange(len(text))] if draw.random() < 0.1 else text


def attack(server, seed, requests):
    """Send odd requests, one after the other; the statuses that came back, 0 for none."""
    draw, statuses = random.Random(seed), []
    for _ in range(requests):
        if draw.random() < 0.2:
            sent = draw.choice(BROKEN).replace(b"%b", CHAT.encode())
        else:
            sent = server.request(odd_body(draw), draw.choice([CHAT] * 8 + ["/predict", "/health", "/docs"]))
        with socket.create_connection(("127.0.0.1", server.port), timeout=120) as client, contextlib.suppress(OSError):
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR) if draw.random() < 0.1 else None
            statuses.append(int((client.recv(4096).split(b" ", 2) + [b"", b"0"])[1] or 0))
    return statuses


@pytest.mark.parametrize(
    "requests, left, half_open", [(120, 100, 300), pytest.param(10_000, 1000, 500, marks=pytest.mark.soak)]
)
def test_a_server_stays_up_among_hostile_clients(litserve, base, requests, left, half_open):
    """Odd and broken requests, clients that leave at once, requests that never end. It listens where it was told to,
    and prints no key."""
    server = Server(
        litserve, base, "2x1x1x1", "--openai_spec", "true", "--access_token", "hf_private", key="sesame-open"
    )
    printed = server.drained()
    expected = server.answer()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port))
    assert server.post(QUESTION | {"temperature": 1e39}, CHAT)[0] == 400
    assert server.post(QUESTION | {"n": 9}, CHAT)[0] == 400
    with concurrent.futures.ThreadPoolExecutor(4) as attackers:
        jobs = [attackers.submit(attack, server, seed, requests // 4) for seed in range(4)]
    statuses = [status for job in jobs for status in job.result()]
    assert {200, 400, 422} <= set(statuses), sorted(set(statuses))
    assert server.answer() == expected
    held = []
    for number in range(half_open):
        held.append(socket.create_connection(("127.0.0.1", server.port)))
        held[-1].sendall(server.request(b"{}", CHAT)[: -1 if number % 2 else -3])
    for _ in range(left):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(server.request(json.dumps(QUESTION | {"max_completion_tokens": 100}).encode(), CHAT))
    begun = time.monotonic()
    assert server.answer() == expected
    seconds = time.monotonic() - begun
    print(f"{requests} odd requests, {left} clients left, {half_open} half open: an answer in {seconds:.2f} s")
    if left == 1000:
        assert seconds < 2 * float(os.environ.get("AXO_TEST_SLOWNESS", "1"))
    for client in held:
        client.close()
    os.kill(server.command.pid, signal.SIGTERM)
    text = printed()
    assert server.command.returncode == 128 + signal.SIGTERM
    assert "sesame-open" not in text and "hf_private" not in text and "(not shown)" in text


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
