"""The command line: one file a verb, and nothing heavy imported before it is needed."""

import time

STARTED = time.perf_counter()  # this package is the first that the command loads
