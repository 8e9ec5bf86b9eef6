"""Every kind of input becomes the tokens of its text, and what cannot be read is named."""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from shardwright.errors import DataError, MissingExtraError
from shardwright.run import tokenize as tokenize_module
from shardwright.run.dataset import SEPARATOR, path_tokens
from shardwright.run.token_file import open_token_file
from shardwright.run.tokenize import END_OF_TEXT, TokenizerEncoder, tokenize

TEXTS = ["hello world", "two\nlines of text", "", "naïve café", "a <|endoftext|> in text"]


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch):
    """The library warns in every later fork of this process if it has used threads."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small BPE of the library, with padding, truncation and marks that tokenizing must not apply."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [train]")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<|endoftext|>", "<pad>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_padding(length=64, pad_id=2, pad_token="<pad>")
    tokenizer.enable_truncation(3)
    path = tmp_path_factory.mktemp("trained") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def texts_of(path, tokenizer=None):
    """Documents of a token file as text."""
    found = open_token_file(path)
    parts = np.split(found.tokens, found.ends[:-1])
    assert all(part[-1] == found.header.separator for part in parts)
    if tokenizer is None:
        return [bytes(part[:-1].astype(np.uint8)).decode() for part in parts]
    from tokenizers import Tokenizer

    decode = Tokenizer.from_file(str(tokenizer)).decode
    return [decode(part[:-1].tolist(), skip_special_tokens=False) for part in parts]


def lines(texts, field="text"):
    return "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts))


def as_text(folder):
    for i, text in enumerate(TEXTS):
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    return [folder]


def as_files(folder):
    as_text(folder)
    return [folder / f"{i}.txt" for i in range(len(TEXTS))]


def as_gzipped_text(folder):
    for i, text in enumerate(TEXTS):
        (folder / f"{i}.txt.gz").write_bytes(gzip.compress(text.encode()))
    return [folder]


def as_lines(folder):
    (folder / "a.jsonl").write_text(lines(TEXTS) + "\n  \n")
    return [folder / "a.jsonl"]


def as_gzipped_lines(folder):
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[:3]).encode()))
    (folder / "b.NDJSON").write_text(lines(TEXTS[3:]))
    return [folder]


def as_parquet(folder, kind="string"):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra [data]")
    from pyarrow import parquet

    column = pyarrow.array(TEXTS, getattr(pyarrow, kind)())
    table = pyarrow.table({"id": list(range(len(TEXTS))), "text": column})
    parquet.write_table(table, folder / "a.parquet", row_group_size=2)
    return [folder / "a.parquet"]


def as_parquet_of_large_strings(folder):
    return as_parquet(folder, "large_string")


KINDS = (
    as_text,
    as_files,
    as_gzipped_text,
    as_lines,
    as_gzipped_lines,
    as_parquet,
    as_parquet_of_large_strings,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("whose", ["bytes", "trained"])
def test_every_kind_of_input_becomes_the_tokens_of_its_text(tmp_path, request, kind, whose):
    tokenizer = "bytes" if whose == "bytes" else str(request.getfixturevalue("trained"))
    folder = tmp_path / "in"
    folder.mkdir()
    seen = []
    document = tokenize(
        kind(folder),
        tmp_path / "c.tokens",
        tokenizer=tokenizer,
        advance=lambda done, total: seen.append((done, total)),
    )
    expected = [text for text in TEXTS if text]
    found = open_token_file(tmp_path / "c.tokens")
    assert texts_of(tmp_path / "c.tokens", None if whose == "bytes" else tokenizer) == expected
    assert document["documents"] == len(expected)
    assert document["tokens"] == len(found.tokens) == found.ends[-1]
    assert document["text_bytes"] == sum(len(text.encode()) for text in expected)
    assert document["digest"] == found.digest()
    assert (document["vocab"], document["separator"], document["dtype"]) == (
        (257, 256, "uint16") if whose == "bytes" else (400, 1, "uint16")
    )
    total = sum(file.stat().st_size for file in folder.iterdir())
    assert seen[-1] == (total, total)
    assert all(0 <= done <= total for done, _ in seen)


def test_special_tokens_of_the_text_stay_text(tmp_path, trained):
    (tmp_path / "a.txt").write_text("x<|endoftext|>y")
    tokenize([tmp_path / "a.txt"], tmp_path / "c", tokenizer=str(trained.parent))  # a folder that holds one
    tokens = open_token_file(tmp_path / "c").tokens.tolist()
    assert tokens.count(1) == 1
    assert tokens[-1] == 1
    assert 0 not in tokens


def test_bytes_are_as_train_reads_them(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a").write_bytes(b"\xff\x00\xfe" * 99)
    (folder / "b.py").write_text("pass\n")
    (folder / ".hidden").write_text("no")
    tokenize([folder], tmp_path / "c")
    np.testing.assert_array_equal(open_token_file(tmp_path / "c").tokens, path_tokens(folder))


def test_batches_do_not_show(tmp_path, trained, monkeypatch):
    (tmp_path / "a.jsonl").write_text(lines([f"line {i} " * (i % 9) for i in range(200)]))
    whole = tokenize([tmp_path / "a.jsonl"], tmp_path / "c", tokenizer=str(trained))
    monkeypatch.setattr(tokenize_module, "BATCH_BYTES", 100)
    monkeypatch.setattr(tokenize_module, "BATCH_DOCUMENTS", 7)
    seen = []
    parts = tokenize(
        [tmp_path / "a.jsonl"],
        tmp_path / "d",
        tokenizer=str(trained),
        advance=lambda done, total: seen.append(done),
    )
    assert len(seen) > 20
    assert seen == sorted(seen)
    assert (tmp_path / "c").read_bytes() == (tmp_path / "d").read_bytes()
    assert whole["digest"] == parts["digest"]


def test_output_inside_the_input_is_not_read(tmp_path):
    (tmp_path / "a.txt").write_text("hi")
    for _ in range(2):  # the second time it is there
        tokenize([tmp_path], tmp_path / "c.tokens")
        assert open_token_file(tmp_path / "c.tokens").tokens.tolist() == [104, 105, SEPARATOR]


def test_a_vocabulary_with_gaps_and_large_ids(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [train]")
    vocab = {"</s>": 7, "word": 200_000, "other": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="other"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("word what")
    document = tokenize([tmp_path / "a.txt"], tmp_path / "c", tokenizer=str(tmp_path / "t.json"))
    assert (document["vocab"], document["separator"], document["dtype"]) == (200_001, 7, "uint32")
    assert open_token_file(tmp_path / "c").tokens.tolist() == [200_000, 3, 7]
    tokenize([tmp_path / "a.txt"], tmp_path / "c", tokenizer=str(tmp_path / "t.json"), separator="other")
    assert open_token_file(tmp_path / "c").ends.tolist() == [3]  # though its id is in the text too


BAD_LINES = {
    '{"text": "cut': r"a.jsonl:2 is not JSON: .* at column 10: .*|a.jsonl:2 is not JSON",
    "[1]": r"a.jsonl:2 is a JSON list and no record: give lines like {\"text\": ...}",
    '{"content": "x", "n": 1}': r"a.jsonl:2 has no field 'text' \(it has content, n\): name .* --text-field",
    '{"text": null}': r"a.jsonl:2 has a NoneType in field 'text': name one that holds text with --text-field",
    '{"text": "\\ud800"}': r"a.jsonl:2 is not UTF-8: surrogates not allowed",
    "\x00": r"a.jsonl:2 is not",
    "[" * 100_000: r"a.jsonl:2 is nested too deep",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:12])
def test_a_bad_line_is_named_or_left_out_and_counted(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(lines(["one"]) + line + "\n" + lines(["two"]))
    with pytest.raises(DataError, match=rf"(?:{BAD_LINES[line]}).*; or leave such out with --skip-bad"):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "c")
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]
    document = tokenize([tmp_path / "a.jsonl"], tmp_path / "c", skip_bad=True)
    assert texts_of(tmp_path / "c") == ["one", "two"]
    assert document["skipped"] == len(document["first_skipped"]) == 1
    assert "a.jsonl:2" in document["first_skipped"][0]


def test_text_that_a_tokenizer_cannot_take_is_named(tmp_path, trained, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    (tmp_path / "b.txt").write_bytes(b"long" * 9)
    (tmp_path / "c.txt").write_bytes(b"good")
    monkeypatch.setattr(TokenizerEncoder, "largest", 32)
    with pytest.raises(DataError, match=r"a.txt is not UTF-8 at byte 2; or leave such out with --skip-bad"):
        tokenize([tmp_path / "a.txt"], tmp_path / "o", tokenizer=str(trained))
    with pytest.raises(
        DataError, match=r"b.txt has more than the .* a document may have with a tokenizer: split"
    ):
        tokenize([tmp_path / "b.txt"], tmp_path / "o", tokenizer=str(trained))
    document = tokenize([tmp_path], tmp_path / "o", tokenizer=str(trained), skip_bad=True)
    assert (document["documents"], document["skipped"]) == (1, 2)


def test_many_left_out_are_counted_and_the_first_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(["one"]) + "bad\n" * 9)
    document = tokenize([tmp_path / "a.jsonl"], tmp_path / "c", skip_bad=True)
    assert document["skipped"] == 9
    assert [fault.partition(" ")[0][-2:] for fault in document["first_skipped"]] == [
        ":2",
        ":3",
        ":4",
        ":5",
        ":6",
    ]


@pytest.mark.parametrize(
    ("files", "inputs", "message"),
    [
        ({}, ["absent"], r"input \S+absent does not exist: give files or folders of text"),
        ({}, ["."], r"input \S+ holds no files: give files or folders of text"),
        ({"a.txt": b"", "b.jsonl": b"\n"}, ["."], "input holds no text: give files"),
        ({"a.jsonl.zst": b"x"}, ["a.jsonl.zst"], r"cannot read \S+: .zst is not text: unpack it first"),
        ({"a.tar.gz": b"x"}, ["."], r"cannot read \S+: .tar is not text: unpack"),
        ({"a.txt.gz": b"text"}, ["."], r"cannot read \S+a.txt.gz: Not a gzipped file .*: mend it"),
        (
            {"a.txt.gz": gzip.compress(b"t" * 999)[:20]},
            ["."],
            r"cannot read \S+: Compressed file ended before",
        ),
        ({"a.jsonl.gz": gzip.compress(b"{}")[:-9] + bytes(9)}, ["."], r"cannot read \S+: .*: mend it"),
        ({}, ["/dev/null"], "input /dev/null is no regular file: write its text to one"),
        ({"c": b"\x93SHWTOK\n..."}, ["c"], r"input \S+c is a token file already: train with it"),
    ],
)
def test_input_that_cannot_be_read_is_one_error(tmp_path, files, inputs, message):
    folder = tmp_path / "in"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        tokenize([folder / name for name in inputs], tmp_path / "out.tokens")
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


def parquet_of(path, **columns):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra [data]")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)


def test_parquet_that_cannot_be_used_is_one_error(tmp_path):
    parquet_of(tmp_path / "a.parquet", content=["x", None, "y"], n=[1, 2, 3])
    path = tmp_path / "a.parquet"
    with pytest.raises(
        DataError, match=r"a.parquet has no column 'text' \(it has content, n\): name .* --text-f"
    ):
        tokenize([path], tmp_path / "c")
    with pytest.raises(DataError, match=r"a.parquet has int64 in column 'n', which is no text: name"):
        tokenize([path], tmp_path / "c", text_field="n")
    with pytest.raises(
        DataError, match=r"a.parquet, row 2 has no text in column 'content'; or leave such out"
    ):
        tokenize([path], tmp_path / "c", text_field="content")
    assert tokenize([path], tmp_path / "c", text_field="content", skip_bad=True)["skipped"] == 1
    assert texts_of(tmp_path / "c") == ["x", "y"]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cannot read \S+a.parquet: .*: mend it, or leave it out"):
        tokenize([path], tmp_path / "c")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingExtraError, match=r"reading \S+ needs the extra \[data\]: pip install 'shardw"):
        tokenize([tmp_path / "a.parquet"], tmp_path / "c")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot read tokenizer \S+: No such file.*: give a tokenizer.json, or 'bytes'"),
        ("text", r"tokenizer \S+ is not JSON: give a tokenizer.json, or 'bytes' for a token a byte"),
        ("{}", r"tokenizer \S+ is none of the tokenizers library: "),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_one_error(tmp_path, content, message):
    pytest.importorskip("tokenizers", reason="needs the extra [train]")
    if content is not None:
        (tmp_path / "t.json").write_text(content)
    with pytest.raises(DataError, match=message):
        tokenize([Path(__file__)], tmp_path / "c", tokenizer=str(tmp_path / "t.json"))


def test_a_separator_that_cannot_be_found_is_an_error(tmp_path, trained):
    with pytest.raises(
        DataError, match=r"has no token '<x>' \(it has <pad>, <s>, <\|endoftext\|>\): name one"
    ):
        tokenize([Path(__file__)], tmp_path / "c", tokenizer=str(trained), separator="<x>")
    renamed = trained.read_text(encoding="utf-8").replace("<|endoftext|>", "<|stop|>")
    (tmp_path / "t.json").write_text(renamed, encoding="utf-8")
    with pytest.raises(
        DataError, match=r"has no end-of-text token of a usual name \(it has .*\): .*--separator"
    ):
        tokenize([Path(__file__)], tmp_path / "c", tokenizer=str(tmp_path / "t.json"))
    tokenize([Path(__file__)], tmp_path / "c", tokenizer=str(tmp_path / "t.json"), separator="<|stop|>")
    with pytest.raises(DataError, match="separator '<x>' is not a byte: leave out --separator"):
        tokenize([Path(__file__)], tmp_path / "c", separator="<x>")
    assert len(set(END_OF_TEXT)) == len(END_OF_TEXT)


def test_ctrl_c_leaves_no_half_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_module, "BATCH_BYTES", 10)
    (tmp_path / "a.jsonl").write_text(lines(["0123456789"] * 9))
    (tmp_path / "c").write_text("before")

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "c", advance=interrupt)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl", "c"]
    assert (tmp_path / "c").read_text() == "before"
