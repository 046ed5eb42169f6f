"""Configuration files: what every key becomes, and what an error names."""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from pathlib import Path

import pytest

from controller.config import Config, DcqcnConfig, InterfaceConfig, load_config
from controller.congestion.dcqcn import preset
from controller.errors import UsageError
from controller.priority.classes import default_classes
from controller.priority.jobs import Job, JobMatch
from controller.priority.laxity import DEFAULT_THRESHOLDS_ns

LINK_Bps = 12_500_000


def load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "stellar.toml"
    path.write_text(text)
    return load_config(path)


def test_an_empty_file_is_the_default_configuration(tmp_path: Path) -> None:
    config = load(tmp_path, "")
    assert config == Config()
    assert config.classes == default_classes()
    assert not config.dcqcn.enabled


def test_every_key_arrives_where_it_belongs(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
        [observe]
        max_flows = 1000
        idle_flow_s = 5
        [control]
        env_variable = "MY_JOB"
        horizon = "200ms"
        beyond_horizon = "drop"
        [ecn]
        slot = "62.5us"
        [laxity]
        thresholds = ["1s", "500ms", "100ms", "50ms", "20ms", "10ms", "1ms"]
        hysteresis = 0.25
        raise = "drained"
        [dcqcn]
        enabled = false
        preset = "connectx"
        prediction = false
        phases = false
        [[interface]]
        name = "host1:eth0"
        mode = "tc"
        rate = "100mbit"
        mark = "instant"
        echo = "cnp"
        pace = true
        classify = "dscp"
        drain = 0.9
        [[interface]]
        name = "eth1"
        pace = false
        """,
    )
    assert (config.observe.max_flows, config.observe.idle_flow_s) == (1000, 5)
    assert config.control.env_variable == "MY_JOB"
    assert config.control.horizon_ns == 200_000_000
    assert config.control.beyond_horizon == "drop"
    assert config.ecn.slot_ns == 62_500
    assert config.laxity.thresholds_ns[0] == 1_000_000_000
    assert config.laxity.thresholds_ns[6] == 1_000_000
    assert (config.laxity.hysteresis, config.laxity.raise_at) == (0.25, "drained")
    assert config.dcqcn == DcqcnConfig(False, "connectx", False, False)
    assert config.interfaces == (
        InterfaceConfig("host1", "eth0", "tc", LINK_Bps, "instant", "cnp", True, "dscp", 0.9),
        InterfaceConfig("", "eth1", "native", None, None, None, False, None, 0.95),
    )


def test_a_class_keeps_what_its_entry_does_not_name(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
        [[class]]
        number = 6
        dscp = 46
        priority = 5
        kmin = "100KB"
        kmax = 400000
        pmax = 0.2
        floor = 0.2
        ceiling = 0.5
        [[class]]
        number = 1
        pmax = 1
        """,
    )
    expected = list(default_classes())
    expected[6] = replace(
        expected[6], dscp=46, priority=5, kmin_bytes=100_000, kmax_bytes=400_000, pmax=0.2,
        floor_share=0.2, ceiling_share=0.5,
    )  # fmt: skip
    expected[1] = replace(expected[1], pmax=1.0)
    assert config.classes == tuple(expected)


def test_two_classes_may_swap_their_dscps(tmp_path: Path) -> None:
    config = load(tmp_path, "[[class]]\nnumber = 0\ndscp = 0\n[[class]]\nnumber = 1\ndscp = 8\n")
    assert [entry.dscp for entry in config.classes[:2]] == [0, 8]


