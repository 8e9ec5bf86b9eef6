"""Data is a function of (seed, step, sample), and a global batch is the same set in every layout."""

import pickle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from gloo import layout_of
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import DataError
from shardwright.job import Job
from shardwright.run.dataset import (
    LIBRARY_BYTES,
    MASKED,
    SEPARATOR,
    VOCAB,
    TokenDataset,
    build_dataset,
    join_documents,
    library_tokens,
    path_tokens,
)
from shardwright.run.token_file import open_token_file, token_file_writer

JOB = Job(seq=8, global_batch=12, seed=3, held_out=0.1)
LAYOUTS = [
    layout_of(1, 1, 0, 1, 12),
    layout_of(1, 1, 0, 12, 1),
    layout_of(2, 1, 0, 3, 2),
    layout_of(1, 4, 3, 1, 3),
    layout_of(2, 3, 2, 1, 2),
    layout_of(2, 2, 1, 3, 1),
]


class Counting(NamedTuple):
    """A corpus whose documents end without a separator."""

    tokens: np.ndarray
    ends: np.ndarray


def counting_dataset(windows=50, job=JOB):
    """Tokens that count up, so that a window's first token tells which window it is."""
    return TokenDataset(np.arange(windows * job.seq + 1, dtype=np.uint16), job)


def global_batch(data, step, layout, method="microbatches"):
    parts = [getattr(data, method)(step, layout, rank) for rank in range(layout.dp)]
    rows = [
        np.concatenate([array for array in sample if array is not None], axis=1)
        for part in parts
        for sample in part
    ]
    return np.array(sorted(np.concatenate(rows).tolist()))


@pytest.mark.parametrize("method", ["microbatches", "held_out_microbatches"])
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda layout: layout.label)
def test_global_batch_is_the_same_set_in_every_layout(layout, method):
    data = counting_dataset()
    for step in (0, 3, 7):
        expected = global_batch(data, step, LAYOUTS[0], method)
        assert expected.shape == (12, 16)
        np.testing.assert_array_equal(global_batch(data, step, layout, method), expected)


def test_microbatches_have_the_shape_of_the_layout():
    layout = LAYOUTS[2]
    parts = counting_dataset().microbatches(0, layout, 1)
    assert [(part.tokens.shape, part.targets.shape, part.documents) for part in parts] == [
        ((2, 8), (2, 8), None)
    ] * 3
    assert all(array.dtype == np.int64 for part in parts for array in part[:2])


def test_samples_do_not_depend_on_the_order_of_asking():
    data, other = counting_dataset(), counting_dataset()
    asked = [(step, index) for step in range(9) for index in range(12)]
    forward = {key: data.sample(*key)[0].tolist() for key in asked}
    backward = {key: other.sample(*key)[0].tolist() for key in reversed(asked)}
    assert forward == backward


