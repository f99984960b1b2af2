"""Prints `--vs NAME` for each quick peer this machine can run; on stderr, what others lack."""

import sys

from . import peers

for name, peer in peers().items():
    if lack := peer.missing():
        print(f"note: {name}: {lack}", file=sys.stderr)
    elif peer.quick:
        print("--vs", name)
