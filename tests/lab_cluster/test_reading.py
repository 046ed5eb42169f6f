"""Scenario files: what they give, and what is said of wrong ones."""

from __future__ import annotations

import re

import pytest

from controller.errors import InputError, UsageError
from controller.lab.kinds import find_scenario, load_cluster
from controller.lab.scenario import KNOWN_POLICIES, ORACLE
from controller.priority.coordination import COORDINATORS
from controller.priority.policies import POLICIES
from tests.lab_cluster.files import JOB, NETWORK, load, with_job, write


def test_a_short_file_has_all_policies_and_usual_numbers(tmp_path):
    scenario = load(tmp_path, NETWORK + JOB)
    assert scenario.name == "mine"
    assert scenario.policies == KNOWN_POLICIES
    assert (scenario.seeds, scenario.iterations, scenario.warmup) == (10, 100, 10)
    assert scenario.network.fabric.nics == 8
    assert scenario.network.fabric.nic_Bps == scenario.network.fabric.uplink_Bps == 12.5e9
    assert scenario.jobs[0].jitter == 0.02


def test_every_policy_of_the_controller_can_be_simulated():
    assert set(KNOWN_POLICIES) == {*COORDINATORS, ORACLE}
    assert set(COORDINATORS) >= set(POLICIES)


def test_every_key_of_the_network_and_of_conditions_arrives(tmp_path):
    head = """
kind = "cluster"
about = "words"
policies = ["fair", "laxity"]
seeds = 3
iterations = 40
warmup = 4
start = "together"
jitter = 0.1
[conditions]
floor_share = 0.1
plan = "3ms"
raise = "64KiB"
start_error = 0.2
bytes_error = 0.3
qps_per_peer = 2
sharing = "classes"
"""
    network = (
        NETWORK
        + """
uplink_rate = "400gbit"
uplinks_per_spine = 2
placement = "packed"
share_nics = true
"""
    )
    scenario = load(tmp_path, head + network + JOB)
    assert scenario.policies == ("fair", "laxity")
    assert (scenario.seeds, scenario.iterations, scenario.warmup) == (3, 40, 4)
    assert scenario.start == "together" and scenario.about == "words"
    fabric = scenario.network.fabric
    assert (fabric.uplink_Bps, fabric.uplinks) == (50e9, 2)
    assert scenario.network.placement == "packed"
    assert scenario.network.share_nics
    conditions = scenario.conditions
    assert (conditions.floor_share, conditions.plan_ns, conditions.raise_bytes) == (0.1, 3e6, 65536)
    assert (conditions.start_error, conditions.bytes_error) == (0.2, 0.3)
    assert conditions.qps_per_peer == 2
    assert scenario.jobs[0].jitter == 0.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense = 1" + NETWORK + JOB, "key nonsense is unknown; allowed: kind, about, policies"),
        (
            'kind = "cluster"\nincast = 1' + NETWORK + JOB,
            "key incast is unknown; allowed: kind, about, policies",
        ),
        (
            "[incast]",
            "key kind is missing, and key incast is none of a cluster scenario",
        ),
        ('kind = "roads"' + NETWORK + JOB, "key kind is 'roads'; allowed: cluster, congestion."),
        ("seeds = 0" + NETWORK + JOB, "key seeds is 0; allowed: 1 .. 1000."),
        ("seeds = true" + NETWORK + JOB, "key seeds is True; allowed: 1 .. 1000."),
        ("iterations = 1000001" + NETWORK + JOB, "key iterations is 1000001; allowed: 1 .. 100000"),
        ('start = "now"' + NETWORK + JOB, "key start is 'now'; allowed: random, together."),
        ("jitter = 2" + NETWORK + JOB, "key jitter is 2; allowed: 0 .. 1."),
        ('policies = ["best"]' + NETWORK + JOB, "Policy 'best' is unknown; allowed: fair, static"),
        ('policies = "fair"' + NETWORK + JOB, "key policies is 'fair'; allowed: a list of fair"),
        ("policies = []" + NETWORK + JOB, "No policy is named; allowed: fair"),
        ('policies = ["fair", "fair"]' + NETWORK + JOB, "Policy fair is named 2 times"),
        (JOB, "key topology is missing; allowed: a table [topology]."),
        (NETWORK, "key job is missing; allowed: [[job]] entries."),
        ("topology = 3\n" + JOB, "key topology is 3; allowed: a table."),
        ("[topology]\nnics_per_leaf = 4\n" + JOB, "key topology.nic_rate is missing; allowed: a r"),
        (NETWORK + "size = 4\n" + JOB, "key topology.size is unknown; allowed: nic_rate, leaves"),
        (NETWORK.replace("spines = 1", "") + JOB, "key topology.spines is missing; allowed: 1 .."),
        (NETWORK.replace("spines = 1", "spines = 0") + JOB, "There are 2 leaves and no spine"),
        (NETWORK.replace("100gbit", "100") + JOB, "key topology.nic_rate is '100'; allowed: 1 Mbi"),
        (NETWORK.replace("= 2", "= 500").replace("= 4", "= 500") + JOB, "Number of NICs is 250000"),
        (NETWORK + 'placement = "best"\n' + JOB, "key topology.placement is 'best'; allowed: pack"),
        (NETWORK + "[conditions]\nplan = 3\n" + JOB, "key conditions.plan is 3; allowed: 0 ns .."),
        (NETWORK + "[conditions]\nfloor_share = 0.5\n" + JOB, "key conditions: "),
        (NETWORK + '[conditions]\nsharing = "x"\n' + JOB, "key conditions.sharing is 'x'; allowed"),
        (
            NETWORK + '[conditions]\nraise = "1KB"\nsharing = "dcqcn"\n' + JOB,
            'key conditions.raise is given beside sharing = "dcqcn"',
        ),
        (NETWORK + "[conditions]\nloss = 1\n" + JOB, "key conditions.loss is unknown; allowed: fl"),
        ("x = [", "not TOML"),
    ],
)
def test_a_wrong_file_is_told_by_file_key_and_what_is_allowed(tmp_path, text, message):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        load(tmp_path, text)
    assert str(tmp_path / "mine.toml") in caught.value.message


