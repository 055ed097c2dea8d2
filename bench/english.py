"""Write one file of English text, about 20 million tokens, from five Debian packages.

`apt-get download linux-doc-6.1 python3.11-doc git-doc dict-gcide manpages-dev`, unpack each with `dpkg-deb -x FILE
FOLDER`, then `python -m bench.english FOLDER english.txt`. The script takes the sources of the documentation
(reStructuredText, AsciiDoc, manual pages) and the text of the dictionary, without translations, cuts them into pieces
of about 16,000 characters that end with a paragraph, and writes the pieces in a random order with a fixed seed, so
that any beginning of the file is a mixture of all sources. It prints the SHA-256 of the file. With a third argument, a
folder, it also writes there each text of 120,000 to 1,000,000 bytes as a document of its own.
"""

from __future__ import annotations

import gzip
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

PIECE = 16_000  # characters
ENDINGS = (".rst.gz", ".txt.gz", ".rst.txt", ".txt", ".dict.dz", ".2.gz", ".3.gz")
LONG = range(120_000, 1_000_000)  # bytes of the texts that are documents of their own
SKIPPED = ("translations", "_static", "html/_sources/translations", "licenses", "RelNotes")


def texts(folder: Path) -> Iterator[str]:
    """Yield every English text below a folder once, in the order of paths."""
    seen = set()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name.endswith(ENDINGS)):
        if any(part in SKIPPED for part in path.parts):
            continue
        data = gzip.decompress(path.read_bytes()) if path.suffix in (".gz", ".dz") else path.read_bytes()
        digest = hashlib.sha256(data).digest()
        if digest not in seen:  # linux-doc holds its sources twice
            seen.add(digest)
            yield data.decode("utf-8", errors="ignore").replace("\0", "")


def pieces(text: str) -> Iterator[str]:
    """Cut a text into pieces of at least `PIECE` characters that end with a paragraph."""
    start = 0
    while start < len(text):
        end = text.find("\n\n", start + PIECE)
        end = len(text) if end < 0 else end + 2
        yield text[start:end].strip() + "\n\n"
        start = end


def main(folder: str, target: str, documents: str | None = None) -> None:
    """Write the text and print its size and digest; write long texts into the folder `documents`."""
    found = []
    for text in texts(Path(folder)):
        found += [piece for piece in pieces(text) if not piece.isspace()]
        data = text.encode()
        if documents is not None and len(data) in LONG:
            name = Path(documents, f"{hashlib.sha256(data).hexdigest()[:8]}.txt")
            name.parent.mkdir(exist_ok=True)
            name.write_bytes(data)
    order = np.random.default_rng(0).permutation(len(found))
    data = "".join(found[place] for place in order).encode()
    Path(target).write_bytes(data)
    print(f"{len(found):,} pieces, {len(data):,} bytes, sha256 {hashlib.sha256(data).hexdigest()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
