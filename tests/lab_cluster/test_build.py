"""What a seed makes of a scenario."""

from __future__ import annotations

import numpy as np
import pytest

from controller.errors import UsageError
from controller.lab.build import build
from tests.lab_cluster.files import NETWORK, load, with_job

ONE_SWITCH = '[topology]\nnics_per_leaf = 4\nnic_rate = "100gbit"\nshare_nics = true\n'
TWO = """
[[job]]
name = "slow"
nics = 2
period = "1s"
share = 0.5
overlap = false
[[job]]
name = "fast"
nics = 2
period = "250ms"
share = 0.5
overlap = false
"""


def test_a_seed_gives_the_same_jobs_again_and_another_seed_others(tmp_path):
    scenario = load(
        tmp_path, NETWORK + '[[job]]\nname = "a"\nnics = 3\nmodel = "resnet50"\ncount = 2'
    )
    assert build(scenario, 1).jobs == build(scenario, 1).jobs
    one, two = build(scenario, 1).jobs[0], build(scenario, 2).jobs[0]
    assert one.nics != two.nics and one.arrival_ns != two.arrival_ns


def test_nics_by_number_are_kept_and_copies_share_them(tmp_path):
    keys = 'name = "a"\nnics = [5, 0, 3]\nmodel = "resnet50"\ncount = 2\ngpus_per_nic = 8'
    first, second = build(load(tmp_path, with_job(keys)), 1).jobs
    assert first.nics == second.nics == (5, 0, 3)
    assert (first.name, second.name) == ("a-1", "a-2")
    assert first.gpu_count == 24


def test_all_jobs_have_time_for_their_iterations_and_the_warmup(tmp_path):
    head = 'start = "together"\niterations = 10\nwarmup = 2\n'
    setup = build(load(tmp_path, head + ONE_SWITCH + TWO), 1)
    assert setup.period_ns == pytest.approx({"slow": 1e9, "fast": 0.25e9})
    assert setup.until == {"slow": 12, "fast": 48}


def test_a_job_that_comes_late_or_leaves_has_fewer_iterations(tmp_path):
    head = 'start = "together"\niterations = 10\nwarmup = 2\n'
    late = TWO.replace('name = "fast"', 'name = "fast"\narrival = "6s"')
    assert build(load(tmp_path, head + ONE_SWITCH + late), 1).until["fast"] == 24
    short = TWO.replace('name = "fast"', 'name = "fast"\niterations = 7')
    assert build(load(tmp_path, head + ONE_SWITCH + short), 1).until["fast"] == 7
    never = TWO.replace('name = "fast"', 'name = "fast"\narrival = "1min"')
    assert build(load(tmp_path, head + ONE_SWITCH + never), 1).until["fast"] == 3


def test_periods_too_far_apart_are_refused_with_both_jobs(tmp_path):
    head = 'start = "together"\niterations = 3\n'
    far = TWO.replace('"1s"', '"100min"').replace('"250ms"', '"1us"')
    with pytest.raises(UsageError, match=r"of job fast with a period of 1 us.* job slow .*100 s"):
        build(load(tmp_path, head + ONE_SWITCH + far.replace('"100min"', '"100s"')), 1)
    with pytest.raises(UsageError, match="allowed: 5,000,000"):
        build(load(tmp_path, head + ONE_SWITCH + far), 1)


def test_many_long_iterations_are_refused_where_times_lose_precision(tmp_path):
    head = 'start = "together"\niterations = 100000\n'
    longer = TWO.replace('"1s"', '"60min"').replace('"250ms"', '"60min"')
    with pytest.raises(UsageError, match=r"Job slow ends .* a period of 3600 s; allowed: up to"):
        build(load(tmp_path, head + ONE_SWITCH + longer), 1)
    late = TWO.replace('name = "fast"', 'name = "fast"\ncount = 40\nevery = "5400min"')
    with pytest.raises(UsageError, match=r"Job fast-\d+ ends"):
        build(load(tmp_path, ONE_SWITCH + late), 1)


def test_jobs_that_start_together_come_exactly_one_after_the_other(tmp_path):
    keys = 'name = "a"\nnics = 2\nmodel = "resnet50"\ncount = 3\narrival = "1s"\nevery = "2s"\n'
    jobs = build(load(tmp_path, with_job(keys, head='start = "together"')), 1).jobs
    assert [job.arrival_ns for job in jobs] == [1e9, 3e9, 5e9]


def test_random_arrivals_are_a_poisson_process(tmp_path):
    keys = 'name = "a"\nnics = 2\nmodel = "resnet50"\nperiod = "1ms"\ncount = 400\nevery = "2s"\n'
    network = NETWORK + "share_nics = true\n"
    jobs = build(load(tmp_path, with_job(keys, network=network)), 1).jobs
    gaps_s = np.diff([job.arrival_ns for job in jobs]) / 1e9
    # Mean and deviation of an exponential distribution are equal; 399 of them are off by 5 %.
    assert np.mean(gaps_s) == pytest.approx(2, rel=0.15)
    assert np.std(gaps_s) == pytest.approx(2, rel=0.2)


def test_a_job_begins_within_its_first_period_where_the_start_is_random(tmp_path):
    begins = [
        build(load(tmp_path, ONE_SWITCH + TWO), seed).jobs[1].arrival_ns / 0.25e9
        for seed in range(40)
    ]
    assert 0 <= min(begins) < 0.2 and 0.8 < max(begins) <= 1


def test_the_load_of_a_link_is_the_sum_of_the_shares_of_those_who_send_on_it(tmp_path):
    setup = build(load(tmp_path, ONE_SWITCH + TWO.replace("nics = 2", "nics = [0, 1]")), 1)
    load_of_links = setup.link_load
    # NICs 0 and 1 up, then down, both jobs half of the time; 2 and 3 are idle.
    assert load_of_links == pytest.approx([1, 1, 0, 0, 1, 1, 0, 0])
    assert setup.shown == ("slow", "fast")


def test_classes_by_hand_go_from_five_downwards_again_and_again(tmp_path):
    keys = 'name = "a"\nnics = 2\nmodel = "resnet50"\ncount = 8\n'
    network = NETWORK + "share_nics = true\n"
    jobs = build(load(tmp_path, with_job(keys, network=network)), 1).jobs
    assert [job.traffic_class for job in jobs] == [5, 4, 3, 2, 1, 0, 5, 4]
    given = build(load(tmp_path, with_job(keys + "class = 6", network=network)), 1).jobs
    assert {job.traffic_class for job in given} == {6}
