"""Printouts of `nvidia-smi topo -m`: every artefact read right or refused, and none with a column moved."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import EvidenceError
from shardwright.measure.topology import has_matrix, read_topologies

FOLDER = Path(__file__).parent / "data" / "topo"
FILES = sorted(FOLDER.glob("*.txt"))
BROKEN = "t29_bad_matrix_hand_edited_missing_columns.txt"
GOOD = [path for path in FILES if path.name != BROKEN]
LINK = r"(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS)"

# By eye, from the files: devices, NICs, what the legend calls them, CPU affinity and NUMA node of the first
# and of the last device, and GPU NUMA ID of the first.
EXPECTED = {
    "t03": (2, [], [], ("28-55,84-111", "28-55,84-111"), ("1", "1"), "N/A"),
    "t04": (8, ["mlx5_0", "mlx5_1"], ["mlx5_0", "mlx5_1"], ("0-23,48-71", "24-47,72-95"), ("0", "1"), ""),
    "t05": (4, ["NIC0"], ["rocep49s0"], ("32-63,96-127", "32-63,96-127"), ("1", "1"), "N/A"),
    "t06": (4, [], [], ("0-47", "0-47"), ("0", "0"), "N/A"),
    "t07": (2, ["NIC0", "NIC1"], ["mlx5_0", "mlx5_1"], ("56-111,168-223",) * 2, ("1", "1"), "N/A"),
    "t08": (
        2,
        ["NIC0", "NIC1", "NIC2", "NIC3"],
        ["rocep4s0f0", "rocep4s0f1", "rocep137s0f0", "rocep137s0f1"],
        ("0-13,28-41", "14-27,42-55"),
        ("0", "1"),
        "N/A",
    ),
    "t09": (8, ["NIC0", "NIC1"], ["mlx5_0", "mlx5_1"], ("0-15,64-79", "48-63,112-127"), ("0", "3"), "N/A"),
    "t11": (4, ["NIC0", "NIC1"], ["mlx5_0", "mlx5_1"], ("0-95,192-287", "96-191,288-383"), ("0", "1"), "N/A"),
    "t12": (2, [], [], ("0-63", "0-63"), ("0", "0"), "N/A"),
    "t14": (8, [], [], ("0-47,96-143", "48-95,144-191"), ("0", "1"), "N/A"),
    "t15": (4, ["NIC0", "NIC1", "NIC2", "NIC3"], [""] * 4, ("0-15", "0-15"), ("0", "0"), "N/A"),
    "t16": (4, ["NIC0", "NIC1", "NIC2", "NIC3"], [""] * 4, ("0", "0"), ("0-1", "0-1"), ""),
    "t18": (3, ["NIC0", "NIC1"], ["mlx5_0", "mlx5_1"], ("64-71", "64-71"), ("1", "1"), "N/A"),
    "t19": (4, ["NIC0"], ["mlx5_0"], ("0-103", "0-103"), ("0", "0"), "N/A"),
    "t20": (
        8,
        [f"NIC{n}" for n in range(12)],
        [""] * 12,
        ("0-55,112-167", "56-111,168-223"),
        ("0", "1"),
        "N/A",
    ),
    "t21": (8, [f"NIC{n}" for n in range(8)], [""] * 8, ("0-47,96-143", "48-95,144-191"), ("0", "1"), "N/A"),
    "t24": (8, [], [], ("0-31,64-95", "32-63,96-127"), ("0", "1"), ""),
    "t27": (8, [f"NIC{n}" for n in range(6)], [""] * 6, ("0-47,96-143", ""), ("0", ""), "N/A"),
    "t32": (6, ["mlx5_1", "mlx5_0"], ["mlx5_1", "mlx5_0"], ("0-13,28-41", "14-27,42-55"), ("", ""), ""),
}

# Links that would be wrong if a column were moved, by eye: from, to, class.
LINKS = {
    "t04": [
        ("GPU0", "GPU7", "NV2"),
        ("GPU3", "GPU4", "NV1"),
        ("GPU2", "mlx5_0", "PIX"),
        ("GPU7", "mlx5_1", "PIX"),
    ],
    "t05": [("GPU3", "NIC0", "SYS"), ("GPU0", "GPU1", "NV12")],
    "t08": [
        ("GPU0", "NIC1", "PHB"),
        ("GPU0", "NIC2", "SYS"),
        ("GPU1", "NIC2", "PHB"),
        ("NIC2", "NIC3", "PIX"),
    ],
    "t11": [
        ("GPU2", "NIC0", "NODE"),
        ("GPU1", "NIC0", "SYS"),
        ("GPU2", "GPU3", "NODE"),
        ("GPU1", "GPU2", "SYS"),
    ],
    "t12": [("GPU0", "GPU1", "PHB")],
    "t15": [("GPU2", "NIC2", "PXB"), ("GPU2", "NIC1", "NODE"), ("GPU0", "GPU3", "NV4")],
    "t16": [("GPU3", "NIC3", "PXB"), ("GPU3", "NIC2", "SYS")],
    "t18": [("GPU0", "GPU1", "NV4"), ("GPU2", "NIC0", "PHB"), ("GPU1", "NIC1", "NODE")],
    "t20": [
        ("GPU0", "NIC0", "PIX"),
        ("GPU4", "NIC6", "PIX"),
        ("GPU7", "NIC9", "PIX"),
        ("GPU7", "NIC8", "PXB"),
    ],
    "t21": [("GPU3", "NIC3", "PIX"), ("GPU4", "NIC4", "PIX"), ("GPU3", "NIC4", "SYS")],
    "t24": [
        ("GPU0", "GPU1", "NV12"),
        ("GPU1", "GPU2", "NODE"),
        ("GPU6", "GPU7", "NV12"),
        ("GPU3", "GPU4", "SYS"),
    ],
    "t27": [
        ("GPU2", "NIC1", "PIX"),
        ("GPU6", "NIC3", "PIX"),
        ("GPU1", "NIC0", "SYS"),
        ("GPU7", "GPU0", "NV18"),
    ],
    "t32": [
        ("GPU2", "mlx5_0", "PIX"),
        ("GPU5", "mlx5_1", "PIX"),
        ("GPU0", "mlx5_0", "NODE"),
        ("GPU0", "GPU1", "PIX"),
    ],
}


def read(text, name="topo.txt"):
    return read_topologies(text, name)


def one(path):
    (topology,) = read(path.read_text(), path.name)
    return topology


def link(topology, a, b):
    names = [*topology.devices, *topology.nics]
    return topology.classes[names.index(a)][names.index(b)]


def content(topology):
    """What a topology says, wherever it stands."""
    return replace(topology, file="", line=0, rows=(), host="", peers=())


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.name[:3])
def test_an_artefact_has_the_devices_nics_and_affinities_that_stand_in_it(path):
    found = one(path)
    devices, nics, legend, affinity, numa, gpu_numa = EXPECTED[path.name[:3]]
    assert found.devices == tuple(f"GPU{n}" for n in range(devices))
    assert list(found.nics) == nics
    assert list(found.nic_devices) == legend
    assert (found.affinity[0], found.affinity[-1]) == affinity
    assert (found.numa[0], found.numa[-1]) == numa
    assert found.gpu_numa[0] == gpu_numa


@pytest.mark.parametrize(
    ("path", "a", "b", "expected"),
    [(path, *each) for path in GOOD for each in LINKS.get(path.name[:3], [])],
    ids=lambda value: value.name[:3] if isinstance(value, Path) else value,
)
def test_a_link_is_of_the_class_that_stands_between_its_names(path, a, b, expected):
    found = one(path)
    assert link(found, a, b) == link(found, b, a) == expected


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.name[:3])
def test_every_cell_of_every_row_is_where_its_words_stand(path):
    """No artefact has a blank cell of links, so that words of a line are its cells."""
    found = one(path)
    header, *rest = [
        line.split() for line in path.read_text().split("# nvidia-smi topo -p2p")[0].splitlines()
    ]
    while not header or not header[0].startswith(("GPU", "mlx")):
        header, *rest = rest
    names = header[: header.index("CPU")]
    seen = 0
    for words in rest:
        if words and words[0] in names and re.fullmatch(LINK, words[1]):
            assert [link(found, words[0], name) for name in names] == words[1 : 1 + len(names)]
            seen += 1
    assert seen == len(names) - sum(1 for n in [*found.devices, *found.nics] if unread(found, n))


def unread(topology, name):
    """Whether a name has no row of its own: the matrix was cut off."""
    return any(
        f"row {name} is" in words or name in words.split(":")[0].split() for words in missing(topology)
    )


def missing(topology):
    return [words.replace(",", "") for words in topology.missing]


def test_the_broken_matrix_is_refused_with_file_line_and_column():
    with pytest.raises(EvidenceError, match=rf"^{BROKEN}:4:10: row GPU1 has X in column GPU0") as caught:
        read((FOLDER / BROKEN).read_text(), BROKEN)
    assert caught.value.exit_status == 2


def test_rows_that_were_cut_off_are_said_and_filled_by_symmetry_alone():
    found = one(FOLDER / "t27_h100_4nic_for_8gpu_sys_nics.txt")
    assert found.device_classes[7] == ("NV18",) * 7 + ("X",)
    assert [row[7] for row in found.nic_classes] == ["-"] * 6
    assert [row[0] for row in found.nic_classes] == ["PIX", "SYS", "SYS", "SYS", "SYS", "SYS"]
    assert found.missing[0].startswith(
        "row GPU7 is missing: its links to NIC0, NIC1, NIC2, NIC3, NIC4, NIC5 and"
    )
    assert found.affinity[7] == found.numa[7] == ""


def test_peer_to_peer_status_is_put_to_its_matrix():
    found = one(FOLDER / "t12_2x5090_phb_with_p2p_gns.txt")
    (peers,) = found.peers
    assert (peers.line, peers.text.split(), peers.what) == (8, ["GPU0", "X", "GNS"], "rw")
    assert peers.status == (("X", "GNS"), ("GNS", "X"))


def labelled(text):
    """Two tasks of `srun --label`, their lines mixed."""
    lines = text.splitlines()
    return "\n".join(f"{task}: {line}" for line in lines for task in (0, 1)) + "\n"


FORMS = {
    "CRLF": lambda text: text.replace("\n", "\r\n"),
    "colours": lambda text: re.sub(r"(GPU\d+|NIC\d+)", "\x1b[4m\\1\x1b[0m", text),
    "colours without escape": lambda text: re.sub(r"(GPU\d+)", r"[4m\1[0m", text),
    "tabs as spaces": lambda text: text.expandtabs(8),
    "blank lines between": lambda text: text.replace("\n", "\n\n"),
    "byte order mark": lambda text: "\ufeff" + text,
    "indented": lambda text: "".join(f"    {line}" for line in text.splitlines(keepends=True)),
    "in a log": lambda text: f"$ nvidia-smi topo -m\n{text}\nINFO: starting\nstep: 1 loss: 2.0\n",
    "prompt behind": lambda text: text.rstrip("\n") + "\nuser@host:~$ exit\n",
    "trailing spaces": lambda text: re.sub(r"(?m)$", "   ", text),
    "quoted": lambda text: re.sub("(?m)^", "> ", text),
    "with the time": lambda text: re.sub("(?m)^", "2024-05-01T12:00:00.123456Z ", text),
    "pdsh": lambda text: "".join(f"node7: {line}" for line in text.splitlines(keepends=True)),
    "mpirun": lambda text: "".join(f"[1,0]<stdout>:{line}" for line in text.splitlines(keepends=True)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.name[:3])
def test_a_printout_is_the_same_in_every_form(path, form):
    (found,) = read(FORMS[form](path.read_text()))
    assert content(found) == content(one(path))


@pytest.mark.parametrize("width", [60, 80, 100, 132])
@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.name[:3])
def test_lines_that_a_terminal_broke_are_made_whole(path, width):
    lines = path.read_text().expandtabs(8).splitlines()
    if path.name.startswith("t27"):
        lines = lines[1:]  # a comment that is broken is no comment any more
    broken = [line[at : at + width] for line in lines for at in range(0, max(len(line), 1), width)]
    (found,) = read("\n".join(broken) + "\n")
    assert content(found) == content(one(path))


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.name[:3])
def test_two_tasks_are_two_nodes(path):
    first, second = read(labelled(path.read_text()))
    assert (first.host, second.host) == ("0", "1")
    assert content(first) == content(second) == content(one(path))


def test_printouts_of_several_hosts_in_one_file_are_several_nodes():
    a, b = (FOLDER / name for name in ("t14_8xh20_no_nic_columns.txt", "t05_4xa100_sxm_single_nic_sys.txt"))
    first, second = read(f"== node1\n{a.read_text()}\n== node2\n{b.read_text()}")
    assert content(first) == content(one(a))
    assert content(second) == content(one(b))


def rows_of(text):
    """Lines of a matrix' rows: number from 0, and the places of their cells of links."""
    lines = text.split("\n")
    found = []
    for number, line in enumerate(lines):
        if "topo -p2p" in line:
            break
        words = list(re.finditer(r"\S+", line))
        if (
            len(words) > 2
            and re.fullmatch(r"(GPU|NIC|mlx5_)\d+", words[0][0])
            and re.fullmatch(LINK, words[1][0])
        ):
            cells = [(word.start(), word.end()) for word in words[1:] if re.fullmatch(LINK, word[0])]
            found.append((number, cells))
    return lines, found


