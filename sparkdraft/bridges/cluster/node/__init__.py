"""What runs on a machine of the cluster. It is copied there, so it has Python's standard library alone (allreduce.py
also torch), imports its own files relatively, and runs on Python 3.10 or later:

    look             what this machine has: versions, interfaces, counters, room; JSON in, JSON out
    keep RUN         runs one command until it ends, or until nobody is heard of on standard input
    end RUN          ends an earlier `keep`, and what it has left behind
    clear RUN        the same, but not where that `keep` still runs
    allreduce JSON   one rank of a measurement
"""
