"""The flags of `vllm serve` (0.19 to 0.32) that nothing here corresponds to, and why."""

from __future__ import annotations

from sparkdraft.bridges.tables import LIST, SWITCH, VALUE, without

ONE_MACHINE = "one machine, one GPU; `sparkdraft cluster` runs vLLM on several (docs/cluster.md)"
TEXT_ONLY = "messages are text here, and a vision tower is not loaded"
ADAPTERS = "adapters are not read: merge them into the weights"
KERNELS = "kernels are chosen by the GPU and the format of the weights"
FILES = "safetensors and GGUF files are recognised; nothing has to be chosen"
OWN_FILES = "all files are read from the model's folder"
SCHEDULER = "one scheduler: first come, first served, prompts in chunks"
STATISTICS = "requests are not logged; `/metrics` and `/v1/status` have the statistics"
PROXY = "put a reverse proxy before the server"
MEMORY = "nothing is moved out of memory: lower `--max-seqs` or `--kv-tokens`"
CACHES = "layers with a window or a state have caches of their own"
GRAPHS = "nothing is compiled by torch; `--no-graphs` turns recorded steps off"
NO_CODE = "no code of a checkpoint or of a plugin is ever run"
CORES = "the cores that the process may use are used; `taskset` limits them"
LOGS = "only warnings and errors are logged"
NOT_BUILT = "not built"

