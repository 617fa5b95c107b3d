"""The command `train`, and what the three commands share: how they begin and end, and their common options."""

import atexit
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import click

from spillcliff.errors import Refused, UserError
from spillcliff.live import GONE, unread
from spillcliff.output import Output
from spillcliff.stop import SIGNALS

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def guarded(command: click.Command, name: str) -> None:
    """Runs a command and leaves with the contract's exit code; an expected failure is one line on stderr."""
    def interrupt(signum, frame):
        raise KeyboardInterrupt

    for number in SIGNALS:
        if signal.getsignal(number) == signal.SIG_DFL:  # what is ignored from the start (nohup) stays so
            signal.signal(number, interrupt)
    for stream in (sys.stdout, sys.stderr):  # a console of an old code page must not end a run over one character
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        code = command.main(prog_name=name, standalone_mode=False)
    except UserError as e:
        code = _fail(str(e), e.exit_code)
    except click.ClickException as e:
        code = _fail(e.format_message(), 2)
    except (KeyboardInterrupt, click.Abort):
        _leave_interrupted()
    except OSError as e:  # click ends the line on stderr after an interrupt: with the terminal closed it can't
        if e.errno not in GONE or not isinstance(e.__context__, KeyboardInterrupt):
            raise
        _leave_interrupted()
    sys.exit(code if isinstance(code, int) else 0)