def test_a_congestion_scenario_without_kind_is_told_what_to_write(tmp_path):
    with pytest.raises(UsageError) as caught:
        find_scenario(str(write(tmp_path, "[steady]\nseeds = 3")))
    assert caught.value.remedy == 'Write kind = "congestion" at its top.'


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("nics = 2", "key job[1].name is missing; allowed: a name."),
        ('name = "a b"\nnics = 2', "key job[1].name: "),
        ('name = "a"', "key job[1].nics is missing; allowed: a number of NICs, or a list of them."),
        ('name = "a"\nnics = 1', "key job[1].nics is 1; allowed: 2 .. 16384."),
        ('name = "a"\nnics = "4"', "key job[1].nics is '4'; allowed: a number of NICs, or a list"),
        ('name = "a"\nnics = [1, 8]', "key job[1].nics is [1, 8]; allowed: two or more of 0 .. 7"),
        ('name = "a"\nnics = [1, 1]', "key job[1].nics is [1, 1]; allowed: two or more of 0 .. 7"),
        ('name = "a"\nnics = 9\nmodel = "resnet50"', "Jobs need 9 NICs and the network has 8."),
        ('name = "a"\nnics = 2\nmodel = "vgg"', "key job[1].model is 'vgg'; allowed: resnet50, b"),
        ('name = "a"\nnics = 2', "key job[1] has no compute time; allowed: a model, a trace, comp"),
        (
            'name = "a"\nnics = 2\ncompute = "1s"',
            "key job[1] has no gradient; allowed: a model, by",
        ),
        ('name = "a"\nnics = 2\nbytes = "1MB"', "key job[1] has no compute time; allowed: a model"),
        (
            'name = "a"\nnics = 2\nperiod = "1s"\nbytes = "1MB"\nshare = 0.3',
            "key job[1].period is given beside bytes; allowed: period and share, or compute and by",
        ),
        (
            'name = "a"\nnics = 2\ncompute = "1s"\nbytes = "1MB"\nshare = 0.3',
            "key job[1].share is given beside bytes; allowed: one of both.",
        ),
        ('name = "a"\nnics = 2\nperiod = "1s"', "key job[1].share is missing; allowed: above 0 .."),
        (
            'name = "a"\nnics = 2\nmodel = "resnet50"\nshare = 1',
            "key job[1].share is 1; allowed: a",
        ),
        ('name = "a"\nnics = 2\ncompute = "1s"\nmicrobatches = 3', "key job[1].microbatches is gi"),
        (
            'name = "a"\nnics = 2\nmodel = "resnet50"\nclass = 7',
            "key job[1].class is 7; allowed: 0",
        ),
        (
            'name = "a"\nnics = 2\nmodel = "resnet50"\nfactors = [1, 0]',
            "key job[1].factors is 0; al",
        ),
        (
            'name = "a"\nnics = 2\nmodel = "resnet50"\nfactors = 1',
            "key job[1].factors is 1; allowed",
        ),
        (
            'name = "a"\nnics = 2\nmodel = "resnet50"\nfactors = [1, 2]\ntrace = "x.csv"',
            "key job[1].factors is given beside a trace; allowed: one of both.",
        ),
        (
            'name = "a"\nnics = 2\nmodel = "resnet50"\ncount = 5',
            "Jobs need 10 NICs and the network",
        ),
        (
            'name = "a"\nnics = 2\nmodel = "resnet50"\niterations = 10',
            "Job a leaves after 10 iterat",
        ),
        (
            'name = "a"\nnics = 2\nmodel = "resnet50"\ncolour = 1',
            "key job[1].colour is unknown; all",
        ),
    ],
)
def test_a_wrong_job_is_told_by_file_key_and_what_is_allowed(tmp_path, keys, message):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        load(tmp_path, with_job(keys))
    assert str(tmp_path / "mine.toml") in caught.value.message


