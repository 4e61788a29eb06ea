"""What a user may say about single layers of a model, by their names.

    plan = {"*.q_proj": "normal", "*.o_proj": "transposed", "lm_head": "normal:whole->split", "*.router": "replicate"}

A key is matched against the names of ``model.named_modules()``; ``*`` stands for any text, dots too, ``?`` for one
character, ``[...]`` for one of these. Of several keys that match a layer the last one counts. A key that matches no
layer is an error. Layers that no key matches are left to ``plan="auto"``. A value is

    normal, transposed                which way the weight is split; activations stay split where the plan can prove it
    normal:whole->split (and so on)   the same, and what comes in and goes out: ``whole`` features on every rank along x
                                      and y, or ``split`` as the layer's axes say. ``split`` is the user's word that
                                      what stands before or after takes it so; nothing checks it but shapes.
    replicate                         the serial layer, whole on every rank
    auto                              as if not named
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

KINDS = ("normal", "transposed", "replicate", "auto")
_VALUE = re.compile(r"(normal|transposed):(whole|split)->(whole|split)")


@dataclass(frozen=True)
class Override:
    """What the user asks for one layer.

    Attributes:
        kind: "normal", "transposed" or "replicate".
        pattern: The key that says so.
        split_in, split_out: Whether activations come in and go out split; None: where the plan can prove it.
    """

    kind: str
    pattern: str
    split_in: bool | None = None
    split_out: bool | None = None


def _read(value: str, pattern: str) -> Override:
    if value in KINDS:
        return Override(value, pattern)
    match = _VALUE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(
            f"parallelize: plan[{pattern!r}]={value!r} is not known; use one of {KINDS}, or a kind with layouts, such"
            " as 'normal:whole->split'"
        )
    return Override(match[1], pattern, match[2] == "split", match[3] == "split")


def overrides(plan: dict[str, str], layers: Iterable[str], others: Iterable[str]) -> dict[str, Override]:
    """Name of a layer -> what the user asks for it.

    Args:
        plan: Patterns and values.
        layers: Names of the layers that can be split.
        others: Names of all other modules, for messages.

    Raises:
        ValueError: A value is not known, or a pattern matches no layer.
    """
    names, asked = list(layers), dict[str, Override]()
    for pattern, value in plan.items():
        override = _read(value, pattern)
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            near = [name for name in others if fnmatchcase(name, pattern)][:3]
            such = f"it matches {near}, which hold no weight to split, or are experts in one tensor"
            why = such if near else "such names are " + ", ".join(names[:6])
            raise ValueError(f"parallelize: plan[{pattern!r}] matches no layer that can be split; {why}")
        asked.update(dict.fromkeys(matched, override))
    return {name: override for name, override in asked.items() if override.kind != "auto"}
