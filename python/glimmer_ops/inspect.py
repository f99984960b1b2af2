"""`glimmer inspect`: what a GGUF file, a program or a data file holds, without running it.

`describe` gives plain data, as `--json` prints it; `tables` renders it for people. Nothing here
reads weights: only headers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from . import gguf
from ._files import check_not_special
from ._native import _C
from .program import Method, Program, Weight, read_program
from .tokenizer import Tokenizer, TokenizerError

Description = dict[str, Any]


def ranges(numbers: Iterable[int]) -> str:
    """ "0-2, 5" for 0, 1, 2 and 5."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def _tally(items: Iterable[tuple[str, int]]) -> Description:
    """Number and bytes by type, the largest first."""
    count, size = Counter[str](), Counter[str]()
    for qtype, nbytes in items:
        count[qtype] += 1
        size[qtype] += nbytes
    return {t: {"tensors": count[t], "bytes": n} for t, n in size.most_common()}


# --- programs ------------------------------------------------------------------------------------


def _layer_ops(method: Method) -> list[Description]:
    """The ops of layers, layers with equal ones together; embed and head likewise."""
    ops: dict[int | str, Counter[str]] = defaultdict(Counter)
    for instruction in method.instructions:
        ops[instruction.layer][instruction.name] += 1
    groups: dict[tuple[tuple[str, int], ...], list[int | str]] = defaultdict(list)
    for layer, counts in ops.items():
        groups[tuple(sorted(counts.items()))].append(layer)
    described = []
    for same, layers in groups.items():
        named = [str(x) for x in layers if not isinstance(x, int)]
        numbered = ranges(x for x in layers if isinstance(x, int))
        described.append({"layers": ", ".join(filter(None, (*named, numbered))), "ops": dict(same)})
    return described


def _method(method: Method) -> Description:
    return {
        "name": method.name,
        "inputs": [str(x) for x in method.inputs],
        "outputs": [str(x) for x in method.outputs],
        "instructions": len(method.instructions),
        "instructions_per_layer": method.per_layer,
        "delegates": dict(method.delegates),
        "arenas": method.arenas,
        "ops": dict(sorted(method.calls.items())),
        "layers": _layer_ops(method),
        "weight_bytes_per_row": method.weight_bytes,
    }


def _pools(program: Program) -> list[Description]:
    """Pools of one shape and layer kind together."""
    groups: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for pool in program.pools.values():
        prefix = "draft_" if pool.draft else ""
        sliding = program.constants.get(f"get_{prefix}sliding_layers")
        known = isinstance(sliding, list) and pool.layer is not None and pool.layer < len(sliding)
        kind = ("sliding" if sliding[pool.layer] else "global") if known else "other"  # type: ignore[index]
        groups[prefix.replace("_", " ") + kind, str(pool.tensor)].append(pool)
    return [
        {
            "kind": kind,
            "layers": ranges({p.layer for p in pools if p.layer is not None}),
            "tensor": tensor,
            "tensors": len(pools),
            "pages": pools[0].tensor.sizes[0] if pools[0].tensor.sizes else 0,
            "bytes": sum(p.tensor.nbytes for p in pools),
        }
        for (kind, tensor), pools in sorted(groups.items())
    ]


def _weights(program: Program) -> Description:
    weights = program.weights.values()
    decode = program.method("decode")
    return {
        "id": program.weights_id,
        "tensors": len(weights),
        "bytes": sum(w.tensor.nbytes for w in weights),
        "by_type": _tally((w.qtype, w.tensor.nbytes) for w in weights),
        "read_per_decode_token": decode.weight_bytes if decode else None,
        "draft_bytes": sum(w.tensor.nbytes for w in weights if w.draft),
    }


def _check_data_file(program: Program, path: Path | None) -> Description | None:
    """The .ptd beside a program, and whether it holds what the program reads."""
    if not program.weights:
        return None
    if path is None:
        return {"path": None, "verdict": "missing"}
    tensors = dict(_C.data_file_tensors(str(path)))
    wrong = [w.name for w in program.weights.values() if not _same(w, tensors)]
    ids = sorted({key.split(".")[0].removeprefix("weights_") for key in tensors})
    verdict = "holds every weight of the program"
    if wrong:
        verdict = f"lacks {len(wrong)} weights of the program, the first {wrong[0]}"
    return {
        "path": str(path),
        "weights_id": ", ".join(ids[:3]),
        "tensors": len(tensors),
        "bytes": path.stat().st_size,
        "verdict": verdict,
    }


def _same(weight: Weight, tensors: dict[str, int]) -> bool:
    return tensors.get(weight.name) == weight.tensor.nbytes