def _leave_interrupted() -> None:
    """Not by sys.exit: had it come in the middle of an exec (a dataclass being made), CPython would end by SIGINT."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with unread(stream):
            stream.flush()
    os._exit(130)


def _fail(message: str, code: int) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return code


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, words on stderr.")
device_option = click.option("--device", metavar="D",
                             help="cuda, cuda:1, cpu, mps, xpu, or a name under results/.  [default: the best here]")
data_option = click.option("--data", multiple=True, type=click.Path(path_type=Path), metavar="FILE",
                           help="Token file, folder or pattern to train on; may be repeated.")
val_option = click.option("--val", multiple=True, type=click.Path(path_type=Path), metavar="FILE",
                          help="The same to validate on.  [default: the last hundredth of --data]")
dtype_option = click.option("--dtype", type=click.Choice(["uint16", "uint32"]),
                            help="Of a flat token file.  [default: told by its content]")
column_option = click.option("--column", metavar="NAME", help="Of a Parquet or Arrow file.  [default: input_ids, tokens, "
                                                              "ids or the only one of ids]")


@click.group(invoke_without_command=True, context_settings=HELP, no_args_is_help=True)
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), metavar="FILE", help="The plan to run.")
@data_option
@val_option
@dtype_option
@column_option
@click.option("--run", "run_path", type=click.Path(path_type=Path), metavar="DIR",
              help="The run's folder.  [default: results/runs/MODEL-TIME]")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in --run.")
@click.option("--from", "source_path", type=click.Path(path_type=Path), metavar="DIR",
              help="Start from the weights of a run, an exported folder or a Llama-like Hugging Face one.")
@click.option("--sample", "prompts", multiple=True, metavar="TEXT",
              help="After each evaluation, show how the model goes on from this; may be repeated.")
@click.option("--tensorboard", is_flag=True, help="Write event files to RUN/tensorboard too.")
@click.option("--dry-run", is_flag=True, help="Check plan, data and device, say what would run, and stop.")
@click.option("--allow-battery", is_flag=True, help="Start even on battery (about half as fast).")
@device_option
@json_option
@click.pass_context
def cli(ctx, plan_path, data, val, dtype, column, run_path, resume, source_path, prompts, tensorboard, dry_run,
        allow_battery, device, as_json) -> None:
    """Train a small language model as planned, in fp32, and write a receipt of planned beside actual.

    On N cards of one machine: torchrun --nproc-per-node N -- $(which train) --plan ...
    """
    if ctx.invoked_subcommand:
        if any((plan_path, data, val, dtype, column, run_path, resume, source_path, prompts, tensorboard, dry_run)):
            raise click.UsageError(f"options of a run don't go with `train {ctx.invoked_subcommand}`; put its own after it")
        return
    if plan_path is None or not data:
        raise click.UsageError("a run needs --plan FILE and --data FILE; `plan` and `train tokenize` make them")
    if resume and run_path is None:
        raise click.UsageError("--resume needs --run DIR, the folder of the run to go on with")
    from trainer.run.start import Start, launch

    launch(Start(plan_path, data, val, dtype, column, run_path, resume, source_path, prompts, tensorboard, dry_run,
                 allow_battery, device), as_json)


@cli.command(context_settings=HELP)
@click.option("--plan", "plan_path", required=True, type=click.Path(path_type=Path), metavar="FILE", help="The plan to run.")
@data_option
@val_option
@dtype_option
@column_option
@click.option("--run", "run_path", type=click.Path(path_type=Path), metavar="DIR",
              help="The folder that the run would have.  [default: results/runs/MODEL-TIME]")
@click.option("--allow-battery", is_flag=True, help="Only warn of a battery.")
@device_option
@json_option
def audit(plan_path, data, val, dtype, column, run_path, allow_battery, device, as_json) -> None:
    """Go through what a run of the plan would meet here, as every start does; exit 4 if something refuses."""
    from trainer.plan import Plan
    from trainer.run import preflight as checklist
    from trainer.run.log import default_run
    from trainer.run.preflight_facts import examine

    if val and not data:
        raise click.UsageError("--val needs --data FILE, the tokens to train on")
    out, plan = Output(as_json), Plan.load(plan_path)
    findings = checklist.judge(examine(plan, data, val, run_path or default_run(Path("results"), plan), device,
                                       allow_battery, dtype=dtype, column=column, say=out.say))
    refusal = checklist.refusal(findings)
    for line in checklist.lines(findings):
        out.say(line)
    out.result({"findings": [asdict(f) for f in findings], "refused": refusal is not None})
    if refusal:
        raise Refused(str(refusal))


@cli.command(context_settings=HELP)
@click.argument("texts", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="TEXT...")
@click.option("--out", "out_path", required=True, type=click.Path(path_type=Path), metavar="FILE",
              help="Token file to write.")
@click.option("--vocab", default="32000", show_default=True, metavar="N", help="Entries of the tokenizer to train.")
@click.option("--tokenizer", "tokenizer_path", type=click.Path(path_type=Path), metavar="FILE",
              help="Use this tokenizer.json instead of training one.")
@click.option("--field", metavar="NAME", help="Of JSONL, the field that holds the text.  [default: text or content]")
@click.option("--end", metavar="TOKEN", help="What ends a document.  [default: the tokenizer's own end of text]")
@click.option("--val-share", default=0.0, type=click.FloatRange(0, 0.5), metavar="X",
              help="Hold this share of the documents back to validate on, in OUT.val.")
@click.option("--val", multiple=True, type=click.Path(path_type=Path), metavar="TEXT",
              help="Texts to validate on, tokenized into OUT.val.")
@click.option("--pairs", "are_pairs", is_flag=True,
              help="TEXT is JSONL of prompts and answers, or of chats: the loss will be on the answers.")
@click.option("--length", metavar="L", help="With --pairs: tokens in a row, the length of the plan to come.")
@click.option("--packed", is_flag=True, help="With --pairs: as many in a row as fit; each sees those before it.")
@json_option
@click.pass_context
def tokenize(ctx, texts, out_path, vocab, tokenizer_path, field, end, val_share, val, are_pairs, length, packed,
             as_json) -> None:
    """Turn texts (plain or JSONL, also gzip or zstd; files, folders, patterns) into a token file, with a byte-level BPE
    trained on them. Run again after it was stopped, it goes on."""
    from spillcliff.units import parse_count

    if val_share and val:
        raise click.UsageError("--val-share and --val are two ways to the same; give one")
    out = Output(as_json)
    if are_pairs:
        from trainer.tokenize.pairs import tokenize_pairs

        if length is None or tokenizer_path is None:
            raise click.UsageError("--pairs needs --length L, as the plan will have it, and --tokenizer FILE, that of the "
                                   "run to start from")
        for name in ("vocab", "field", "end", "val_share", "val"):
            if ctx.get_parameter_source(name).name == "COMMANDLINE":
                raise click.UsageError(f"--{name.replace('_', '-')} does not go with --pairs")
        out.result(tokenize_pairs(texts, out_path, parse_count(length, "--length"), tokenizer_path, packed, out.say))
        return
    if length is not None or packed:
        raise click.UsageError("--length and --packed go with --pairs")
    from spillcliff.live import Live
    from trainer.tokenize.corpus import tokenize as write

    with Live(out.console()) as live:
        facts = write(texts, out_path, parse_count(vocab, "--vocab"), tokenizer_path, field, end, val_share, val, live.say,
                      live.update)
    out.result(facts)


@cli.command(context_settings=HELP)
@click.option("--run", "run_path", type=click.Path(path_type=Path), metavar="DIR", help="The run's folder.")
@click.option("--from", "folder", type=click.Path(path_type=Path), metavar="DIR",
              help="Instead of --run: an exported folder, or a Llama-like Hugging Face one.")
@click.option("--prompt", "prompts", required=True, multiple=True, metavar="TEXT",
              help="How the text begins; several are written at once.")
@click.option("--count", default=1, show_default=True, type=click.IntRange(1, 4096), help="Texts for each prompt.")
@click.option("--tokens", "most", default=100, show_default=True, type=click.IntRange(1), help="Tokens to add.")
@click.option("--temperature", default=0.8, show_default=True, type=click.FloatRange(0, 100), help="0 takes the likeliest.")
@click.option("--top-k", default=50, show_default=True, type=click.IntRange(1), help="Draw from the K likeliest.")
@click.option("--top-p", default=1.0, show_default=True, type=click.FloatRange(0, 1),
              help="And from the fewest of them that hold this much of the probability.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**63 - 1),
              help="Each further text has the next one.")
@device_option
@json_option
def sample(run_path, folder, prompts, count, most, temperature, top_k, top_p, seed, device, as_json) -> None:
    """Write text with a run's newest checkpoint or an exported folder, shown as it comes."""
    from spillcliff.hardware.device import resolve

    if (run_path is None) == (folder is None):
        raise click.UsageError("a sample needs either --run DIR, a run's folder, or --from DIR, an exported one")
    if not (temperature >= 0 and top_p >= 0):
        raise click.UsageError(f"--temperature {temperature} and --top-p {top_p} must be numbers of 0 or more")
    where = resolve(device)
    from trainer.model.generate import Draw
    from trainer.run.sample import Writer, printable, write

    out = Output(as_json)
    writer = Writer.of_run(run_path, where, out.say) if run_path else Writer.of_folder(folder, where)
    begins = [prompt for prompt in prompts for _ in range(count)]
    is_alone = len(begins) == 1 and not as_json

    def show(row: int, piece: str) -> None:
        if is_alone:
            out.say(printable(piece), end="")

    if is_alone:
        out.say(printable(begins[0]), end="")
    texts = write(writer, begins, most, Draw(temperature, top_k, top_p, seed), show,
                  lambda line: click.echo(line, err=True))
    if is_alone:
        out.say()
    elif not as_json:
        for i, text in enumerate(texts):
            out.say(f"--- {i + 1} of {len(texts)}, seed {seed + i}\n{printable(text)}")
    out.result({"text": texts[0], "texts": [{"prompt": p, "text": t} for p, t in zip(begins, texts, strict=True)]})


