"""Commands on real transformers: probe, predict, plan, trial, generate, certify, temper and others."""

from typing import Annotated

from typer import Argument, Option

from limitlens.cli.common import Sizes, command

Model = Annotated[str, Argument(help="minilm, smollm2, mpnet, qwen, a folder, a GGUF file or a hub id.")]
Decoder = Annotated[str, Argument(help="A decoder: smollm2, qwen, a folder, a GGUF file or a hub id.")]
Tokens = Annotated[float, Option(help="Number of tokens of the text to read.")]
Window = Annotated[int | None, Option(min=1, help="Tokens of a window or document; by default 256 or 512.")]
Documents = Annotated[int, Option(min=2, help="Number of documents to read.")]
Queries = Annotated[int, Option(help="Queries per head.")]
Keys = Annotated[str, Option(metavar="LO:HI:K", help="Numbers of keys that a query attends to.")]
Weights = Annotated[list[float], Option(help="Weight of retrieval in the loss, 0 to 1; one fit for each given.")]
Sampling = Annotated[str, Option(metavar="pooled|document|contiguous", help="Tokens of a sample: random of all "
                                 "windows, random of one window, or consecutive in one window.")]  # fmt: skip
Total = Annotated[str | None, Option(metavar="SHARE|SIZE", help="Share of the cache to keep (0.25; sliding-window "
                                     "layers not counted), or size of the whole cache (16MB).")]  # fmt: skip
Policy = Annotated[str, Option(help="best (chosen for each head), or one for all heads: random, random_eviction, "
                               "recent, streaming, knorm, snapkv, expected, priority, reconstruction.")]  # fmt: skip
Methods = Annotated[str | None, Option(metavar="A,B,...", help="Methods to compare: names of plan --policy, and "
                                       "oracle_topk, kvzip, adakv, duo; default: all.")]  # fmt: skip
KeySharing = Annotated[str, Option(metavar="shared|own", help="Whether the queries of a document share their keys.")]

TEXT = "corpus special seed device"  # shared options of commands that run a model over a text


@command("probing {model}", "tokens", runs="probing.probe", kept=True, shares=f"{TEXT} precision memory ray yes")
def probe(
    model: Model,
    tokens: Tokens = 1e5,
    window: Window = None,
    sizes: Sizes = "64:4096:7",
    replicates: Annotated[int, Option(help="At most this many disjoint samples of each size.")] = 24,
    queries: Queries = 256,
    sampling: Sampling = "pooled",
    score_scale: Annotated[float, Option(help="Measure with scaled scores; the model itself runs unscaled.")] = 1.0,
    batch: Annotated[int | None, Option(help="Windows per forward; about 4,000 tokens by default.")] = None,
) -> None:
    """Measure how far every attention head is from its infinite-token limit: error curve, rate, tokens needed.

    Every head is also classified as averaging, selective or frozen.
    Example: limitlens probe minilm --corpus stdlib-docs --tokens 1e5 --out runs/minilm
    """


@command("predicting {model}", "layers", runs="probing.predict", shares=TEXT)
def predict(
    model: Model, tokens: Tokens = 3072, window: Window = None, sizes: Sizes = "64:4096:7", queries: Queries = 48,
    context: Annotated[int | None, Option(help="Also predict errors over this many consecutive tokens.")] = None,
) -> None:  # fmt: skip
    """Predict what `probe` measures (error curve, rate, tokens needed) from a few thousand tokens of text.

    It is less accurate on decoders than on encoders (docs/predict.md).
    Example: limitlens predict minilm --corpus stdlib-docs --out runs/predicted
    """


