"""Run a notebook cell by cell as Jupyter does and store what it prints: `python docs/run_notebook.py NOTEBOOK`.

Outputs are text: what a cell prints, then the value of its last expression. The page of the notebook shows them.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def run(code: str, name: str, space: dict[str, Any]) -> tuple[str, Any]:
    """Run the code of a cell in a namespace; return what it printed and the value of its last expression, or None."""
    *steps, last = ast.parse(code).body
    value = None
    with redirect_stdout(io.StringIO()) as printed:
        if not isinstance(last, ast.Expr):
            steps.append(last)
        exec(compile(ast.Module(steps, []), name, "exec"), space)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), space)
    return printed.getvalue(), value


def main(path: Path) -> None:
    """Run all cells of the notebook in the present folder and write their outputs into it."""
    document, space, count = json.loads(path.read_text(encoding="utf-8")), {"__name__": "__main__"}, 0
    for cell in document["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        printed, value = run("".join(cell["source"]), path.name, space)
        cell["execution_count"], cell["outputs"] = count, []
        if printed:
            cell["outputs"].append({"name": "stdout", "output_type": "stream", "text": printed.splitlines(True)})
        if value is not None:
            shown = {"text/plain": repr(value).splitlines(True)}
            result = {"data": shown, "execution_count": count, "metadata": {}, "output_type": "execute_result"}
            cell["outputs"].append(result)
        print(f"[{count}]", printed, "" if value is None else repr(value), flush=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