SOME = st.sampled_from(GOOD)


@settings(deadline=None)
@given(SOME, st.data())
def test_a_cell_too_few_is_refused(path, data):
    lines, rows = rows_of(path.read_text())
    number, cells = data.draw(st.sampled_from(rows))
    start, end = data.draw(st.sampled_from(cells))
    line = lines[number]
    lines[number] = line[:start].rstrip(" \t") + line[end:]
    with pytest.raises(EvidenceError, match=rf"^topo.txt:\d+:\d+: row {line.split()[0]} "):
        read("\n".join(lines))


@settings(deadline=None)
@given(SOME, st.data())
def test_a_cell_too_many_is_refused(path, data):
    lines, rows = rows_of(path.read_text())
    number, cells = data.draw(st.sampled_from(rows))
    start, end = data.draw(st.sampled_from(cells))
    line = lines[number]
    between = "\t" if "\t" in line else "     "
    lines[number] = line[:end] + between + line[start:end] + line[end:]
    with pytest.raises(EvidenceError, match=rf"^topo.txt:{number + 1}:\d+: row {line.split()[0]} "):
        read("\n".join(lines))


@settings(deadline=None)
@given(SOME, st.data())
def test_two_cells_of_a_row_exchanged_are_refused_unless_they_are_alike(path, data):
    text = path.read_text()
    lines, rows = rows_of(text)
    number, cells = data.draw(st.sampled_from(rows))
    known = cells[: len(rows)]  # of columns that have rows, the others have nothing to agree with
    (a, b), (c, d) = sorted(data.draw(st.lists(st.sampled_from(known), min_size=2, max_size=2, unique=True)))
    line = lines[number]
    lines[number] = line[:a] + line[c:d] + line[b:c] + line[a:b] + line[d:]
    if line[a:b] == line[c:d]:
        assert content(*read("\n".join(lines))) == content(one(path))
    else:
        with pytest.raises(EvidenceError, match=r"^topo.txt:\d+:\d+: row "):
            read("\n".join(lines))


