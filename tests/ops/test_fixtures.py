"""What any kernel must do with memory, on every op, backend, variant and case of the registries.

Poison: outputs and scratch are full of NaN before a call. Guards: bytes beside every buffer, and
arguments that are not mutated, are as before. Views: tensors aligned for one element only give the
same bits; strided ones are refused by name. Replay: a second call with new inputs in the same
buffers equals a fresh call. Pages: buffers that end, or begin, at an unreadable page. Equal means
equal bits: that the plain call is right is judged by test_registry.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from glimmer_ops.backends import BACKENDS, Backend, Variant
from glimmer_ops.check import clone_args
from glimmer_ops.ops import OPS
from glimmer_ops.ops._contract import Op, generator
from support.bits import same_bits
from support.buffers import Call, Guarded, aligned, odd, sixteen
from support.matrix import CASES, PAIRS
from support.rows import permute_pages

FAST = [p for p in CASES if not p.values[2].slow]
ACCEPTED = [p for p in FAST if not p.values[2].error]
REFUSED = [p for p in FAST if p.values[2].error]


def plain(op: Op, backend: Backend, variant: Variant, args: Sequence[Any]) -> dict[str, Any]:
    """A call in buffers of its own; guarded, since what is written beside others is felt later."""
    return checked(Call(op, Guarded(aligned), args), backend, variant, args)


def checked(call: Call, backend: Backend, variant: Variant, args: Sequence[Any]) -> dict[str, Any]:
    results = call.run(backend, variant, args, poison=0)
    assert call.faults(args, call.op.mutates) == [], variant.name
    return results


def other_inputs(op: Op, args: Sequence[Any]) -> tuple[Any, ...]:
    """Valid arguments of the same shapes and other contents: everything moved by one."""
    named = dict(zip(op.arg_names, clone_args(tuple(args)), strict=True))
    if named.get("block_table") is not None:
        moved = permute_pages(op, tuple(named.values()), generator("other pages"))
        named = dict(zip(op.arg_names, moved, strict=True))
    for name, value in named.items():
        if not isinstance(value, torch.Tensor) or not value.numel():
            continue
        if value.is_floating_point():
            named[name] = value.roll(1, -1)
        elif name in op.rows or value.dtype == torch.uint8:  # tokens, and whole encoded rows
            named[name] = value.roll(1, 0)
    return tuple(named.values())


@pytest.mark.report("G2", "G16", "G24", "N5", "C3")
@pytest.mark.parametrize(("op", "backend", "case"), ACCEPTED)
def test_memory(op, backend, case) -> None:
    args = case.make()
    other = other_inputs(op, args)
    # In the order of use: the first also has poisoned scratch, the last is called twice.
    calls = {
        "poison": Call(op, Guarded(aligned), args),
        "odd addresses": Call(op, Guarded(odd), args),
        "16-byte addresses": Call(op, Guarded(sixteen), args),
    }
    # Both kept, so that no two calls of different inputs have one address but the replay.
    plain_calls = [(Call(op, Guarded(aligned), given), given) for given in (args, other)]
    for variant in backend.variants(op):
        want, fresh = (checked(call, backend, variant, given) for call, given in plain_calls)

        def check(fixture: str, got, want, given, variant=variant) -> None:
            where = f"{case.id}, {variant.name}, {fixture}"
            for name, value in want.items():
                assert same_bits(got[name], value), f"{where}: {name} differs from a plain call"
            call = calls[fixture.split(",")[0]]
            assert call.faults(given, op.mutates) == [], where

        for fixture, call in calls.items():
            first = fixture == "poison"
            with backend.poison_scratch() if first else contextlib.nullcontext():
                got = call.run(backend, variant, args, poison=0xFF if first else 0x7F)
            check(fixture, got, want, args)
        # No call in between: what is cached by the last address must be found out.
        check(f"{fixture}, replay", call.run(backend, variant, other), fresh, other)


@pytest.mark.parametrize(("op", "backend"), PAIRS)
def test_replay_has_other_results(op, backend) -> None:
    """The replay above can tell: its second inputs give other outputs, in most cases of an op."""
    variant = backend.variants(op)[0]
    differ = []
    for case in (p.values[2] for p in ACCEPTED if p.values[:2] == (op, backend)):
        args = case.make()
        a, b = (plain(op, backend, variant, x) for x in (args, other_inputs(op, args)))
        outs = [k for k in a if k not in op.mutates and a[k].numel()]
        differ += [not same_bits(a[k], b[k]) for k in outs]
    assert sum(differ) > 0.6 * len(differ)


@pytest.mark.parametrize(("op", "backend", "case"), REFUSED)
def test_a_refusal_writes_nothing(op, backend, case) -> None:
    args = case.make()
    call = Call(op, Guarded(odd), args)
    for variant in backend.variants(op):
        with pytest.raises(ValueError, match=re.escape(case.error)):
            call.run(backend, variant, args)
        assert call.faults(args, ()) == [], variant
        assert call.written() == [], variant


# --- Strides --------------------------------------------------------------------------------------


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at every other element."""
    wide = tensor.repeat_interleave(2, -1)[..., ::2]
    assert torch.equal(wide.nan_to_num(), tensor.nan_to_num()) and not wide.is_contiguous()
    return wide


