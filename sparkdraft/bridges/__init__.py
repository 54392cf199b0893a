"""Other servers: their commands as ours, ours as a command for vLLM, recipes, and clusters of machines that run vLLM.

Nothing here imports torch. Commands are read by the tables in vllm/flags.py and llama_cpp.py, from which
tools/flag_table.py also writes docs/from-vllm.md and docs/from-llama-cpp.md.
"""
