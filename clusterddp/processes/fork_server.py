"""Takes multiprocessing's fork server, which imports this first, out of the terminal's session.

Its processes die with it, so what ends a terminal's programs must reach it as little as them. In a
module of its own, since a fork server that somebody else has started must stay where it is.
"""

import os
import sys

if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    os.setsid()