@cli.command(context_settings=HELP)
@click.option("--run", "run_path", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The run's folder.")
@click.option("--out", "out_path", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Folder to write.")
@click.option("--checkpoint", "which", default="best", show_default=True, metavar="best|newest|step-N",
              help="Which one: best is by validation loss.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16", "float16"]),
              help="What the weights are written as.")
@json_option
def export(run_path, out_path, which, dtype, as_json) -> None:
    """Write a run's model as a folder that Hugging Face's transformers loads (LlamaForCausalLM, AutoTokenizer)."""
    from spillcliff.units import format_bytes
    from trainer.huggingface.export import export as write

    out = Output(as_json)
    written = write(run_path, out_path, which, dtype, out.say)
    out.say(f"written to {out_path}: the model after step {written['step']}, {format_bytes(written['bytes'])} of {dtype}")
    out.result(written)


@cli.command(context_settings=HELP)
@click.option("--run", "runs", required=True, multiple=True, type=click.Path(path_type=Path), metavar="DIR",
              help="A run's folder; several are drawn into one picture.")
@click.option("--out", "out_path", type=click.Path(path_type=Path), metavar="FILE",
              help="The PNG to write.  [default: curve.png in the first run's folder]")
@click.option("--csv", "csv_path", metavar="FILE|-", help="Write the steps as CSV instead; - is stdout.")
@json_option
def curve(runs, out_path, csv_path, as_json) -> None:
    """Draw loss and tok/s over the tokens seen, or write every step as CSV."""
    from spillcliff.output import write_table
    from trainer.run.learning_curve import draw, read, table

    out = Output(as_json, is_taken=csv_path == "-")
    courses = [read(run, out.say) for run in runs]
    picture = out_path or (None if csv_path else runs[0] / "curve.png")
    if csv_path:
        write_table(out, csv_path, table(courses))
    if picture:
        draw(courses, picture)
        out.say(f"picture {picture}")
    out.result({"picture": picture and str(picture), "csv": csv_path, "steps": sum(len(c.rows) for c in courses)})


def main() -> None:
    guarded(cli, "train")


if __name__ == "__main__":
    main()