def tensor_names(op: Op) -> list[str]:
    return [a.split()[-1] for a in op.args.split(", ") if a.startswith("Tensor")]


def example(op: Op, name: str) -> tuple[Any, ...]:
    """Arguments of a case in which the named tensor can be strided."""
    for case in op.all_cases():
        if not (case.error or case.slow):
            args = case.make()
            value = args[op.arg_names.index(name)]
            if value is not None and value.numel() > 1:
                return args
    raise AssertionError(f"{op.name}: no case has more than one element of {name}")


def with_strided(op: Op, name: str) -> tuple[Any, ...]:
    args = list(example(op, name))
    at = op.arg_names.index(name)
    args[at] = strided(args[at])
    return tuple(args)


@pytest.mark.parametrize(("op", "backend"), PAIRS)
def test_strided_arguments_are_refused_by_name(op, backend) -> None:
    names = tensor_names(op)
    assert names
    for name in names:
        args = with_strided(op, name)
        for variant in backend.variants(op):
            with pytest.raises(ValueError, match=f"{op.name}: {name}: expected a contiguous"):
                backend.run(op, args, variant)


EAGER = [o for o in OPS.values() if BACKENDS["cpu"].supports(o)]


@pytest.mark.parametrize("op", EAGER, ids=lambda o: o.name)
def test_eager_refuses_strided_arguments_by_name(op) -> None:
    packet = getattr(torch.ops.glimmer, op.name)
    for name in tensor_names(op):
        args = with_strided(op, name)
        outs = {k: torch.empty_like(v) for k, v in _outputs(op).items()}
        with pytest.raises(ValueError, match=f"{op.name}: {name}: expected a contiguous tensor"):
            packet(*args)
        with pytest.raises(ValueError, match=f"{op.name}: {name}: expected a contiguous tensor"):
            packet.out(*args, **outs)


def _outputs(op: Op) -> dict[str, torch.Tensor]:
    """What an eager call on the case of `example` returns, under the names of the .out variant."""
    values = getattr(torch.ops.glimmer, op.name)(*example(op, tensor_names(op)[0]))
    if op.returns == 1:
        return {"out": values}
    return {f"out{i}": v for i, v in enumerate(values)}


@pytest.mark.parametrize("op", EAGER, ids=lambda o: o.name)
def test_eager_out_is_filled_or_refused_by_name(op) -> None:
    """.out fills what it is given; a strided or foreign output is refused before anything runs."""
    packet = getattr(torch.ops.glimmer, op.name)
    want = _outputs(op)
    args = example(op, tensor_names(op)[0])
    outs = {k: torch.full_like(v, 7) for k, v in want.items()}
    packet.out(*clone_args(args), **outs)
    assert all(same_bits(outs[k], v) for k, v in want.items())
    for name, value in want.items():
        bad = {"contiguous": strided(value) if value.numel() > 1 else None, "torch": value.bool()}
        for word, out in bad.items():
            if out is None:
                continue
            given = clone_args(args)
            with pytest.raises(ValueError, match=f"{op.name}: {name}: expected.*{word}"):
                packet.out(*given, **(want | {name: out}))
            assert all(same_bits(g, a) for g, a in zip(given, args, strict=True) if _tensor(a))


def _tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


# --- Unreadable pages -----------------------------------------------------------------------------


@functools.cache
def crashes(backend: str, names: tuple[str, ...]) -> dict[str, str]:
    """Which of the named ops crash a process that runs them between unreadable pages, and where."""
    tests = Path(__file__).parents[1]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), *sys.path])}
    found: dict[str, str] = {}
    while names:
        command = [sys.executable, "-m", "support.page_run", backend, *names]
        result = subprocess.run(command, capture_output=True, text=True, env=env)
        if result.returncode == 0:
            break
        last = (result.stdout.splitlines() or ["nothing was run"])[-1]
        op = next((n for n in names if last.startswith(n + " ")), names[0])
        found[op] = f"{last}: exit status {result.returncode}\n{result.stderr[-2000:]}"
        names = names[names.index(op) + 1 :]
    return found


@pytest.mark.report("G3", "N5")
@pytest.mark.parametrize(("op", "backend"), PAIRS)
def test_nothing_outside_the_buffers_is_touched(op, backend, request) -> None:
    pairs = [i.callspec.params for i in request.session.items if i.function is request.function]
    # One process for all the ops that this run of the tests has selected.
    names = tuple(p["op"].name for p in pairs if p["backend"] is backend)
    found = crashes(backend.name, names)
    assert op.name not in found, found[op.name]
