"""The code that runs on each machine of the cluster. It is copied there, so it uses the standard library alone,
imports its own files relatively, and runs on Python 3.10 or later:

    look             reports versions, interfaces, counters and memory; JSON in, JSON out
    keep RUN         runs a command until it ends or heartbeats on standard input stop
"""
