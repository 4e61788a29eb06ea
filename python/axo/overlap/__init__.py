"""Overlap of communication and computation: OAR, ORS, OAG and the gather cache, as one object a model holds.

    model = axo.parallelize(model, comms, overlap=axo.Overlap(gather_cache="none"))

``attach`` does the same to a model made of Axo's layers by hand. Each layer's ``Exchange`` asks its engine; nothing
here is global. See ``options`` for what can be switched, ``engine`` for when things happen.
"""

from axo.overlap.engine import Engine
from axo.overlap.events import Event, Events
from axo.overlap.model import attach, engines, exchanges, record
from axo.overlap.options import Overlap, cache_limits

__all__ = ["Engine", "Event", "Events", "Overlap", "attach", "cache_limits", "engines", "exchanges", "record"]
