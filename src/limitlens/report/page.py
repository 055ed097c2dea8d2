"""One self-contained HTML file of a run: opens anywhere, needs no network, can be mailed.

The page is drawn by a few small scripts that are part of this package (assets/): a charting library would weigh a
megabyte in every page, and its charts can be reached neither by keyboard nor head by head. A content security policy
lets exactly these scripts run and forbids every connection.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from limitlens.errors import InputError
from limitlens.record import provenance, read_run, to_json, write_whole
from limitlens.report.compare_view import compare_view
from limitlens.report.parts import View, compact, details, section, sentence, table
from limitlens.report.plan_view import plan_view
from limitlens.report.probe_view import probe_view
from limitlens.report.scaling_view import heat_view, keys_view, law_view, schedules_view
from limitlens.report.study_view import horizons_view, radii_view, study_view
from limitlens.report.tail_view import hardmax_view, heavy_view

SCRIPTS = ("chart.js", "figure.js", "budget.js", "heads.js", "plans.js", "main.js")

DIGESTS = ("model_revision", "model_sha256", "corpus_sha256", "device", "seconds")
RENAMED = {"length": "context"}  # parameters whose option has another name

Make = Callable[[Mapping[str, Any], Mapping[str, Any]], View]

# A document is known by what it holds: keys that no other kind has, and who draws it.
KINDS: tuple[tuple[str, tuple[str, ...], Make], ...] = (
    ("comparison", ("runs", "differences"), compare_view),
    ("plan", ("heads", "key_value_heads"), plan_view),
    ("probe", ("heads", "model", "corpus"), probe_view),
    ("sweep of horizons", ("horizons", "studies"), horizons_view),
    ("sweep of radii", ("radii", "studies"), radii_view),
    ("study", ("errors", "rates", "n"), study_view),
    ("scaling limits", ("control", "quantities"), law_view),
    ("backward heat flow", ("growth_per_layer", "path"), heat_view),
    ("real keys", ("queries", "median"), keys_view),
    ("temperature schedules", ("predicted", "status"), schedules_view),
    ("hardmax", ("hardmax", "softmax"), hardmax_view),
    ("tails", ("tilts", "inputs"), heavy_view),
)

CITATION = """@software{{limitlens,
  title   = {{limitlens: how softmax attention over n tokens approaches its infinite-token limit}},
  version = {{{version}}},
  year    = {{{year}}}
}}
@inproceedings{{bohbot2026token,
  title     = {{Token Sample Complexity of Attention}},
  author    = {{Bohbot and Letrouit and Peyr\\'e and Vialard}},
  booktitle = {{ICML}}, year = {{2026}}, note = {{arXiv:2512.10656}}
}}
@article{{bruno2026scaling,
  title  = {{Scaling Limits of Long-Context Transformers}},
  author = {{Bruno and Chen and Lin and Polyanskiy and Rigollet}},
  year   = {{2026}}, note = {{arXiv:2605.08505}}
}}"""


def write_report(run: Any, path: str | Path | None = None) -> Path:
    """Write the HTML page of a run.

    Parameters
    ----------
    run : str, Path, mapping or object
        A run folder; the contents of a run.json; or a result with `document()` (a curve, a probe, a plan).
    path : str or Path, optional
        The file to write; report.html in the run folder when left out.

    Returns
    -------
    path : Path
    """
    if path is None:
        if not isinstance(run, (str, Path)):
            raise InputError("no file was given for the report; expected a path such as 'report.html'")
        folder = Path(run)
        path = (folder.parent if folder.is_file() else folder) / "report.html"
    html = page(record_of(run))
    target = Path(path)
    if target.is_dir():
        target = target / "report.html"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, lambda partial: partial.write_text(html, encoding="utf-8", errors="xmlcharrefreplace"))
    except OSError as error:
        raise InputError(
            f"cannot write the report to {str(target)!r} ({error.strerror}); give a file that you may write"
        ) from None
    return target


def record_of(run: Any) -> dict[str, Any]:
    """The contents of a run.json, from a folder, from themselves, or from a result that was never saved."""
    if isinstance(run, (str, Path)):
        return read_run(run)
    if isinstance(run, Mapping):
        return dict(run) if "result" in run else {"result": dict(run)}
    if hasattr(run, "document"):
        made = provenance("", {}, datetime.now(UTC))
        return {"versions": made["versions"], "host": made["host"], "result": json.loads(to_json(run.document()))}
    raise InputError(f"a {type(run).__name__} was given; expected a run folder or a result with document()")


def page(record: Mapping[str, Any]) -> str:
    """The page of a run as HTML."""
    view = view_of(record)
    style, script = _asset("page.css"), "\n".join(_asset(name) for name in SCRIPTS)
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src '{_digest(script)}'; img-src data:; base-uri 'none'"
    )
    words = ("What was measured", "What it found", "What to do")
    verdict = "".join(
        f"<div><dt>{word}</dt><dd>{escape(text)}</dd></div>" for word, text in zip(words, view.verdict, strict=True)
    )
    body = "".join(view.sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(view.title)} · limitlens</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the findings</a>
<header>
<div class="top"><span><b>limitlens</b> · attention over n tokens against its infinite-token limit</span>
<button id="theme" type="button">Theme</button></div>
<h1>{escape(view.title)}</h1>
<p class="subtitle">{escape(view.subtitle)}</p>
</header>
<main id="content">
<section class="card"><dl class="verdict">{verdict}</dl>{view.below}</section>
<noscript><p class="card">The figures need JavaScript; the sentences above and the tables do not.</p></noscript>
{body}
{_trust(view)}
{_provenance(record)}
</main>
<footer><p>Made by limitlens {escape(_version(record))}. This page needs no network and sends nothing anywhere.</p>
</footer>
<script type="application/json" id="data">{embedded({"figures": [], **view.data})}</script>
<script>{script}</script>
</body>
</html>
"""


def view_of(record: Mapping[str, Any]) -> View:
    """Find out which kind of run this is and draw it."""
    result = record["result"]
    for _, keys, make in KINDS:
        if all(key in result for key in keys):
            try:
                return make(result, record)
            except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
                raise InputError(
                    f"the {record.get('command', 'run')} lacks what its report needs ({type(error).__name__}: "
                    f"{error}); "
                    "expected a whole run of this version, so run its command again"
                ) from error
    raise InputError(
        f"a run of {record.get('command', 'an unknown command')!r} has no report; "
        f"expected one of: {', '.join(name for name, _, _ in KINDS)}"
    )


def embedded(data: Any) -> str:
    """JSON that can stand in a script element, whatever strings it holds."""
    text = json.dumps(compact(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _trust(view: View) -> str:
    warned = "".join(f"<li>{escape(sentence(warning))}</li>" for warning in view.warnings)
    known = "".join(f'<li class="known">{escape(sentence(text))}</li>' for text in view.trust)
    if not warned:
        warned = '<li class="fine">The run gave no warnings.</li>'
    return section(
        "Can these numbers be trusted?",
        "Every warning of the run, its numerical floor, and what its numbers do not say.",
        f'<ul class="warnings">{warned}{known}</ul>',
    )


def _provenance(record: Mapping[str, Any]) -> str:
    made = {key: value for key, value in record.items() if key != "result"}
    rows = [(key, str(made[key])) for key in ("started", "finished") if made.get(key) is not None]
    rows += [(key, str(value)) for group in ("versions", "host") for key, value in (made.get(group) or {}).items()]
    rows += [(key, str(record["result"][key])) for key in DIGESTS if record["result"].get(key)]
    year = str(made.get("finished", ""))[:4]
    citation = CITATION.format(version=_version(record), year=year if year.isdigit() else "2026")
    copy = '<button type="button" class="quiet" data-copy="citation">Select and copy</button>'
    return section(
        "How it was made, and how to cite it",
        "The same command and versions give the same numbers on the same machine." if made else "",
        f"<pre>{escape(command_line(made))}</pre>" if made.get("arguments") else "",
        details("Versions, machine and times", table("how it was made", ("what", "value"), rows)) if rows else "",
        f'<h3>Citation</h3><pre id="citation">{escape(citation)}</pre>{copy}',
    )


def command_line(made: Mapping[str, Any]) -> str:
    """The command that made a run, with every argument it had."""
    arguments = dict(made["arguments"])
    words = ["limitlens", str(made.get("command"))]
    for name in ("model", "run", "runs"):
        given = arguments.pop(name, None)
        words += [str(word) for word in (given if isinstance(given, list) else [given]) if word is not None]
    for name, value in arguments.items():
        flag = "--" + (RENAMED.get(name) or str(name)).replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not None and value is not False and value != []:
            words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def _version(record: Mapping[str, Any]) -> str:
    versions = record.get("versions")
    if isinstance(versions, Mapping) and "limitlens" in versions:
        return str(versions["limitlens"])
    from importlib.metadata import version

    return version("limitlens")


def _asset(name: str) -> str:
    return (resources.files("limitlens.report") / "assets" / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
