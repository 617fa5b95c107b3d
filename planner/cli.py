"""The command `plan`."""

import dataclasses
import math
from pathlib import Path

import click

from trainer.cli import HELP, Output, given, guarded, json_option, print_rows


@click.command(context_settings=HELP)
@click.option("--corpus", metavar="100M|FILE", help="Tokens to train on, or a token file to count.")
@click.option("--hours", metavar="H", help="Instead of --corpus: as many tokens as so many hours take (12, 90m).")
@click.option("--epochs", default=1.0, show_default=True, type=click.FloatRange(0, 1e5, min_open=True),
              help="Times that the corpus is seen.")
@click.option("--model", metavar="M", help="Size to plan for.  [default: the one that was measured]")
@click.option("--vocab", metavar="N", help="Its vocabulary.  [default: the one that was measured]")
@click.option("--length", metavar="L", help="Tokens in a sequence.  [default: the longest within 5% of the fastest]")
@click.option("--tokens-per-step", metavar="N", help="Tokens in an optimizer step.  [default: by the corpus]")
@click.option("--limit", metavar="5GB", help="Memory that may be used.  [default: 97% of the cliff]")
@click.option("--device", metavar="NAME", help="Device to plan for: a folder under results/.  [default: this machine's]")
@click.option("--records", "files", multiple=True, type=click.Path(path_type=Path), metavar="FILE",
              help="Plan from these records; may be repeated.")
@click.option("--results", default="results", show_default=True, type=click.Path(path_type=Path), metavar="DIR")
@click.option("--out", "out_path", default="results/plan.json", show_default=True, type=click.Path(path_type=Path),
              metavar="FILE", help="The plan to write.")
@json_option
def cli(corpus, hours, epochs, model, vocab, length, tokens_per_step, limit, device, files, results, out_path,
        as_json) -> None:
    """Choose the sweet spot among measured cells, and forecast the hours of a corpus."""
    from planner import report
    from planner.build import Question, build, device_file, of_device, of_model, read_records
    from probe.cliff import Cliff
    from trainer.units import parse_bytes, parse_count, parse_hours

    if (corpus is None) == (hours is None):
        raise click.UsageError("a plan needs either --corpus (tokens, such as 100M, or a token file) or --hours")
    if not math.isfinite(epochs):
        raise click.UsageError(f"--epochs {epochs} must be a number above 0")
    out = Output(as_json)
    question = Question(
        corpus_tokens=given(corpus, _corpus), hours=given(hours, parse_hours, "--hours"), epochs=epochs, model=model,
        vocab=given(vocab, parse_count, "--vocab"), length=given(length, parse_count, "--length"),
        tokens_per_step=given(tokens_per_step, parse_count, "--tokens-per-step"),
        limit_bytes=given(limit, parse_bytes, "--limit"))
    records = of_model(of_device(read_records(results, files, out.say), device, bool(files)), model, question.vocab)
    folder = files[0].parent.parent if files else results
    name = records[0].device
    forecast = build(records, question, device_file(folder, name), Cliff.load(folder / name / "cliff.json"))
    forecast.plan.save(out_path)
    for line in report.lines(forecast):
        out.say(line)
    if forecast.plan.runners_up:
        print_rows(out, ("runner-up", "tok/s", "peak", "time"), report.runner_rows(forecast))
    print_rows(out, ("corpus", "low", "hours", "high"), report.hour_rows(forecast))
    out.say(f"written to {out_path}")
    out.result(forecast.plan.to_json() | {"out": str(out_path), "hours": {
        str(size): dataclasses.asdict(span) for size, span in forecast.table.items()}})


def _corpus(text: str) -> int:
    """Tokens of a count ("100M") or of a token file."""
    from trainer.errors import UserError
    from trainer.units import parse_count

    if Path(text).is_file():
        from trainer.tokens import Tokens

        count = len(Tokens.open(text).ids)
        if not count:
            raise UserError(f"token file {text} is empty")
        return count
    try:
        return parse_count(text, "--corpus")
    except UserError:
        raise UserError(f"--corpus {text!r} is neither a number of tokens, such as 100M, nor a file that is there") from None


def main() -> None:
    guarded(cli, "plan")


if __name__ == "__main__":
    main()