WITHOUT = without(
    ("--attention-backend", "accepted and not needed: one kernel runs targets and drafters", VALUE),
    ("--chat-template", "put the file into the model's folder as chat_template.jinja", VALUE),
    ("--trust-remote-code", NO_CODE, SWITCH),
    ("--tool-parser-plugin --reasoning-parser-plugin --io-processor-plugin", NO_CODE, VALUE),
    ("--logits-processors", NO_CODE, LIST),
    ("--worker-cls --worker-extension-cls --model-class-overrides --additional-config", NO_CODE, VALUE),
    ("--trust-request-chat-template --trust-request-mm-kwargs", "a request brings no template", SWITCH),
    ("--load-format --safetensors-* --model-loader-extra-config --pt-load-map-location", FILES, VALUE),
    ("--ignore-patterns", FILES, LIST),
    ("--use-tqdm-on-load", "progress is printed if it takes longer than two seconds", SWITCH),
    ("--max-parallel-loading-workers", FILES, VALUE),
    ("--tokenizer --tokenizer-mode --hf-config-path --config-format --chat-template-content-format", OWN_FILES, VALUE),
    ("--model-impl --runner --convert --pooler-config", "the model's own config.json decides; texts only", VALUE),
    ("--skip-tokenizer-init --enable-prompt-embeds --tokens-only", "prompts are texts or token ids", SWITCH),
    (
        "--revision --tokenizer-revision --code-revision --download-dir",
        "`sparkdraft pull` fetches the newest, into the hub's cache",
        VALUE,
    ),
    ("--hf-token", "set HF_TOKEN", VALUE),
    ("--hf-overrides --rope-scaling --rope-theta", "edit config.json in the model's folder", VALUE),
    ("--quantization-config", "how a checkpoint is quantised is read from its files", VALUE),
    ("--allow-deprecated-quantization", "how a checkpoint is quantised is read from its files", SWITCH),
    ("--seed", "requests have seeds, the server has none", VALUE),
    (
        "--use-fp64-gumbel --return-sampling-mask --enable-return-routed-experts --enable-trace-replay",
        NOT_BUILT,
        SWITCH,
    ),
    ("--aux-output-config --watermark-config --diffusion-config -dc --engram-config", NOT_BUILT, VALUE),
    ("--compilation-config -cc --optimization-level -O --performance-mode", GRAPHS, VALUE),
    ("--max-cudagraph-capture-size", GRAPHS, VALUE),
    ("--cudagraph-capture-sizes", GRAPHS, LIST),
    ("--jit-monitor-mode", "kernels are compiled before the server is ready", VALUE),
    ("--jit-monitor-verbose", "kernels are compiled before the server is ready", SWITCH),
    ("--limit-mm-per-prompt --mm-* --media-* --allowed-local-media-path", TEXT_ONLY, VALUE),
    ("--allowed-media-domains", TEXT_ONLY, LIST),
    ("--video-* --ec-transfer-config --ec-manager-config", TEXT_ONLY, VALUE),
    ("--language-model-only --skip-mm-profiling --enable-mm-embeds --disable-chunked-mm-input", TEXT_ONLY, SWITCH),
    (
        "--interleave-mm-strings --mm-encoder-only --mm-device-do-normalize --enable-flash-late-interaction",
        TEXT_ONLY,
        SWITCH,
    ),
    ("--enable-lora --enable-tower-connector-lora --fully-sharded-loras --specialize-active-lora", ADAPTERS, SWITCH),
    ("--enable-mixed-moe-lora-format --enable-moe-shared-loras", ADAPTERS, SWITCH),
    ("--lora-* --max-lora* --max-cpu-loras --default-mm-loras", ADAPTERS, VALUE),
    ("--lora-modules --lora-target-modules", ADAPTERS, LIST),
    ("--cpu-offload-gb --kv-offloading-* --offload-* --swap-space", MEMORY, VALUE),
    (
        "--kv-transfer-config --kv-events-config --weight-transfer-config",
        "caches and weights stay in this process",
        VALUE,
    ),
    ("--enable-sleep-mode --sleep-mode-offload-cudagraph --enable-cumem-allocator", MEMORY, SWITCH),
    ("--sleep-preserve-parameter-names --cpu-offload-params --offload-params", MEMORY, LIST),
    ("--kv-cache-memory-bytes", "the cache's size is given in tokens: `--kv-tokens`", VALUE),
    ("--mamba-* --replayssm-buffer-len", CACHES, VALUE),
    ("--kv-cache-dtype-skip-layers", CACHES, LIST),
    ("--use-replayssm --enable-mamba-* --disable-sliding-window --disable-hybrid-kv-cache-manager", CACHES, SWITCH),
    ("--swa-bounded-replay --kv-sharing-fast-prefill --disable-cascade-attn", CACHES, SWITCH),
    (
        "--prefix-caching-hash-algo --prefix-cache-retention-interval --prefix-match-unit",
        "`--prefix-cache` has no settings",
        VALUE,
    ),
    ("--pipeline-parallel-size -pp --data-parallel-* -dp* --nnodes -n --node-rank -r --master-*", ONE_MACHINE, VALUE),
    ("--data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe", ONE_MACHINE, SWITCH),
    ("--data-parallel-multi-port-external-lb -dpm --disable-nccl-for-dp-synchronization", ONE_MACHINE, SWITCH),
    ("--dp-* --distributed-* --cpu-distributed-timeout-seconds --device-ids --all2all-backend", ONE_MACHINE, VALUE),
    ("--decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp", ONE_MACHINE, VALUE),
    ("--dcp-comm-backend --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size", ONE_MACHINE, VALUE),
    ("--eplb-config --expert-placement-strategy --elastic-ep-max-dp-size --ubatch-size --dbo-*", ONE_MACHINE, VALUE),
    ("--fault-tolerance-config", ONE_MACHINE, VALUE),
    ("--enable-expert-parallel -ep --headless --enable-eplb --enable-dbo --enable-elastic-ep", ONE_MACHINE, SWITCH),
    ("--dcp-q-replicate --enable-hc-sp --enable-batch-sharded-sampling --enable-ep-weight-filter", ONE_MACHINE, SWITCH),
    ("--enable-shm-tensor-arena --enable-nccl-comm-suspend --ray-workers-use-nsight", ONE_MACHINE, SWITCH),
    ("--disable-custom-all-reduce --enable-fault-tolerance --enable-scale-out", ONE_MACHINE, SWITCH),
    ("--numa-bind", CORES, SWITCH),
    ("--numa-bind-nodes --numa-bind-cpus", CORES, LIST),
    ("--moe-backend --linear-backend --attention-config -ac --kernel-config --ir-op-priority", KERNELS, VALUE),
    ("--gdn-prefill-backend --kda-* --sparse-indexer-topk-backend", KERNELS, VALUE),
    ("--enable-flashinfer-autotune", "`sparkdraft tune` measures tiles, once", SWITCH),
    (
        "--scheduler-cls --scheduling-policy --long-prefill-token-threshold --prefill-schedule-interval",
        SCHEDULER,
        VALUE,
    ),
    ("--max-num-scheduled-tokens --max-num-queued-tokens --max-num-active-seqs --watermark", SCHEDULER, VALUE),
    ("--long-prefill-token-threshold-adaptive --scheduler-reserve-full-isl", SCHEDULER, SWITCH),
    ("--stream-interval", "every step's text is sent at once", VALUE),
    ("--sse-keep-alive-interval", "limits are in docs/api.md", VALUE),
    (
        "--structured-outputs-config --reasoning-config",
        "grammars and thoughts follow from the model and the request",
        VALUE,
    ),
    ("--tool-strict-level --tool-server --response-role --cohere-format", "formats follow from the model", VALUE),
    ("--anthropic-disabled-thinking-effort", "a request names it: reasoning_effort", VALUE),
    ("--cohere-is-reasoning-model --exclude-tools-when-tool-choice-none", "formats follow from the model", SWITCH),
    ("--enable-log-requests --disable-log-requests --disable-log-stats --enable-log-outputs", STATISTICS, SWITCH),
    (
        "--enable-log-deltas --enable-logging-iteration-details --kv-cache-metrics --cudagraph-metrics",
        STATISTICS,
        SWITCH,
    ),
    ("--enable-mfu-metrics --enable-server-load-tracking --aggregate-engine-logging", STATISTICS, SWITCH),
    ("--enable-layerwise-nvtx-tracing", "no traces are written", SWITCH),
    ("--kv-cache-metrics-sample --custom-histogram-buckets --show-hidden-metrics-for-version", STATISTICS, VALUE),
    ("--otlp-traces-endpoint --profiler-config", "no traces are written", VALUE),
    ("--collect-detailed-traces", "no traces are written", LIST),
    ("--disable-uvicorn-access-log --disable-fastapi-docs", "there is no access log and no docs page", SWITCH),
    ("--enable-offline-docs --enable-tokenizer-info-endpoint", "there is no docs page and no such route", SWITCH),
    ("--disable-access-log-for-endpoints", "there is no access log", VALUE),
    ("--uvicorn-log-level --log-config-file --max-log-len --log-level --logging-config", LOGS, VALUE),
    ("--log-error-stack", LOGS, SWITCH),
    ("--fail-on-environ-validation", "a SPARKDRAFT_ variable that is not known is always refused", SWITCH),
    ("--enable-per-request-metrics", "a request asks for it: `return_speculation`", SWITCH),
    ("--per-request-spec-decode-metrics", "a request asks for it: `return_speculation`", VALUE),
    ("--enable-force-include-usage", "a request asks for it: `stream_options`", SWITCH),
    ("--return-tokens-as-token-ids", "a request asks for it: `logprobs`", SWITCH),
    (
        "--allowed-origins --allowed-methods --allowed-headers",
        "no CORS headers are sent; `--allowed-hosts` is about names of this server",
        VALUE,
    ),
    ("--allow-credentials", "no CORS headers are sent", SWITCH),
    ("--enable-ssl-refresh --enable-request-id-headers", PROXY, SWITCH),
    ("--ssl-* --root-path --uds --middleware", PROXY, VALUE),
    ("--h11-max-incomplete-event-size --h11-max-header-count", "limits are in docs/api.md", VALUE),
    ("--grpc", "HTTP only", SWITCH),
    ("--grpc-port", "HTTP only", VALUE),
    ("--fingerprint-mode --fingerprint-value", "answers have no system_fingerprint", VALUE),
    ("--config", "not read where it is not here, in a container or in EXTRA_ARGS: import the file by itself", VALUE),
    ("--max-logprobs --logprobs-mode", "the limit is fixed, and log-probabilities are the model's own", VALUE),
    ("--default-chat-template-kwargs", "a request sends chat_template_kwargs", VALUE),
    ("--api-server-count -asc --renderer-num-workers", "one API process", VALUE),
)
