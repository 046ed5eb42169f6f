"""Published numbers: data behind the figures of Zhu, Ghobadi, Misra, Padhye, "ECN or Delay: Lessons
Learnt from Analysis of DCQCN and TIMELY", CoNEXT 2016 (repository jitupadhye-zz/rdma).

The authors' margins stray from their own formula by up to 0.096 degrees from one number of flows
to the next (they were read off a grid of frequencies), hence the tolerance of 0.1.
"""

import pytest

from controller.congestion.convergence import convergence_s
from controller.congestion.linear import phase_margin_deg
from controller.congestion.linear_dcqcn import common_mode, published_jacobian
from controller.congestion.timely import (
    PUBLISHED_WEIGHT_SLOPE,
    TimelyLoop,
    linearised,
    timely_convergence_s,
)

from .settings import paper_loop

# (link Gb/s, Kmax KB, R_AI Mb/s, delay us): {flows: degrees}
MARGINS = {
    # conext2016/figures/pm_rai40_delay*.txt, paper/figures/pm_rai40_delay*.txt
    (40, 200, 40, 0): {2: 26.624, 10: 4.7564, 40: 27.368, 100: 56.48},
    (40, 200, 40, 1): {2: 26.257, 10: 4.5296, 30: 18.201, 100: 56.147},
    (40, 200, 40, 10): {2: 22.952, 10: 2.4883, 50: 32.61, 100: 53.147},
    (40, 200, 40, 25): {2: 17.443, 8: -0.52166, 30: 12.975, 100: 48.146},
    (40, 200, 40, 50): {2: 8.2626, 4: -0.75215, 10: -6.5844, 20: -0.95129, 100: 39.811},
    (40, 200, 40, 100): {2: -10.099, 10: -17.925, 40: 4.0933, 100: 23.142},
    # pm_rai10_delay*.txt
    (40, 200, 10, 0): {2: 58.388, 6: 39.523, 18: 11.998, 42: 15.705, 100: 38.249},
    (40, 200, 10, 10): {2: 54.539, 20: 9.9487, 100: 36.442},
    (40, 200, 10, 25): {2: 48.766, 8: 23.128, 20: 7.8742, 100: 33.732},
    (40, 200, 10, 50): {2: 39.145, 10: 12.613, 22: 4.2528, 100: 29.215},
    (40, 200, 10, 100): {2: 19.902, 4: 24.618, 14: -0.50778, 18: -2.1268, 100: 20.181},
    # pm_rai10_delay*_kmax1000.txt
    (40, 1000, 10, 0): {2: 81.571, 10: 63.6, 12: 24.987, 14: 24.603, 36: 39.409, 100: 51.459},
    (40, 1000, 10, 50): {2: 62.877, 4: 63.793, 12: 20.392, 100: 41.703},
    (40, 1000, 10, 100): {2: 44.183, 6: 48.519, 12: 15.798, 100: 31.946},
    # pm_100gbps_delay*.txt
    (100, 200, 40, 0): {2: 23.919, 10: 12.363, 30: 0.044185, 38: -0.37086, 100: 10.758},
    (100, 200, 40, 50): {2: -16.686, 6: -7.9966, 30: -16.634, 100: -3.7909},
    (100, 200, 40, 100): {2: -57.292, 10: -32.642, 50: -30.048, 100: -18.34},
}
# (Kmax KB, R_AI Mb/s, 1/g): {flows: s}; paper/figures/convergence_*.txt
CONVERGENCE = {
    (200, 40, 256): {2: 0.096901, 10: 0.035894, 50: 0.014118, 100: 0.010089},
    (200, 10, 256): {2: 0.35817, 10: 0.12137, 50: 0.040262, 100: 0.025873},
    (1000, 40, 256): {2: 0.1027, 10: 0.040103, 50: 0.016911, 100: 0.012405},
    (200, 40, 16): {2: 0.10007, 10: 0.037117, 50: 0.014611, 100: 0.010444},
}
# Delay us: {flows: degrees}; pm_timely_delay*_fixed.txt
TIMELY_MARGINS = {
    0: {2: -1.9535, 4: 5.2484, 18: 42.921, 30: 22.013, 40: -1.3105, 50: -22.263},
    50: {2: -7.0458, 10: 25.903, 20: 38.421, 38: -1.1109, 50: -26.915},
    100: {2: -12.138, 10: 23.277, 30: 14.135, 40: -10.106, 50: -31.489},
}


@pytest.mark.parametrize("setting", MARGINS, ids=str)
def test_published_phase_margins_are_met_within_a_tenth_of_a_degree(setting):
    link_Gbps, kmax_KB, r_ai_Mbps, delay_us = setting
    for flows, margin_deg in MARGINS[setting].items():
        loop = paper_loop(flows, delay_us, link_Gbps, kmax_KB, r_ai_Mbps)
        system = common_mode(published_jacobian(loop), loop).later(delay_us * 1e-6)
        assert phase_margin_deg(system) == pytest.approx(margin_deg, abs=0.1), flows


@pytest.mark.parametrize("setting", CONVERGENCE, ids=str)
def test_published_convergence_times_are_met(setting):
    kmax_KB, r_ai_Mbps, per_g = setting
    for flows, time_s in CONVERGENCE[setting].items():
        loop = paper_loop(flows, kmax_KB=kmax_KB, r_ai_Mbps=r_ai_Mbps, g=1 / per_g)
        assert convergence_s(loop) == pytest.approx(time_s, rel=1e-4), flows


@pytest.mark.parametrize("delay_us", TIMELY_MARGINS)
def test_published_margins_of_timely_are_met_with_a_quarter_of_the_papers_slope(delay_us):
    for flows, margin_deg in TIMELY_MARGINS[delay_us].items():
        system = linearised(TimelyLoop(flows), PUBLISHED_WEIGHT_SLOPE).later(delay_us * 1e-6)
        assert phase_margin_deg(system) == pytest.approx(margin_deg, abs=0.1), flows


def test_two_timely_flows_converge_in_the_time_of_the_paper():
    # CoNEXT 2016, section 4, after equation 31: 76.7 ms.
    assert timely_convergence_s(TimelyLoop(2)) == pytest.approx(0.0767, rel=1e-3)
    assert timely_convergence_s(TimelyLoop(1)) is None
