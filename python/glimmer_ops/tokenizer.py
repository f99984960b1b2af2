"""Byte-level BPE text <-> token ids, from a tokenizer.json or from a GGUF file's own vocabulary."""

from __future__ import annotations

import codecs
import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tokenizers
from gguf import TokenType

from ._files import check_not_special
from .gguf import GGUFModel

_BOS_NAMES = ("<|begin_of_text|>",)
# <|eom|> ends a message, not a turn: a thinking message is followed by the answer
_EOS_NAMES = ("<|end_of_text|>", "<|eot|>")
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

# How text is cut before merging: the published patterns, by the name that converters write
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "gpt-4o": _O200K,
    "llama4": _O200K,
}


class TokenizerError(ValueError):
    """The vocabulary cannot be used, or an id is not part of it."""


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes 0..255 in byte-level BPE vocabularies.

    GPT-2's table: printable Latin-1 bytes stand for themselves, the others for U+0100 onwards in
    order of their value.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


@contextlib.contextmanager
def _package_errors(what: str) -> Iterator[None]:
    """Turns the package's errors into TokenizerError: plain Exception, and for a panic in its Rust
    code a BaseException that it does not export."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"{what}: {' '.join(str(error).split())[:300]}") from error


@functools.cache
def _byte_values() -> dict[str, int]:
    return {char: byte for byte, char in enumerate(byte_alphabet())}


class Tokenizer:
    """A vocabulary; `eos_ids` are the ids that end a turn, `bos_id` is None where there is none."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        bos_id: int | None,
        eos_ids: Iterable[int],
        name: str = "tokenizer",
    ) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._added = tokenizer.get_added_tokens_decoder()
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.bos_id = bos_id
        self.eos_ids = set(eos_ids)
        for token in [*self.eos_ids, *([] if bos_id is None else [bos_id])]:
            try:
                self.token_bytes(token)
            except TokenizerError as error:
                raise TokenizerError(f"{name}: begin and end ids: {error}") from error

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] | None = None,
    ) -> Tokenizer:
        """Read a tokenizer.json. Ids that are not given are found by the tokens' names.

        Raises TokenizerError where the file cannot be read or is not byte-level BPE.
        """
        name = os.fspath(path)
        check_not_special(name, TokenizerError)
        with _package_errors(f"{name}: cannot read as tokenizer.json"):
            tokenizer = tokenizers.Tokenizer.from_file(name)
        # The package shows a decoder's parts only as text
        if "ByteLevel" not in repr(tokenizer.decoder):
            raise TokenizerError(
                f"{name}: expected a byte-level decoder, found {tokenizer.decoder!r:.96}"
            )
        if bos_id is None:
            bos_id = next(iter(_ids(tokenizer, _BOS_NAMES)), None)
        if eos_ids is None:
            eos_ids = _ids(tokenizer, _EOS_NAMES)
        return cls(tokenizer, bos_id, eos_ids, name)

    @classmethod
    def from_gguf(cls, model: GGUFModel) -> Tokenizer | None:
        """Build from `tokenizer.ggml.*`; None where the file holds no tokenizer at all.

        Control tokens become special tokens, recognised in text. Raises TokenizerError naming the
        key where the vocabulary is not byte-level BPE or contradicts itself.
        """
        metadata = model.metadata
        if "tokenizer.ggml.model" not in metadata:
            return None
        kind = metadata["tokenizer.ggml.model"]
        if not isinstance(kind, str) or kind != "gpt2":
            raise TokenizerError(_wrong(model, "model", "gpt2 (byte-level BPE)", kind))
        pre = metadata.get("tokenizer.ggml.pre", "default")
        if not isinstance(pre, str) or pre not in _PATTERNS:
            raise TokenizerError(
                _wrong(model, "pre", f"one of {', '.join(_PATTERNS)}", pre)
                + "; give the model's tokenizer.json instead"
            )
        tokens = _strings(model, "tokens")
        if len(tokens) != model.config.vocab_size:
            raise TokenizerError(
                _wrong(model, "tokens", f"{model.config.vocab_size} entries", len(tokens))
            )
        vocab = {token: i for i, token in enumerate(tokens)}
        if len(vocab) != len(tokens):
            raise TokenizerError(_wrong(model, "tokens", "distinct tokens", "duplicates"))
        types = _token_types(model, len(tokens))
        merges = _merges(model, vocab)
        with _package_errors(f"{model.path}: tokenizer.ggml.merges"):
            bpe = tokenizers.models.BPE(vocab=vocab, merges=merges)
        tokenizer = tokenizers.Tokenizer(bpe)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Split(tokenizers.Regex(_PATTERNS[pre]), "isolated"),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        added: dict[int, bool] = {TokenType.CONTROL: True, TokenType.USER_DEFINED: False}
        for special in (True, False):
            tokenizer.add_tokens(
                [
                    tokenizers.AddedToken(token, special=special, normalized=False)
                    for token, type_id in zip(tokens, types, strict=True)
                    if added.get(type_id) is special and token
                ]
            )
        bos_id = _token_id(model, "bos_token_id", len(tokens))
        eos_ids = [_token_id(model, key, len(tokens)) for key in _EOS_KEYS]
        return cls(tokenizer, bos_id, [i for i in eos_ids if i is not None], model.path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a tokenizer.json, which `from_file` and the tokenizers package read.

        The format has no place for the begin and end ids: keep them beside it unless their tokens
        have the usual names.
        """
        try:
            self._tokenizer.save(os.fspath(path))
        except Exception as error:  # the package raises plain Exception
            raise OSError(f"{os.fspath(path)}: cannot write: {error}") from error

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """Token ids of the text; special tokens written in it are recognised. `bos` puts the
        begin token in front (TokenizerError where the vocabulary has none)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"text: expected valid Unicode, found {error}") from error
        with _package_errors(f"{self._name}: cannot encode text"):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not bos:
            return ids
        if self.bos_id is None:
            raise TokenizerError("bos: the vocabulary has no begin token")
        return [self.bos_id, *ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; TokenizerError where the id is not in the vocabulary."""
        added = self._added.get(token)
        if added is not None:
            return added.content.encode()
        text = self._tokenizer.id_to_token(token) if 0 <= token < 1 << 32 else None
        if text is None:
            raise TokenizerError(
                f"token id: expected one of the vocabulary (0 to {self.vocab_size - 1}), "
                f"found {token}"
            )
        values = _byte_values()
        if all(char in values for char in text):
            return bytes(values[char] for char in text)
        return text.encode()


class StreamDecoder:
    """Text of a growing sequence: what is returned is final and never splits a character.

    The pieces of all `feed` calls and of `finish`, joined, equal `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        """Text completed by these ids; an unfinished character waits for the next call."""
        return self._decoder.decode(b"".join(self._tokenizer.token_bytes(i) for i in ids))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was never finished, or nothing."""
        return self._decoder.decode(b"", final=True)


def _ids(tokenizer: tokenizers.Tokenizer, names: Iterable[str]) -> list[int]:
    found = (tokenizer.token_to_id(name) for name in names)
    return [i for i in found if i is not None]


def _wrong(model: GGUFModel, key: str, expected: str, found: object) -> str:
    return f"{model.path}: key tokenizer.ggml.{key}: expected {expected}, found {str(found)[:96]!s}"


def _strings(model: GGUFModel, key: str) -> list[str]:
    value: Any = model.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list):
        found = "nothing" if value is None else type(value).__name__
        raise TokenizerError(_wrong(model, key, "an array of strings", found))
    return value


def _merges(model: GGUFModel, vocab: dict[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for i, merge in enumerate(_strings(model, "merges")):
        # A part may itself start with a space only in vocabularies that are not byte-level
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise TokenizerError(
                _wrong(model, f"merges[{i}]", "two tokens that make a third", repr(merge))
            )
        pairs.append((left, right))
    return pairs


def _token_types(model: GGUFModel, count: int) -> list[int]:
    value: Any = model.metadata.get("tokenizer.ggml.token_type")
    if value is None:
        return [TokenType.NORMAL] * count
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or value.size != count:
        size = value.size if isinstance(value, np.ndarray) else type(value).__name__
        raise TokenizerError(_wrong(model, "token_type", f"{count} integers", size))
    return value.tolist()


def _token_id(model: GGUFModel, key: str, count: int) -> int | None:
    value: Any = model.metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise TokenizerError(_wrong(model, key, f"an id of 0 to {count - 1}", value))
    return value