def test_two_jobs_of_one_name_are_refused(tmp_path):
    with pytest.raises(UsageError, match="2 jobs are named a; allowed: each once"):
        load(tmp_path, NETWORK + JOB + JOB)


def test_some_jobs_with_nics_by_number_and_some_without_are_refused(tmp_path):
    other = JOB.replace('"a"', '"b"').replace("nics = 2", "nics = [0, 1]")
    with pytest.raises(UsageError, match="Some jobs name their NICs and others leave them"):
        load(tmp_path, NETWORK + JOB + other)


def test_a_scenario_that_is_not_there_is_told_with_those_that_are(tmp_path):
    with pytest.raises(UsageError, match="Scenario 'fast' is unknown; allowed: bursty"):
        find_scenario("fast")
    with pytest.raises(UsageError, match="Scenario 'aaaa"):
        find_scenario("a" * 5000)
    with pytest.raises(UsageError, match=r"nowhere\.toml: No such file"):
        find_scenario(str(tmp_path / "nowhere.toml"))


def test_a_scenario_of_another_kind_is_not_read_as_a_cluster():
    with pytest.raises(UsageError, match="key kind is 'congestion'; allowed here: 'cluster'"):
        load_cluster("incast-quick")


def test_period_and_share_say_compute_and_bytes(tmp_path):
    keys = 'name = "a"\nnics = 4\nperiod = "1s"\nshare = 0.25\nbuckets = 3'
    job = load(tmp_path, with_job(keys)).jobs[0]
    assert job.forward_ns + job.backward_ns == pytest.approx(0.75e9)
    assert job.forward_ns == pytest.approx(0.25e9)
    # A ring of four carries 1.5 times the gradient on each link: 12.5 GB/s for a quarter second.
    assert sum(bucket.nbytes for bucket in job.buckets) == round(12.5e9 * 0.25 / 1.5)
    assert [bucket.ready_share for bucket in job.buckets] == pytest.approx([1 / 3, 2 / 3, 1])


