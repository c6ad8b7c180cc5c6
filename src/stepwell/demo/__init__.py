"""The demo: a small GPT is killed with SIGKILL while it learns, and ends as if nothing had happened.

========== ===========================================================================
supervisor starts the children, kills them, compares what they end with
worker     a child: trains with a checkpoint at every step, or without for comparison
model      the network, its text, its data loader and its training loop
report     what is measured and how it is told
========== ===========================================================================
"""

from __future__ import annotations