def test_jobs_keep_their_order_and_rules(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
        [[job]]
        name = "llama"
        class = 5
        class_floor = 2
        class_ceiling = 7
        set_ect = true
        rate = "50mbit"
        dcqcn = false
        [job.match]
        src = "10.0.0.0/24"
        dst = ["10.0.1.1", "fd00::/8"]
        qpn = [0x11, 18]
        uid = 1000
        command = ["python*", "torchrun"]
        cgroup = "/system.slice"
        env = "RANK=*"
        [[job]]
        name = "opt"
        """,
    )
    match = JobMatch(
        src=(ipaddress.ip_network("10.0.0.0/24"),),
        dst=(ipaddress.ip_network("10.0.1.1/32"), ipaddress.ip_network("fd00::/8")),
        qpn=(17, 18),
        uid=(1000,),
        command=("python*", "torchrun"),
        cgroup=("/system.slice",),
        env=("RANK=*",),
    )
    assert config.jobs == (Job("llama", match, 5, 2, 7, True, 6_250_000, False), Job("opt"))


def test_dcqcn_is_on_when_its_table_is_there(tmp_path: Path) -> None:
    assert load(tmp_path, "[dcqcn]\n").dcqcn == DcqcnConfig(enabled=True)


def test_constants_of_dcqcn_hold_as_given_and_the_others_follow_the_link(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
        [dcqcn]
        g = 0.0625
        initial_alpha = 0.5
        alpha_update = "1ms"
        decrease_interval = "0"
        timer = "2ms"
        echo_interval = "100us"
        byte_counter = "1MB"
        fast_recovery_steps = 3
        rate_ai = "1mbit"
        rate_hai = "4mbit"
        min_rate = "100kbit"
        first_cut_rate = "0"
        min_decrease_factor = 0.25
        [dcqcn.phase_steps]
        idle = 0
        begin = 4
        middle = 1.5
        end = 0.25
        begin_share = 0.2
        end_share = 0.8
        """,
    )
    dcqcn = config.dcqcn
    found = dcqcn.parameters(LINK_Bps)
    assert found == replace(
        preset("paper", LINK_Bps),
        g=0.0625, initial_alpha=0.5, alpha_update_ns=1_000_000, decrease_interval_ns=0,
        timer_ns=2_000_000, echo_interval_ns=100_000, byte_counter_bytes=1_000_000,
        fast_recovery_steps=3, rate_ai_Bps=125_000, rate_hai_Bps=500_000, min_rate_Bps=12_500,
        first_cut_rate_Bps=0, min_decrease_factor=0.25,
        phase_steps=type(found.phase_steps)(0, 4, 1.5, 0.25, 0.2, 0.8),
    )  # fmt: skip
    assert dcqcn.parameters(10 * LINK_Bps).timer_ns == 2_000_000
    # Every constant can be given, but for the link's own rate and the table of steps.
    assert set(dcqcn.overrides) == set(vars(found)) - {"link_Bps", "phase_steps"}
    assert set(dcqcn.phase_overrides) == set(vars(found.phase_steps))

    half = load(tmp_path, "[dcqcn]\npreset = 'connectx'\nrate_ai = '80kbit'\n").dcqcn
    assert half.parameters(LINK_Bps) == replace(preset("connectx", LINK_Bps), rate_ai_Bps=10_000)


def test_constants_that_do_not_fit_together_on_a_link_are_refused_there(tmp_path: Path) -> None:
    """The preset's hyper step shrinks with the link, below the additive one that is given."""
    dcqcn = load(tmp_path, "[dcqcn]\npreset = 'connectx'\nrate_ai = '1mbit'\n").dcqcn
    dcqcn.parameters(100 * LINK_Bps)
    with pytest.raises(UsageError, match=r"rate_hai_Bps is .*; allowed: rate_ai_Bps \(125000\)"):
        dcqcn.parameters(LINK_Bps)


def test_default_thresholds_stand_when_only_hysteresis_is_given(tmp_path: Path) -> None:
    laxity = load(tmp_path, "[laxity]\nhysteresis = 0\n").laxity
    assert laxity.thresholds_ns == DEFAULT_THRESHOLDS_ns
    assert laxity.hysteresis == 0


