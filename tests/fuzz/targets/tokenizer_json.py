"""tokenizer.json beside a model: read, encode, decode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from . import Target
from ._json import mutate


def prepare(folder: Path) -> Callable[[bytes], None]:
    from glimmer_ops.run import load_tokenizer

    (folder / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": [1]}')

    def read(data: bytes) -> None:
        (folder / "tokenizer.json").write_bytes(data)
        tokenizer = load_tokenizer(folder)
        assert tokenizer is not None
        tokenizer.decode(tokenizer.encode("the end"))

    return read


def make_seeds() -> dict[str, bytes]:
    import tempfile

    from glimmer_ops.gguf import load
    from glimmer_ops.tokenizer import Tokenizer

    from .gguf import TARGET as files

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "seed.gguf")
        path.write_bytes(files.make_seeds()["floats.gguf"])
        tokenizer = Tokenizer.from_gguf(load(path))
        assert tokenizer is not None
        tokenizer.save(path.with_name("tokenizer.json"))
        return {"tokenizer.json": path.with_name("tokenizer.json").read_bytes()}


TARGET = Target(
    instrument=("glimmer_ops.tokenizer", "glimmer_ops.run"),
    prepare=prepare,
    refusals=lambda: (ValueError,),
    mutate=mutate,
    make_seeds=make_seeds,
    named="tokenizer.json",
)
