"""Commands and files of other servers as DGX Spark users have posted them, cut down to what matters.

POSTED_IN says where: a model page's discussion and a forum thread on Gemma 4 with DFlash, a thread on DFlash, the page
of a container, and a report on Gemma 4 with its assistant.
"""

from __future__ import annotations

GEMMA_DFLASH = """VLLM_DISABLE_COMPILE_CACHE=1 vllm serve google/gemma-4-31B-it \\
  --quantization fp8 --tensor-parallel-size 1 --max-model-len 16384 --max-num-batched-tokens 16384 \\
  --gpu-memory-utilization 0.80 --enforce-eager --limit-mm-per-prompt '{"image":0,"video":0}' \\
  --speculative-config \
  '{"method":"dflash","model":"RedHatAI/gemma-4-31B-it-speculator.dflash","num_speculative_tokens":8}'
"""
GEMMA_TWO_SPARKS = """VLLM_DISABLE_COMPILE_CACHE=1 NCCL_IB_DISABLE=1 vllm serve google/gemma-4-31B-it \\
  --quantization fp8 --tensor-parallel-size 2 --distributed-executor-backend ray --max-model-len 16384 \\
  --max-num-batched-tokens 16384 --gpu-memory-utilization 0.80 --enforce-eager \\
  --speculative-config \
  '{"method":"dflash","model":"RedHatAI/gemma-4-31B-it-speculator.dflash","num_speculative_tokens":8}'
"""
GEMMA_INT4 = """vllm serve Intel/gemma-4-31B-it-int4-AutoRound --max-num-seqs 4 --attention-backend FLASH_ATTN \\
  --speculative-config \
  '{"method":"dflash","model":"RedHatAI/gemma-4-31B-it-speculator.dflash","num_speculative_tokens":7}'
"""
QWEN_INT4 = """./launch-cluster.sh -t vllm-node-tf5 --solo --apply-mod mods/fix-qwen3.5-chat-template \\
-e VLLM_MARLIN_USE_ATOMIC_ADD=1 \\
exec vllm serve Intel/Qwen3.5-35B-A3B-int4-AutoRound --host 0.0.0.0 --port 8888 --max-model-len 262144 \\
  --max-num-batched-tokens 32768 --gpu-memory-utilization 0.7 --enable-auto-tool-choice --tool-call-parser qwen3_xml \\
  --load-format fastsafetensors --enable-prefix-caching --chat-template unsloth.jinja \\
  --speculative-config '{"method": "dflash", "model": "z-lab/Qwen3.5-35B-A3B-DFlash", "num_speculative_tokens": 15}' \\
  --attention-backend flash_attn
"""
CODER_NEXT = """vllm serve saricles/Qwen3-Coder-Next-NVFP4-GB10 --enforce-eager --attention-backend flash_attn \\
  --max-num-batched-tokens 32768 --max-num-seqs 4 --gpu-memory-utilization 0.60 \\
  --speculative-config.method dflash --speculative-config.model z-lab/Qwen3-Coder-Next-DFlash \\
  --speculative-config.num_speculative_tokens 15
"""
CODER_NEXT_COMPILED = CODER_NEXT.replace("--enforce-eager ", "")
DFLASH_CONTAINER = """docker run -d --name vllm-dflash \\
--gpus all --network host --ipc host --ulimit memlock=-1:-1 \\
-v /models/DFlash-Qwen3.5-27B-Uncensored-NVFP4:/models/target:ro \\
-e MODEL_PATH=/models/target -e SERVED_MODEL_NAME=qwen35-dflash -e DFLASH_DRAFTER=z-lab/Qwen3.5-27B-DFlash \\
-e DFLASH_NUM_SPEC_TOKENS=15 -e MAX_MODEL_LEN=65536 -e MAX_NUM_SEQS=16 -e MAX_NUM_BATCHED_TOKENS=32768 \\
-e GPU_MEMORY_UTILIZATION=0.85 -e ATTENTION_BACKEND=flash_attn -e VLLM_API_KEY=$VLLM_API_KEY \\
ghcr.io/aeon-7/vllm-dflash:latest
"""
TURBOQUANT_CONTAINER = """docker run -d --name vllm-dflash-tq --gpus all --network host \\
-v /models/DFlash-Qwen3.5-27B-Uncensored-NVFP4:/models/target:ro \\
-e MODEL_PATH=/models/target -e DFLASH_DRAFTER=z-lab/Qwen3.5-27B-DFlash -e DFLASH_NUM_SPEC_TOKENS=15 \\
-e MAX_MODEL_LEN=65536 -e MAX_NUM_SEQS=16 -e MAX_NUM_BATCHED_TOKENS=32768 -e GPU_MEMORY_UTILIZATION=0.85 \\
-e ATTENTION_BACKEND=flash_attn -e ENABLE_TURBOQUANT=1 -e TQ_MODE=hybrid -e TQ_KEY_BITS=4 -e TQ_VALUE_BITS=3 \\
vllm-dflash-tq:latest
"""
GEMMA_MTP = """vllm serve RedHatAI/gemma-4-26B-A4B-it-FP8-Dynamic \\
--served-model-name gemma4-fp8-mtp --max-model-len 65536 --gpu-memory-utilization 0.45 --max-num-seqs 4 \\
--max-num-batched-tokens 8192 --enable-auto-tool-choice --tool-call-parser gemma4 --reasoning-parser gemma4 \\
--port 11437 \\
--speculative-config '{"method":"gemma4_mtp","model":"google/gemma-4-26B-A4B-it-assistant","num_speculative_tokens":4}'
"""
GEMMA_MTP_BARE = """vllm serve RedHatAI/gemma-4-26B-A4B-it-FP8-Dynamic --max-model-len 32768 --kv-cache-dtype auto \\
--speculative-config '{"method":"gemma4_mtp","model":"google/gemma-4-26B-A4B-it-assistant","num_speculative_tokens":4}'
"""
COMPOSE = """
services:
  proxy:
    image: nginx
  vllm:
    image: ghcr.io/aeon-7/vllm-dflash:latest
    network_mode: host
    volumes:
      - ${MODELS:-/models}/DFlash-Qwen3.5-27B-Uncensored-NVFP4:/models/target:ro
    environment:
      MODEL_PATH: /models/target
      SERVED_MODEL_NAME: qwen35-dflash
      DFLASH_DRAFTER: z-lab/Qwen3.5-27B-DFlash
      DFLASH_NUM_SPEC_TOKENS: 15
      MAX_MODEL_LEN: ${MAX_MODEL_LEN:-65536}
      VLLM_API_KEY: ${VLLM_API_KEY:?set it}
      EXTRA_ARGS: --kv-cache-dtype fp8 --seed 3
"""
COMPOSE_OF_A_COMMAND = """
services:
  server:
    image: vllm/vllm-openai:v0.32.0
    command: ["--model", "Qwen/Qwen3-8B", "--max-num-seqs", "16", "--no-enable-prefix-caching"]
    environment: ["VLLM_LOGGING_LEVEL=DEBUG"]
"""
LLAMA = """llama-server -hf unsloth/Qwen3.6-35B-A3B-GGUF:MXFP4_MOE -c 65536 -np 4 -ngl 99 -fa on -ctk q8_0 -ctv q8_0 \\
  --temp 0.7 --top-k 20 --jinja --mlock -b 4096 -ub 2048 --alias qwen --host 0.0.0.0 --port 8080
"""
LLAMA_COMPOSE = """
services:
  llamacpp-server:
    image: ghcr.io/ggml-org/llama.cpp:server
    volumes: ["./models:/models"]
    environment:
      LLAMA_ARG_MODEL: /models/my_model.gguf
      LLAMA_ARG_CTX_SIZE: 4096
      LLAMA_ARG_N_PARALLEL: 2
      LLAMA_ARG_ENDPOINT_METRICS: 1
"""
POSTED_IN = {
    "discussion": ("GEMMA_DFLASH",),
    "gemma thread": ("GEMMA_DFLASH", "GEMMA_TWO_SPARKS", "GEMMA_INT4"),
    "dflash thread": ("QWEN_INT4", "CODER_NEXT", "CODER_NEXT_COMPILED"),
    "container": ("DFLASH_CONTAINER", "TURBOQUANT_CONTAINER", "COMPOSE"),
    "report": ("GEMMA_MTP", "GEMMA_MTP_BARE", "LLAMA"),
}
