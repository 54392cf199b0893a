"""The command line: one file per verb; nothing heavy is imported before it is needed."""

import time

STARTED = time.perf_counter()  # this package is the first that the command loads
