"""The flags of `llama-server` and `llama-cli` that nothing here corresponds to, and why."""

from __future__ import annotations

from sparkdraft.bridges.tables import LIST, SWITCH, VALUE, without

TEXT_ONLY = "messages are text here, and a vision tower is not loaded"
ONE_GPU = "a model runs on one GPU, or on the CPU, as a whole"
CORES = "the cores that the process may use are used; `taskset` limits them"
PER_REQUEST = "a request names it"
HELD = "how files and caches are held is not chosen"
CHUNKS = "prompts are read in chunks that `--max-step-ms` limits"
SAMPLERS = "these samplers are not built"
DEPTH = "the depth is chosen every step from measured cost and acceptance"
DRAFTER = "a drafter runs where its model runs, with its threads"
ADAPTERS = "adapters are not read: merge them into the weights"
NO_EMBEDDINGS = "there are no embeddings and no reranking"
ONE_MODEL = "one model per server, and caches are not saved"
NO_TOOLS = "the server runs no tools: a client does"
PROXY = "put a reverse proxy before the server"
LOGS = "only warnings and errors are logged"
TYPED = "a chat is typed; `sparkdraft generate --prompt` writes one answer"
TERMINAL = "`sparkdraft chat` has no choice of this"
NAME_IT = "name the model: `--model`"

