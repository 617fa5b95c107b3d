"""Runs a plan's step for minutes on the device at hand, and keeps what was seen."""

from probe import soak
from probe.cell import cell_of
from probe.grid.session import QUESTION_S, Session, answer_of, now
from probe.outcome import CellProgress, Outcome
from probe.records import Measurement, Status
from probe.soak import LEAST_WINDOWS, Soak, Window
from probe.tasks.table import RunSoak, SoakProgress
from probe.verdict import FIRST_S, Card, judge
from spillcliff.console import LiveLine
from spillcliff.errors import NoPlan, UserError
from spillcliff.hardware.device import on_battery
from spillcliff.units import format_duration
from trainer.plan import Plan


class SoakRun:
    """One soak of a plan's step, put on disk also if it is interrupted or fails."""

    def __init__(self, session: Session, plan: Plan, minutes: float, live: LiveLine) -> None:
        """UserError for another device's plan."""
        self.session, self.plan, self.minutes, self.live = session, plan, minutes, live
        self.facts, self.path = session.facts, session.store.folder.soaks
        if self.facts.fingerprint != plan.device:
            raise UserError(f"the plan was made on {plan.device}, and this is {self.facts.fingerprint}; plan for this one")
        self.cell, self.on_battery = cell_of(plan.model, plan.step), on_battery(self.facts.uuid)
        self.windows: tuple[Window, ...] = ()

    def run(self) -> Soak:
        """What was seen; NoPlan where the step doesn't fit."""
        task = RunSoak(self.plan.model, self.cell, self.session.device, self.facts.uuid, self.minutes * 60)
        longest_s = QUESTION_S + FIRST_S[self.plan.step.engine] + self.minutes * 120
        try:
            outcome = self.session.workers.run(task, longest_s, self.facts.kind == "cpu", tell=self._show)
        except KeyboardInterrupt:
            self._keep_unfinished()
            raise
        last = outcome.answer or outcome.progress
        self.windows = last.windows if last else ()
        if outcome.answer is None and self.windows:
            self._keep_unfinished()
        self._refuse_oom(outcome)
        if not self.windows and (outcome.answer or outcome.killed == "timeout"):
            raise UserError(f"no step ended within {self.minutes * 60:.0f} s; give more --minutes")
        return self._keep(answer_of(outcome).settled)

    def _show(self, progress: SoakProgress) -> None:
        self.windows = progress.windows
        last = self.windows[-1]
        heat = "" if last.temperature_c is None else f"  {last.temperature_c:.0f} degrees"
        rate = f"{self.plan.step.tokens / last.step_s:,.0f} tok/s"
        self.live.update(f"{last.at_s:.0f} of {self.minutes * 60:.0f} s  {rate}{heat}")

    def _refuse_oom(self, outcome: Outcome[SoakProgress, SoakProgress]) -> None:
        """The verdict on it as on a cell that measured nothing."""
        as_cell: Outcome[Measurement, CellProgress] = Outcome(
            answer=Measurement() if outcome.answer else None, error=outcome.error, killed=outcome.killed,
            resident_bytes=outcome.resident_bytes, exit_code=outcome.exit_code, printed=outcome.printed)
        status, why = judge(as_cell, self.cell, Card(self.facts.total_bytes, is_card=False), ())
        if status is Status.OOM:
            raise NoPlan(f"the plan's step does not fit on {self.facts.name} now: {why}; end what else holds memory, or "
                         f"plan with a smaller --limit")

    def _keep(self, settled: bool) -> Soak:
        kept = Soak(schema=1, at=now(), device=self.facts.fingerprint, software=self.facts.software, cell=self.cell,
                    minutes=self.minutes, seconds=self.windows[-1].at_s, windows=self.windows, settled=settled,
                    on_battery=self.on_battery)
        soak.append(self.path, kept)
        return kept

    def _keep_unfinished(self) -> None:
        if len(self.windows) >= LEAST_WINDOWS:
            self._keep(settled=False)
            self.live.say(f"broken off: {format_duration(self.windows[-1].at_s)} of it kept in {self.path}, as not settled")
        else:
            self.live.say("broken off before there was enough to keep")
