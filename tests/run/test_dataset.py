"""Data is a function of (seed, step, sample), and a global batch is the same set in every layout."""

from pathlib import Path

import numpy as np
import pytest
from gloo import layout_of

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

JOB = Job(seq=8, global_batch=12, seed=3, held_out=0.1)
LAYOUTS = [
    layout_of(1, 1, 0, 1, 12),
    layout_of(1, 1, 0, 12, 1),
    layout_of(2, 1, 0, 3, 2),
    layout_of(1, 4, 3, 1, 3),
    layout_of(2, 3, 2, 1, 2),
    layout_of(2, 2, 1, 3, 1),
]


def counting_dataset(windows=50, job=JOB):
    """Tokens that count up, so that a window's first token tells which window it is."""
    return TokenDataset(np.arange(windows * job.seq + 1, dtype=np.uint16), job)


def global_batch(data, step, layout, method="microbatches"):
    parts = [getattr(data, method)(step, layout, rank) for rank in range(layout.dp)]
    rows = [np.concatenate([tokens, targets], axis=1) for part in parts for tokens, targets in part]
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
    assert [(tokens.shape, targets.shape) for tokens, targets in parts] == [((2, 8), (2, 8))] * 3
    assert all(array.dtype == np.int64 for part in parts for array in part)


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
    ids, targets = data.sample(0, 0)
    assert ids.tolist() == tokens[:8].tolist()
    assert targets.tolist() == [98, 99, 100, SEPARATOR, MASKED, 121, 122, SEPARATOR]


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
