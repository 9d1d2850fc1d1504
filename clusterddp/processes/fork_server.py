"""What multiprocessing's fork server imports at its start: it leaves the terminal's session.

Its processes die with it, so what ends a terminal's programs must reach it as little as them.
"""

import os
import sys

if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    os.setsid()
