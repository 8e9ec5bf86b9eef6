"""Megatron's notation of a split, against what its own documentation writes out."""

import pytest

from shardwright.errors import LayoutError
from shardwright.plan.layer_notation import NotedStage, noted_layers, noted_stages


def test_a_70b_model_on_forty_chunks():
    """cases.md G9, NVIDIA-NeMo/Megatron-Bridge#5391: 80 layers, pp 8, five chunks a rank."""
    layers = noted_layers("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL")
    assert len(layers) == 8 * 5
    assert sum(layers) == 80
    assert layers == (*[2] * 35, 3, 2, 2, 2, 1)


def test_the_example_of_megatron():
    """Megatron-LM, parse_str_to_list: "Ettt|(tt|)*29,m|L" is 32 stages, the last two of m and L."""
    stages = noted_stages("Ettt|(tt|)*29,m|L")
    assert len(stages) == 32
    assert stages[0] == NotedStage(layers=3, embedding=1, loss=0, mtp=0)
    assert stages[1:30] == (NotedStage(2, 0, 0, 0),) * 29
    assert stages[30:] == (NotedStage(0, 0, 0, 1), NotedStage(0, 0, 1, 0))


@pytest.mark.parametrize(
    ("notation", "layers"),
    [
        ("E,(t|)*3,tL", (1, 1, 1, 1)),
        ("E t*3 | t*2 L", (3, 2)),
        ("E((t|)*2,t|)*2,tL", (1, 1, 1, 1, 1, 1, 1)),
        ("Et|*1,tL", (1, 1)),
        ("EtL", (1,)),
    ],
)
def test_groups_and_letters_repeat(notation, layers):
    assert noted_layers(notation) == layers


@pytest.mark.parametrize(
    ("notation", "message"),
    [
        ("Et|xL", r"has 'x' in 'xL': use E, t, m, L"),
        ("Et|(tL", r"has '\(' in '\(tL'"),
        ("Et*|tL", r"has '\*'"),
        ("t|tL", r"reads 'ttL': give one E, then layers t, any m, and one L last"),
        ("Et|Lt", r"reads 'EtLt': give one E"),
        ("", r"reads '': give one E"),
        ("Et||tL", r"leaves stages \[1\] without a layer: give each one t"),
        ("Ettt|m|L", r"places m: multi-token prediction is not split into stages"),
        ("E(t*999|)*999,tL", r"is over 100,000 letters: repeat less"),
    ],
)
def test_what_is_no_layout_is_refused_with_the_way_out(notation, message):
    with pytest.raises(LayoutError, match=message):
        noted_layers(notation)
