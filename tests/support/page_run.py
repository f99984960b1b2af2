"""Runs every case of some ops between unreadable pages: `python -m support.page_run BACKEND OP...`.

Prints what it is about to run, so that whoever started this process knows what crashed it.
"""

from __future__ import annotations

import faulthandler
import sys

from glimmer_ops.backends import BACKENDS, Backend
from glimmer_ops.ops import OPS
from glimmer_ops.ops._contract import Op
from support.buffers import Call, Paged


def run(op: Op, backend: Backend) -> None:
    for case in op.all_cases():
        if case.slow:
            continue
        args = case.make()
        for edge in ("end", "begin"):
            call = Call(op, Paged(edge), args)
            for variant in backend.variants(op):
                print(op.name, case.id, variant.name, f"page-{edge}", flush=True)
                try:
                    call.run(backend, variant, args)
                except ValueError:
                    if not case.error:
                        raise


def main(backend: str, names: list[str]) -> None:
    faulthandler.enable()
    for name in names:
        run(OPS[name], BACKENDS[backend])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
