"""``python -m axo.cli`` is the command ``axo``."""

from axo.cli.main import main

main()
