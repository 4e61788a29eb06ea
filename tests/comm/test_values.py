"""What ranks send each other: it comes as it was sent, or is refused, and nothing of it runs."""

import dataclasses
import enum
import json
import pickle
import random
import re
import sys
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from axo.comm import values
from axo.comm.values import pack, unpack
from axo.errors import Error
from tests.checkpoint.hostile import Bomb
from tests.launcher import rank_outcomes, run_ranks

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Sample:
    ids: torch.Tensor
    name: str = ""


@dataclasses.dataclass(slots=True)
class Slotted:
    ids: list


class Tagged(list):
    __slots__ = ("tag",)


class Split(enum.StrEnum):
    TRAIN = "train"


class Level(enum.IntEnum):
    LOW = 1


class Word(str):
    pass


class Batch(UserDict):
    def __init__(self, data, kind):
        super().__init__(data)
        self.kind = kind


class Loud(OrderedDict):
    """Its own functions would leave their mark."""

    def __setitem__(self, key, value):
        raise AssertionError("it ran")


class Bad(OSError):
    def __init__(self, path):
        super().__init__(2, "not there", path)
        self.place = path


class Closing(dict):
    def __del__(self):
        pass


class Free:
    pass


def same(one, other):
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
        one, other = (each.resolve_conj().contiguous().reshape(-1) for each in (one, other))
        assert one.is_meta or torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    elif isinstance(one, np.ndarray | np.generic):
        assert type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, BaseException):
        assert (type(one), one.args, str(one), vars(one)) == (type(other), other.args, str(other), vars(other))
    else:
        assert type(one) is type(other)
        if isinstance(one, dict):
            assert list(one) == list(other)
            [same(one[key], other[key]) for key in one]
        elif isinstance(one, list | tuple):
            assert len(one) == len(other)
            [same(*each) for each in zip(one, other, strict=True)]
        elif dataclasses.is_dataclass(one) or isinstance(one, UserDict):
            names = [each.name for each in dataclasses.fields(one)] if dataclasses.is_dataclass(one) else vars(one)
            [same(getattr(one, name), getattr(other, name)) for name in names]
        else:
            assert one == other


def dtypes():
    every = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    return sorted((each for each in every if "q" not in str(each) and "bits" not in str(each)), key=str)


