"""Records outlive whatever happens to the process that writes them, and damage is named by file and line."""

import json

import pytest
from helpers.made import make_record

from probe.cell import Cell, grid
from probe.records import Record, append, frame, latest, load, of_device
from spillcliff.errors import UserError


def test_a_record_comes_back_as_it_was_written(tmp_path):
    path = tmp_path / "a" / "records.jsonl"
    for batch in (1, 2):
        append(path, make_record(batch))
    assert load(path) == [make_record(1), make_record(2)]
    assert json.loads(path.read_text().splitlines()[0])["model"]["parameters"] == 150_436_608


def test_throughput_counts_every_micro_step():
    """Low by the accumulation factor is a known fault of throughput meters."""
    r = make_record(4, 512, accum=3, step_s=(2.0, 1.0, 1.5))
    assert r.tok_s == 4 * 512 * 3 / 1.5


def test_the_peak_is_the_best_figure_there_is():
    assert make_record(reserved_peak_bytes=3, device_peak_bytes=5).peak_bytes == 5
    assert make_record(reserved_peak_bytes=3, device_peak_bytes=None).peak_bytes == 3


def test_a_torn_last_line_is_set_aside_and_nothing_else_is_lost(tmp_path):
    path = tmp_path / "records.jsonl"
    append(path, make_record(1))
    with path.open("a") as f:
        f.write('{"schema": 1, "at": "2026')
    said: list[str] = []
    assert len(load(path, said.append)) == 1 and "line 2 is torn" in said[0]
    append(path, make_record(2))
    assert load(path) == [make_record(1), make_record(2)]
    assert (tmp_path / "records.jsonl.torn").read_text().startswith('{"schema": 1, "at"')


@pytest.mark.parametrize(("change", "words"), [
    (dict(schema=2), "newer than this version reads"), (dict(schema=None), "schema"), (dict(status="great"), "status"),
    (dict(step_s=[0.0]), "step_s"), (dict(step_s=[]), "step_s"), (dict(step_s="fast"), "step_s"), (dict(cell=None), "cell"),
    (dict(cell={"model": "150M"}), "batch"), (dict(model={}), "model"), (dict(device=5), "device"),
    (dict(device_peak_bytes="4GB"), "device_peak_bytes"), (dict(device_peak_bytes=-1), "device_peak_bytes"),
    (dict(readings=[]), "readings"), (dict(micro_s=True), "micro_s")])
def test_damage_is_named_by_line_and_field(tmp_path, change, words):
    path = tmp_path / "records.jsonl"
    good = make_record().to_json()
    path.write_text("\n".join(json.dumps(v) for v in (good, good | change, good)) + "\n")
    with pytest.raises(UserError, match=rf"line 2.*{words}"):
        load(path)


def test_unknown_fields_are_ignored_and_optional_ones_may_lack():
    values = make_record().to_json() | {"colour": "blue"}
    for name in ("readings", "software", "why", "warmup_s", "micro_s", "alloc_retries"):
        del values[name]
    assert Record.from_json(values).tok_s == pytest.approx(1000)


def test_the_newest_record_of_a_cell_counts():
    old, new = make_record(tok_s=1000), make_record(tok_s=2000)
    assert list(latest([old, make_record(8), new]).values()) == [new, make_record(8)]


def test_a_frame_has_a_row_for_each_record():
    table = frame([make_record(1), make_record(2, status="oom", step_s=())])
    assert table.status.tolist() == ["fits", "oom"] and table.tok_s.isna().tolist() == [False, True]


def test_a_grid_runs_small_cells_first():
    cells = grid(("10M", "1M"), {"batch": (4, 1), "length": (256, 128), "accum": (1, 2)})
    assert len(cells) == len(set(cells)) == 16
    assert [c.model for c in cells] == ["10M"] * 8 + ["1M"] * 8
    sizes = [c.batch * c.length for c in cells[:4]]
    assert sizes == sorted(sizes)


def test_a_cell_needs_no_more_than_a_larger_one():
    small = Cell.of("10M", 2, 128)
    assert small.within(Cell.of("10M", 4, 128)) and small.within(Cell.of("10M", 2, 256, accum=2))
    assert not small.within(Cell.of("10M", 1, 512)) and not small.within(Cell.of("20M", 4, 128))
    assert Cell.of("10M", 2, 128, accum=2).within(Cell.of("10M", 2, 128, accum=3))
    assert not Cell.of("10M", 2, 128, accum=2).within(Cell.of("10M", 4, 256))


def test_a_device_s_records_are_read_in_order_whoever_wrote_them(tmp_path):
    """The second line is written without blanks, as another program might, and is the newest but one."""
    a, b = make_record(1, tok_s=1000), make_record(1, tok_s=2000, device="nvidia-h200")
    compact = json.dumps(make_record(1, tok_s=3000).to_json(), separators=(",", ":"))
    lines = [json.dumps(a.to_json()), compact, json.dumps(b.to_json()), json.dumps(make_record(1, tok_s=4000).to_json())]
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(lines) + "\n" + lines[0][:50])
    said: list[str] = []
    devices: list[str] = []

    def choose(names: list[str]) -> str:
        devices.extend(names)
        return a.device

    records = of_device([path], choose, said.append)
    assert [round(r.tok_s) for r in records] == [1000, 3000, 4000] and set(devices) == {a.device, b.device}
    assert len(said) == 1 and "torn" in said[0]
    path.write_text("")
    assert of_device([path], lambda names: names[0]) == []


def test_a_cell_s_options_measure_that_cell():
    assert Cell.of("10M", 2, 128).command_options() == ""
    assert Cell.of("10M", 2, 128, 2, vocab=500, engine="graph", recompute="block").command_options() == (
        " --accum 2 --engine graph --recompute block --vocab 500")