def _compared(program: Program, source: Path, draft: Path | None) -> Description:
    """Bytes of the weights that come from the file or files, beside the files' tensors."""
    nbytes = gguf.load(source).nbytes + (gguf.load_draft(draft).nbytes if draft else 0)
    weights = (w for w in program.weights.values() if draft or not w.draft)
    ratio = sum(w.tensor.nbytes for w in weights) / nbytes
    path = f"{source} + {draft}" if draft else str(source)
    return {"path": path, "bytes": nbytes, "resident_ratio": ratio}


def _describe_program(
    path: Path, data: Path | None, source: Path | None, draft: Path | None
) -> Description:
    program = read_program(path)
    described: Description = {
        "kind": "program",
        "path": str(path),
        "bytes": path.stat().st_size,
        "methods": [_method(m) for m in program.methods],
        "weights": _weights(program),
        "data_file": _check_data_file(program, data),
        "pools": _pools(program),
        "constants": program.constants,
    }
    if source is not None:
        described["gguf"] = _compared(program, source, draft)
    return described


def _describe_data(path: Path) -> Description:
    tensors = _C.data_file_tensors(str(path))
    return {
        "kind": "data",
        "path": str(path),
        "bytes": path.stat().st_size,
        "tensors": dict(tensors),
        "tensor_bytes": sum(n for _, n in tensors),
    }


# --- GGUF ----------------------------------------------------------------------------------------


def _by_role(model: gguf.GGUFModel | gguf.GGUFDraft) -> Description:
    """For each kind of tensor, which layers have which type; "" for a tensor of no layer."""
    roles: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for name, tensor in model.tensors.items():
        parts = name.removesuffix(".weight").split(".")
        layer = [int(parts[1])] if parts[0] == "blk" else []
        role = ".".join(parts[2:] if layer else parts)
        roles[role][tensor.qtype].extend(layer)
    return {role: {t: ranges(x) for t, x in types.items()} for role, types in roles.items()}


def _tokenizer(model: gguf.GGUFModel) -> Description:
    prefix = "tokenizer.ggml."
    described: Description = {}
    for key, value in model.metadata.items():
        if key.startswith(prefix):  # of the lists only the lengths
            single = isinstance(value, (str, bool, int, float))
            described[key.removeprefix(prefix)] = value if single else len(value)
    try:
        tokenizer = Tokenizer.from_gguf(model)
        described["verdict"] = "usable" if tokenizer else "none in the file"
    except TokenizerError as error:
        described["verdict"] = f"not usable: {error}"
    return described


def _describe_gguf(path: Path) -> Description:
    model = gguf.load_either(path)
    tensors = model.tensors.values()
    config = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(model.config).items()}
    described: Description = {
        "kind": "draft" if isinstance(model, gguf.GGUFDraft) else "gguf",
        "path": str(path),
        "bytes": path.stat().st_size,
        "config": config,
        "tensors": len(model.tensors),
        "tensor_bytes": model.nbytes,
        "by_type": _tally((t.qtype, t.nbytes) for t in tensors),
        "by_role": _by_role(model),
    }
    if isinstance(model, gguf.GGUFModel):  # a draft's vocabulary is its target's
        described["tokenizer"] = _tokenizer(model)
    return described


def describe(path: Path, source: Path | None = None, draft: Path | None = None) -> Description:
    """Plain data about a .gguf, .pte or .ptd file, or a folder with model.pte and model.ptd.

    source, draft: the GGUF files of an export, to compare sizes with. ValueError, naming the file,
    for a file that is missing, damaged or of another kind.
    """
    if draft is not None and source is None:
        raise ValueError("--draft-gguf: expected --gguf too")
    if path.is_dir():
        path = path / "model.pte"
    check_not_special(path)
    try:
        with open(path, "rb") as f:
            magic = f.read(8)
    except FileNotFoundError:
        expected = "a .gguf, .pte or .ptd file or a model folder"
        raise ValueError(f"{path}: expected {expected}, found nothing") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    is_program = magic[:4] != b"GGUF" and magic[4:6] != b"FT"
    if source is not None and not is_program:
        raise ValueError(f"--gguf: expected a program to compare with, found {path}")
    if magic[:4] == b"GGUF":
        return _describe_gguf(path)
    if magic[4:6] == b"FT":
        return _describe_data(path)
    data = path.with_suffix(".ptd")
    return _describe_program(path, data if data.exists() else None, source, draft)


# --- tables --------------------------------------------------------------------------------------


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _pairs(values: Description, title: str | None = None) -> Table:
    table = _table("name", "value", title=title)
    for name, value in values.items():
        table.add_row(name, f"{value:g}" if isinstance(value, float) else str(value))
    return table


