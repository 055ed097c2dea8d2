"""Replacements for characters that a terminal cannot encode, so that printing never fails."""

import codecs
import sys
import unicodedata

SPELLED = {
    "±": "+/-", "−": "-", "–": "-", "·": "*", "√": "sqrt ", "²": "^2", "½": "1/2", "×": "x", "≥": ">=", "≤": "<=",
    "∞": "inf", "‖": "|", "→": "->", "Σ": "sum ",
}  # fmt: skip


def spell(error: UnicodeError) -> tuple[str, int]:
    """Error handler for encoding (`codecs`): ASCII text in place of the characters that failed, and where to go on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_in_ascii, error.object[error.start : error.end])), error.end


def _in_ascii(letter: str) -> str:
    if letter in SPELLED or unicodedata.combining(letter):  # an accent is left out
        return SPELLED.get(letter, "")
    name = unicodedata.name(letter, "")
    if name.startswith("GREEK "):  # GREEK SMALL LETTER BETA
        return name.split()[-1].lower()
    return unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode() or "?"


def replace_unencodable() -> None:
    """Make stdout and stderr replace characters that their encoding lacks."""
    codecs.register_error("limitlens.ascii", spell)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="limitlens.ascii")
