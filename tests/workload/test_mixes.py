"""Mixes: what the built-in ones have in common, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.errors import UsageError
from controller.workload.mixes import MIXES, Mix, MixJob, find_mix, load_mix

MS = 1_000_000
GOOD = """
[mix]
name = "mine"
jitter = 0.1
[[job]]
name = "a"
period = "500ms"
[[job]]
name = "b"
model = "bert-large"
period = "1s"
share = 0.5
class = 2
max_slowdown = 1.2
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mix.toml"
    path.write_text(text)
    return path


def test_a_file_gives_jobs_with_the_shares_of_their_models(tmp_path: Path) -> None:
    mix = find_mix(str(written(tmp_path, GOOD)))
    assert (mix.name, mix.jitter) == ("mine", 0.1)
    assert mix.jobs == (
        MixJob("a", "resnet50", 500 * MS, 0.39, 5),
        MixJob("b", "bert-large", 1000 * MS, 0.5, 2, 1.2),
    )
    assert mix.jobs[0].compute_ns + mix.jobs[0].window_ns == 500 * MS
    assert mix.load == pytest.approx(0.89)
    assert mix.longest_ns == 1000 * MS


def test_a_file_without_a_name_is_called_by_its_own(tmp_path: Path) -> None:
    text = '[[job]]\nname = "a"\nperiod = "500ms"\n'
    assert load_mix(written(tmp_path, text)).name == "mix"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[mix", "not TOML"),
        ("", "key job is missing"),
        ("job = 3", "key job is missing"),
        ("other = 1", "key other is unknown; allowed: mix, job"),
        (GOOD.replace("jitter = 0.1", "jitter = 1"), r"mix\.jitter is 1; allowed: 0 \.\. 0\.9"),
        (GOOD.replace("jitter", "joy"), r"mix\.joy is unknown; allowed: name, jitter, start"),
        (GOOD.replace("jitter = 0.1", 'start = "now"'), r"mix\.start is 'now'; allowed: random"),
        (GOOD.replace('"bert-large"', '"gpt"'), r"job\[2\]\.model is 'gpt'; allowed: resnet50"),
        (GOOD.replace('period = "500ms"', ""), r"job\[1\]\.period is missing"),
        (GOOD.replace('"500ms"', "500"), r"job\[1\]\.period is 500; allowed: 20 ms"),
        (GOOD.replace('"500ms"', '"1ms"'), r"job\[1\]\.period is '1ms'"),
        (GOOD.replace("share = 0.5", "share = 0"), r"job\[2\]\.share is 0; allowed: above 0"),
        (GOOD.replace("share = 0.5", "share = 1"), r"job\[2\]: .*share is 1.0; .*below 1"),
        (GOOD.replace("class = 2", "class = 7"), r"job\[2\]\.class is 7; allowed: 0 \.\. 6"),
        (GOOD.replace("1.2", "0.5"), r"job\[2\]\.max_slowdown is 0\.5; allowed: 1 \.\. 100"),
        (GOOD.replace('"b"', '"a"'), "two jobs a"),
        (GOOD.replace('"b"', '"b c"'), r"job\[2\]"),
        ('[[job]]\nname = "a"\nperiod = "1s"\nperiods = 1', r"job\[1\]\.periods is unknown"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError, match=message) as caught:
        load_mix(path)
    assert str(path) in caught.value.message


def test_a_file_that_is_not_there_is_an_error_of_its_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml: No such file"):
        find_mix(str(tmp_path / "none.toml"))


def test_an_unknown_mix_is_an_error_that_names_all() -> None:
    with pytest.raises(UsageError, match=f"allowed: {', '.join(MIXES)}, or a TOML file"):
        find_mix("nothing")


def test_the_built_in_mixes_load_the_link_but_never_beyond_it() -> None:
    for name, mix in MIXES.items():
        assert find_mix(name) is mix
        assert 0.5 < mix.load <= 1.0
        assert (mix.jitter, mix.start) == (
            (0.02, "together") if name.endswith("steady") else (0.2, "random")
        )
        assert {job.model for job in mix.jobs} == {"resnet50", "bert-large"}
    counts = {len(mix.jobs) for mix in MIXES.values()}
    assert counts == {2, 3}


def test_periods_of_the_built_in_mixes_are_equal_2_to_3_and_incommensurate() -> None:
    for jobs in ("two", "three"):
        periods = {
            kind: sorted({job.period_ns for job in MIXES[f"{jobs}-{kind}"].jobs})
            for kind in ("equal", "2-3", "golden")
        }
        assert len(periods["equal"]) == 1
        assert periods["2-3"][-1] / periods["2-3"][0] == pytest.approx(1.5, abs=1e-6)
        assert periods["golden"][-1] / periods["golden"][0] == pytest.approx(1.618, abs=1e-3)


def test_a_mix_without_jobs_is_refused() -> None:
    with pytest.raises(UsageError, match=r"has 0 jobs; allowed: 1 \.\. 8"):
        Mix("empty", ())
