"""Settings for every test."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

# Workers share the cores; threads inside each would only wait for one another.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# Read when triton is first imported: without a GPU its programs are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("default", deadline=None, derandomize=True)
settings.load_profile("default")
