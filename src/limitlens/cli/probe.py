"""`limitlens probe`: every head of a real transformer, in one pass over a corpus."""

from __future__ import annotations

from typing import Annotated

import typer

from limitlens.cli import common

# What only a run that measures needs.
MEASURING = (
    "replicates", "mode", "factor", "batch", "averaging_power", "averaging_growth", "frozen_weight", "frozen_growth",
    "checkpoint_every", "resume", "memory", "ray", "precision",
)  # fmt: skip


def probe(
    context: typer.Context,
    model: common.Model,
    corpus: Annotated[
        str, typer.Option(help="stdlib-docs, stdlib-code, a file, a folder or a dataset.")
    ] = "stdlib-docs",
    tokens: Annotated[
        float | None, typer.Option(help="Tokens to read; 1e5 when left out, 3072 with --pilot-only.")
    ] = None,
    window: Annotated[int | None, typer.Option(help="Tokens a window; 256 when left out.")] = None,
    special: Annotated[
        str, typer.Option(metavar="auto|none|bos", help="Tokens around a window: as in training, none, the first.")
    ] = "auto",
    sizes: Annotated[str, typer.Option(metavar="LO:HI:K", help="Sample sizes n.")] = "64:4096:7",
    replicates: Annotated[int, typer.Option(help="Samples behind every point.")] = 24,
    queries: Annotated[
        int | None, typer.Option(help="Queries a head; 256 when left out, 48 with --pilot-only.")
    ] = None,
    mode: Annotated[
        str, typer.Option(metavar="pool|document|contiguous", help="Samples of all windows, or of single ones.")
    ] = "pool",
    factor: Annotated[
        float, typer.Option(help="Multiply every score as it is looked at; the model's forward stays as it is.")
    ] = 1.0,
    pilot_only: Annotated[
        bool, typer.Option("--pilot-only", help="Measure nothing: foretell every head from a few tokens.")
    ] = False,
    batch: Annotated[int | None, typer.Option(help="Windows a forward; about 4,000 tokens when left out.")] = None,
    averaging_power: Annotated[float, typer.Option(help="An averaging head has n^power effective tokens.")] = 0.5,
    averaging_growth: Annotated[
        float, typer.Option(help="And their number grows at least like n to this power.")
    ] = 0.75,
    frozen_weight: Annotated[float, typer.Option(help="A frozen head gives one key this weight.")] = 0.5,
    frozen_growth: Annotated[float, typer.Option(help="And its effective tokens grow at most like this.")] = 0.3,
    seed: common.Seed = 0,
    device: common.Device = "auto",
    precision: common.Precision = "accurate",
    memory: common.Memory = None,
    ray: common.Ray = None,
    out: common.Out = None,
    overwrite: common.Overwrite = False,
    yes: common.Yes = False,
    checkpoint_every: common.Every = None,
    resume: common.Resume = False,
    json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Every head of a real transformer in one pass over a corpus: errors, rates, regimes, tokens needed.

    Example: limitlens probe minilm --corpus stdlib-docs --tokens 1e5 --out runs/minilm
    """
    from limitlens.errors import InputError
    from limitlens.foresight.predict import predict
    from limitlens.heads.regimes import Thresholds
    from limitlens.probing.probe import probe as run_probe

    tokens = (3072 if pilot_only else 1e5) if tokens is None else tokens
    queries = (48 if pilot_only else 256) if queries is None else queries
    if not (tokens >= 1 and float(tokens).is_integer()):
        raise InputError(f"tokens is {tokens:g}; expected a whole number of at least 1, such as 100000 or 1e5")
    thresholds = Thresholds(averaging_power, averaging_growth, frozen_weight, frozen_growth)
    started = common.begin(context)
    if pilot_only:
        given = (name for name in MEASURING if context.get_parameter_source(name).name != "DEFAULT")  # type: ignore[union-attr]
        if (name := next(given, None)) is not None:
            raise InputError(f"--{name.replace('_', '-')} is of no use with --pilot-only, which measures nothing")
        with common.progress(f"foretelling {model}", quiet, unit="layers") as report:
            told = predict(
                model, corpus, tokens=int(tokens), queries=queries, window=window, special=special, sizes=sizes,
                seed=seed, device=device, progress=report,
            )  # fmt: skip
        common.show(context, "probe", told, started=started, out=out, json=json, quiet=quiet)
        return
    checkpoint = common.kept(out, checkpoint_every, resume)
    with common.progress(f"probing {model}", quiet, unit="tokens") as report:
        run = run_probe(
            model, corpus, int(tokens), window=window, special=special, sizes=sizes, replicates=replicates,
            queries=queries, factor=factor, seed=seed, device=device, batch=batch, thresholds=thresholds,
            yes=yes, progress=report, checkpoint=checkpoint, memory=common.size("--memory", memory), ray=ray, mode=mode,
            precision=precision,
        )  # fmt: skip
    common.show(context, "probe", run, started=started, out=out, json=json, quiet=quiet, checkpoint=checkpoint)
