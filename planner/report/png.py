"""The page's charts as PNG files, for where HTML can't be shown."""

from pathlib import Path

from planner.report import charts
from planner.report.drawing import WIDE
from planner.report.page_data import PageData
from planner.report.text import end_of
from spillcliff.files import write_atomic


def draw(page: PageData, folder: Path) -> list[Path]:
    """Writes hours.png, sizes.png (of more than one model) and receipts.png (of runs, if any) into `folder`, and returns
    those written. UserError if they can't be written."""
    written = []
    for name, chart in (("hours", charts.hours), ("sizes", charts.models), ("receipts", charts.receipts)):
        if drawing := chart(page, WIDE):
            written.append(folder / f"{name}.png")
            write_atomic(written[-1], drawing.png(end_of(page.title, 90)))
    return written
