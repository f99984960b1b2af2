"""The `glimmer` command. Every failure a user can cause is one line on stderr and exit status 1."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ._native import check_isa

if TYPE_CHECKING:
    from .gguf import GGUFModel
    from .tokenizer import Tokenizer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Muse Glimmer on ExecuTorch: export a GGUF, run it, check and inspect the kernels.",
)
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False, soft_wrap=True)

ModelDir = Annotated[Path, typer.Option("--model", help="Folder that `glimmer export` wrote.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0 = all cores.")]


@contextlib.contextmanager
def _bytes_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, fed with (bytes done, bytes in all)."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    hidden = not errors.is_terminal
    with Progress(*columns, console=errors, transient=True, disable=hidden) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _size(n: float) -> str:
    for unit in ("B", "KB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.2f} GB"


def _file_tokenizer(model: GGUFModel) -> Tokenizer | None:
    """The GGUF's own tokenizer; a note when it has one that cannot be used, since ids still can."""
    from .tokenizer import Tokenizer, TokenizerError

    try:
        return Tokenizer.from_gguf(model)
    except TokenizerError as error:
        errors.print(f"note: no tokenizer.json is written: {error}", markup=False)
        return None


@app.command()
def ops(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="As in the README: what is built, for any machine.")
    ] = False,
) -> None:
    """The support matrix: op × backend × dtype × weight type, from the registry."""
    from .backends import BACKENDS
    from .matrix import markdown as matrix
    from .ops import OPS

    if markdown:
        print(matrix())
        return
    table = Table("op", *BACKENDS, "dtypes", "weight types")
    for op in OPS.values():
        marks = []
        for backend in BACKENDS.values():
            variants = backend.variants(op) if backend.supports(op) else []
            marks.append(", ".join(v.name for v in variants) or "-")
        table.add_row(op.name, *marks, ", ".join(op.dtypes), ", ".join(op.qtypes) or "-")
    console.print(table)


@app.command()
def check(
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    backend: Annotated[str | None, typer.Option(help="Only this backend.")] = None,
    case: Annotated[str | None, typer.Option(help="Only the case with this id.")] = None,
    slow: Annotated[bool, typer.Option("--slow", help="Also the large cases.")] = False,
) -> None:
    """Op-level correctness: one line a case, NMSE against the float64 reference, and a verdict."""
    from .backends import BACKENDS
    from .check import check as check_op
    from .ops import OPS

    for name, value, known in (("op", op, OPS), ("backend", backend, BACKENDS)):
        if value is not None and value not in known:
            raise ValueError(f"--{name}: expected one of {', '.join(known)}, found '{value}'")
    selected = [OPS[op]] if op else list(OPS.values())
    on = [BACKENDS[backend]] if backend else list(BACKENDS.values())
    passed = failed = 0
    for o in selected:
        for b in (b for b in on if b.supports(o)):
            for v in check_op(o, b, case, slow or case is not None):
                passed, failed = passed + v.passed, failed + (not v.passed)
                sign = "<=" if v.passed else ">"
                value = "refused" if v.nmse is None else f"nmse {v.nmse:.1e} {sign} {v.bound:.0e}"
                verdict = "pass" if v.passed else "FAIL"
                line = f"{verdict} {v.op:16} {b.name} {v.variant:13} {v.case:32} {value}"
                print(line if v.passed else f"{line} {v.detail}")
    if passed + failed == 0:
        names = ", ".join(b.name for b in on)
        if not any(b.supports(o) for o in selected for b in on):
            raise ValueError(f"--op: expected one with a kernel for {names}, found '{op}'")
        raise ValueError(f"--case: no case has the id '{case}'")
    console.print(f"{passed} passed, {failed} failed")
    if failed:
        raise typer.Exit(1)


@app.command()
def bench(
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    backend: Annotated[str | None, typer.Option(help="Only this backend.")] = None,
    case: Annotated[str | None, typer.Option(help="Only the case with this id.")] = None,
    variant: Annotated[
        str | None, typer.Option(help="A variant of `glimmer ops`, or all; default: the best.")
    ] = None,
    vs: Annotated[
        list[str] | None, typer.Option(help="A peer to measure beside; may be given again.")
    ] = None,
    threads: Annotated[str, typer.Option(help="4, or 1,2,4 for each; default: all cores.")] = "",
    samples: Annotated[int | None, typer.Option(min=3, help="Samples of each case.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases and samples.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the rows.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw F.png (roofline) and F-scaling.png.")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Rows of an earlier --json: a verdict for each.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Measure this exported model instead of ops.")
    ] = None,
    gguf: Annotated[Path | None, typer.Option(help="The model's GGUF, for the peers.")] = None,
) -> None:
    """Speed of ops or of a model, in % of this machine's limits and against other projects."""
    from .bench.command import Request
    from .bench.command import bench as run_bench

    request = Request(
        op=op,
        backend=backend,
        case=case,
        variant=variant,
        vs=tuple(vs or ()),
        threads=threads,
        samples=samples,
        quick=quick,
        json=json,
        plot=plot,
        compare=compare,
        model=model,
        gguf=gguf,
    )
    if not run_bench(request, console, errors):
        raise typer.Exit(1)