@command("measuring windows", "windows", runs="cache.plan", shares="seed device", kept=True)
def plan(
    model: Decoder,
    corpus: Annotated[str | None, Option(help="Calibration text; default: that of --run, or stdlib-docs.")] = None,
    total: Total = None,
    error: Annotated[float | None, Option(help="Relative output error of each head, instead of --total.")] = None,
    context: Annotated[int, Option(help="Prompt length at which the cache is cut.")] = 4096,
    policy: Policy = "best",
    weights: Annotated[
        str | None, Option("--for", metavar="AXES", help="Weights of text and recall, such as text=1,recall=10.")
    ] = None,
    run: Annotated[
        str | None, Option(help="Folder of a saved probe; its error curves set the budgets of --policy random.")
    ] = None,
    special: Annotated[str | None, Option(help="Special tokens: auto, none, bos; default: as --run, or auto.")] = None,
    dtype: Annotated[str, Option(help="Number format of the model: float32, bfloat16, float16.")] = "float32",
) -> None:
    """Plan a smaller KV cache: how many keys each head keeps, and by which policy, for a cache size or an error.

    Example: limitlens plan smollm2 --total 0.25 --context 1024 --out runs/plan; limitlens trial runs/plan then measures
    the model with the plan. With --for text=1,recall=10 it also keeps what the model can look up.
    """


@command("reading documents", "documents", runs="cache.trial", shares="device", kept=True)
def trial(
    plan: Annotated[str, Argument(metavar="PLAN", help="Folder that limitlens plan --out wrote.")],
    tasks: Annotated[str, Option(metavar="A,B,...", help="text, needle1, needle8, hop, repeat, words.")] = "text",
    documents: Annotated[int, Option(min=2, help="Number of documents, the same for every task.")] = 24,
    corpus: Annotated[str | None, Option(metavar="TEXT", help="Another text than that of the plan.")] = None,
    policies: Methods = None,
) -> None:
    """Measure a model's predictions with the smaller KV cache of a plan, and compare them with baselines.

    Prints KL divergence, agreement and likelihood on text, and accuracy on recall tasks: facts planted in the text and
    asked for after the cut. Example: limitlens trial runs/plan --tasks text,needle1,needle8 --documents 24
    """


@command("writing", "tokens", runs="cache.generate", shares="device")
def generate(
    model: Decoder,
    plan: Annotated[str, Option(metavar="PLAN", help="Folder that limitlens plan --out wrote.")],
    prompt: Annotated[str, Option(metavar="FILE", help="Text file that the model continues.")],
    max_new_tokens: Annotated[int, Option(help="Number of tokens to write, at most.")] = 200,
    force: Annotated[bool, Option("--force", help="Allow a plan made before fine-tuning (same shapes).")] = False,
) -> None:
    """Continue a text with a decoder whose KV cache keeps only what a plan says: text, bytes, tokens a second.

    Decoding is greedy, and no chat template is added to the prompt.
    Example: limitlens generate smollm2 --plan runs/plan --prompt notes.txt --max-new-tokens 100
    """


@command("reading documents", "documents", runs="cache.certify", shares=TEXT, kept=True)
def certify(
    model: Decoder,
    context: Annotated[int, Option(help="Tokens before the queries.")] = 4096,
    error: Annotated[float, Option(help="Largest output error, relative to the output.")] = 0.1,
    delta: Annotated[float, Option(help="Allowed probability of an error above --error.")] = 0.1,
    rules: Annotated[str | None, Option(metavar="A,B,...", help="Rules to compare; all by default.")] = None,
    documents: Documents = 8,
    draws: Annotated[int, Option(help="Draws of the sample of each query.")] = 64,
    heads: Annotated[float, Option(help="Share of the key/value heads measured in each document.")] = 0.25,
    tasks: Annotated[
        str, Option(metavar="A,B,...", help="Tasks that test predictions with certified reads: text, needle1, ...")
    ] = "text",
) -> None:
    """Measure how many keys a query must read for an output error below --error with probability 1 − --delta.

    Prints keys and bytes read, selection included, and how often the error held, for every rule and head.
    Example: limitlens certify smollm2 --corpus stdlib-docs --context 4096 --error 0.1 --delta 0.1 --out runs/certify
    """