@settings(deadline=None)
@given(SOME, st.data())
def test_two_columns_exchanged_with_their_names_change_nothing(path, data):
    lines, rows = rows_of(path.read_text())
    count = len(rows[0][1])
    a, b = sorted(data.draw(st.lists(st.sampled_from(range(count)), min_size=2, max_size=2, unique=True)))
    first = next(n for n, line in enumerate(lines) if "CPU Affinity" in line)
    for number in [first, *(number for number, _ in rows)]:
        words = list(re.finditer(r"\S+", lines[number]))
        words = words[:count] if number == first else words[1 : 1 + count]
        (i, j), (k, m) = words[a].span(), words[b].span()
        line = lines[number]
        lines[number] = line[:i] + line[k:m] + line[j:k] + line[i:j] + line[m:]
    (found,), known = read("\n".join(lines)), one(path)
    names = [*known.devices, *known.nics]
    assert {(x, y): link(found, x, y) for x in names for y in names} == {
        (x, y): link(known, x, y) for x in names for y in names
    }
    assert (found.affinity, found.numa) == (known.affinity, known.numa)


@settings(deadline=None)
@given(SOME, st.data())
def test_a_row_that_is_cut_off_changes_no_link_that_is_still_known(path, data):
    lines, rows = rows_of(path.read_text())
    number, _ = data.draw(st.sampled_from(rows))
    name = lines[number].split()[0]
    del lines[number]
    (found,), known = read("\n".join(lines)), one(path)
    names = [*known.devices, *known.nics]
    for a in names:
        for b in names:
            assert link(found, a, b) in (link(known, a, b), "-")
    if name.startswith("GPU"):  # of one NIC the others tell all
        assert any(f"row {name} is missing" in words for words in found.missing)


