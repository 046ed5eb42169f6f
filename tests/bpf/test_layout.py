"""``controller/dataplane/layout.py`` says what ``bpf/shared.h`` says, by the C compiler."""

from __future__ import annotations

import enum
import re
from pathlib import Path

import numpy as np
import pytest

from controller.dataplane import layout
from controller.dataplane.compile import SOURCE_DIRECTORY, Artifact
from tests.hook import run_c

STRUCTS = {
    "flow_key": layout.FLOW_KEY,
    "psn_gap": layout.PSN_GAP,
    "flow_stats": layout.FLOW_STATS,
    "inflight_key": layout.INFLIGHT_KEY,
    "inflight": layout.INFLIGHT,
    "pair": layout.PAIR,
    "flow_event": layout.FLOW_EVENT,
    "port_control": layout.PORT_CONTROL,
    "class_control": layout.CLASS_CONTROL,
    "job_settings": layout.JOB_SETTINGS,
    "job_plan": layout.JOB_PLAN,
    "job_progress": layout.JOB_PROGRESS,
    "iteration_event": layout.ITERATION_EVENT,
    "laxity_control": layout.LAXITY_CONTROL,
    "dcqcn_control": layout.DCQCN_CONTROL,
    "flow_control": layout.FLOW_CONTROL,
    "marker": layout.MARKER,
    "replay_meta": layout.REPLAY_META,
    "test_clock": layout.TEST_CLOCK,
}
ENUMS: dict[str, tuple[str, type[enum.IntEnum]]] = {
    "direction": ("DIRECTION_", layout.Direction),
    "reason": ("REASON_", layout.Reason),
    "kind": ("KIND_", layout.Kind),
    "transport": ("TRANSPORT_", layout.Transport),
    "nak_code": ("NAK_", layout.NakCode),
    "pair_state": ("PAIR_", layout.PairState),
    "phase": ("PHASE_", layout.PhaseNumber),
    "act": ("ACT_", layout.Act),
}
# Bits are #define constants in C, NAME_ and the member's name.
FLAGS: dict[str, type[enum.IntFlag]] = {
    "PORT_": layout.PortFlag,
    "JOB_": layout.JobFlag,
    "DCQCN_": layout.DcqcnFlag,
}
CONSTANTS = {
    "STELLAR_ABI": layout.ABI,
    "STELLAR_MAX_PORTS": layout.MAX_PORTS,
    "STELLAR_MAX_FLOWS": layout.MAX_FLOWS,
    "PSN_GAP_SLOTS": layout.PSN_GAP_SLOTS,
    "RTT_BUCKETS": layout.RTT_BUCKETS,
    "RTT_FIRST_LOG2": layout.RTT_FIRST_LOG2,
    "STELLAR_CLASSES": layout.CLASSES,
    "STELLAR_TOP_CLASS": layout.TOP_CLASS,
    "STELLAR_MAX_JOBS": layout.MAX_JOBS,
    "STELLAR_MAX_CONTROLS": layout.MAX_CONTROLS,
    "CLASS_UNSET": layout.CLASS_UNSET,
    "MARKER_SLOTS": layout.MARKER_SLOTS,
    "MARKERS_PER_PORT": layout.MARKERS_PER_PORT,
    "LAXITY_THRESHOLDS": layout.CLASSES - 1,
}
_U32, _U64 = np.dtype("<u4"), np.dtype("<u8")
# Maps by name: (key, value) as Python reads them.
MAPS = {
    "flows": (layout.FLOW_KEY, layout.FLOW_STATS),
    "flow_template": (_U32, layout.FLOW_STATS),
    "inflight": (layout.INFLIGHT_KEY, layout.INFLIGHT),
    "pairs": (layout.FLOW_KEY, layout.PAIR),
    "reasons": (_U32, _U64),
    "port_controls": (_U32, layout.PORT_CONTROL),
    "class_controls": (_U32, layout.CLASS_CONTROL),
    "dcqcn_controls": (_U32, layout.DCQCN_CONTROL),
    "laxity_controls": (_U32, layout.LAXITY_CONTROL),
    "dscp_classes": (_U32, _U32),
    "jobs": (_U32, layout.JOB_SETTINGS),
    "plans": (_U32, layout.JOB_PLAN),
    "assignments": (layout.FLOW_KEY, _U32),
    "control_epoch": (_U32, _U32),
    "crc32_table": (_U32, _U32),
    "controls": (_U32, layout.FLOW_CONTROL),
    "progress": (_U32, layout.JOB_PROGRESS),
    "job_departures": (_U32, _U64),
    "markers": (_U32, layout.MARKER),
    "acts": (_U32, _U64),
}
ENTRIES = {
    "reasons": layout.MAX_PORTS * len(layout.Direction) * len(layout.Reason),
    "flows": layout.MAX_FLOWS,
    "pairs": layout.MAX_FLOWS,
    "port_controls": layout.MAX_PORTS,
    "class_controls": layout.MAX_PORTS * layout.CLASSES,
    "dcqcn_controls": layout.MAX_PORTS,
    "dscp_classes": 64,
    "jobs": layout.MAX_JOBS,
    "plans": 2 * layout.MAX_JOBS,
    "assignments": layout.MAX_CONTROLS,
    "crc32_table": 256,
    "controls": layout.MAX_CONTROLS,
    "progress": layout.MAX_JOBS,
    "job_departures": layout.MAX_JOBS * layout.MAX_PORTS,
    "markers": layout.MAX_PORTS * layout.MARKERS_PER_PORT,
    "acts": layout.MAX_PORTS * len(layout.Act),
}
HEADER = (SOURCE_DIRECTORY / "shared.h").read_text()


