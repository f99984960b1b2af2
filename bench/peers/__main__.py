"""Prints `--vs NAME` for every peer that this machine can run, and on stderr why not the others."""

import sys

from . import peers

for name, peer in peers().items():
    if lack := peer.missing():
        print(f"note: {name}: {lack}", file=sys.stderr)
    else:
        print("--vs", name)
