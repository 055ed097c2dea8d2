"""Helpers that run the command line inside a test."""

from __future__ import annotations

import pytest

from limitlens.cli import main


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err