def of_every_dtype():
    whole = [each for each in dtypes() if not str(each).removeprefix("torch.").startswith(("int", "uint"))]
    whole += [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
    return {str(each): torch.arange(48, dtype=torch.uint8).view(each) for each in whole if each is not torch.bool}


def tagged():
    value = Tagged([1])
    value.tag = "a"
    return value


def deep(levels):
    return {"more": deep(levels - 1)} if levels else 1


def loud():
    value = Loud()
    OrderedDict.__setitem__(value, "a", 1)
    value.more = [2]
    return value


_BOOLS, _GROUP = torch.ones(2).bool(), ExceptionGroup("g", [OSError(1, "x")])
VALUES = {
    "plain": [None, True, 2**100, 0.5, float("inf"), "ä\0", b"\0\xff", bytearray(b"x"), 1j, [], (), {}, set(), {1, 2}],
    "nested": {"a": [1, (2, {3: "x", (4, 5): frozenset({6})})]},
    "dtypes": of_every_dtype(),
    "shapes": [torch.ones(()), torch.empty(0, 3), torch.arange(6).view(2, 3).T, torch.ones(1).expand(5), _BOOLS],
    "lazy": [torch.ones(2, dtype=torch.complex64).conj(), torch.zeros(2, 3, device="meta")],
    "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), pack_sequence([torch.ones(3), torch.ones(2)])],
    "paths": [Path("a/b")],
    "numpy": [np.arange(6.0).reshape(2, 3), np.array(["ab", "c"]), np.float32(1.5), np.bool_(True), np.zeros((0, 2))],
    "times": [np.array(["2026-01-01"], "datetime64[D]"), np.arange(4, dtype=">i2")],
    "tuples": [Pair(torch.ones(1), "x"), torch.ones(2, 2).max(0)],
    "dicts": [OrderedDict(b=1, a=2), Counter("aab"), defaultdict(list, {"a": [1]}), defaultdict(None, {1: 2}), loud()],
    "classes": [Sample(torch.ones(2), "s"), Slotted([1]), Batch({"ids": torch.ones(3)}, "train")],
    "errors": [ValueError("a", 1), KeyError("k"), OSError(2, "gone", "file"), Bad("there"), _GROUP],
    "enums": [Split.TRAIN, Level.LOW],
    "state of random": random.Random(0).getstate(),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_comes_as_it_was_sent(value):
    if isinstance(value, list) and any(isinstance(each, BaseException) for each in value):
        value[0].add_note("in a worker")
    received = unpack(pack(value))
    if isinstance(value, list) and any(isinstance(each, ExceptionGroup) for each in value):
        same(value.pop().exceptions[0], received.pop().exceptions[0])
    same(value, received)


def test_what_a_tokenizer_returns_comes_whole():
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import BatchEncoding, PreTrainedTokenizerFast
    from transformers.modeling_outputs import CausalLMOutput

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="?")
    batch = tokenizer(["a b", "b"], padding=True, return_tensors="pt")
    received = unpack(pack(batch))
    assert type(received) is BatchEncoding and received["input_ids"].tolist() == [[0, 1], [1, 2]]
    assert received.word_ids(0) == batch.word_ids(0) and received.tokens(1) == ["b", "?"]
    output = unpack(pack(CausalLMOutput(logits=torch.ones(2))))
    assert type(output) is CausalLMOutput and output.logits.tolist() == output["logits"].tolist() == [1, 1]


def test_slots_of_a_list_come_with_it():
    received = unpack(pack(tagged()))
    assert type(received) is Tagged and received == [1] and received.tag == "a"


def test_what_a_reader_has_room_for_is_known_to_the_sender():
    assert unpack(pack(deep(100))) == deep(100)
    with pytest.raises(TypeError, match="a dict that is nested too deeply"):
        unpack(pack(deep(101)))


def test_a_tensor_that_stands_twice_is_sent_once_and_has_storage_of_its_own():
    one = torch.ones(1000)
    message = pack({"ids": one, "labels": one, "more": torch.zeros(1000)})
    received = unpack(message)
    assert received["ids"] is received["labels"] and len(message) < 9000
    assert received["ids"].untyped_storage().nbytes() == 4000
    assert unpack(pack(torch.ones(2, requires_grad=True))).requires_grad


class Local:
    def __reduce__(self):
        raise AssertionError


def local():
    @dataclasses.dataclass
    class Inner:
        a: int

    return Inner(1)


def circle():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Free(), "tests.comm.test_values:Free cannot be sent to other ranks; send tensors, arrays"),
        (lambda: 1, "builtins:function"),
        (Closing(), "Closing cannot be sent"),
        (local(), "local.<locals>.Inner is no class of an imported module"),
        (circle(), "nested too deeply"),
        (torch.ones(2).to_sparse(), "a tensor of class Tensor (layout torch.sparse_coo"),
        (np.array([None]), "a numpy array of object"),
        (np.zeros(2, "i4,f4"), "a numpy array of"),
        (defaultdict(lambda: 1), "a defaultdict of <function"),
        (open, "builtin_function_or_method"),
        (Free, "builtins:type"),
        (np.zeros((1, 1)).view(np.matrix), "numpy:matrix cannot be sent"),
        (Word("a"), "Word cannot be sent"),
        (re.I | re.M, "is no member of an imported module's enum"),
        (Tagged(), "a dict cannot be sent to other ranks (AttributeError: "),
        (np.zeros(1, np.dtype(("V2", [("a", "i2")]))), "a numpy array of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-",  # of an object it would be an address
)
def test_what_cannot_be_sent_is_named(value, message):
    with pytest.raises(TypeError) as error:
        unpack(pack({"batch": [value]}))
    assert message in str(error.value)


@pytest.mark.parametrize(("held", "said"), [(Free(), "<tests"), (Tagged(), "[]")], ids=["free", "unset slot"])
def test_an_error_that_cannot_be_sent_is_told_in_words(held, said):
    received = unpack(pack(ValueError("why", held)))
    assert type(received) is RuntimeError and str(received).startswith(f"ValueError: ('why', {said}")


@pytest.mark.parametrize("args", [("why",), ("why", [Slotted([1])])])
def test_an_error_of_a_class_that_only_the_sender_has_is_told_in_words(args, monkeypatch):
    message = pack(Bad("there") if len(args) == 1 else ValueError(*args))
    monkeypatch.delitem(sys.modules, __name__)
    received = unpack(message)
    assert type(received) is RuntimeError
    assert str(received).startswith("Bad: [Errno 2] not there: 'there'" if len(args) == 1 else "ValueError: ('why', [")


@dataclasses.dataclass
class Ends(SystemExit):
    why: int


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), Ends(3)])
def test_what_ends_a_process_is_told_in_words(error):
    assert str(unpack(pack(error))) == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("size", [-1, 0, 1 << 40])
def test_a_broadcast_of_no_size_is_refused(size):
    with pytest.raises(Error, match=f"a rank has sent {size} bytes"):
        values.broadcast(None, lambda tensor: tensor.fill_(size), False, torch.device("cpu"))


def message_of(value, data=b""):
    head = {"tensors": [], "value": value} if not isinstance(value, dict) or "value" not in value else value
    text = value if isinstance(value, str) else json.dumps(head)
    return torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text.encode() + data), dtype=torch.uint8)


