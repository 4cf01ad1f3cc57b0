"""The base of every error that rvllm raises on purpose.

Each module names its own errors next to the code that finds them; all derive from `RvllmError`, so that a caller
(the command line, a notebook) can show the message alone and leave the traceback for real bugs.
"""

from __future__ import annotations


class RvllmError(Exception):
    """A problem with the input or the machine, said in words: what was found and what is allowed."""
