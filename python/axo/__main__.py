"""``python -m axo``: the command line, where no program ``axo`` was installed."""

from axo.cli.main import main

if __name__ == "__main__":
    main()
