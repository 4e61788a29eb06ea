"""Overlap of communication and computation: OAR, ORS, OAG and the gather cache, as one object a model holds.

    model = axo.parallelize(model, comms, overlap=axo.Overlap(gather_cache="none"))

``attach`` does the same to a model made of Axo's layers by hand. Each layer's ``Exchange`` asks its engine; nothing
here is global. What is issued on the way of one step, from above to below:

    engine                         what a layer asks for, and when things happen, for a whole model
    gathers                        weights: gathered ahead of their products, kept or dropped
    gradients                      gradients: from a product, over the axes, in buckets, to ``.grad``
    route                          over which axes a layer's tensors travel

    options, model                 what can be switched; how a model gets its engine
    no_sync, weight_phase          accumulation without communication, and backward passes in two phases
    autograd                       what autograd wants of a gradient, and `.grad` as it fills it
    checks                         forward passes that are refused
    events, pool, dispatch_modes   collectives on their way and a record of them, buffers, what hides from modes

Names load on first use: ``options`` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axo.lazy import names_of

if TYPE_CHECKING:
    from axo.overlap.engine import Engine
    from axo.overlap.events import Event, Events
    from axo.overlap.model import attach, engines, exchanges, record
    from axo.overlap.options import Overlap, cache_limits

__all__ = ["Engine", "Event", "Events", "Overlap", "attach", "cache_limits", "engines", "exchanges", "record"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = names_of(
        __name__,
        {
            "Engine": "axo.overlap.engine",
            "Event": "axo.overlap.events",
            "Events": "axo.overlap.events",
            "Overlap": "axo.overlap.options",
            "attach": "axo.overlap.model",
            "cache_limits": "axo.overlap.options",
            "engines": "axo.overlap.model",
            "exchanges": "axo.overlap.model",
            "record": "axo.overlap.model",
        },
    )