def test_a_share_alone_keeps_the_compute_time(tmp_path):
    keys = 'name = "a"\nnics = 2\ncompute = "300ms"\nforward_share = 0.5\nshare = 0.25'
    job = load(tmp_path, with_job(keys)).jobs[0]
    assert (job.forward_ns, job.backward_ns) == (150e6, 150e6)
    # 100 ms at 12.5 GB/s; a ring of two carries the gradient once.
    assert sum(bucket.nbytes for bucket in job.buckets) == 1_250_000_000


def test_microbatches_make_the_part_before_the_sending_pass_longer(tmp_path):
    keys = 'name = "a"\nnics = 2\nmodel = "gpt2-xl"\nmicrobatches = {}'
    one = load(tmp_path, with_job(keys.format(1))).jobs[0]
    four = load(tmp_path, with_job(keys.format(4))).jobs[0]
    assert four.backward_ns == pytest.approx(one.backward_ns)
    assert four.forward_ns == pytest.approx(4 * one.forward_ns + 3 * one.backward_ns)


def test_without_overlap_all_is_sent_after_the_backward_pass(tmp_path):
    keys = 'name = "a"\nnics = 2\nmodel = "resnet50"\noverlap = false'
    (bucket,) = load(tmp_path, with_job(keys)).jobs[0].buckets
    assert (bucket.ready_share, bucket.nbytes) == (1.0, 102_228_128)


def test_a_trace_beside_the_file_gives_compute_times_and_bytes(tmp_path):
    # Windows of 10 ms every 100, 120, 80 ms: compute times of 90, 110, 70 ms.
    rows = ["start_us,end_us,bytes"]
    rows += [f"{start},{start + 10_000},4000000" for start in (0, 100_000, 220_000, 300_000)]
    (tmp_path / "job.csv").write_text("\n".join(rows) + "\n")
    job = load(tmp_path, with_job('name = "a"\nnics = 2\ntrace = "job.csv"')).jobs[0]
    assert job.forward_ns + job.backward_ns == pytest.approx(90e6)
    assert job.factors == pytest.approx((1, 11 / 9, 7 / 9))
    assert sum(bucket.nbytes for bucket in job.buckets) == 4_000_000
    assert job.source == "csv trace, 3 iterations"


def test_a_trace_with_a_model_has_its_times_and_the_models_buckets(tmp_path):
    rows = [f"{start},10\n" for start in (0, 100_000, 220_000, 300_000)]
    (tmp_path / "job.csv").write_text("start_us,bytes\n" + "".join(rows))
    keys = 'name = "a"\nnics = 2\nmodel = "resnet50"\ntrace = "job.csv"\nbytes = "5MB"'
    job = load(tmp_path, with_job(keys)).jobs[0]
    assert job.forward_ns + job.backward_ns == pytest.approx(100e6)
    assert job.backward_ns / job.forward_ns == pytest.approx(85.6 / 134.9)
    assert sum(bucket.nbytes for bucket in job.buckets) == 5_000_000


def test_a_trace_that_cannot_be_read_is_told_with_the_key(tmp_path):
    path = write(tmp_path, with_job('name = "a"\nnics = 2\ntrace = "none.csv"'))
    with pytest.raises(InputError, match=re.escape("key job[1].trace: ") + ".*does not exist"):
        load_cluster(str(path))
    (tmp_path / "none.csv").write_text("start_us,bytes\n0,5\n100,5\n")
    with pytest.raises(InputError, match="has 2 sync windows that follow one another; 3 are need"):
        load_cluster(str(path))
