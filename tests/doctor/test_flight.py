"""Flight recorder dumps of several ranks: who is missing, who differs, who only waits."""

import pytest
from evidence_files import causes, entry, found, peer, write_dump

RING = range(4001, 5001)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("ring", [True, False])
def test_a_rank_that_stopped_calling_is_named_even_if_its_ring_was_overrun(tmp_path, as_json, ring):
    old = [entry(seq) for seq in RING] if ring else []
    for rank in range(4):
        mine = [] if rank == 2 else [entry(5001, state="scheduled")]
        last = 5000 if rank == 2 else 5001
        write_dump(tmp_path, rank, old + mine, {"0": (last, 5000)}, as_json=as_json)
    (finding,) = found(tmp_path)
    assert (finding["cause"], finding["certainty"], finding["ranks"]) == (
        "skipped_collective",
        "certain",
        [2],
    )
    assert "train_step at train.py:20" in finding["summary"]
    assert finding["numbers"]["waiting_ranks"] == [0, 1, 3]


def test_all_in_the_same_call_is_the_network_and_no_rank(tmp_path):
    for rank in range(4):
        write_dump(tmp_path, rank, [entry(9), entry(10, state="started")], {"0": (10, 9)})
    assert causes(tmp_path) == [("network_stall", "likely", [])]


def test_half_of_the_dumps_do_not_tell(tmp_path):
    for rank in range(2):
        write_dump(tmp_path, rank, [entry(9), entry(10, state="started")], {"0": (10, 9)})
    (finding,) = found(tmp_path)
    assert (finding["cause"], finding["certainty"], finding["ranks"]) == (
        "not_enough_ranks",
        "cannot_tell",
        [],
    )
    assert any("ranks 2-3" in wanted for wanted in finding["collect"])


@pytest.mark.parametrize(
    ("other", "cause"),
    [({"size": 200}, "size_mismatch"), ({"operation": "nccl:broadcast"}, "operation_mismatch")],
)
def test_the_rank_that_differs_is_named(tmp_path, other, cause):
    for rank in range(4):
        last = entry(10, state="started", **(other if rank == 3 else {}))
        write_dump(tmp_path, rank, [entry(9), last], {"0": (10, 9)})
    assert causes(tmp_path) == [(cause, "certain", [3])]


def test_of_two_ranks_that_differ_neither_is_blamed_alone(tmp_path):
    groups = {"0": ("default_pg", [0, 1])}
    for rank in range(2):
        write_dump(tmp_path, rank, [entry(10, state="started", size=100 + rank)], {"0": (10, 9)}, groups)
    assert causes(tmp_path) == [("size_mismatch", "certain", [0, 1])]


def test_a_chain_of_groups_ends_at_the_rank_that_nobody_explains(tmp_path):
    """Rank 0 waits for 2 over dp, 2 waits for 3 over tp, 3 waits for nobody."""
    groups = {"0": ("default_pg", [0, 1, 2, 3]), "1": ("tp", [2, 3]), "2": ("dp", [0, 2])}
    tp, dp = ("1", "tp"), ("2", "dp")
    write_dump(tmp_path, 0, [entry(5, state="scheduled", group=dp)], {"2": (5, 4)}, groups)
    write_dump(tmp_path, 2, [entry(7, state="scheduled", group=tp)], {"1": (7, 6), "2": (4, 4)}, groups)
    write_dump(tmp_path, 3, [], {"1": (6, 6)}, groups)
    (finding,) = found(tmp_path)
    assert (finding["cause"], finding["ranks"]) == ("skipped_collective", [3])
    assert finding["numbers"]["process_group"] == "1"


def test_groups_called_in_different_orders(tmp_path):
    """Rank 0 waits in tp for rank 1, who waits in dp for rank 0."""
    groups = {"1": ("tp", [0, 1]), "2": ("dp", [0, 1])}
    write_dump(
        tmp_path, 0, [entry(7, state="scheduled", group=("1", "tp"))], {"1": (7, 6), "2": (4, 4)}, groups
    )
    write_dump(
        tmp_path, 1, [entry(5, state="scheduled", group=("2", "dp"))], {"1": (6, 6), "2": (5, 4)}, groups
    )
    assert causes(tmp_path) == [("order_mismatch", "certain", [0, 1])]


def test_a_receive_without_its_send(tmp_path):
    groups = {"0": ("default_pg", [0, 1])}
    write_dump(tmp_path, 0, [peer("nccl:send 0->1", "completed")], {"0": (0, 0)}, groups)
    write_dump(
        tmp_path, 1, [peer("nccl:recv 1<-0", "completed"), peer("nccl:recv 1<-0")], {"0": (0, 0)}, groups
    )
    assert causes(tmp_path) == [("missing_peer", "certain", [0])]


def test_two_ranks_that_both_receive_first(tmp_path):
    groups = {"0": ("default_pg", [0, 1])}
    write_dump(tmp_path, 0, [peer("nccl:recv 0<-1")], {"0": (0, 0)}, groups)
    write_dump(tmp_path, 1, [peer("nccl:recv 1<-0")], {"0": (0, 0)}, groups)
    assert causes(tmp_path) == [("crossed_peers", "likely", [0, 1])]


def test_healthy_dumps_are_healthy(tmp_path):
    for rank in range(4):
        write_dump(tmp_path, rank, [entry(seq) for seq in range(1, 9)], {"0": (8, 8)})
    assert found(tmp_path) == []


def test_sizes_are_told_as_modules_of_the_model(tmp_path):
    from shardwright.model import preset

    numel = 128256 * 4096
    for rank in range(2):
        last = entry(10, "nccl:_all_gather_base", "started") | {
            "input_sizes": [[numel // 4]],
            "output_sizes": [[numel]],
        }
        write_dump(tmp_path, rank, [last], {"0": (10, 9)})
    (finding,) = found(tmp_path, model=preset("llama-3.1-8b"))
    assert finding["numbers"]["group_size"] == 4
    assert "embedding" in finding["numbers"]["module"]


def test_a_device_that_has_not_begun_what_the_others_have(tmp_path):
    for rank in range(4):
        state = "scheduled" if rank == 1 else "started"
        write_dump(tmp_path, rank, [entry(9), entry(10, state=state)], {"0": (10, 9)})
    assert causes(tmp_path) == [("lagging_rank", "likely", [1])]


def test_a_block_under_tensor_parallelism_by_its_size(tmp_path):
    """Llama-3.1-8B: 218,103,808 elements of matrices in 4 parts, and two norms of 4096 whole."""
    from shardwright.model import preset

    numel = 218_103_808 // 4 + 2 * 4096
    last = entry(9, "nccl:_all_gather_base", "started") | {
        "input_sizes": [[numel // 4]],
        "output_sizes": [[numel]],
    }
    write_dump(tmp_path, 0, [last], {"0": (9, 8)})
    (finding,) = found(tmp_path, model=preset("llama-3.1-8b"), given="tp=4 gpus=16")
    assert finding["numbers"]["module"] == "a block on a rank of tp 4"
    assert finding["numbers"]["group_size"] == 4