def test_every_epoch_visits_every_training_window_once_in_its_own_order():
    data = counting_dataset()
    firsts = [int(data.sample(*divmod(i, 12))[0][0]) for i in range(2 * data.train_windows)]
    epochs = firsts[: data.train_windows], firsts[data.train_windows :]
    windows = [window * JOB.seq for window in range(data.train_windows)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == windows
    assert epochs[0] != epochs[1] != windows


def test_seed_changes_the_order():
    other = counting_dataset(job=JOB.model_copy(update={"seed": 4}))
    assert any(int(counting_dataset().sample(0, i)[0][0]) != int(other.sample(0, i)[0][0]) for i in range(12))


def test_held_out_windows_are_the_last_and_never_trained_on():
    data = counting_dataset()
    assert (data.train_windows, data.held_out_windows) == (45, 5)
    held = {int(data.held_out(0, i)[0][0]) // JOB.seq for i in range(12)}
    assert held == set(range(45, 50))
    np.testing.assert_array_equal(data.held_out(0, 0)[0], data.held_out(0, 5)[0])  # from the start again


def test_target_is_the_next_token_and_none_after_a_separator():
    tokens = join_documents([b"abcd", b"", b"xyz"])
    assert tokens.tolist() == [97, 98, 99, 100, SEPARATOR, 120, 121, 122, SEPARATOR]
    data = TokenDataset(tokens, Job(seq=8, global_batch=1, held_out=0.0))
    ids, targets, documents = data.sample(0, 0)
    assert documents is None
    assert ids.tolist() == tokens[:8].tolist()
    assert targets.tolist() == [98, 99, 100, SEPARATOR, MASKED, 121, 122, SEPARATOR]


def test_packed_documents_are_numbered_and_share_windows_and_targets():
    tokens = join_documents([b"abcd", b"", b"xyz", b"0123456789", b"q"])
    job = Job(seq=4, global_batch=1, held_out=0.3, packing="documents")
    data, windows = (
        TokenDataset(tokens, job),
        TokenDataset(tokens, job.model_copy(update={"packing": "windows"})),
    )
    found = {}
    for asked in [("sample", i) for i in range(data.train_windows)] + [("held_out", 0), ("held_out", 1)]:
        packed, joined = (getattr(each, asked[0])(asked[1], 0) for each in (data, windows))
        np.testing.assert_array_equal(packed.tokens, joined.tokens)
        np.testing.assert_array_equal(packed.targets, joined.targets)
        found[bytes(packed.tokens.astype(np.uint8))] = packed.documents.tolist()
    assert found == {
        b"abcd": [0, 0, 0, 0],
        b"\0xyz": [0, 1, 1, 1],
        b"\x00012": [0, 1, 1, 1],
        b"3456": [0, 0, 0, 0],
        b"789\0": [0, 0, 0, 0],
    }


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=6, max_size=30),
    seq=st.integers(1, 12),
    packing=st.sampled_from(["windows", "documents"]),
)
def test_documents_and_masks_against_a_loop(lengths, seq, packing):
    corpus = Counting(np.arange(sum(lengths), dtype=np.uint16), np.cumsum(lengths))
    owner = np.repeat(np.arange(len(lengths)), lengths)  # no separator tells them apart
    if sum(lengths) <= seq:
        return
    data = TokenDataset(corpus, Job(seq=seq, global_batch=1, held_out=0.0, packing=packing))
    for step in range(data.train_windows):
        tokens, targets, documents = data.sample(step, 0)
        for i, token in enumerate(tokens):
            same = owner[token] == owner[token + 1]
            assert targets[i] == (token + 1 if same else MASKED)
        if packing == "documents":
            assert (documents == owner[tokens] - owner[tokens[0]]).all()


def token_file(path, documents, vocab=VOCAB, dtype=np.uint8):
    with token_file_writer(path, vocab=vocab, separator=vocab - 1, tokenizer=bytes(32)) as writer:
        writer.add([np.frombuffer(document, dtype) for document in documents])
    return path


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_a_token_file_gives_the_samples_of_the_same_text(tmp_path, packing):
    documents = [bytes([i] * (7 * i % 23)) for i in range(60)]
    job = JOB.model_copy(update={"packing": packing})
    text = TokenDataset(join_documents(documents), job)
    data = build_dataset(token_file(tmp_path / "c", documents), VOCAB, job)
    assert data.train_windows == text.train_windows > 12
    for layout in LAYOUTS:
        for step in (0, 5):
            for method in ("microbatches", "held_out_microbatches"):
                np.testing.assert_array_equal(
                    global_batch(data, step, layout, method), global_batch(text, step, LAYOUTS[0], method)
                )
    assert len(data.digest()) == 64
    assert data.digest() == open_token_file(tmp_path / "c").digest() != text.digest()


def test_a_dataset_of_a_token_file_is_pickled_without_its_tokens(tmp_path):
    data = build_dataset(token_file(tmp_path / "c", [bytes(200_000)]), VOCAB, JOB)
    pickled = pickle.dumps(data)
    assert len(pickled) < 3000
    np.testing.assert_array_equal(pickle.loads(pickled).sample(3, 2).tokens, data.sample(3, 2).tokens)
    assert type(data.sample(0, 0).tokens) is np.ndarray


