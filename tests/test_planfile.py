"""plan.toml: exact round trip, versions, faults found at load, and writing whole or not at all."""

import errno
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwright.cluster import cluster_of
from shardwright.errors import PlanFileError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import BUILT_TYPES, preset, preset_names
from shardwright.plan.explain import explanation, plan_of, predict
from shardwright.plan.space import INNER, search_space
from shardwright.planfile import SCHEMA_VERSION, Plan, load_plan, save_plan

JOB = Job(seq=64, global_batch=8, precision="fp32")
PLAN = plan_of(
    preset("bytes-5m"), JOB, cluster_of("cpu", 2), Layout(dp_shard=2, zero_stage=3, microbatches=4)
)


def edited(old, new, plan=PLAN):
    text = plan.to_toml()
    assert text.count(old) == 1
    return text.replace(old, new)


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from([name for name in preset_names() if preset(name).model_type in BUILT_TYPES]),
    device=st.sampled_from(["cpu", "h100-sxm", "gb200", "mi300x"]),
    ranks=st.sampled_from([1, 2, 8, 48]),
    seq=st.integers(1, 10**6),
    optimizer=st.sampled_from(["adamw", "sgd", "adafactor"]),
    rate=st.floats(0, 1),
    data=st.data(),
)
def test_round_trip_is_exact(name, device, ranks, seq, optimizer, rate, data):
    job = Job(seq=seq, global_batch=48, optimizer=optimizer, learning_rate=rate)
    model = preset(name)
    grid = data.draw(st.sampled_from(search_space(model, job, ranks).grids))
    inner = data.draw(st.integers(0, grid.table.shape[INNER] - 1))
    grid = grid.along(INNER, slice(inner, inner + 1))
    rows = np.flatnonzero(grid.layouts)
    assume(len(rows))
    layout = grid.table.layout(int(rows[data.draw(st.integers(0, len(rows) - 1))]), model.layers)
    plan = plan_of(model, job, cluster_of(device, ranks), layout)
    assert Plan.from_toml(plan.to_toml()) == plan
    assert Plan.from_toml(plan.to_toml()).to_toml() == plan.to_toml()
    assert Plan.checked(json.loads(plan.model_dump_json())) == plan


def test_a_file_and_its_folder_are_the_same(tmp_path):
    path = save_plan(PLAN, tmp_path / "new" / "folder" / "plan.toml")
    assert load_plan(path) == load_plan(path.parent) == PLAN
    assert [file.name for file in path.parent.iterdir()] == ["plan.toml"]


def test_writing_into_a_folder_makes_its_plan_toml(tmp_path):
    assert save_plan(PLAN, tmp_path) == tmp_path / "plan.toml"
    assert load_plan(tmp_path) == PLAN


def test_terms_add_up_and_the_file_is_for_people():
    text, memory = PLAN.to_toml(), PLAN.prediction.memory
    assert memory.total == sum(memory.model_dump().values())
    assert memory.total - memory.reserved == memory.communicators + memory.context
    for part in ("schema_version = 1", "[layout]", 'name = "bytes-5m"', 'latency = "160 us"'):
        assert part in text


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (
            "schema_version = 0",
            r"schema_version=0, this shardwright reads 1: plan again with 'shardwright plan'",
        ),
        (
            "schema_version = 2",
            r"schema_version=2, this shardwright reads 1: upgrade shardwright, or plan again",
        ),
        ("", r"key 'schema_version' is missing: give a file that 'shardwright plan -o' wrote"),
        ('schema_version = "1"', r"schema_version='1' must be a whole number"),
        ("schema_version = true", r"schema_version=True must be a whole number"),
    ],
)
def test_another_version_is_refused_with_what_to_do(line, fault):
    text = edited(f"schema_version = {SCHEMA_VERSION}", line)
    with pytest.raises(PlanFileError, match=r"^plan \(my/plan.toml\): " + fault + "$"):
        Plan.from_toml(text, "my/plan.toml")