@command("tempering {model}", "parts", runs="interventions.temper", shares="seed device", keeps=True)
def temper(
    model: Decoder,
    to: Annotated[int, Option(help="Tokens of the longer context.")],
    text: Annotated[str, Option(help="Text to fit on; its other documents are held out.")] = "stdlib-docs",
    other: Annotated[str | None, Option(help="Second held-out text, never fitted.")] = None,
    rope_scaling: Annotated[str, Option(metavar="none|linear|ntk|yarn", help="Scaling of rotary positions.")] = "yarn",
    retrieval_weight: Weights = [0.0, 0.2],  # noqa: B006 - typer only reads it
    constant: Annotated[bool, Option("--constant", help="Fit a constant factor per head too.")] = False,
    trained: Annotated[int | None, Option(min=1, help="Trained window; the model's by default.")] = None,
    documents: Annotated[int, Option(min=2, help="Held-out documents of each text, at most.")] = 6,
    steps: Annotated[int, Option(min=1, help="Gradient steps of each fit, at most.")] = 24,
) -> None:
    """Fit factors on a decoder's attention scores for a longer context, and compare them with YaRN and truncation.

    Perplexity and retrieval of distant passages are measured on held-out documents.
    Example: limitlens temper smollm2 --to 32768 --text wiki.txt --retrieval-weight 0.2 --constant --out runs/temper
    """


@command("reading documents", "documents", runs="interventions.depth", shares=f"{TEXT} yes", kept=True)
def depth(
    model: Model,
    keys: Keys = "16:256:5",
    key_sharing: KeySharing = "shared",
    include: Annotated[str, Option(help="Further runs: the same keys in all layers; single layers.")] = "fixed,single",
    replicates: Annotated[int, Option(min=1, help="Random draws per document.")] = 1,
    documents: Documents = 16,
    window: Window = None,
) -> None:
    """Let each query attend to n sampled keys; measure the error in every layer and in the model's predictions.

    Example: limitlens depth minilm --keys 16:512:6 --key-sharing own --out runs/depth
    """


@command("reading documents", "documents", runs="interventions.downstream", shares="seed device", kept=True)
def downstream(
    model: Model,
    data: Annotated[str, Option(help="Labelled documents: a folder of .txt files for each label, .jsonl or .csv.")],
    keys: Keys = "16:256:5",
    key_sharing: KeySharing = "shared",
    test: Annotated[int, Option(min=6, help="Held-out documents to classify.")] = 500,
    train: Annotated[int | None, Option(min=2, help="Training documents; all others by default.")] = None,
    window: Window = None,
) -> None:
    """Measure how a classifier's accuracy, agreement and margins depend on the number of keys per query.

    Example: limitlens downstream minilm --data reviews --keys 16:256:5 --out runs/reviews
    """


@command("designs in {model}", "layers", runs="interventions.designs", shares=TEXT)
def designs(
    model: Model,
    keys: Keys = "16:512:6",
    designs: Annotated[str | None, Option("--only", help="Designs to compare, A,B,...; all by default.")] = None,
    context: Annotated[int, Option(help="Tokens of a document.")] = 512,
    documents: Documents = 32,
    queries: Annotated[int, Option(help="Queries per document.")] = 4,
) -> None:
    """Compare sparse attention (windows, strides, blocks, random keys, projections) at equal numbers of keys.

    Prints error, bias and rate of every design. Example: limitlens designs minilm --keys 16:512:6 --out runs/d
    """


@command("stability of top keys in {model}", "documents", runs="interventions.stability", shares=TEXT)
def stability(
    model: Model,
    keys: Annotated[int, Option(help="Tokens of the context that is exchanged.")] = 256,
    top: Annotated[int, Option(help="Number of keys of largest weight to compare.")] = 5,
    contexts: Annotated[int, Option(help="Other texts before each document.")] = 8,
    documents: Documents = 8,
    trust: Annotated[float, Option(help="Share of the top keys that a trusted head keeps.")] = 0.8,
) -> None:
    """Measure whether the top keys of every head stay the same when the text before them changes.

    Example: limitlens stability minilm --keys 256 --out runs/stability
    """