def test_a_run_resumed_at_any_step_reads_what_the_whole_run_read():
    whole, resumed = counting_dataset(), counting_dataset()
    steps = [whole.microbatches(step, LAYOUTS[2], 1) for step in range(11)]
    for step in (7, 8, 9, 10):  # with another layout before, as an elastic restart has
        resumed.microbatches(step, LAYOUTS[1], 0)
        for found, expected in zip(resumed.microbatches(step, LAYOUTS[2], 1), steps[step], strict=True):
            np.testing.assert_array_equal(found.tokens, expected.tokens)


def test_default_corpus_is_the_library_without_its_tests():
    tokens = library_tokens()
    assert 10**6 < len(tokens) < LIBRARY_BYTES + 10**5
    assert tokens.max() == SEPARATOR < VOCAB
    text = bytes(tokens[:200_000].astype(np.uint8).tolist())
    assert b"def " in text
    np.testing.assert_array_equal(tokens, library_tokens())


def test_default_corpus_is_cut_at_the_limit():
    assert (library_tokens(limit_bytes=50_000) != SEPARATOR).sum() == 50_000


def test_folder_is_read_in_order_of_path_and_any_bytes_are_text(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_bytes(b"\xff\x00")
    (tmp_path / "a.txt").write_text("hi")
    (tmp_path / ".hidden").write_text("no")
    expected = [104, 105, SEPARATOR, 255, 0, SEPARATOR]
    assert path_tokens(tmp_path).tolist() == expected
    assert path_tokens(tmp_path / "a.txt").tolist() == expected[:3]


def test_digest_tells_data_apart():
    assert counting_dataset().digest() == counting_dataset().digest() != counting_dataset(51).digest()
    assert len(counting_dataset().digest()) == 64


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({}, "absent", r"data path \S+absent does not exist: give a text file"),
        ({}, ".", r"data folder \S+ holds no tokens in 0 files: give"),
        ({"a": "", "b": ""}, ".", "holds no tokens in 2 files"),
        ({"a": ""}, "a", r"data \S+a is empty: give"),
        (
            {"a": "0123456789"},
            "a",
            r"data has 11 tokens, fewer than one window .* held out \(seq=8: 17 tokens\): give",
        ),
    ],
)
def test_data_that_cannot_be_used_is_one_error_with_the_way_out(tmp_path, files, path, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        build_dataset(tmp_path / path, VOCAB, JOB)


def test_vocabulary_must_hold_the_tokens():
    with pytest.raises(
        DataError, match="vocab=256 but the data uses token ids up to 256: use vocab=257 or more"
    ):
        build_dataset(Path(__file__), 256, JOB)
    assert build_dataset(Path(__file__), 257, JOB).train_windows > 1


def test_vocabulary_must_hold_that_of_a_token_file(tmp_path):
    path = token_file(tmp_path / "c", [bytes(100)], vocab=300)
    with pytest.raises(
        DataError, match=r"vocab=299 but token file \S+ was made with a vocabulary of 300: use"
    ):
        build_dataset(path, 299, JOB)
    assert build_dataset(path, 300, JOB).train_windows > 1


def test_a_token_file_too_short_for_the_job_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"data has 13 tokens, fewer .* 17 tokens\): give"):
        build_dataset(token_file(tmp_path / "c", [bytes(12)]), VOCAB, JOB)


def test_a_damaged_token_file_is_found_by_any_process_whose_share_it_is(tmp_path):
    path = token_file(tmp_path / "c", [b"7" * 100])
    path.write_bytes(path.read_bytes().replace(b"7\0" * 100, b"7\0" * 99 + b"6\0"))
    with pytest.raises(DataError, match="is damaged in 1 of its 1 blocks"):
        build_dataset(path, VOCAB, JOB, share=(0, 2))
    assert build_dataset(path, VOCAB, JOB, share=(1, 2)).train_windows > 1  # the other one ends the run


def test_a_token_file_among_text_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    token_file(tmp_path / "c", [bytes(100)])
    with pytest.raises(DataError, match=r"data \S+c is a token file among text: give it alone"):
        build_dataset(tmp_path, VOCAB, JOB)