@settings(deadline=None)
@given(SOME)
def test_a_column_name_too_few_is_refused(path):
    text = path.read_text()
    first = re.search(r"GPU1[ \t]+", text)
    with pytest.raises(EvidenceError, match=r"^topo.txt:\d+:\d+: row "):
        read(text[: first.start()] + text[first.end() :])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("GPU0\tX\tNV4\nGPU1\tNV4\tX\n", r":1:1: a row of links stands under no header"),
        ("\tGPU0\tGPU1\tCPU Affinity\n", r":1:1: a header of a topology is followed by no row"),
        ("\tGPU0\tGPU0\tCPU Affinity\nGPU0\tX\tX\n", r":1:7: column GPU0 stands twice"),
        ("\tGPU0\tGPU1\nGPU0\tX\tNVX\nGPU1\tNVX\tX\n", r":2:8: row GPU0 in column GPU1 is 'NVX', no class"),
        (
            "\tGPU0\tGPU1\nGPU0\tX\tSYS\nGPU1\tPIX\tX\n",
            r":3:6: row GPU1 has PIX in column GPU0, row GPU0 \(line 2\)",
        ),
        ("\tGPU0\tGPU1\nGPU0\tX\tSYS\nGPU0\tX\tSYS\n", r":3:1: row GPU0 stands twice"),
        ("\tGPU0\tGPU1\nGPU0\tX\t\nGPU1\tSYS\tX\n", r":2:8: row GPU0 in column GPU1 is blank"),
        (
            "GPU0 GPU1 CPU Affinity NUMA Affinity\nGPU0 X SYS 0-3\nGPU1 SYS X 0-3\n",
            r":2:12: row GPU0 has \['0-3'\] behind its links, the header has the columns CPU Affinity, NUMA",
        ),
    ],
)
def test_a_matrix_that_contradicts_itself_is_refused(text, words):
    with pytest.raises(EvidenceError, match="^topo.txt" + words):
        read(text)