BYTES = [["uint8", [3], "cpu", False]]
HOSTILE = {
    "no class": {"object": ["os:system", [], {}]},
    "a function": {"object": ["builtins:eval", ["1"], {}]},
    "a destructor": {"object": ["tests.comm.test_values:Closing", [], {}]},
    "another kind": {"object": ["subprocess:Popen", ["id"], {}]},
    "lazily imported": {"object": ["this:d", [], {}]},
    "an object's array": {"array": ["|O", [1], False, {"bytearray": "AAAAAAAAAAA="}]},
    "an array of many": {"array": ["<f8", [1 << 60], False, {"tensor": 0}]},
    "no kind": {"eval": "1"},
    "two kinds": {"tuple": [], "set": []},
    "no dtype": {"tensors": [["load", [1], "cpu", False]], "value": 1},
    "a negative shape": {"tensors": [["uint8", [-1], "cpu", False]], "value": 1},
    "more than there is": {"tensors": [["float64", [1 << 40], "cpu", False]], "value": 1},
    "less than there is": {"tensors": [["uint8", [1], "cpu", False]], "value": {"tensor": 0}},
    "deep": '{"tensors": [], "value": ' + "[" * 100000 + "]" * 100000 + "}",
    "a function for a dtype": {"dtype": "load"},
    "SystemExit": {"object": ["builtins:SystemExit", [], {}]},
    "no member": {"enum": ["tests.comm.test_values:Split", "mro"]},
    "no enum": {"enum": ["tests.comm.test_values:Pair", "first"]},
    "an array twice": {"tensors": BYTES, "value": [{"array": ["|u1", [3], False, {"tensor": 0}]}] * 2},
    "rows of a tensor": {"tensors": BYTES, "value": {"tuple": {"tensor": 0}}},
    "a list of rows": {"tensors": BYTES, "value": {"object": ["tests.comm.test_values:Tagged", {"tensor": 0}, {}]}},
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_a_message_that_means_harm_is_an_error(value):
    with pytest.raises(Error, match="what a rank sent is no plain value"):
        unpack(message_of(value, b"abc" if "tensors" in value else b""))  # no byte too many: it is the value's fault
    assert "this" not in __import__("sys").modules


def test_damaged_messages_are_read_or_refused(tmp_path):
    whole = bytes(pack([VALUES[name] for name in ("nested", "shapes", "numpy", "classes", "dicts", "errors")]).tolist())
    draw = random.Random(0)
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            data[at : at + draw.choice([0, 1, 1, 8])] = draw.randbytes(draw.choice([0, 1, 1, 8]))
        try:
            unpack(torch.frombuffer(data, dtype=torch.uint8))
        except (Error, TypeError):
            pass


def send_bomb(flag):
    """Rank 0 is hostile: it sends what its peers, reading a batch and a broadcast, once unpickled."""
    import lightning as L

    from axo.integrations.fabric.loader import SharedLoader
    from axo.integrations.fabric.strategy import AxoStrategy

    fabric = L.Fabric(accelerator="cpu", strategy=AxoStrategy("2x1x1x1"))
    fabric.launch()
    comms = fabric.strategy.comms
    said = []
    loader = SharedLoader(DataLoader(range(4)), comms)
    for what, send in ("batch", comms.x.broadcast), ("broadcast", comms.everyone.broadcast):
        if comms.rank == 0:
            data = torch.frombuffer(bytearray(pickle.dumps(("batch", Bomb(Path(flag) / what)))), dtype=torch.uint8)
            for tensor in (torch.tensor([len(data)]), data):
                send(tensor)
            continue
        with pytest.raises(Error, match="what a rank sent is no plain value") as error:
            next(iter(loader)) if what == "batch" else fabric.broadcast(None)
        said.append(str(error.value))
    return said


def test_what_a_hostile_peer_sends_to_a_loader_and_by_broadcast_does_not_run(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "works")))
    assert len(run_ranks(send_bomb, 2, str(tmp_path), env={"TORCHELASTIC_RUN_ID": "1"})[1]) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["works"]


def broadcast(value, src):
    import lightning as L

    from axo.integrations.fabric.strategy import AxoStrategy

    fabric = L.Fabric(accelerator="cpu", strategy=AxoStrategy("2x2x1x1"))
    fabric.launch()
    sent = Free() if value == "free" and fabric.global_rank == src else value if fabric.global_rank == src else None
    return str(fabric.broadcast(sent, src))


def test_fabric_broadcasts_what_programs_send():
    value = {"path": Path("a"), "state": [torch.arange(3), OrderedDict(w=torch.ones(1))], "name": "x"}
    assert run_ranks(broadcast, 4, value, 2, env={"TORCHELASTIC_RUN_ID": "1"}) == [str(value)] * 4
    for outcome in rank_outcomes(broadcast, 4, "free", 3, env={"TORCHELASTIC_RUN_ID": "1"}):
        assert outcome.error == "TypeError" and "Free cannot be sent to other ranks" in outcome.message
