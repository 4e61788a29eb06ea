"""A kernel that does nothing for a time, by the GPU's clock of nanoseconds.

``torch.cuda._sleep`` counts cycles of the latter, which a card slows down while it multiplies: a link that is simulated
by it would slow down with the product beside it. NVIDIA only (``%globaltimer``).
"""

from __future__ import annotations

import triton
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["nanoseconds"])
def hold(nanoseconds):  # type: ignore[no-untyped-def]
    """Keep one program busy for so long."""
    start = globaltimer()
    now = start
    while now - start < nanoseconds:
        now = globaltimer()
