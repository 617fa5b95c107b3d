"""On a card: a run that is well and then starved on purpose is named, by its folder and as any other process."""

import dataclasses

import pytest
from helpers.jobs import WINDOW, disorder, end, start_run, wait_for_findings
from helpers.runs import make_home, receipt
from helpers.waiting import wait_for

from probe.health.observe import JobObserver
from trainer.config import ModelConfig, StepConfig
from trainer.plan import Plan, Span
from trainer.run_folder import RunFolder

pytestmark = pytest.mark.gpu
CUDA = ("--device", "cuda")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A plan of the speed that the card has, whose run would take hours."""
    home = make_home(tmp_path_factory.mktemp("health"), *CUDA, model=ModelConfig.named("50M", 4000),
                     shape=StepConfig(16, 512), save=90)
    tok_s = receipt(home / "whole")["actual"]["tok_s"]
    plan = Plan.load(home / "plan.json")
    predicted = dataclasses.replace(plan.predicted, tok_s=Span(0.9 * tok_s, tok_s, 1.1 * tok_s))
    dataclasses.replace(plan, steps=10**6, eval=10**4, checkpoint=10**4, predicted=predicted).save(home / "plan.json")
    return home


def test_a_run_on_a_card_is_named_from_inside_and_from_outside(home):
    folder = RunFolder(home / "job")
    job = start_run(home, "job", *CUDA)
    try:
        wait_for(lambda: folder.log.exists() and folder.log.read_text().count("\n") > 30)
        observers = [JobObserver.of_run(folder.path, None, home / "results", 4 * WINDOW),
                     JobObserver(job.pid, None, None, home / "results", 4 * WINDOW)]
        for state, level, what in (("", "ok", "steady"), ("starved", "bad", "data bubble")):
            disorder(home, state)
            for observer in observers:
                findings = wait_for_findings(observer, level, alive="running", speed=what)
                print(findings)
                assert findings["speed"].level == level
                assert "card" in findings["speed"].line
        assert job.poll() is None
    finally:
        end(job)
