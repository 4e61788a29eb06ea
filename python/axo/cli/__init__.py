"""The command ``axo``: one file a subcommand; what a command does is in the package that it calls."""
