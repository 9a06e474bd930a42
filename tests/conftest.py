"""Makes `tests.ranks` importable from every test, and lets commands keep their compiled modules."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

# A test of ranks starts five processes or more: where this is set each would compile our modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
