"""Heat maps of tok/s and peak memory over batch and length."""

from pathlib import Path

from probe.records import Record, frame
from trainer.errors import UserError


def heat_map(records: list[Record], title: str, limit_bytes: int | None, path: Path) -> None:
    """Two maps in one PNG, tok/s and peak in GB: cells that failed bear their status, cells never run stay blank, peaks
    over the limit are in red. UserError if the file can't be written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    table = frame(records)
    batches, lengths = sorted(table.batch.unique()), sorted(table.length.unique())
    figure, axes = plt.subplots(1, 2, figsize=(3.5 + 1.6 * len(lengths), 1.9 + 0.5 * len(batches)), layout="constrained")
    for axis, column, scale, label, colours in ((axes[0], "tok_s", 1, "throughput, tok/s", "viridis"),
                                                (axes[1], "peak_bytes", 1e9, "peak memory, GB", "cividis")):
        fits = table[table.status == "fits"]
        values = (fits.pivot_table(index="batch", columns="length", values=column, aggfunc="last")
                  .reindex(index=batches, columns=lengths).astype(float) / scale) if len(fits) else None
        grid = values.to_numpy() if values is not None else np.full((len(batches), len(lengths)), np.nan)
        image = axis.imshow(grid, cmap=colours, aspect="auto", origin="lower")
        for row in table.itertuples():
            at = lengths.index(row.length), batches.index(row.batch)
            value = getattr(row, column)
            if row.status == "fits" and value == value and value is not None:  # no figure on a device that has none
                value /= scale
                dark = image.norm(value) < 0.6
                over = column == "peak_bytes" and limit_bytes and value * scale > limit_bytes
                axis.text(*at, f"{value:,.0f}" if scale == 1 else f"{value:.2f}", ha="center", va="center",
                          color="red" if over else "white" if dark else "black", fontsize=9)
            else:
                word = "-" if row.status == "fits" else row.status
                axis.text(*at, word, ha="center", va="center", color="0.3", fontsize=9)
        axis.set(title=label, xlabel="length", ylabel="batch", xticks=range(len(lengths)), yticks=range(len(batches)))
        axis.set_xticklabels(lengths)
        axis.set_yticklabels(batches)
        if len(fits):
            figure.colorbar(image, ax=axis)
    figure.suptitle(title, fontsize=10)
    try:
        figure.savefig(path, dpi=130)
    except OSError as e:
        raise UserError(f"can't write {path}: {e.strerror or e}") from None
    finally:
        plt.close(figure)
