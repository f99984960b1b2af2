"""`python -m glimmer_ops` is the `glimmer` command."""

from .cli import main

main()