WITHOUT = without(
    ("--ubatch-size -ub --cache-reuse --keep", CHUNKS, VALUE),
    (
        "--threads-batch -tb --threads-http --cpu-mask -C --cpu-range -Cr --cpu-strict --prio --poll --numa",
        CORES,
        VALUE,
    ),
    ("--cpu-mask-batch -Cb --cpu-range-batch -Crb --cpu-strict-batch --prio-batch --poll-batch", CORES, VALUE),
    ("--mlock --no-mmap --mmap --swa-full --kv-offload -kvo -nkvo --repack -nr --no-host --op-offload", HELD, SWITCH),
    ("--load-mode -lm --lazy-mode -lzm --moe-cache-mib --defrag-thold -dt", HELD, VALUE),
    (
        "--ctx-checkpoints --swa-checkpoints -ctxcp --checkpoint-min-step -cms",
        "states are kept as `--prefix-cache` needs them",
        VALUE,
    ),
    ("--cache-idle-slots", "prompts are kept in the KV cache itself", SWITCH),
    (
        "--fit -fit --fit-target -fitt --fit-ctx -fitc",
        "what fits is planned before anything is loaded: `sparkdraft plan`",
        VALUE,
    ),
    ("--check-tensors", "`sparkdraft check` asks the model questions with known answers", SWITCH),
    ("--split-mode -sm --tensor-split -ts --main-gpu -mg --device -dev --rpc", ONE_GPU, VALUE),
    ("--override-tensor -ot --n-cpu-moe -ncmoe --n-cpu-ffn -ncffn", ONE_GPU, VALUE),
    ("--cpu-moe -cmoe", ONE_GPU, SWITCH),
    ("--rope-* --yarn-* --override-kv", "the model's own file decides", VALUE),
    ("--model-url -mu --docker-repo -dr", "fetch the file, or name a hub id with `--model`", VALUE),
    ("--hf-token -hft", "set HF_TOKEN", VALUE),
    ("--embd-gemma-default --fim-qwen-* --vision-gemma-4b-default --vision-gemma-12b-default", NAME_IT, SWITCH),
    ("--chat-template --chat-template-file", "the template of the model's file is used", VALUE),
    (
        "--chat-template-kwargs --reasoning-effort --reasoning -rea",
        f"{PER_REQUEST}: chat_template_kwargs, reasoning_effort",
        VALUE,
    ),
    (
        "--reasoning-budget --reasoning-budget-message",
        "thoughts have no limit of their own: max_tokens counts them",
        VALUE,
    ),
    ("--reasoning-preserve --prefill-assistant", "the model's template decides", SWITCH),
    ("--skip-chat-parsing", "`--reasoning-parser none` leaves thoughts in the text", SWITCH),
    ("--predict --n-predict -n", f"{PER_REQUEST}: max_tokens; chat and generate have `--max-tokens`", VALUE),
    ("--reverse-prompt -r", f"{PER_REQUEST}: stop", VALUE),
    ("--ignore-eos --special -sp", PER_REQUEST, SWITCH),
    ("--seed -s --presence-penalty --frequency-penalty --logit-bias -l", PER_REQUEST, VALUE),
    ("--json-schema -j --json-schema-file -jf", PER_REQUEST, VALUE),
    ("--grammar --grammar-file", "a JSON schema in the request constrains the output", VALUE),
    ("--samplers --sampler-seq --sampling-seq --dry-* --xtc-* --mirostat* --typical*", SAMPLERS, VALUE),
    ("--top-n* --dynatemp-* --repeat-last-n --adaptive-*", SAMPLERS, VALUE),
    ("--backend-sampling -bs --spec-draft-backend-sampling", "sampling runs where the model runs", SWITCH),
    ("--spec-draft-n-min --draft-min --draft-n-min --spec-draft-p-min --draft-p-min --draft-p-split", DEPTH, VALUE),
    ("--spec-ngram-* --lookup-cache-static -lcs --lookup-cache-dynamic -lcd", DEPTH, VALUE),
    ("--spec-default", "drafting is on by itself", SWITCH),
    ("--spec-synth-*", "for benchmarks: `sparkdraft bench`", VALUE),
    ("--spec-draft-* -ngld --gpu-layers-draft --n-gpu-layers-draft -ctkd -ctvd --cache-type-*-draft", DRAFTER, VALUE),
    ("--threads-draft -td --threads-batch-draft -tbd --cpu-mask-draft -Cd --cpu-range-draft -Crd", DRAFTER, VALUE),
    ("--cpu-strict-draft --prio-draft --poll-draft --cpu-mask-batch-draft -Cbd", DRAFTER, VALUE),
    ("--cpu-strict-batch-draft --prio-batch-draft --poll-batch-draft", DRAFTER, VALUE),
    ("--override-tensor-draft -otd --n-cpu-moe-draft -ncmoed --device-draft -devd", DRAFTER, VALUE),
    ("--spec-draft-cpu-moe --cpu-moe-draft -cmoed", DRAFTER, SWITCH),
    ("--mmproj* -mm -mmu -mmdev --image-* --media-path --mtmd-* --video-*", TEXT_ONLY, VALUE),
    ("--mmproj-auto --mmproj-offload", TEXT_ONLY, SWITCH),
    ("--lora* --control-vector*", ADAPTERS, VALUE),
    ("--lora-init-without-apply", ADAPTERS, SWITCH),
    ("--control-vector-layer-range", ADAPTERS, LIST),
    ("--embedding --embeddings --rerank --reranking", NO_EMBEDDINGS, SWITCH),
    ("--pooling --embd-normalize", NO_EMBEDDINGS, VALUE),
    ("--spm-infill", "there is no route for infilling", SWITCH),
    (
        "--slots --props --context-shift --no-context-shift",
        "`/v1/status` shows what runs; a context is never shifted",
        SWITCH,
    ),
    ("--slot-prompt-similarity -sps", "a prompt finds its prefix wherever it is cached", VALUE),
    ("--slot-save-path --models-dir --models-preset --models-max --sleep-idle-seconds", ONE_MODEL, VALUE),
    ("--models-autoload", ONE_MODEL, SWITCH),
    ("--tags", "a model has names only: `--served-name`", VALUE),
    ("--tools --tools-runtime --mcp-servers-*", NO_TOOLS, VALUE),
    ("--agent -ag -no-ag --ui-mcp-proxy --webui-mcp-proxy", NO_TOOLS, SWITCH),
    ("--ui-config --webui-config --ui-config-file --webui-config-file", "the chat page has no settings", VALUE),
    ("--api-key-file", "one key is used: put it into SPARKDRAFT_API_KEY", VALUE),
    ("--ssl-* --path --api-prefix --cors-*", PROXY, VALUE),
    ("--cors-credentials --reuse-port", PROXY, SWITCH),
    ("--timeout -to --sse-ping-interval", "limits are in docs/api.md", VALUE),
    ("--log-* --verbosity -lv", LOGS, VALUE),
    ("--log-disable --log-jsonl --log-verbose --log-prefix --log-timestamps --verbose -v --perf", LOGS, SWITCH),
    ("--prompt -p --file -f --binary-file -bf --in-prefix --in-suffix", TYPED, VALUE),
    ("--system-prompt -sys --system-prompt-file -sysf", "`sparkdraft chat --system TEXT` sets it", VALUE),
    ("--conversation -cnv --interactive -i --interactive-first -if", "`sparkdraft chat` is a conversation", SWITCH),
    ("--single-turn -st -no-cnv", TYPED, SWITCH),
    ("--in-prefix-bos --display-prompt --verbose-prompt --prompt-cache-all --prompt-cache-ro", TYPED, SWITCH),
    ("--prompt-cache", ONE_MODEL, VALUE),
    ("--color -co --simple-io --multiline-input -mli --show-timings", TERMINAL, SWITCH),
    ("--print-token-count -ptc", TERMINAL, VALUE),
    ("--offline", "set HF_HUB_OFFLINE=1", SWITCH),
    ("--escape -e", "prompts are taken as they are", SWITCH),
)
