"""Several machines as one server: vLLM's multiprocess executor over ssh, checked first and supervised while it runs.

`hosts_file.py` reads which machines there are, `host.py` runs commands on them, `node/` is what runs there. `checks.py`
judges what `node/look.py` found, `measure.py` times an all-reduce, `expect.py` says what that means for a model,
`ranks.py` starts one process per machine and `supervisor.py` keeps them up. No torch here.
"""
