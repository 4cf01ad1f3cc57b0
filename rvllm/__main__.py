"""`python -m rvllm` is the same as the command `rvllm`."""

import sys

from rvllm.cli import main

sys.exit(main())
