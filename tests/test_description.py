"""Every description goes to TOML and comes back equal; all faults are reported at once."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import Cluster, Device, Link, device, device_names
from shardwright.description import Description, nearest
from shardwright.errors import ClusterError, JobError, LayoutError, ModelError, ShardwrightError
from shardwright.job import Job
from shardwright.layout import KEPT_BY_SELECTIVE, Layout
from shardwright.model import Llama3Rope, ModelSpec, preset, preset_names

COUNT = st.integers(1, 10**6)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
NON_NEGATIVE = st.floats(min_value=0, allow_infinity=False)
SHARE = st.floats(min_value=0, max_value=1, exclude_max=True)
EFFICIENCY = st.floats(min_value=0, max_value=1, exclude_min=True)
AMOUNT = st.integers(0, 2**70)
NAME = st.text(max_size=20)

LINKS = st.builds(
    Link,
    bandwidth=POSITIVE,
    latency=NON_NEGATIVE,
    small_latency=NON_NEGATIVE,
    ll128_latency=NON_NEGATIVE,
    start=NON_NEGATIVE,
    ramp=NON_NEGATIVE,
    switch_bandwidth=NON_NEGATIVE,
)

DEVICES = st.builds(
    Device,
    name=NAME,
    aliases=st.lists(NAME, max_size=3).map(tuple),
    kind=st.sampled_from(["cuda", "rocm", "cpu"]),
    memory=st.integers(1, 2**70),
    memory_bandwidth=POSITIVE,
    bf16=POSITIVE,
    fp32=POSITIVE,
    fp64=POSITIVE,
    matmul_efficiency=EFFICIENCY,
    attention_efficiency=EFFICIENCY,
    memory_efficiency=EFFICIENCY,
    context=AMOUNT,
    communicator=AMOUNT,
    allocator_margin=SHARE,
    gpus_per_node=COUNT,
    intra_link=LINKS,
    inter_link=LINKS,
    source=NAME,
)

CLUSTERS = st.builds(
    Cluster,
    ranks=COUNT,
    gpus_per_node=COUNT,
    device=DEVICES,
    price_per_device_hour=NON_NEGATIVE,
    assumed=st.lists(NAME, max_size=3).map(tuple),
)

ROPES = st.builds(
    Llama3Rope, factor=POSITIVE, low_freq_factor=POSITIVE, high_freq_factor=POSITIVE, original_positions=COUNT
)

SHARED_HEADS = st.tuples(st.integers(1, 64), st.integers(1, 16)).map(lambda two: (two[0] * two[1], two[1]))

MODELS = st.builds(
    lambda heads_and_kv, **values: ModelSpec(heads=heads_and_kv[0], kv_heads=heads_and_kv[1], **values),
    heads_and_kv=SHARED_HEADS,
    name=NAME,
    model_type=st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
    layers=COUNT,
    hidden=COUNT,
    ffn=COUNT,
    head_size=COUNT.map(lambda half: 2 * half),
    vocab=COUNT,
    tied_embeddings=st.booleans(),
    qkv_bias=st.booleans(),
    out_bias=st.booleans(),
    mlp_bias=st.booleans(),
    qk_norm=st.booleans(),
    norm_eps=POSITIVE,
    rope_theta=POSITIVE,
    rope_scaling=st.none() | ROPES,
    sliding_window=st.none() | COUNT,
    max_positions=COUNT,
    initializer_range=POSITIVE,
    source=NAME,
)

JOBS = st.builds(
    Job,
    seq=COUNT,
    global_batch=COUNT,
    steps=COUNT,
    precision=st.sampled_from(["bf16", "fp32", "fp64"]),
    optimizer=st.sampled_from(["adamw", "sgd", "sgd_momentum", "adamw_8bit", "adafactor", "muon"]),
    learning_rate=NON_NEGATIVE,
    min_learning_rate_ratio=SHARE,
    beta1=SHARE,
    beta2=SHARE,
    epsilon=POSITIVE,
    weight_decay=NON_NEGATIVE,
    clip_norm=NON_NEGATIVE,
    seed=AMOUNT,
    eval_batches=COUNT,
    held_out=SHARE,
)

LAYOUTS = st.builds(
    lambda shard, stage, recompute, **values: Layout(
        dp_shard=shard,
        zero_stage=0 if shard == 1 else stage,
        recompute=recompute,
        kept=KEPT_BY_SELECTIVE if recompute == "selective" else (),
        **values,
    ),
    shard=COUNT,
    stage=st.integers(1, 3),
    recompute=st.sampled_from(["none", "selective", "full"]),
    dp_replicate=COUNT,
    micro_batch=COUNT,
    microbatches=COUNT,
)


def assert_round_trip(record: Description) -> None:
    assert type(record).from_toml(record.to_toml()) == record


@settings(deadline=None)
@given(record=st.one_of(LINKS, DEVICES, CLUSTERS, ROPES, MODELS, JOBS, LAYOUTS))
def test_toml_round_trip_is_exact(record):
    assert_round_trip(record)


def test_toml_keeps_carriage_returns():
    assert_round_trip(device("h100").model_copy(update={"source": "a\r\nb\rc\n"}))


@settings(deadline=None)
@given(record=st.one_of(DEVICES, MODELS, JOBS, LAYOUTS))
def test_json_round_trip_is_exact(record):
    assert type(record).checked(json.loads(record.model_dump_json())) == record


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_round_trips(name):
    assert_round_trip(preset(name))


@pytest.mark.parametrize("name", device_names())
def test_every_device_round_trips(name):
    assert_round_trip(device(name))


def test_toml_states_units_and_json_has_si_numbers():
    link = Link(bandwidth=50e9, latency=5e-6)
    assert 'bandwidth = "50 GB/s"' in link.to_toml()
    assert link.model_dump(include={"bandwidth", "latency"}) == {"bandwidth": 50e9, "latency": 5e-6}


def test_plain_dump_of_a_device_has_numbers_only():
    values = device("h100-sxm").model_dump()
    assert values["memory"] == round(79.1 * 2**30)
    assert isinstance(values["bf16"], float)


def test_records_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Link(bandwidth=1, latency=0).bandwidth = 2


def test_all_faults_are_reported_at_once():
    values = {"seq": 0, "global_batch": "many", "steps": 5, "beta1": 1.5, "lerning_rate": 1.0}
    with pytest.raises(JobError) as raised:
        Job.checked(values, "job.toml")
    message = str(raised.value)
    assert message.startswith("job (job.toml): ")
    for part in ("seq=0: ", "global_batch='many': ", "beta1=1.5: ", "unknown key 'lerning_rate'"):
        assert part in message


def test_every_missing_key_is_listed():
    with pytest.raises(ModelError) as raised:
        ModelSpec.checked({"name": "x"})
    for key in ("model_type", "layers", "hidden", "ffn", "heads", "kv_heads", "head_size", "vocab"):
        assert f"key '{key}' is missing" in str(raised.value)


def test_unknown_key_names_the_nearest():
    with pytest.raises(JobError, match=r"unknown key 'global_bach' \(did you mean 'global_batch'\?\)"):
        Job.checked({"seq": 1, "global_batch": 1, "global_bach": 2})


def test_unknown_nested_key_names_the_nearest_of_its_table():
    values = device("h100-sxm").model_dump() | {"intra_link": {"bandwidth": 1, "latency": 0, "latncy": 1}}
    with pytest.raises(ClusterError, match=r"unknown key 'intra_link.latncy' \(did you mean 'latency'\?\)"):
        Device.checked(values)


def test_unknown_key_of_an_optional_table_names_the_nearest():
    values = preset("llama-3.1-8b").model_dump()
    values["rope_scaling"]["fctor"] = 1
    with pytest.raises(ModelError, match=r"unknown key 'rope_scaling.fctor' \(did you mean 'factor'\?\)"):
        ModelSpec.checked(values)


def test_a_far_off_key_lists_the_known_ones():
    known = r"unknown key 'zzz' \(known: chunks, cp, cp_kind, dispatch, dp_replicate, dp_shard, ep, etp, kept"
    with pytest.raises(LayoutError, match=known):
        Layout.checked({"zzz": 1})


@pytest.mark.parametrize("memory", ["80 Gib", "eighty", "1e999 B", float("inf"), "1e5e3 B"])
def test_a_bad_quantity_lists_the_units(memory):
    with pytest.raises(ClusterError, match=r"memory=.* is not a finite number with a unit of B, kB"):
        Device.checked(device("h100-sxm").model_dump() | {"memory": memory})


def test_a_quantity_is_not_a_truth_value():
    with pytest.raises(
        ClusterError, match="latency=True: a truth value is not a number with a unit of s, ms"
    ):
        Link.checked({"bandwidth": 1, "latency": True})


def test_bad_toml_names_the_file_line_and_column(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("seq = 1\nglobal_batch = \n")
    with pytest.raises(JobError, match=r"job\.toml is not valid TOML: .*line 2, column 16"):
        Job.from_file(path)


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    with pytest.raises(JobError, match=r"cannot read .*absent\.toml: No such file"):
        Job.from_file(tmp_path / "absent.toml")
    with pytest.raises(JobError, match=r"cannot read .*: Is a directory"):
        Job.from_file(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JobError, match=r"cannot read .*binary\.toml: it is not UTF-8 text"):
        Job.from_file(binary)


def test_nearest_prefers_one_and_else_lists_all():
    assert nearest("lama", ["llama", "qwen"]) == " (did you mean 'llama'?)"
    assert nearest("gpt", ["llama", "qwen"]) == " (known: llama, qwen)"


def test_a_fault_between_keys_names_the_table_without_quoting_it():
    class Outer(Description):
        job: Job

    with pytest.raises(
        ShardwrightError, match=r"job: warmup_steps=2000 is not less than steps=1000"
    ) as raised:
        Outer.checked({"job": {"seq": 1, "global_batch": 1, "warmup_steps": 2000}})
    assert "{" not in str(raised.value)