@app.command()
def synth(
    preset: Annotated[str, typer.Option(help="tiny, mid (real widths, 4 layers) or 30b.")],
    out: Annotated[Path, typer.Option(help="The GGUF file to write.")],
    quant: Annotated[str, typer.Option(help="F16, Q4_K_M, Q5_K_M or Q6_K.")] = "Q4_K_M",
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    draft_out: Annotated[
        Path | None, typer.Option(help="Also write a DFlash draft model that fits it.")
    ] = None,
    draft_error_rate: Annotated[
        float | None,
        typer.Option(
            help="With --draft-out: agree on all but this share of greedy tokens, 0 to 1."
        ),
    ] = None,
) -> None:
    """Write a valid random Muse Glimmer GGUF, to try everything with no download."""
    from .synth import synth as write
    from .synth_draft import synth_pair

    if draft_error_rate is not None and draft_out is None:
        raise ValueError("--draft-error-rate: expected --draft-out as well")
    if draft_error_rate is not None and not 0 <= draft_error_rate < 1:
        raise ValueError(
            f"--draft-error-rate: expected 0 or greater and below 1, found {draft_error_rate}"
        )
    if draft_out is not None and draft_out.resolve() == out.resolve():
        raise ValueError(f"--draft-out: expected another file than --out, found {draft_out}")
    with _bytes_progress(f"writing {out.name}") as progress:
        if draft_out is None:
            files = [write(out, preset, quant, seed, progress)]
        else:
            files = [
                *synth_pair(
                    out, draft_out, preset, quant, seed, progress, error_rate=draft_error_rate
                )
            ]
    for file in files:
        console.print(f"{file}: {_size(file.stat().st_size)}", markup=False)


@app.command()
def export(
    gguf: Annotated[Path, typer.Option(help="The model's GGUF file.")],
    out: Annotated[Path, typer.Option(help="Folder for model.pte and model.ptd.")],
    draft_gguf: Annotated[
        Path | None, typer.Option(help="A DFlash draft model's GGUF file, to speculate with.")
    ] = None,
    backend: Annotated[str, typer.Option(help="cpu.")] = "cpu",
    max_seq_len: Annotated[int | None, typer.Option(help="Positions a sequence may have.")] = None,
    slots: Annotated[int, typer.Option(help="Sequences that may be open at once.")] = 4,
    max_chunk: Annotated[int, typer.Option(help="Most tokens of one prefill call.")] = 512,
    kv_dtype: Annotated[str, typer.Option(help="f16, bf16 or f32.")] = "f16",
    pages: Annotated[
        int | None, typer.Option(help="Pages of 64 positions in each global layer's pool.")
    ] = None,
    all_logits: Annotated[
        bool, typer.Option("--all-logits", help="Let every row of a chunk have logits.")
    ] = False,
) -> None:
    """Turn a GGUF file into an ExecuTorch program that maps its weights as they are."""
    from .gguf import load, load_draft
    from .lowering import ExportOptions, from_gguf, to_executorch
    from .lowering.export import default_max_seq_len

    model = load(gguf)
    draft = load_draft(draft_gguf) if draft_gguf else None
    fused = from_gguf(model, draft)
    longest = default_max_seq_len(model.config, fused.draft)
    tokenizer = _file_tokenizer(model)
    options = ExportOptions(
        backend=backend,
        max_seq_len=longest if max_seq_len is None else max_seq_len,
        slots=slots,
        max_chunk=max_chunk,
        kv_dtype=kv_dtype,
        pages=pages,
        all_logits=all_logits,
    )
    started = time.perf_counter()
    with _bytes_progress(f"exporting {gguf.name}") as progress:
        to_executorch(fused, out, options, tokenizer, progress)
    size = sum(f.stat().st_size for f in out.iterdir())
    console.print(f"{out}: {_size(size)} in {time.perf_counter() - started:.1f} s", markup=False)


