"""Words for terminals that know only ASCII: what cannot be shown is written out instead of ending the program."""

import codecs
import sys
import unicodedata

SPELLED = {
    "±": "+/-", "−": "-", "–": "-", "·": "*", "√": "sqrt ", "²": "^2", "½": "1/2", "×": "x", "≥": ">=", "≤": "<=",
    "∞": "inf", "‖": "|", "→": "->", "Σ": "sum ",
}  # fmt: skip


def spell(error: UnicodeError) -> tuple[str, int]:
    """Plain letters for the characters that could not be encoded; a question mark for those that have none."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain, error.object[error.start : error.end])), error.end


def write_plainly() -> None:
    """Let stdout and stderr spell out what their encoding lacks."""
    codecs.register_error("limitlens.plain", spell)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="limitlens.plain")


def _plain(letter: str) -> str:
    if letter in SPELLED:
        return SPELLED[letter]
    if unicodedata.combining(letter):  # an accent
        return ""
    name = unicodedata.name(letter, "")
    if name.startswith("GREEK "):  # GREEK SMALL LETTER BETA
        return name.split()[-1].lower()
    return unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode() or "?"
