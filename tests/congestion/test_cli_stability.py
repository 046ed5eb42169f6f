import json

import pytest
from click.testing import CliRunner

from controller.cli_lab_stability import stability_command
from controller.errors import UsageError


def run(*arguments):
    result = CliRunner().invoke(stability_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def document(*arguments):
    return json.loads(run(*arguments, "--json"))


def test_the_document_has_the_keys_that_others_script_against():
    found = document("--flows", "10", "--delay-us", "50", "--link-gbps", "40", "--r-ai-mbps", "40",
                     "--kmax-kb", "200", "--g", "0.00390625")  # fmt: skip
    # CoNEXT 2016, pm_rai40_delay50.txt and convergence_default.txt.
    assert found["phase_margin_deg"] == pytest.approx(-6.5844, abs=0.1)
    assert found["convergence_s"] == pytest.approx(0.035894, rel=1e-4)
    assert set(found["fixed_point"]) == {"p", "q_bytes"}
    exact = found["exact"]
    assert exact["stable"] is True
    assert exact["q_bytes"] == pytest.approx(122.6e3, rel=1e-3)
    assert exact["critical_delay_us"] == pytest.approx(62.47, abs=0.01)
    assert exact["rightmost_per_s"] < 0


def test_defaults_are_the_settings_of_the_paper():
    short = document("--flows", "4", "--delay-us", "0")
    assert short["setting"]["r_ai_mbps"] == 40 and short["setting"]["g"] == 1 / 256
    assert short["setting"]["kmin_kb"] == 5 and short["setting"]["kmax_kb"] == 200
    assert short["phase_margin_deg"] == pytest.approx(13.407, abs=0.1)


def test_other_link_rates_leave_the_other_constants_alone():
    # pm_100gbps_delay50.txt
    found = document("--flows", "30", "--delay-us", "50", "--link-gbps", "100")
    assert found["phase_margin_deg"] == pytest.approx(-16.634, abs=0.1)


def test_a_loop_without_fixed_point_says_so_and_why():
    found = document("--flows", "64", "--delay-us", "50")
    exact = found["exact"]
    assert exact["exists"] is False and exact["stable"] is False
    assert exact["q_bytes"] is None and exact["critical_delay_us"] is None
    assert "above Pmax" in found["reasons"]["exact.q_bytes"]
    assert "No fixed point" in run("--flows", "64", "--delay-us", "50")


def nulls(entry, name=""):
    if isinstance(entry, dict):
        return {found for key, each in entry.items() for found in nulls(each, f"{name}.{key}")}
    return {name[1:]} if entry is None else set()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--flows", "64", "--delay-us", "50"),
        ("--flows", "1", "--delay-us", "50"),
        ("--flows", "100000", "--delay-us", "100000"),
        ("--flows", "10", "--delay-us", "100000"),
        ("--flows", "4", "--delay-us", "10", "--preset", "connectx"),
        ("--flows", "1", "--delay-us", "50", "--model", "timely"),
        ("--flows", "90", "--delay-us", "50", "--model", "timely"),
    ],
)
def test_every_null_has_its_reason(arguments):
    found = document(*arguments)
    del found["margin_ladder"]
    assert nulls(found) == set(found["reasons"])


def test_the_formula_of_convergence_is_not_used_where_it_does_not_hold():
    assert document("--flows", "4", "--delay-us", "10", "--preset", "connectx")[
        "convergence_s"
    ] is None  # fmt: skip
    assert document("--flows", "1", "--delay-us", "10")["convergence_s"] is None
    assert document("--flows", "2", "--delay-us", "10")["convergence_s"] > 0


def test_a_margin_beyond_a_whole_turn_is_not_called_stable():
    # The margin falls with the delay by whole turns; the critical delay does not.
    for delay in range(100, 2000, 100):
        found = document("--flows", "10", "--delay-us", str(delay))
        assert found["published_stable"] is False


def test_timely_has_no_marks_and_names_what_it_ignores():
    found = document("--model", "timely", "--flows", "10", "--delay-us", "100", "--g", "0.004")
    # pm_timely_delay100_fixed.txt
    assert found["phase_margin_deg"] == pytest.approx(23.277, abs=0.1)
    assert found["fixed_point"]["p"] is None and found["exact"]["p"] is None
    assert found["reasons"]["fixed_point.p"] == "TIMELY marks no packets"
    assert found["setting"]["ignored"] == ["--g"]


def test_connectx_brings_its_own_step_and_gain():
    setting = document("--flows", "4", "--delay-us", "10", "--preset", "connectx")["setting"]
    assert setting["r_ai_mbps"] == 5 and setting["g"] == 5 / 1024


@pytest.mark.parametrize(
    "arguments",
    [
        ("--flows", "10", "--delay-us", "50"),
        ("--flows", "1", "--delay-us", "0", "--window-us", "1000"),
        ("--flows", "100000", "--delay-us", "1000000", "--link-gbps", "400.125"),
        ("--flows", "90", "--delay-us", "50", "--model", "timely", "--kmax-kb", "300"),
        ("--flows", "1", "--delay-us", "50", "--model", "timely"),
    ],
)
def test_the_text_fits_a_terminal(arguments):
    assert max(len(line) for line in run(*arguments).splitlines()) <= 80


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--flows", "0"),
        ("--delay-us", "-1"),
        ("--delay-us", "nan"),
        ("--link-gbps", "0"),
        ("--r-ai-mbps", "50000"),
        ("--kmax-kb", "0"),
        ("--kmin-kb", "200"),
        ("--kmin-kb", "199.5"),
        ("--g", "2"),
        ("--g", "0"),
        ("--pmax", "1.5"),
        ("--window-us", "-3"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_option(option, value):
    arguments = {"--flows": "2", "--delay-us": "10", option: value}
    flat = [part for pair in arguments.items() for part in pair]
    with pytest.raises(UsageError, match=f"{option} is .*allowed"):
        CliRunner().invoke(stability_command, flat, catch_exceptions=False)


def test_a_window_has_no_meaning_for_timely():
    with pytest.raises(UsageError, match="--window-us has no effect"):
        run("--model", "timely", "--flows", "2", "--delay-us", "1", "--window-us", "5")