@app.command()
def run(
    model: ModelDir,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Token ids: 1,2,3 or @FILE.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json to use.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=0)] = 64,
    chunk: Annotated[int | None, typer.Option(help="Prefill chunk; default: the largest.")] = None,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 = off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 = off.")] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    exact: Annotated[
        bool, typer.Option("--exact", help="Float activations in matmuls instead of int8.")
    ] = False,
    threads: Threads = 0,
    ids_only: Annotated[
        bool, typer.Option("--ids-only", help="Print ids instead of text.")
    ] = False,
    logits: Annotated[
        Path | None, typer.Option(help="Write [T, vocab] float32: a row a given token.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Time every op; write a Chrome trace, or an .etdp ETDump.")
    ] = None,
    speculate: Annotated[
        bool, typer.Option("--speculate", help="Draft and verify blocks; the text is the same.")
    ] = False,
    block_length: Annotated[
        int | None,
        typer.Option(help="With --speculate: 2 to 16 tokens a block; default: what is fastest."),
    ] = None,
) -> None:
    """Continue a prompt and report prefill and decode speed."""
    from .run import Request
    from .run import run as run_model

    request = Request(
        model=model,
        prompt=prompt,
        tokens=tokens,
        tokenizer=tokenizer,
        max_new_tokens=max_new_tokens,
        chunk=chunk,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        exact=exact,
        threads=threads,
        ids_only=ids_only,
        logits=logits,
        profile=profile,
        speculate=speculate,
        block_length=block_length,
    )
    for table in run_model(request, write=lambda text: print(text, end="", flush=True)):
        (errors if ids_only else console).print(table)


@app.command()
def diff(
    model: Annotated[
        list[Path], typer.Option(help="A folder of `glimmer export`; twice for two, A then B.")
    ],
    tokens: Annotated[str, typer.Option(help="Token ids: 1,2,3 or @FILE.")],
    path: Annotated[str | None, typer.Option(help="exact or int8; exact,int8 for A and B.")] = None,
    isa: Annotated[str | None, typer.Option(help="An ISA; scalar,avx2 for A and B.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Tokens a step; default: 16.")] = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="Run the decode method, not forward.")
    ] = False,
    tolerance: Annotated[
        float | None, typer.Option(help="A fixed one, of a row's rms relative difference.")
    ] = None,
    bits: Annotated[bool, typer.Option("--bits", help="Any other bit is a difference.")] = False,
    threads: Threads = 0,
) -> None:
    """The first layer and op where two exports, paths or ISAs part, and by how much.

    Exit status 1 when they do. By default an op parts from the other side when a row of its output
    differs by more than 1e-4 of its rms (2e-2 where both sides round activations to int8) and by
    8 times more than the ops before it.
    """
    from . import diff as compare
    from .run import parse_ids
    from .session import set_threads

    sides = compare.make_sides(model, path, isa)
    set_threads(threads or len(os.sched_getaffinity(0)))
    result = compare.diff(sides, parse_ids(tokens), chunk, tolerance, bits, decode)
    for line in compare.summary(result):
        console.print(line, markup=False, soft_wrap=True)
    for table in compare.tables(result):
        console.print(table)
    console.print(compare.verdict(result), markup=False, soft_wrap=True)
    if result.parted:
        raise typer.Exit(1)


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A .gguf, .pte or .ptd file or a model folder.")],
    gguf: Annotated[Path | None, typer.Option(help="A program's GGUF, to compare bytes.")] = None,
    draft_gguf: Annotated[Path | None, typer.Option(help="Its draft's GGUF file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """What a file holds: methods, ops a layer, weights by type, pools, arenas, constants."""
    from .inspect import describe, tables

    described = describe(file, gguf, draft_gguf)
    if json:
        print(dumps(described, indent=2))
        return
    for table in tables(described):
        console.print(table)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("out"),
    quant: Annotated[str, typer.Option(help="F16, Q4_K_M, Q5_K_M or Q6_K.")] = "Q4_K_M",
) -> None:
    """The main job, checked: synthesise a tiny GGUF, export, run, compare with upstream's model."""
    from .demo import demo as run_demo

    if not run_demo(out, quant, console):
        raise typer.Exit(1)


def _quiet() -> None:
    """Keeps off the terminal what torch, torchao and executorch say about themselves on import."""
    warnings.filterwarnings("ignore")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> None:
    """Entry point: turns every expected failure into one line and a status."""
    _quiet()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that clean-up code runs
    try:
        check_isa()
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        errors.print(f"error: {' '.join(str(error).split())}", markup=False)
        sys.exit(1)
