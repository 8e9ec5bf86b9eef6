"""A token file gives back what was written, or is refused when it is opened: any cut, any changed byte."""

import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import DataError
from shardwright.run import token_file
from shardwright.run.token_file import (
    FIELDS,
    HEADER_BYTES,
    MARK,
    is_token_file,
    open_token_file,
    token_file_writer,
)

TOKENIZER = bytes(range(32))


def write(path, documents, vocab=1000, separator=999, calls=1):
    with token_file_writer(path, vocab=vocab, separator=separator, tokenizer=TOKENIZER) as writer:
        for i in range(calls):
            writer.add([np.array(ids, np.uint32) for ids in documents[i::calls]])
    return path


@pytest.fixture
def small_blocks(monkeypatch):
    """Checksums of 64 B each, so that a small file has many."""
    monkeypatch.setattr(token_file, "BLOCK", 64)


@pytest.mark.parametrize(("vocab", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_what_was_written_is_read(tmp_path, vocab, dtype):
    path = write(tmp_path / "new" / "c.tokens", [[1, 2], [], [vocab - 1], [5]], vocab, 0)
    found = open_token_file(path)
    assert found.tokens.tolist() == [1, 2, 0, vocab - 1, 0, 5, 0]
    assert found.ends.tolist() == [3, 5, 7]
    assert (found.tokens.dtype, found.ends.dtype) == (dtype, "int64")
    header = found.header
    assert (header.tokens, header.documents, header.vocab, header.separator) == (7, 3, vocab, 0)
    assert (header.version, header.tokenizer, header.size) == (1, TOKENIZER, path.stat().st_size)
    assert [file.name for file in path.parent.iterdir()] == ["c.tokens"]
    with pytest.raises(ValueError, match="read-only"):
        found.tokens[0] = 3


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 999), max_size=90), min_size=1, max_size=12),
    calls=st.integers(1, 4),
)
def test_any_documents_in_any_number_of_calls(tmp_path_factory, documents, calls):
    folder = tmp_path_factory.mktemp("any")
    if not any(documents):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_file, "BLOCK", 64)
        found = open_token_file(write(folder / "c", documents, calls=calls))
    ordered = [ids for i in range(calls) for ids in documents[i::calls] if ids]
    assert found.tokens.tolist() == [token for ids in ordered for token in [*ids, 999]]
    assert np.diff(found.ends, prepend=0).tolist() == [len(ids) + 1 for ids in ordered]


def test_the_digest_is_of_the_tokens_and_not_of_the_path(tmp_path):
    digests = [
        open_token_file(write(tmp_path / name, documents)).digest()
        for name, documents in [("a", [[1, 2], [3]]), ("b", [[1, 2], [3]]), ("c", [[1, 2], [4]])]
    ]
    assert digests[0] == digests[1] != digests[2]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_it_is_pickled_as_its_path(tmp_path, monkeypatch):
    write(tmp_path / "c", [[7] * 100_000])
    monkeypatch.chdir(tmp_path)
    found = open_token_file(token_file.Path("c"))
    pickled = pickle.dumps(found)
    assert len(pickled) < 1000
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(pickle.loads(pickled).tokens, found.tokens)


def test_any_changed_byte_is_found_when_it_is_opened(tmp_path, small_blocks):
    path = write(tmp_path / "c", [[i] * (i % 7 + 1) for i in range(24)])
    whole = path.read_bytes()
    header = open_token_file(path).header
    assert header.blocks == 7
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        assert is_token_file(path)
        with pytest.raises(DataError, match=r"damaged in|has version") as raised:
            open_token_file(path)
        part = (
            "blocks" if HEADER_BYTES <= place < header.checks_at else "header|checksums|first 8 B|has version"
        )
        assert raised.match(part), place
        assert raised.match(
            "copy it again, or make it anew with 'shardwright tokenize'|has version 1, this|make it"
        )
    path.write_bytes(whole)
    open_token_file(path)


def test_any_cut_is_found_when_it_is_opened(tmp_path, small_blocks):
    path = write(tmp_path / "c", [[i] * (i % 7 + 1) for i in range(12)])
    whole = path.read_bytes()
    for size in range(len(MARK), len(whole)):
        path.write_bytes(whole[:size])
        assert is_token_file(path)
        message = (
            "less than its header"
            if size < HEADER_BYTES
            else f"{size} B, its header says {len(whole)}: it is cut off"
        )
        with pytest.raises(DataError, match=message):
            open_token_file(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(DataError, match="it is longer than it was written, copy it again, or make it anew"):
        open_token_file(path)


def test_blocks_in_the_wrong_order_are_found(tmp_path, small_blocks):
    path = write(tmp_path / "c", [list(range(500))])
    whole = bytearray(path.read_bytes())
    a, b = HEADER_BYTES, HEADER_BYTES + 64
    whole[a:b], whole[b : b + 64] = whole[b : b + 64], whole[a:b]
    path.write_bytes(whole)
    with pytest.raises(DataError, match=f"in 2 of its 16 blocks, the first from byte {a} to {b}: copy"):
        open_token_file(path)


def test_processes_of_a_node_share_the_checking(tmp_path, small_blocks):
    path = write(tmp_path / "c", [list(range(500))])
    whole = bytearray(path.read_bytes())
    whole[HEADER_BYTES + 5 * 64] ^= 4
    path.write_bytes(whole)
    for share in range(4):
        if share == 5 % 4:
            with pytest.raises(DataError, match="damaged in 1 of its 16 blocks"):
                open_token_file(path, (share, 4))
        else:
            open_token_file(path, (share, 4))


def test_another_version_says_which_is_understood(tmp_path):
    path = write(tmp_path / "c", [[1]])
    whole = path.read_bytes()
    path.write_bytes(whole[:8] + struct.pack("<I", 2) + whole[12:])
    with pytest.raises(
        DataError,
        match=r"has version 2, this shardwright reads version 1: make it anew with 'shardwright tok",
    ):
        open_token_file(path)


def test_header_keeps_its_size():
    assert (HEADER_BYTES, FIELDS.size) == (256, 224)


def test_text_is_no_token_file(tmp_path):
    (tmp_path / "text").write_text("text")
    (tmp_path / "empty").write_text("")
    assert not any(is_token_file(tmp_path / name) for name in ("text", "empty", "absent", "."))


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[5, 1000, 3]], "token id 1000 is not in the vocabulary of 1000: give the tokenizer"),
        ([], "input holds no text: give"),
        ([[], []], "input holds no text: give"),
    ],
)
def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path, documents, message):
    path = tmp_path / "c"
    path.write_text("before")
    with pytest.raises(DataError, match=message):
        write(path, documents)
    assert [file.name for file in tmp_path.iterdir()] == ["c"]
    assert path.read_text() == "before"


def test_ctrl_c_leaves_nothing(tmp_path):
    def interrupted():
        with token_file_writer(tmp_path / "c", vocab=9, separator=0, tokenizer=TOKENIZER) as writer:
            writer.add([np.ones(5, np.uint8)])
            assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["c.partial"]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


def test_output_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"output \S+ is a folder: give a file, \S+corpus.tokens for example"):
        write(tmp_path, [[1]])
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write \S+/c: .*: give another path with -o"):
        write(tmp_path / "file" / "c", [[1]])
    with pytest.raises(DataError, match=r"cannot read token file \S+absent: No such file"):
        open_token_file(tmp_path / "absent")
