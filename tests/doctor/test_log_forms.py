"""Lines as people's logs have them: cut off, wrapped, of old versions. What silence says depends on it."""

import pytest
from evidence_files import causes, found

PREFIX = "RuntimeError: Detected mismatch between collectives on ranks. Rank {} is running "
OPTIONS = "TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda, layout=Strided (default))"


def old_line(rank):
    """torch 1.12, as in OFA-Sys/OFA#271."""
    return (
        f"[E ProcessGroupNCCL.cpp:737] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum=469508, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 180221{rank} milliseconds "
        "before timing out.\n"
    )


def write(tmp_path, text):
    path = tmp_path / "train.log"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("ranks", "size", "expected"),
    [
        ((1, 2, 3, 5, 6, 7), None, ("not_enough_ranks", "cannot_tell", [])),
        ((1, 2, 3, 5, 6, 7), 8, ("skipped_collective", "likely", [0, 4])),
        ((1, 2, 3), None, ("skipped_collective", "likely", [0])),
        ((0, 1, 2, 4, 5, 6, 7), None, ("skipped_collective", "likely", [3])),
        ((0, 2), None, ("not_enough_ranks", "cannot_tell", [])),
    ],
)
def test_silence_of_several_ranks_says_something_where_their_number_is_known(tmp_path, ranks, size, expected):
    head = "" if size is None else f"world size: {size}\n"
    assert causes(write(tmp_path, head + "".join(map(old_line, ranks)))) == [expected]


@pytest.mark.parametrize("cut", [4, 8, 14])
def test_a_log_that_ends_in_the_middle_of_a_rank_names_nobody(tmp_path, cut):
    """hiyouga/LlamaFactory#7396: pasted up to "ran fo"."""
    text = "".join(map(old_line, (0, 3, 4, 2)))
    path = write(tmp_path, text[: text.rindex("ran for") + cut - 2])
    assert causes(path) == [("not_enough_ranks", "cannot_tell", [])]


def test_the_last_rank_counts_though_its_line_is_cut_off(tmp_path):
    text = "".join(map(old_line, (0, 1, 2, 3)))
    path = write(tmp_path, text[: text.rindex("ran for") + 6])
    assert "ranks 0-3" in found(path)[0]["summary"]


def test_a_stuck_watchdog_whose_line_was_wrapped(tmp_path):
    """om-ai-lab/VLM-R1#257."""
    path = write(
        tmp_path,
        "[rank6]:[E429 13:55:49.384372190 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 6] "
        "ProcessGroupNCCL'\ns watchdog got stuck for 480 seconds without making progress in monitoring "
        "enqueued collectives.\n",
    )
    assert causes(path) == [("watchdog_stuck", "likely", [6])]


def inconsistent(rank, operation, shape):
    body = f"OpType={operation}, TensorShape=[{shape}], TensorDtypes=Float, {OPTIONS}"
    return PREFIX.format(rank) + f"inconsistent collective: CollectiveFingerPrint({body})\n"


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([(0, "BROADCAST", 34112)], ("operation_mismatch", "cannot_tell", [])),
        (
            [(0, "BROADCAST", 34112), (1, "BROADCAST", 34112), (2, "ALLREDUCE", 1)],
            ("operation_mismatch", "certain", [2]),
        ),
        (
            [(0, "ALLREDUCE", 8), (1, "ALLREDUCE", 16), (2, "ALLREDUCE", 8), (3, "ALLREDUCE", 8)],
            ("size_mismatch", "certain", [1]),
        ),
        ([(0, "ALLREDUCE", 8), (3, "ALLREDUCE", 8)], ("operation_mismatch", "cannot_tell", [])),
    ],
)
def test_fingerprints_of_torch_1_12_of_each_rank(tmp_path, calls, expected):
    """pytorch/pytorch#78022: every rank prints its own alone."""
    assert causes(write(tmp_path, "".join(inconsistent(*call) for call in calls))) == [expected]


def test_an_exit_code_beside_a_mismatch_is_its_echo(tmp_path):
    """speechbrain/speechbrain#2401."""
    sides = [
        f"collective: CollectiveFingerPrint(SequenceNumber=485, OpType={name}, TensorShape=[{size}], "
        f"TensorDtypes=Float, {OPTIONS})"
        for name, size in (("ALLREDUCE", 25), ("BROADCAST", 1))
    ]
    path = write(
        tmp_path,
        f"{PREFIX.format(1)}{sides[0]}, but Rank 0 is running {sides[1]}.Collectives differ in the following "
        "aspects:   Op type: ALLREDUCEvs BROADCAST\n"
        "[2024-02-09 09:09:15,164] torch.distributed.elastic.multiprocessing.api: [ERROR] failed "
        "(exitcode: 1) local_rank: 0 (pid: 170581) of "
        "binary: /usr/bin/python3.10\n",
    )
    assert causes(path) == [("operation_mismatch", "certain", [0, 1])]


def test_an_exit_code_alone_is_still_told(tmp_path):
    path = write(
        tmp_path,
        "[2024-02-09 09:09:15,164] torch.distributed.elastic.multiprocessing.api: [ERROR] failed "
        "(exitcode: 1) local_rank: 0 (pid: 170581) of binary: /usr/bin/python3.10\n",
    )
    assert [cause for cause, _, _ in causes(path)] == ["rank_failed"]


def desync(*lines):
    return "".join(f"\t - {line}\n" for line in lines)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            desync(
                "[2] finished collective #41, but didn't join collective #42 (count from 1)",
                "[0,1,3] joined but didn't finish collective #42 (count from 1)",
            ),
            ("skipped_collective", "certain", [2]),
        ),
        (
            desync(
                "[0,1,3] joined but didn't finish collective #42 (count from 1)",
                "[2] finished collective #41, but didn't join collective #42 (count from 1)",
            ),
            ("skipped_collective", "certain", [2]),
        ),
        (
            desync(
                "[2] joined but didn't finish collective #41 (count from 1)",
                "[0,1,3] finished collective #41, but didn't join collective #42 (count from 1)",
            ),
            ("lagging_rank", "likely", [2]),
        ),
        (
            desync("[2, 5] finished collective #41, but didn't join collective #42 (count from 1)"),
            ("skipped_collective", "certain", [2, 5]),
        ),
    ],
    ids=["did not join", "in another order", "did not finish", "alone"],
)
def test_who_lags_in_a_desync_report(tmp_path, text, expected):
    """Those in the call that others did not join wait; those in a call that others have finished lag."""
    assert causes(write(tmp_path, "[rank0]: torch.distributed desync report\n" + text)) == [expected]
