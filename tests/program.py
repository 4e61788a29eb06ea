"""``python -c CODE ARGUMENTS`` for a process that is forked: ``Command("tests.program", CODE, *ARGUMENTS)``."""

import sys

if __name__ == "__main__":
    sys.argv[0] = "-c"
    exec(compile(sys.argv.pop(1), "<string>", "exec"), {"__name__": "__main__"})