def enumerators(name: str) -> list[str]:
    match = re.search(rf"enum {name} \{{(.*?)\}};", HEADER, re.DOTALL)
    assert match, f"enum {name} is not in shared.h"
    body = re.sub(r"/\*.*?\*/", "", match[1], flags=re.DOTALL)
    return re.findall(r"[A-Z][A-Z0-9_]*", body)


def flags_in_c() -> list[str]:
    """Names of all bits: constants of 1, 2, 4 .. whose name begins as one of FLAGS."""
    found = re.findall(r"^#define (\w+)\s+(\d+)", HEADER, re.MULTILINE)
    bits = {str(1 << bit) for bit in range(32)}
    return [name for name, value in found if name.startswith(tuple(FLAGS)) and value in bits]


@pytest.fixture(scope="module")
def compiler_says(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Value of each C expression below, by its text."""
    expressions = [*CONSTANTS, *flags_in_c()]
    for struct, dtype in STRUCTS.items():
        expressions.append(f"sizeof(struct {struct})")
        for member in dtype.names or ():
            expressions.append(f"offsetof(struct {struct}, {member})")
            expressions.append(f"sizeof(((struct {struct} *)0)->{member})")
    for name in ENUMS:
        expressions += enumerators(name)
    prints = "\n".join(f'printf("%s\\t%lld\\n", "{e}", (long long)({e}));' for e in expressions)
    tmp: Path = tmp_path_factory.mktemp("layout")
    output = run_c(
        tmp,
        "#include <stddef.h>\n#include <stdio.h>\n#include <linux/types.h>\n"
        f'#include <linux/bpf.h>\n#include "shared.h"\nint main(void) {{ {prints} }}\n',
    )
    return {line.split("\t")[0]: int(line.split("\t")[1]) for line in output.splitlines()}


@pytest.mark.parametrize("name", STRUCTS)
def test_a_struct_has_the_same_members_at_the_same_offsets(
    name: str, compiler_says: dict[str, int]
) -> None:
    dtype = STRUCTS[name]
    assert dtype.names and dtype.fields
    end = 0
    for member in dtype.names:
        field, offset = dtype.fields[member][:2]
        assert offset == compiler_says[f"offsetof(struct {name}, {member})"], member
        size = compiler_says[f"sizeof(((struct {name} *)0)->{member})"]
        assert field.itemsize == size, member
        # No hole, so no member of the C struct is missing here.
        assert offset == end, f"hole before {member}"
        end = offset + size
    assert end == dtype.itemsize == compiler_says[f"sizeof(struct {name})"]


def test_every_struct_of_the_header_is_mirrored() -> None:
    assert set(re.findall(r"^struct (\w+) \{", HEADER, re.MULTILINE)) == set(STRUCTS)


def test_every_enum_of_the_header_is_mirrored() -> None:
    assert set(re.findall(r"^enum (\w+) \{", HEADER, re.MULTILINE)) == set(ENUMS)


@pytest.mark.parametrize("name", ENUMS)
def test_an_enum_has_the_same_names_and_values(name: str, compiler_says: dict[str, int]) -> None:
    prefix, mirror = ENUMS[name]
    in_c = {label: compiler_says[label] for label in enumerators(name)}
    count = in_c.pop(f"{prefix}MAX", len(mirror))
    assert in_c == {prefix + member.name: member.value for member in mirror}
    assert count == len(mirror)


@pytest.mark.parametrize("prefix", FLAGS)
def test_a_set_of_bits_has_the_same_names_and_values(
    prefix: str, compiler_says: dict[str, int]
) -> None:
    in_c = {name: compiler_says[name] for name in flags_in_c() if name.startswith(prefix)}
    assert in_c == {prefix + str(member.name): member.value for member in FLAGS[prefix]}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_has_the_same_value(name: str, compiler_says: dict[str, int]) -> None:
    assert compiler_says[name] == CONSTANTS[name]


def test_the_compiled_maps_have_the_sizes_that_python_reads(artifact: Artifact) -> None:
    for name, (key, value) in MAPS.items():
        spec = artifact.maps[name]
        assert (spec.key_size, spec.value_size) == (key.itemsize, value.itemsize), name
    for name, entries in ENTRIES.items():
        assert artifact.maps[name].max_entries == entries, name


def test_every_map_that_python_reads_or_writes_is_compared(artifact: Artifact) -> None:
    of_the_programs_alone = {"events", "packet_in_hand"}
    assert set(artifact.maps) == set(MAPS) | of_the_programs_alone


def test_the_ring_buffer_holds_4096_events(artifact: Artifact) -> None:
    record = 8 + layout.FLOW_EVENT.itemsize  # behind a header of 8 bytes
    assert record % 8 == 0
    assert artifact.maps["events"].max_entries // record == 4096


def test_rtt_buckets_are_half_octaves_from_512_ns() -> None:
    bounds = layout.rtt_bucket_bounds_ns()
    assert bounds.tolist()[:5] == [0, 768, 1024, 1536, 2048]
    assert len(bounds) == layout.RTT_BUCKETS