CLASS = "[[class]]\nnumber = 2\n"
JOB = "[[job]]\nname = 'a'\n"
IF = "[[interface]]\nname = 'eth0'\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # classes
        (CLASS + "dscp = 64", ["class[1].dscp is 64", "0 .. 63"]),
        (CLASS + "dscp = '26'", ["class[1].dscp is '26'"]),
        (CLASS + "dscp = 26", ["key class:", "Classes 2 and 4", "dscp 26"]),
        (CLASS + "priority = 16", ["class[1].priority is 16", "0 .. 15"]),
        (CLASS + "kmin = '300KB'\nkmax = '200KB'", ["class[1]", "kmin 300000", "kmax 200000"]),
        (CLASS + "kmin = '3GB'\nkmax = '4GB'", ["class[1].kmin is '3GB'", "0 B .. 2.147 GB"]),
        (CLASS + "kmin = -1\nkmax = 1", ["class[1].kmin is -1"]),
        (CLASS + "kmax = '1MB'", ["class[1]", "kmax is given and kmin is not"]),
        (CLASS + "pmax = 0", ["class[1].pmax is 0", "above 0 .. 1"]),
        (CLASS + "pmax = nan", ["class[1].pmax is nan"]),
        (CLASS + "floor = 0.7", ["key class:", "110%", "100 %"]),
        (CLASS + "floor = 0.5\nceiling = 0.25", ["class[1]", "floor 0.5", "ceiling 0.25"]),
        (CLASS + "ceiling = 0", ["class[1].ceiling is 0", "above 0 .. 1"]),
        (CLASS + "weight = 1", ["class[1].weight is unknown", "dscp, priority, kmin"]),
        (CLASS + CLASS, ["class[2].number is 2 again"]),
        ("[[class]]\ndscp = 1", ["class[1].number is missing", "0 .. 7"]),
        ("[[class]]\nnumber = 8", ["class[1].number is 8", "0 .. 7"]),
        ("[class]\nnumber = 1", ["key class is a table", "[[class]]"]),
        ("class = 3", ["key class is 3", "[[class]]"]),
        # jobs
        (JOB + JOB, ["key job:", "Job a stands twice"]),
        ("[[job]]\nclass = 1", ["job[1].name is missing"]),
        ("[[job]]\nname = 'a b'", ["job[1]", "Job name is 'a b'"]),
        ("[[job]]\nname = 3", ["job[1].name is 3", "a string"]),
        (JOB + "class = 8", ["job[1].class is 8", "0 .. 7"]),
        (JOB + "class = 7", ["job[1]", "class is 7", "0 .. 6", "class_ceiling"]),
        (JOB + "class_floor = 6\nclass_ceiling = 5", ["job[1]", "class_floor 6"]),
        (JOB + "rate = '0mbit'", ["job[1].rate is '0mbit'", "8 kbit/s .. "]),
        (JOB + "rate = 0", ["job[1].rate is 0", "100mbit"]),
        (JOB + "rate = 100", ["job[1].rate is 100", "100mbit"]),
        (JOB + "rate = '100Mb'", ["job[1].rate is '100Mb'", "100mbit"]),
        (JOB + "set_ect = 1", ["job[1].set_ect is 1", "true, false"]),
        (JOB + "ect = true", ["job[1].ect is unknown", "set_ect"]),
        (JOB + "match = 'x'", ["job[1].match is 'x'", "a table"]),
        (JOB + "[job.match]\nsource = 'x'", ["job[1].match.source is unknown", "src, dst"]),
        (JOB + "[job.match]\nsrc = '10.0.0.1/24'", ["job[1].match.src", "host bits"]),
        (JOB + "[job.match]\nqpn = 16777216", ["job[1].match.qpn is 16777216"]),
        # interfaces
        (IF + "rate = '0'", ["interface[1].rate is '0'", "8 kbit/s .. "]),
        (IF + "mark = 'ecn'", ["interface[1].mark is 'ecn'", "window, instant, off"]),
        (IF + "echo = true", ["interface[1].echo is True", "becn, cnp, off"]),
        (IF + "pace = 'yes'", ["interface[1].pace is 'yes'", "true, false"]),
        (IF + "classify = 'x'", ["interface[1].classify is 'x'", "job, dscp"]),
        (IF + "drain = 0", ["interface[1].drain is 0", "above 0 .. 1"]),
        (IF + "drain = 1.5", ["interface[1].drain is 1.5"]),
        (IF + IF, ["interface[2].name is 'eth0' again"]),
        ("[[interface]]\nname = 'a:'", ["interface[1].name", "'a:'", "NETNS:IF"]),
        # the rest
        ("[control]\nenv_variable = 'A B'", ["control.env_variable is 'A B'", "STELLAR_JOB"]),
        ("[control]\nhorizon = '11s'", ["control.horizon is '11s'", "1 ms .. 10 s"]),
        ("[control]\nhorizon = 1", ["control.horizon is 1", "20ms"]),
        ("[control]\nbeyond_horizon = 'x'", ["control.beyond_horizon", "clamp, drop"]),
        ("[ecn]\nslot = '1ns'", ["ecn.slot is '1ns'", "1 us .. 1 s"]),
        ("[ecn]\nslots = 16", ["ecn.slots is unknown", "slot"]),
        ("[laxity]\nthresholds = ['1s']", ["laxity.thresholds", "7 durations"]),
        ("[laxity]\nthresholds = [7, 6, 5, 4, 3, 2, 1]", ["laxity.thresholds", "7 durations"]),
        (
            "[laxity]\nthresholds = ['7s', '6s', '5s', '4s', '3s', '2s', '2s']",
            ["laxity.thresholds", "class 7", "not below class 6's"],
        ),
        ("[laxity]\nhysteresis = 2", ["laxity.hysteresis is 2", "0 .. 1"]),
        ("[laxity]\nraise = 'now'", ["laxity.raise is 'now'", "message, drained"]),
        ("[dcqcn]\npreset = 'fast'", ["dcqcn.preset is 'fast'", "paper, connectx"]),
        ("[dcqcn]\ng = 0", ["dcqcn.g is 0", "above 0 .. 1"]),
        ("[dcqcn]\nmin_decrease_factor = 1", ["key dcqcn", "min_decrease_factor", "below 1"]),
        ("[dcqcn]\ntimer = '0'", ["dcqcn.timer is '0'", "1 ns .. 10 s"]),
        ("[dcqcn]\nfast_recovery_steps = 0", ["dcqcn.fast_recovery_steps is 0", "1 .. 31"]),
        ("[dcqcn]\nmin_rate = '0'", ["dcqcn.min_rate is '0'"]),
        ("[dcqcn]\nrate_ai = '2mbit'\nrate_hai = '1mbit'", ["key dcqcn", "rate_hai_Bps"]),
        ("[dcqcn]\nalpha = 1", ["dcqcn.alpha is unknown", "alpha_update"]),
        ("[dcqcn.phase_steps]\nbegin = 17", ["dcqcn.phase_steps.begin is 17", "0 .. 16"]),
        ("[dcqcn.phase_steps]\nstart = 1", ["dcqcn.phase_steps.start is unknown", "begin"]),
        (
            "[dcqcn.phase_steps]\nbegin_share = 0.5\nend_share = 0.4",
            ["key dcqcn", "phase_steps.end_share"],
        ),
        (
            IF + "rate = '10mbit'\n[dcqcn]\nrate_ai = '20mbit'",
            ["key dcqcn on eth0", "rate_ai_Bps", "at most the link's"],
        ),
    ],
)
def test_an_error_names_the_file_the_key_and_what_is_allowed(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text + "\n")
    for word in [str(tmp_path / "stellar.toml"), *words]:
        assert word in caught.value.message


def test_a_file_that_is_no_text_or_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    with pytest.raises(UsageError, match="No such file"):
        load_config(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not TOML"):
        load_config(path)
