"""Tensors with shapes and no values, whose storages are followed.

torch's ``FakeTensorMode`` needs 0.1 to 0.3 ms to find what one operation gives. The blocks of a model are alike, and so
are its steps. So results are remembered: the same operation on the same kind of tensors and arguments gives the same
kind of results (new tensors, views of its inputs, or its inputs). Two kinds of operations go to torch each time: those
whose result depends on values, and those that change the shape or the storage of an input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from axo.dryrun.memory import Ledger

_CPU = torch.device("cpu")
_DEVICE = torch.ops.prim.device.default
_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


class _Result(NamedTuple):
    """What an operation gives: input ``same``, or a tensor like this, in the storage of input ``of`` or its own."""

    same: int | None
    of: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class _Outcome(NamedTuple):
    """What an operation gives: results, or None, in a ``form`` (a list, a tuple; None: the only one as it is)."""

    form: type | None
    results: tuple[_Result | None, ...]


class Shaped(FakeTensor):
    """A tensor without values that asks its mode first for what is known."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE:  # torch asks very often
            return args[0].device
        for argument in args:
            first = argument[0] if type(argument) is list and argument else argument
            if isinstance(first, Shaped):
                result = cast("Faking", first.fake_mode).again(func, args, kwargs or {})
                if result is not NotImplemented:
                    return result
                break
        return super().__torch_dispatch__(func, types, args, kwargs or {})


class Faking(FakeTensorMode):
    """Makes tensors without values, and has their storages followed."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._ledger = ledger
        self.watch: Callable[[Any, Any, Any], None] = lambda operation, args, result: None
        self._outcomes: dict[tuple[Any, ...], _Outcome | None] = {}  # None: torch is asked each time
        self._attributes: dict[str, Any] = {}  # of a tensor without values

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs: list[FakeTensor] = []
        key = _key(func, args, kwargs or {}, inputs)
        outcome = None if key is None else self._outcomes.get(key)
        if outcome is not None:
            result = self._make(outcome, inputs)
            self.watch(func, args, result)
            return result
        before = [tensor.untyped_storage()._cdata for tensor in inputs]
        result = super().dispatch(func, types, args, kwargs or {})
        for tensor in tree_leaves(result) if isinstance(result, (tuple, list, dict)) else (result,):
            if isinstance(tensor, FakeTensor):
                tensor.__class__ = Shaped
                self._ledger.see(tensor)
        if key is not None and key not in self._outcomes:
            same = key == _key(func, args, kwargs or {}, [])
            same &= before == [tensor.untyped_storage()._cdata for tensor in inputs]
            self._outcomes[key] = self._learn(func, result, inputs) if same else None
        self.watch(func, args, result)
        return result

    def again(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What ``func`` gives where that is known, else NotImplemented."""
        inputs: list[FakeTensor] = []
        key = _key(func, args, kwargs, inputs)
        outcome = None if key is None else self._outcomes.get(key)
        if outcome is None:
            return NotImplemented
        result = self._make(outcome, inputs)
        self.watch(func, args, result)
        return result

    def _learn(self, func: Any, result: Any, inputs: list[FakeTensor]) -> _Outcome | None:
        if _BY_VALUE & set(func.tags) or torch.is_inference_mode_enabled():
            return None
        form = next((kind for kind in (list, tuple) if isinstance(result, kind)), None)
        results: list[_Result | None] = []
        storages = [tensor.untyped_storage()._cdata for tensor in inputs]
        fresh = set[int]()
        for one in result if form is not None else (result,):
            if one is None:
                results.append(None)
                continue
            if not isinstance(one, FakeTensor) or one.constant is not None or one.requires_grad or one.device != _CPU:
                return None
            same = next((number for number, tensor in enumerate(inputs) if tensor is one), None)
            storage = one.untyped_storage()
            of = storages.index(storage._cdata) if storage._cdata in storages else None
            like = _Result(same, of, tuple(one.shape), one.stride(), int(one.storage_offset()), one.dtype)
            results.append(like)
            if same is not None:
                continue
            self._attributes = self._attributes or {name: vars(one)[name] for name in vars(one) if name != "_is_param"}
            again = self._tensor(like, inputs)
            alike = torch._C._dispatch_key_set(again) == torch._C._dispatch_key_set(one)
            if not alike or again.untyped_storage().nbytes() != storage.nbytes() or storage._cdata in fresh:
                return None
            if of is None:
                fresh.add(storage._cdata)
        return _Outcome(form, tuple(results))

    def _make(self, outcome: _Outcome, inputs: list[FakeTensor]) -> Any:
        results: list[Any] = []
        for one in outcome.results:
            if one is None or one.same is not None:
                results.append(None if one is None else inputs[one.same])  # type: ignore[index]
                continue
            tensor = self._tensor(one, inputs)
            if one.of is None:
                self._ledger.see(tensor)
            results.append(tensor)
        return results[0] if outcome.form is None else outcome.form(results)

    def _tensor(self, like: _Result, inputs: list[FakeTensor]) -> torch.Tensor:
        if like.of is None:
            shape = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device="meta")
        else:
            shape = torch.empty(0, dtype=like.dtype, device="meta")
            shape.set_(inputs[like.of].untyped_storage(), like.offset, like.shape, like.stride)
        tensor = torch.Tensor._make_subclass(Shaped, shape, dispatch_device=True, device_for_backend_keys=_CPU)
        vars(tensor).update(self._attributes)
        return tensor


def _key(func: Any, args: Any, kwargs: Any, inputs: list[FakeTensor]) -> tuple[Any, ...] | None:
    """What decides what ``func`` gives; its tensors go to ``inputs``. None: values may."""
    if not isinstance(func, torch._ops.OpOverload):
        return None
    key: list[Any] = [func]
    try:
        _add(key, args, inputs)
        for name, value in kwargs.items():
            key.append(name)
            _add(key, (value,), inputs)
        whole = tuple(key)
        hash(whole)
    except TypeError:
        return None
    return whole


def _add(key: list[Any], arguments: Iterable[Any], inputs: list[FakeTensor]) -> None:
    for each in arguments:
        if isinstance(each, FakeTensor):
            if each.constant is not None:
                raise TypeError
            inputs.append(each)
            key.append((each.shape, each.stride(), each.storage_offset(), each.dtype))
        elif isinstance(each, torch.Tensor):
            raise TypeError
        elif isinstance(each, (list, tuple)):
            key.append(len(each))
            _add(key, each, inputs)
        else:
            key.append((type(each), each))  # 1, 1.0 and True are equal
