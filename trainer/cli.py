"""The command `train`."""

from dataclasses import asdict
from pathlib import Path

import click
from click.core import ParameterSource

from spillcliff.cli import HELP, PATH, column_option, device_option, dtype_option, json_option, run_command
from spillcliff.console import LiveLine, Output
from spillcliff.errors import Refused

MOST_TOKENS = 1_000_000
"""Of a text: more is a slip of the finger, and would overflow what sizes are counted in."""

data_option = click.option("--data", multiple=True, type=PATH, metavar="FILE",
                           help="Token file, folder or pattern to train on; may be repeated.")
val_option = click.option("--val", multiple=True, type=PATH, metavar="FILE",
                          help="The same to validate on.  [default: the last hundredth of --data]")


@click.group(invoke_without_command=True, context_settings=HELP, no_args_is_help=True)
@click.option("--plan", "plan_path", type=PATH, metavar="FILE", help="The plan to run.")
@data_option
@val_option
@dtype_option
@column_option
@click.option("--run", "run_path", type=PATH, metavar="DIR",
              help="The run's folder.  [default: results/runs/MODEL-TIME]")
@click.option("--resume", is_flag=True, help="Continue from the newest checkpoint in --run.")
@click.option("--from", "source_path", type=PATH, metavar="DIR",
              help="Start from the weights of a run, an exported folder or a Llama-like Hugging Face one.")
@click.option("--lr", type=float, metavar="X",
              help="Peak learning rate instead of the plan's; with --resume, from there on.")
@click.option("--sample", "prompts", multiple=True, metavar="TEXT",
              help="After each evaluation, show how the model continues this; may be repeated.")
@click.option("--tensorboard", is_flag=True, help="Write event files to RUN/tensorboard too.")
@click.option("--dry-run", is_flag=True, help="Check plan, data and device, say what would run, and stop.")
@click.option("--allow-battery", is_flag=True, help="Start even on battery (about half as fast).")
@click.option("--keep-step", is_flag=True, help="Keep the planned batch even where memory spills while it trains.")
@device_option
@json_option
@click.pass_context
def cli(ctx: click.Context, plan_path: Path | None, data: tuple[Path, ...], val: tuple[Path, ...], dtype: str | None,
        column: str | None, run_path: Path | None, resume: bool, source_path: Path | None,
        lr: float | None, prompts: tuple[str, ...], tensorboard: bool, dry_run: bool, allow_battery: bool,
        keep_step: bool, device: str | None, as_json: bool) -> None:
    """Train a small language model as planned, in fp32, and write a receipt of planned beside actual.

    On N cards of one machine: torchrun --nproc-per-node N -- $(which train) --plan ...
    """
    if ctx.invoked_subcommand:
        if any((plan_path, data, val, dtype, column, run_path, resume, source_path, lr is not None, prompts, tensorboard,
                dry_run)):
            raise click.UsageError(f"options of a run don't go with `train {ctx.invoked_subcommand}`; put its own after it")
        return
    if plan_path is None or not data:
        raise click.UsageError("a run needs --plan FILE and --data FILE; `plan` and `train tokenize` make them")
    if resume and run_path is None:
        raise click.UsageError("--resume needs --run DIR, the folder of the run to continue")
    from trainer.run.start import StartOptions, start

    start(StartOptions(
        plan=plan_path, data=data, val=val, dtype=dtype, column=column, run=run_path, resume=resume, source=source_path,
        lr=lr, prompts=prompts, tensorboard=tensorboard, dry_run=dry_run, allow_battery=allow_battery, keep_step=keep_step,
        device=device), as_json)


@cli.command(context_settings=HELP)
@click.option("--plan", "plan_path", required=True, type=PATH, metavar="FILE", help="The plan to run.")
@data_option
@val_option
@dtype_option
@column_option
@click.option("--run", "run_path", type=PATH, metavar="DIR",
              help="The folder that the run would have.  [default: results/runs/MODEL-TIME]")
@click.option("--allow-battery", is_flag=True, help="Only warn of a battery.")
@device_option
@json_option
def audit(plan_path: Path, data: tuple[Path, ...], val: tuple[Path, ...], dtype: str | None, column: str | None,
          run_path: Path | None, allow_battery: bool, device: str | None, as_json: bool) -> None:
    """Check what a run of the plan would meet here, as every start does; exit 4 if something refuses."""
    from trainer.plan import Plan
    from trainer.run import preflight
    from trainer.run.preflight_facts import gather_for_audit
    from trainer.run_folder import RunFolder, new_run_folder

    if val and not data:
        raise click.UsageError("--val needs --data FILE, the tokens to train on")
    out, plan = Output(as_json), Plan.load(plan_path)
    folder = RunFolder(run_path) if run_path else new_run_folder(Path("results"), plan)
    findings = preflight.check(gather_for_audit(plan, data, val, folder, device, allow_battery, dtype=dtype, column=column,
                                                say=out.say))
    refusal = preflight.refusal(findings)
    for line in preflight.lines(findings):
        out.say(line)
    out.result({"findings": [asdict(f) for f in findings], "refused": refusal is not None})
    if refusal:
        raise Refused(str(refusal))