def test_another_version_is_refused_before_its_keys_are_read():
    with pytest.raises(
        PlanFileError, match=r"^plan: schema_version=9, this shardwright reads 1: upgrade[^;]*$"
    ):
        Plan.from_toml("schema_version = 9\nnew_key = 1\n")


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (
            "zero_stage = 3",
            "zero_stag = 3",
            r"unknown key 'layout.zero_stag' \(did you mean 'zero_stage'\?\)",
        ),
        (
            "global_batch = 8",
            "global_bach = 8",
            r"unknown key 'job.global_bach' \(did you mean 'global_batch'\?\)",
        ),
        ("global_batch = 8", "", r"key 'job.global_batch' is missing"),
        (
            "[layout]",
            "[layuot]",
            r"unknown key 'layuot' \(did you mean 'layout'\?\).*|.*key 'layout' is missing",
        ),
        ("zero_stage = 3", "zero_stage = 7", r"layout.zero_stage=7: "),
        (
            "dp_shard = 2",
            "dp_shard = 1",
            r"zero_stage=3 does not go with dp_shard=1: stage 0 means dp_shard=1",
        ),
        ("global_batch = 8", "global_batch = 12", r"dp=2 x .* is not global_batch=12: use microbatches=6"),
        (
            "global_batch = 8",
            "global_batch = 9",
            r"is not global_batch=9: use global_batch=8 .* or another micro_b",
        ),
        (
            "global_batch = 8",
            "global_batch = 1",
            r"dp=2 ranks each need a sequence but global_batch=1: use at most",
        ),
        ("\nranks = 2", "\nranks = 4", r"layout has 2 ranks .*, the cluster 4: make their product 4"),
    ],
)
def test_faults_of_an_edited_file(tmp_path, old, new, fault):
    path = tmp_path / "plan.toml"
    path.write_text(edited(old, new))
    with pytest.raises(PlanFileError, match=fault) as raised:
        load_plan(path)
    message = str(raised.value)
    assert message.startswith(f"plan ({path}): ")
    assert "\n" not in message
    assert "{" not in message  # no table is quoted whole


def test_all_faults_at_once():
    text = edited("zero_stage = 3", "zero_stage = 7").replace("seq = 64", 'seq = "long"')
    with pytest.raises(PlanFileError, match=r"layout\.zero_stage=7") as raised:
        Plan.from_toml(text)
    assert "job.seq='long'" in str(raised.value)


def test_absent_or_damaged_files(tmp_path):
    with pytest.raises(
        PlanFileError, match=r"plan file .*x\.toml does not exist: make one with 'shardwright plan"
    ):
        load_plan(tmp_path / "x.toml")
    with pytest.raises(PlanFileError, match=r"folder .* holds no plan\.toml: make one with"):
        load_plan(tmp_path)
    (tmp_path / "plan.toml").write_text(PLAN.to_toml()[:-200] + "[")
    with pytest.raises(PlanFileError, match=r"plan\.toml is not valid TOML"):
        load_plan(tmp_path)
    (tmp_path / "plan.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanFileError, match="not UTF-8"):
        load_plan(tmp_path)


def test_where_nothing_can_be_written_nothing_is_left(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(PlanFileError, match=r"cannot write .*file/plan\.toml: .*: give another path"):
        save_plan(PLAN, tmp_path / "file" / "plan.toml")
    (tmp_path / "folder" / "plan.toml" / "plan.toml").mkdir(parents=True)
    with pytest.raises(PlanFileError, match=r"cannot write .*plan\.toml: Is a directory"):
        save_plan(PLAN, tmp_path / "folder" / "plan.toml")
    assert not list(tmp_path.rglob("*.partial"))


def test_a_full_disk_leaves_the_older_plan(tmp_path, monkeypatch):
    path = save_plan(PLAN, tmp_path / "plan.toml")
    write = Path.write_text

    def fill(self, text, **options):
        write(self, text[: len(text) // 2], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(PlanFileError, match=r"cannot write .*: No space left on device: give another path"):
        save_plan(PLAN.model_copy(update={"written_by": "later"}), path)
    assert load_plan(path) == PLAN
    assert [file.name for file in tmp_path.iterdir()] == ["plan.toml"]


def test_an_edited_layout_is_explained_afresh_and_the_stored_prediction_told_from_it(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(edited("zero_stage = 3", "zero_stage = 1"))
    plan = load_plan(path)
    assert plan.prediction == PLAN.prediction
    fresh = predict(plan.model, plan.job, plan.cluster, plan.layout)
    assert fresh != plan.prediction
    document = explanation(plan)
    assert document["stages"][0]["total"] == fresh.memory.total
    assert not document["stored_prediction_agrees"]
    assert explanation(PLAN)["stored_prediction_agrees"]
