"""An error in a line: its kind, and how its words begin and end. It keeps no traceback.

Of a compiler's words, which may be a whole program, the first say what failed and the last say what is wrong.
"""

from __future__ import annotations

_ONE, _EACH = 400, 200  # characters kept: of a single line, and of the first and of the last of several


def in_a_line(error: Exception) -> str:
    """The kind of an error, and how its words begin and end."""
    told = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    ends = [told[0][:_EACH], told[-1][:_EACH]] if len(told) > 1 else [told[0][:_ONE]]
    return f"{type(error).__name__}: {' ... '.join(ends)}"