@cli.command(context_settings=HELP)
@click.argument("texts", nargs=-1, required=True, type=PATH, metavar="TEXT...")
@click.option("--out", "out_path", required=True, type=PATH, metavar="FILE",
              help="Token file to write.")
@click.option("--vocab", default="32000", show_default=True, metavar="N", help="Entries of the tokenizer to train.")
@click.option("--tokenizer", "tokenizer_path", type=PATH, metavar="FILE",
              help="Use this tokenizer.json instead of training one.")
@click.option("--field", metavar="NAME", help="Of JSONL, the field that holds the text.  [default: text or content]")
@click.option("--end", metavar="TOKEN", help="What ends a document.  [default: the tokenizer's own end of text]")
@click.option("--val-share", default=0.0, type=click.FloatRange(0, 0.5), metavar="X",
              help="Hold this share of the documents back to validate on, in OUT.val.")
@click.option("--val", multiple=True, type=PATH, metavar="TEXT",
              help="Texts to validate on, tokenized into OUT.val.")
@click.option("--pairs", "are_pairs", is_flag=True,
              help="TEXT is JSONL of prompts and answers, or of chats: the loss will be on the answers.")
@click.option("--length", metavar="L", help="With --pairs: tokens in a row, the length of the plan to come.")
@click.option("--packed", is_flag=True, help="With --pairs: as many in a row as fit; each sees those before it.")
@json_option
@click.pass_context
def tokenize(ctx: click.Context, texts: tuple[Path, ...], out_path: Path, vocab: str, tokenizer_path: Path | None,
             field: str | None, end: str | None, val_share: float, val: tuple[Path, ...], are_pairs: bool,
             length: str | None, packed: bool, as_json: bool) -> None:
    """Turn texts (plain or JSONL, also gzip or zstd; files, folders, patterns) into a token file, with a byte-level BPE
    trained on them. Run again after it was stopped, it continues."""
    from spillcliff.units import parse_count

    if val_share and val:
        raise click.UsageError("--val-share and --val are two ways to the same; use one")
    out = Output(as_json)
    if are_pairs:
        from trainer.tokenize.pairs import tokenize_pairs

        if length is None or tokenizer_path is None:
            raise click.UsageError("--pairs needs --length L, as the plan will have it, and --tokenizer FILE, that of the "
                                   "run to start from")
        for name in ("vocab", "field", "end", "val_share", "val"):
            if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE:
                raise click.UsageError(f"--{name.replace('_', '-')} does not go with --pairs")
        out.result(tokenize_pairs(texts, out_path, parse_count(length, "--length"), tokenizer_path, is_packed=packed,
                                  say=out.say))
        return
    if length is not None or packed:
        raise click.UsageError("--length and --packed go with --pairs")
    from trainer.tokenize.corpus import CorpusOptions
    from trainer.tokenize.corpus import tokenize as tokenize_corpus

    options = CorpusOptions(texts=texts, out=out_path, vocab=parse_count(vocab, "--vocab"), tokenizer=tokenizer_path,
                            field=field, end=end, val_share=val_share, val=val)
    with LiveLine(out.console()) as live:
        result = tokenize_corpus(options, live.say, live.update)
    out.result(result)


@cli.command(context_settings=HELP)
@click.option("--run", "run_path", type=PATH, metavar="DIR", help="The run's folder.")
@click.option("--from", "folder", type=PATH, metavar="DIR",
              help="Instead of --run: an exported folder, or a Llama-like Hugging Face one.")
@click.option("--checkpoint", "which", default="best", show_default=True, metavar="best|newest|N",
              help="Of --run, which one: best is by validation loss, N a step.")
@click.option("--prompt", "prompts", required=True, multiple=True, metavar="TEXT",
              help="How the text begins; several are written at once.")
@click.option("--count", default=1, show_default=True, type=click.IntRange(1, 4096), help="Texts for each prompt.")
@click.option("--tokens", "most", default=100, show_default=True, type=click.IntRange(1, MOST_TOKENS), help="Tokens to add.")
@click.option("--temperature", default=0.8, show_default=True, type=click.FloatRange(0, 100), help="0 takes the likeliest.")
@click.option("--top-k", default=50, show_default=True, type=click.IntRange(1), help="Draw from the K likeliest.")
@click.option("--top-p", default=1.0, show_default=True, type=click.FloatRange(0, 1),
              help="And from the fewest of them that hold this much of the probability.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**63 - 1),
              help="Each further text has the next one.")