def test_a_text_without_a_matrix_has_none():
    text = "step: 1 loss: 2.0\nGPU0 is hot\nGPU0 and GPU1 talk over NV4\n"
    assert not has_matrix(text)
    assert read(text) == []


def test_old_drivers_write_soc_for_sys():
    (found,) = read("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSOC\t0-7\nGPU1\tSOC\t X \t8-15\n")
    assert found.device_classes == (("X", "SYS"), ("SYS", "X"))


WHOLE = [path for path in GOOD if not one(path).missing]
"""Those with a row for every name: each link stands twice."""


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(WHOLE), st.data())
def test_characters_lost_or_gained_anywhere_never_move_a_link(path, data):
    """Refused, or every link between two names that are still there is what it was, or not known."""
    text = path.read_text()
    end = text.index("Legend") if "Legend" in text else len(text)
    start = data.draw(st.integers(0, end - 1))
    stop = data.draw(st.integers(start, min(start + 60, end)))
    extra = data.draw(st.sampled_from(["", "", "\t", " ", "X", "\n", "NV12\t", "SYS     ", "1"]))
    try:
        found = read(text[:start] + extra + text[stop:])
    except EvidenceError as fault:
        if re.match(r"topo.txt:\d+:\d+: ", str(fault)):
            return
        raise
    known = one(path)
    names = {*known.devices, *known.nics}
    for topology in found:
        own = [name for name in (*topology.devices, *topology.nics) if name in names]
        for a in own:
            for b in own:
                assert link(topology, a, b) in (link(known, a, b), "-"), (
                    a,
                    b,
                    text[:start] + extra + text[stop:],
                )
