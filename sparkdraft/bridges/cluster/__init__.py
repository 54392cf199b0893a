"""Several machines as one server: vLLM's multiprocess executor over ssh, checked first and supervised while it runs.

`hosts.py` reads the hosts file and runs commands on its machines, and `node/` is the code that runs there. `checks.py`
judges the facts that `node/look.py` finds, `expect.py` predicts speeds, `ranks.py` starts one process per machine, and
`supervisor.py` keeps them up. Nothing here imports torch.
"""