@device_option
@json_option
@click.pass_context
def sample(ctx: click.Context, run_path: Path | None, folder: Path | None, which: str, prompts: tuple[str, ...], count: int,
           most: int, temperature: float, top_k: int, top_p: float, seed: int, device: str | None, as_json: bool) -> None:
    """Write text with a run's best checkpoint or an exported folder, shown as it comes."""
    from spillcliff.hardware.device import resolve_device

    if (run_path is None) == (folder is None):
        raise click.UsageError("a sample needs either --run DIR, a run's folder, or --from DIR, an exported one")
    if folder and ctx.get_parameter_source("which") == ParameterSource.COMMANDLINE:
        raise click.UsageError("--checkpoint goes with --run; an exported folder holds one model")
    if not (temperature >= 0 and top_p >= 0):
        raise click.UsageError(f"--temperature {temperature} and --top-p {top_p} must be numbers of 0 or more")
    torch_device = resolve_device(device)
    from trainer.model.generate import Sampling
    from trainer.run.sample import TextModel, check_text, printable, write_texts
    from trainer.run_folder import RunFolder

    out = Output(as_json)

    for prompt in prompts:
        check_text(prompt)

    def note(line: str) -> None:
        click.echo(line, err=True)

    if run_path:
        model = TextModel.of_run(RunFolder(run_path), torch_device, which, note)
    elif folder:
        model = TextModel.of_folder(folder, torch_device)
    begins = [prompt for prompt in prompts for _ in range(count)]
    is_alone = len(begins) == 1 and not as_json

    has_begun = False

    def show(row: int, piece: str) -> None:
        nonlocal has_begun
        if is_alone:
            has_begun = True
            out.say(printable(piece), end="")

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    try:
        texts = write_texts(model, begins, most, sampling, show, note)
    finally:  # what went wrong has a line of its own
        if has_begun:
            out.say()
    if not (is_alone or as_json):
        for i, text in enumerate(texts):
            out.say(f"--- {i + 1} of {len(texts)}, seed {seed + i}\n{printable(text)}")
    out.result({"text": texts[0], "texts": [{"prompt": p, "text": t} for p, t in zip(begins, texts, strict=True)]})


@cli.command(context_settings=HELP)
@click.option("--run", "run_path", required=True, type=PATH, metavar="DIR", help="The run's folder.")
@click.option("--out", "out_path", required=True, type=PATH, metavar="DIR", help="Folder to write.")
@click.option("--checkpoint", "which", default="best", show_default=True, metavar="best|newest|N",
              help="Which one: best is by validation loss, N a step.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16", "float16"]),
              help="What the weights are written as.")
@json_option
def export(run_path: Path, out_path: Path, which: str, dtype: str, as_json: bool) -> None:
    """Write a run's model as a folder that Hugging Face's transformers loads (LlamaForCausalLM, AutoTokenizer)."""
    from spillcliff.units import format_bytes
    from trainer.huggingface.export import export as write_export
    from trainer.run_folder import RunFolder

    out = Output(as_json)
    written = write_export(RunFolder(run_path), out_path, which, dtype, out.say)
    out.say(f"written to {out_path}: the model after step {written['step']}, {format_bytes(written['bytes'])} of {dtype}")
    out.result(written)


@cli.command(context_settings=HELP)
@click.option("--run", "runs", required=True, multiple=True, type=PATH, metavar="DIR",
              help="A run's folder; several are drawn into one picture.")
@click.option("--out", "out_path", type=PATH, metavar="FILE",
              help="The PNG to write.  [default: curve.png in the first run's folder]")
@click.option("--csv", "csv_path", metavar="FILE|-", help="Write the steps as CSV instead; - is stdout.")
@json_option
def curve(runs: tuple[Path, ...], out_path: Path | None, csv_path: str | None, as_json: bool) -> None:
    """Draw loss and tok/s over the tokens seen, or write every step as CSV."""
    from trainer.run.learning_curve import draw, read, table
    from trainer.run_folder import RunFolder

    out = Output(as_json, stdout_is_taken=csv_path == "-")
    curves = [read(RunFolder(run), out.say) for run in runs]
    picture = out_path or (None if csv_path else RunFolder(runs[0]).curve)
    if csv_path:
        out.csv(csv_path, table(curves))
    if picture:
        draw(curves, picture)
        out.say(f"picture {picture}")
    out.result({"picture": picture and str(picture), "csv": csv_path, "steps": sum(len(c.rows) for c in curves)})


def main() -> None:
    run_command(cli, "train")


if __name__ == "__main__":
    main()
