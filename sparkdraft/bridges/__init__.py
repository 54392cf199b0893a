"""Our configuration beside others': as a command for vLLM, from commands of vLLM and llama.cpp, and as recipes.

Nothing here imports vLLM or torch. vllm_flags.py and llama_flags.py are the tables; commands are read, and the pages
docs/from-vllm.md and docs/from-llama-cpp.md are written, from the same rows.
"""
