"""DCQCN in BPF and the model in floats, side by side: every event goes to both and is compared.

Rates stay within 0.1 % (the promise is 1 %), alpha within 1 % down to 2^-16 and within 2^-22
below, where a cut by it is less than a millionth; stages and what is released are equal.
The model has every constant as it is; in BPF, rates are whole bytes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from controller.agent import maps
from controller.congestion.dcqcn import DcqcnParameters, Phase
from controller.congestion.reaction_point import ReactionPoint
from controller.dataplane.layout import JobFlag, PhaseNumber, PortFlag
from controller.priority.jobs import JobPlan
from tests.acting import JOB, Acting, START_ns
from tests.hook import PORT
from tests.packets import ACK, CNP, V4, WRITE_MIDDLE, Opcode, packet

PEER_QPN, LOCAL_QPN = 0x11, 0x21
GAP_ns = 10_000_000_000
MS, S = 10**6, 10**9
_FAR_ns = 1 << 61
_NUMBERS = {Phase(number.name.lower()): number for number in PhaseNumber}
# Beyond, BPF keeps the stage and the model goes on counting.
_MAX_STAGE = 1 << 20


class Flow:
    """One outgoing flow in BPF and its model, side by side; every event is compared.

    Parameters
    ----------
    expected_bytes, predicted_Bps, window_start_ns
        Of the job's plan. 0 expected bytes: there is none.
    """

    def __init__(
        self,
        acting: Acting,
        parameters: DcqcnParameters,
        prediction: bool = True,
        phases: bool = True,
        expected_bytes: int = 0,
        predicted_Bps: float = 0.0,
        window_start_ns: int = START_ns,
    ) -> None:
        acting.reset()
        self.acting, self.parameters = acting, parameters
        acting.port(PortFlag.DCQCN)
        acting.job(JobFlag.DCQCN, gap_ns=GAP_ns)
        acting.assign(PEER_QPN)
        maps.write_dcqcn(acting.fds, PORT, parameters, prediction, phases)
        if expected_bytes:
            plan = JobPlan("job", expected_bytes, window_start_ns, _FAR_ns, _FAR_ns, 0, 0)
            maps.write_plan(acting.fds, JOB, plan, predicted_Bps)
        acting.xdp.write_pair(LOCAL_QPN, PEER_QPN, V4[1], V4[0])
        # Shares as BPF has them, in 256ths.
        steps = parameters.phase_steps
        self._steps = replace(
            steps,
            begin_share=round(steps.begin_share * 256) / 256,
            end_share=round(steps.end_share * 256) / 256,
        )
        self._phases, self._expected_bytes = phases, expected_bytes
        self._window_start_ns = window_start_ns
        self._predicted_Bps = round(predicted_Bps) if prediction else 0
        self.model = ReactionPoint(parameters)
        self.now_ns = START_ns
        self._psn = self._sent_bytes = 0
        self._last_ns: int | None = None
        self.increases = dict.fromkeys(PhaseNumber, 0)
        self.worst = {"rc_Bps": 0.0, "rt_Bps": 0.0, "alpha": 0.0}
        self.acks = 0
        self.send(0, 4)
        self.answer(0, self.acting.receive_xdp, ACK)  # tells BPF whose ACKs these are

    # ---- events ----

    def send(self, gap_ns: int, payload_bytes: int) -> None:
        """One packet after `gap_ns`; more of the same at that moment if BPF needs them."""
        self.now_ns += gap_ns
        self.acting.at(self.now_ns)
        frame = packet(WRITE_MIDDLE, self._psn, payload_bytes, dqpn=PEER_QPN, sport=0xC001)
        self._psn += 1
        self._model_sends(len(frame), payload_bytes)
        self.acting.send(frame)
        for _ in range(10):
            state = self.state()
            if not state["limited"] or (
                state["expiry_ns"] > self.now_ns
                and state["bytes"] < self.parameters.byte_counter_bytes
            ):
                break
            # Rests of a long silence are worked off with packets. A repetition is no payload.
            self._advance(lambda: self.model.sent(self.now_ns, len(frame)))
            self.acting.send(frame)
        self.check()

    def _model_sends(self, wire_bytes: int, payload_bytes: int) -> None:
        model = self.model
        if self._last_ns is None or self._last_ns + GAP_ns < self.now_ns:
            self._sent_bytes = 0
            if self._predicted_Bps:
                # Events due until then are overtaken: their rates do not matter any more.
                model.begin_window(self.now_ns, self._predicted_Bps)
        self._last_ns = self.now_ns
        self._sent_bytes += payload_bytes
        self._advance(lambda: model.sent(self.now_ns, wire_bytes))

    def notify(self, gap_ns: int, receive: Callable[[bytes], object], cnp: bool) -> None:
        """A CNP, or an ACK with BECN, after `gap_ns`."""
        self.now_ns += gap_ns
        self._advance(lambda: self.model.notify(self.now_ns))
        if cnp:
            self.answer(0, receive, CNP)
        else:
            self.answer(0, receive, ACK, becn=True)
        self.check()

    def answer(
        self, gap_ns: int, receive: Callable[[bytes], object], opcode: Opcode, becn: bool = False
    ) -> None:
        """An answer of the peer, without the model."""
        self.now_ns += gap_ns
        self.acting.at(self.now_ns)
        self.acks += opcode is ACK
        receive(packet(opcode, 0, dqpn=LOCAL_QPN, src=V4[1], dst=V4[0], becn=becn))

    @property
    def phase(self) -> Phase:
        """Phase of the job, as of now."""
        in_window = self.now_ns >= self._window_start_ns or not self._has_plan
        return self._steps.phase(self._sent_bytes, self._expected_bytes, in_window)

    @property
    def _has_plan(self) -> bool:
        return self._expected_bytes > 0

    def _advance(self, event: Callable[[], object]) -> None:
        model, phase = self.model, self.phase
        model.phase_multiplier = self._steps.multiplier(phase) if self._phases else 1.0
        before = self._model_increases()
        event()
        self.increases[_NUMBERS[phase]] += self._model_increases() - before

    def _model_increases(self) -> int:
        counters = self.model.counters
        return counters.fast_recovery + counters.additive + counters.hyper

    # ---- comparison ----

    def state(self) -> np.void:
        """What BPF has."""
        return self.acting.control()

    def check(self) -> None:
        """BPF and the model say the same."""
        state, model = self.state(), self.model
        counters = model.counters
        assert bool(state["limited"]) == model.limited
        if model.limited or counters.cuts or counters.windows:
            for name, expected in (("rc_Bps", model.rc_Bps), ("rt_Bps", model.rt_Bps)):
                error = abs(int(state[name]) - expected) / expected
                self.worst[name] = max(self.worst[name], error)
                assert error <= 1e-3, (name, int(state[name]), expected)
        stages = (model.timer_stage, model.byte_stage)
        assert (state["timer_stage"], state["byte_stage"]) == tuple(
            min(stage, _MAX_STAGE) for stage in stages
        )
        if state["cut_before"]:
            self._check_alpha(state)
        assert state["cuts"] == counters.cuts
        assert state["suppressed"] == counters.suppressed
        assert state["feedback"] == counters.cuts + counters.suppressed
        assert state["prediction_starts"] == counters.windows
        assert state["prediction_floors"] == counters.floored
        # Steps are whole bytes a second in BPF: of thousands, one more or less may be needed.
        for number, expected in self.increases.items():
            assert abs(int(state["increases"][number]) - expected) <= expected / 1000

    def _check_alpha(self, state: np.void) -> None:
        periods = (self.now_ns - int(state["alpha_ns"])) // self.parameters.alpha_update_ns
        alpha = int(state["alpha_q32"]) / 2**32 * (1 - self.parameters.g) ** periods
        error = abs(alpha - self.model.alpha)
        if self.model.alpha > 2**-16:
            self.worst["alpha"] = max(self.worst["alpha"], error / self.model.alpha)
            assert error <= 0.01 * self.model.alpha
        else:
            assert error <= 2**-22


def cut(flow: Flow, times: int) -> None:
    """Notifications one timer apart at most, none of them too soon."""
    gap_ns = flow.parameters.decrease_interval_ns or 1000
    for number in range(times):
        flow.notify(gap_ns, flow.acting.receive_xdp, cnp=number % 2 == 0)
