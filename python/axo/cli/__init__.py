"""The command ``axo``: a file for each subcommand, or related ones. What it does is in the package that it calls."""
