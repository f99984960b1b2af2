"""Byte-level BPE from a GGUF vocabulary and from tokenizer.json, and incremental decoding."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from glimmer_ops.gguf import GGUFError, Metadata, load
from glimmer_ops.synth import synth
from glimmer_ops.tokenizer import (
    _PATTERNS,
    StreamDecoder,
    Tokenizer,
    TokenizerError,
    byte_alphabet,
)

TEXTS = [
    "",
    "hello world",
    "the other and the one, is it 12345?",
    "café naïve — “quoted” …",
    "日本語 한국어 العربية 🎉👩‍👩‍👧",
    "tabs\tand\n\nnewlines  \r\n  x ",
    "it's we'll I'VE",
    "\x00\x01\x7f\u00ad\u0100\ufffd",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(synth(tmp_path_factory.mktemp("tok") / "tiny.gguf", "tiny", "Q4_K_M"))


@pytest.fixture(scope="module")
def tokenizer(model):
    return Tokenizer.from_gguf(model)


def changed(model, /, **keys):
    values = {key: model.metadata[key] for key in model.metadata}
    for key, item in keys.items():
        if item is None:
            del values[f"tokenizer.ggml.{key}"]
        else:
            values[f"tokenizer.ggml.{key}"] = item
    return dataclasses.replace(model, metadata=Metadata(model.path, values))


def test_byte_alphabet_is_gpt2s():
    alphabet = byte_alphabet()
    assert len(set(alphabet)) == 256
    assert alphabet[ord("A")] == "A" and alphabet[ord(" ")] == "Ġ" and alphabet[ord("\n")] == "Ċ"
    assert set(alphabet) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_shorten(tokenizer, model):
    tokens = model.metadata["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in tokenizer.encode("the world and hello")] == [
        "the",
        "Ġworld",
        "Ġand",
        "Ġ",
        "hello",
    ]
    assert len(tokenizer.encode("é")) == 1  # a merge of two bytes of one character
    assert tokenizer.vocab_size == len(tokens) == model.config.vocab_size


def test_special_tokens(tokenizer, model):
    tokens = model.metadata["tokenizer.ggml.tokens"]
    assert tokens[tokenizer.bos_id] == "<|begin_of_text|>"
    assert {tokens[i] for i in tokenizer.eos_ids} == {"<|end_of_text|>", "<|eot|>"}
    ids = tokenizer.encode("<|start|>user<|message|>hi<|eot|>")
    assert tokens[ids[0]] == "<|start|>" and tokens[ids[-1]] == "<|eot|>"
    assert tokenizer.decode(ids) == "<|start|>user<|message|>hi<|eot|>"
    assert tokenizer.encode("hi", bos=True) == [tokenizer.bos_id, *tokenizer.encode("hi")]
    # an unused token is not special: its text is ordinary text
    assert tokens.index("[unused3]") not in tokenizer.encode("[unused3]")
    assert tokenizer.decode([tokens.index("[unused3]")]) == "[unused3]"


def test_agrees_with_the_tokenizers_package_on_its_own_gpt2_rules(tokenizer, model):
    tokens = model.metadata["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in model.metadata["tokenizer.ggml.merges"]]
    peer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges)
    )
    peer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in TEXTS:
        assert tokenizer.encode(text) == peer.encode(text).ids


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 12345  x\n\ny", "it|'s| 12345| | x|\n|\n|y"),
        ("llama-bpe", "It'S 12345  x\n\ny", "It|'S| |123|45| | x|\n\n|y"),
        ("llama4", "It's HTTPServer 12345 a/b\n", "It's| HTTPServer| |123|45| a|/b|\n"),
    ],
)
def test_pre_tokenizer_patterns(pre, text, pieces):
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_PATTERNS[pre]), "isolated")
    assert [piece for piece, _ in split.pre_tokenize_str(text)] == pieces.split("|")


# --- incremental ---------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 1023), max_size=40), cut=st.integers(1, 5))
def test_stream_equals_decode_for_any_ids(tokenizer, ids, cut):
    stream = StreamDecoder(tokenizer)
    pieces = [stream.feed(ids[i : i + cut]) for i in range(0, len(ids), cut)]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)


def test_stream_never_splits_a_character(tokenizer):
    stream = StreamDecoder(tokenizer)
    pieces = [stream.feed([byte]) for byte in "a🎉é".encode()]
    assert pieces == ["a", "", "", "", "🎉", "", "é"]
    assert stream.feed([0xF0, 0x9F]) == "" and stream.finish() == "\ufffd"


# --- tokenizer.json ------------------------------------------------------------------------------


def test_from_file_equals_from_gguf(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = Tokenizer.from_file(path)
    assert (loaded.bos_id, loaded.eos_ids) == (tokenizer.bos_id, tokenizer.eos_ids)
    for text in [*TEXTS, "<|start|>x<|eot|>"]:
        assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode([*range(1024)]) == tokenizer.decode([*range(1024)])
    given_ids = Tokenizer.from_file(path, bos_id=1, eos_ids=[2, 3])
    assert (given_ids.bos_id, given_ids.eos_ids) == (1, {2, 3})
    with pytest.raises(TokenizerError, match="token id: expected .* found 5000"):
        Tokenizer.from_file(path, eos_ids=[5000])


def test_saving_where_nothing_can_be_written_is_an_os_error(tokenizer, tmp_path):
    with pytest.raises(OSError, match="no/tokenizer.json: cannot write"):
        tokenizer.save(tmp_path / "no" / "tokenizer.json")


def test_bad_tokenizer_files_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(TokenizerError, match="absent.json: cannot read as tokenizer.json"):
        Tokenizer.from_file(tmp_path / "absent.json")
    for text in ("", "{}", '{"model": 3}', "\x00"):
        path.write_text(text)
        with pytest.raises(TokenizerError, match="cannot read as tokenizer.json"):
            Tokenizer.from_file(path)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    with pytest.raises(TokenizerError, match="expected a byte-level decoder, found None"):
        Tokenizer.from_file(path)


# --- bad vocabularies ----------------------------------------------------------------------------


def test_a_file_without_a_tokenizer_gives_none(model):
    keys = {k: model.metadata[k] for k in model.metadata if not k.startswith("tokenizer.")}
    assert (
        Tokenizer.from_gguf(dataclasses.replace(model, metadata=Metadata(model.path, keys))) is None
    )


@pytest.mark.parametrize(
    ("key", "item", "words"),
    [
        ("model", "llama", "ggml.model: expected gpt2 .*, found llama"),
        ("pre", "mystery", "ggml.pre: expected one of .* found mystery; give .*tokenizer.json"),
        ("tokens", None, "ggml.tokens: expected an array of strings, found nothing"),
        ("tokens", 7, "ggml.tokens: expected an array of strings, found int"),
        ("tokens", ["a", "b"], "ggml.tokens: expected 1024 entries, found 2"),
        ("tokens", ["a"] * 1024, "ggml.tokens: expected distinct tokens"),
        ("merges", None, "ggml.merges: expected an array of strings"),
        ("merges", ["t h", "nope x"], r"ggml.merges\[1\]: expected two tokens .* 'nope x'"),
        ("merges", ["th"], r"ggml.merges\[0\]: expected two tokens"),
        ("token_type", np.ones(5, np.int32), "token_type: expected 1024 integers, found 5"),
        ("token_type", np.ones(1024, np.float32), "token_type: expected 1024 integers"),
        ("token_type", "x", "token_type: expected 1024 integers, found str"),
        ("bos_token_id", 1024, "bos_token_id: expected an id of 0 to 1023, found 1024"),
        ("eos_token_id", -1, "eos_token_id: expected an id of 0 to 1023, found -1"),
        ("eot_token_id", True, "eot_token_id: expected an id of 0 to 1023, found True"),
    ],
)
def test_bad_vocabularies_name_the_key(model, key, item, words):
    with pytest.raises(TokenizerError, match=words):
        Tokenizer.from_gguf(changed(model, **{key: item}))


def test_token_types_and_ids_are_optional(model):
    plain = changed(model, token_type=None, bos_token_id=None, eos_token_id=None, eot_token_id=None)
    tokenizer = Tokenizer.from_gguf(plain)
    assert tokenizer.bos_id is None and tokenizer.eos_ids == set()
    with pytest.raises(TokenizerError, match="bos: the vocabulary has no begin token"):
        tokenizer.encode("x", bos=True)


def test_text_that_is_not_utf8_names_its_key(model):
    with pytest.raises(GGUFError, match="tiny.gguf: key tokenizer.ggml.model: expected UTF-8"):
        Tokenizer.from_gguf(changed(model, model=b"\xff"))


@pytest.mark.parametrize("token", [-1, 1024, 1 << 40])
def test_ids_outside_the_vocabulary_are_refused(tokenizer, token):
    with pytest.raises(TokenizerError, match=f"token id: expected .*0 to 1023.*found {token}"):
        tokenizer.decode([5, token])


def test_a_model_key_that_is_a_list_is_refused(model):
    with pytest.raises(TokenizerError, match="tokenizer.ggml.model: expected gpt2"):
        Tokenizer.from_gguf(changed(model, model=np.array([1, 2])))


def test_a_panic_of_the_package_is_an_error_that_names_the_file(tokenizer, tmp_path):
    """A prefix longer than a merged token makes the package's reader panic, not fail."""
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    content = json.loads(path.read_text())
    content["model"]["continuing_subword_prefix"] = "a" * 200
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="tokenizer.json: cannot read as tokenizer.json"):
        Tokenizer.from_file(path)


def test_begin_and_end_ids_outside_the_vocabulary_name_the_file(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    with pytest.raises(TokenizerError, match="tokenizer.json: begin and end ids: .*found 5000"):
        Tokenizer.from_file(path, eos_ids=[5000])