def _types(by_type: Description, *more: tuple[str, str, int]) -> Table:
    table = _table("type", "tensors", "bytes", "share")
    total = sum(x["bytes"] for x in by_type.values())
    for qtype, x in by_type.items():
        share = f"{x['bytes'] / max(total, 1):.1%}"
        table.add_row(qtype, str(x["tensors"]), f"{x['bytes']:,}", share)
    table.add_row("all", str(sum(x["tensors"] for x in by_type.values())), f"{total:,}", "")
    for name, count, nbytes in more:
        table.add_row(name, count, f"{nbytes:,}", "")
    return table


def _method_tables(methods: list[Description]) -> Iterator[Table]:
    table = _table("method", "instructions", "a layer", "delegates", "planned bytes")
    signatures = _table("method", "inputs", "outputs")
    layers = _table("method", "layers", "ops")
    for m in methods:
        per_layer = m["instructions_per_layer"]
        delegates = ", ".join(f"{n} {k}" for k, n in m["delegates"].items()) or "0"
        planned = " + ".join(f"{n:,}" for n in m["arenas"])
        shown = "-" if per_layer is None else f"{per_layer:g}"
        table.add_row(m["name"], str(m["instructions"]), shown, delegates, planned)
        signatures.add_row(m["name"], "\n".join(m["inputs"]), "\n".join(m["outputs"]))
        for i, group in enumerate(m["layers"]):
            ops = ", ".join(f"{n} {op}" for op, n in group["ops"].items())
            layers.add_row("" if i else m["name"], group["layers"], ops)
    calls = _table("op", "calls", "in")
    for op in sorted({op for m in methods for op in m["ops"]}):
        by_count: dict[int, list[str]] = defaultdict(list)
        for m in methods:
            if op in m["ops"]:
                by_count[m["ops"][op]].append(m["name"])
        for i, (count, names) in enumerate(sorted(by_count.items(), reverse=True)):
            calls.add_row("" if i else op, str(count), ", ".join(names))
    yield from (table, signatures, calls, layers)


def _program_tables(d: Description) -> Iterator[Table]:
    weights, data = d["weights"], d["data_file"]
    yield _pairs({"program": d["path"], "bytes": f"{d['bytes']:,}", "weights id": weights["id"]})
    yield from _method_tables(d["methods"])
    read = weights["read_per_decode_token"]
    more = [] if read is None else [("read a decoded token", "", read)]
    if weights["draft_bytes"]:
        more.append(("the draft's own", "", weights["draft_bytes"]))
    yield _types(weights["by_type"], *more)
    if data is not None:
        yield _pairs({f"data file {k}": f"{v:,}" if k == "bytes" else v for k, v in data.items()})
    if "gguf" in d:
        ratio = f"{d['gguf']['resident_ratio']:.4f}"
        yield _pairs({"GGUF": d["gguf"]["path"], "resident weights / GGUF tensors": ratio})
    pools = _table("pools", "layers", "each", "tensors", "pages", "bytes")
    for p in d["pools"]:
        cells = (p["kind"], p["layers"], p["tensor"], p["tensors"], p["pages"])
        pools.add_row(*map(str, cells), f"{p['bytes']:,}")
    pools.add_row("all", "", "", "", "", f"{sum(p['bytes'] for p in d['pools']):,}")
    yield pools
    yield _pairs(d["constants"], "constants")


def _gguf_tables(d: Description) -> Iterator[Table]:
    letters = "".join("s" if s else "G" for s in d["config"]["sliding"])
    config = {k: v for k, v in d["config"].items() if k != "sliding"}
    yield _pairs({**config, "layers (s sliding, G global)": letters}, d["path"])
    yield _types(d["by_type"])
    roles = _table("tensor", "types by layer")
    for role, types in d["by_role"].items():
        roles.add_row(role, "; ".join(f"{t}: {x}" if x else t for t, x in types.items()))
    yield roles
    if "tokenizer" in d:
        yield _pairs(d["tokenizer"], "tokenizer")


def _data_tables(d: Description) -> Iterator[Table]:
    table = _table("tensor", "bytes", title=d["path"])
    for key, nbytes in d["tensors"].items():
        table.add_row(key, f"{nbytes:,}")
    table.add_row(f"all {len(d['tensors'])}", f"{d['tensor_bytes']:,}")
    table.add_row("file", f"{d['bytes']:,}")
    yield table


def tables(described: Description) -> Iterator[Table]:
    """What `describe` gave, for people."""
    kinds = {
        "program": _program_tables,
        "gguf": _gguf_tables,
        "draft": _gguf_tables,
        "data": _data_tables,
    }
    return kinds[described["kind"]](described)
