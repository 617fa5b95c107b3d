"""On a card: a killed run goes on bit for bit, memory that runs out or spills in mid-run is met, and the ledger is told."""

import pytest
from helpers.runs import before_step, kill_and_go_on, log, make_home, receipt, train_with

from trainer.config import ModelConfig, StepConfig
from trainer.plan import Span

pytestmark = pytest.mark.gpu
CUDA = ("--device", "cuda")
MODEL = ModelConfig.named("5M", 4000)
SHAPE = StepConfig(16, 256)


@pytest.fixture(scope="module", params=["eager", "graph"])
def home(request, tmp_path_factory):
    return make_home(tmp_path_factory.mktemp(request.param), *CUDA, model=MODEL, save=5,
                     shape=StepConfig(4, 64, 2, request.param))


def test_a_killed_run_goes_on_bit_for_bit(home, kills):
    kill_and_go_on(home, kills, 1.5, *CUDA)


def at_step(number: int, code: str, look_every_s: float = 0.0) -> str:
    """Code that does something before a step of a run whose card is looked at so often."""
    return f"""
import torch
from trainer.run import speed_watch
speed_watch.LOOK_EVERY_S = {look_every_s}
""" + before_step(number, code)


def cap(share: float, peak: str) -> str:
    """Code after which the process may hold what it has for good and a share of what a step needs beside."""
    return (f"torch.cuda.synchronize(); torch.cuda.empty_cache(); held = torch.cuda.memory_reserved(); "
            f"torch.cuda.set_per_process_memory_fraction((held + {share} * ({peak} - held)) / "
            f"torch.cuda.get_device_properties(0).total_memory)")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Runs in which a step's own memory is most of all."""
    return make_home(tmp_path_factory.mktemp("large"), *CUDA, model=MODEL, shape=SHAPE, save=45)


@pytest.mark.parametrize("at", [1, 30])
def test_out_of_memory_goes_on_with_half_the_batch(large, at):
    """A cap on the process, as if another program had taken the rest."""
    peak = receipt(large / "whole")["reserved_peak_bytes"]
    done = train_with(large, at_step(at, cap(0.7, peak)), f"oom-{at}", *CUDA)
    assert done.returncode == 0, done.stderr
    ours, whole = receipt(large / f"oom-{at}"), receipt(large / "whole")
    print(ours["out_of_memory"], ours["ratio"], ours["loss"], whole["loss"])
    assert ours["out_of_memory"][0] == {"step": at, "batch": 8, "accum": 2}
    assert ours["loss"] == pytest.approx(whole["loss"], rel=2e-2)


def test_out_of_memory_where_a_graph_is_recorded(tmp_path, large):
    home = make_home(tmp_path, *CUDA, model=MODEL, shape=StepConfig(16, 256, 1, "graph"), save=45)
    peak = receipt(large / "whole")["reserved_peak_bytes"]
    done = train_with(home, at_step(1, cap(0.7, peak)), "oom", *CUDA)
    assert done.returncode == 0, done.stderr
    assert receipt(home / "oom")["out_of_memory"][0]["batch"] == 8
    assert receipt(home / "oom")["loss"] == pytest.approx(receipt(home / "whole")["loss"], rel=2e-2)


def test_a_spill_in_mid_run_is_told_live(tmp_path, large):
    """From step 30 on what the steps take is pinned host memory; the plan's speed is that of the undisturbed run."""
    tok_s = receipt(large / "whole")["actual"]["tok_s"]
    home = make_home(tmp_path, *CUDA, model=MODEL, shape=SHAPE, save=45, tok_s=Span(0.95 * tok_s, tok_s, 1.05 * tok_s))
    assert not receipt(home / "whole")["troubles"]
    spill = ("from helpers import small_card; torch.cuda.synchronize(); torch.cuda.empty_cache(); "
             "self.pool = small_card.SpillingPool(0); self.inside = torch.cuda.use_mem_pool(self.pool.pool); "
             "self.inside.__enter__()")
    done = train_with(home, at_step(30, spill, look_every_s=1.0), "spilled", *CUDA)
    print(done.stderr[-500:], receipt(home / "spilled")["ratio"], receipt(home / "spilled")["troubles"])
    told = log(home / "spilled", "trouble")
    assert told
    assert told[0]["what"] == "spill"
    assert 30 < told[0]["step"] < receipt(large / "whole")["steps"]


def test_a_run_that_waits_for_tokens_says_so(large):
    """Each batch takes 50 ms more than the step that runs meanwhile."""
    slow = """
import time
from trainer.data import tokens
real = tokens.Tokens.batch
def slow(self, *a):
    time.sleep(0.1)
    return real(self, *a)
tokens.Tokens.batch = slow
"""
    done = train_with(large, slow, "starved", *CUDA)
    assert done.returncode == 0, done.stderr
    spent = receipt(large / "starved")["ledger"]
    print(spent)
    assert spent["data_s"] > 0.5 * (spent["data_s"] + spent["compute_s"])
    assert receipt(large / "whole")["ledger"]["data_s"] < 0.05 * receipt(large / "whole")["ledger"]["compute_s"]
