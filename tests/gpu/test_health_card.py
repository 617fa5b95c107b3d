"""On a card: a run that is well and one that is starved on purpose are named, by their folder and as any other process."""

import dataclasses

import pytest
from helpers.jobs import SLEEPS, end, health, log_lines, start, verdicts, wait_for
from helpers.runs import make_home, receipt

from trainer.config import ModelConfig, StepConfig
from trainer.plan import Plan, Span

pytestmark = pytest.mark.gpu
CUDA = ("--device", "cuda")
STARVED = SLEEPS + "slow(tokens.Tokens, 'batch', 0.4)"


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


@pytest.mark.parametrize(("name", "code", "expected"), [
    ("well", "", ("ok", "steady")), ("starved", STARVED, ("bad", "data bubble"))])
def test_a_run_on_a_card_is_named_from_inside_and_from_outside(home, name, code, expected):
    job = start(home, code, name, *CUDA)
    try:
        wait_for(lambda: log_lines(home / name) > 30)
        looks = [health(home, "--seconds", "8", "--json", *which) for which in (("--run", name), ("--pid", job.pid))]
        for look in looks:
            told = verdicts(look)
            print(told)
            assert told["alive"][:2] == ("ok", "running") and told["speed"][:2] == expected
            assert "card" in told["speed"][2]
        assert job.poll() is None
    finally:
        end(job)
