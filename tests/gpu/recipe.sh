#!/bin/sh
# A first session on a machine that has a CUDA device, torch for CUDA, nvcc and ninja, but no network.
#
#   recipe.sh fetch [PYTHON_VERSION]   here, with a network: the wheels that such a machine lacks, into .carry/wheels
#   recipe.sh build                    there: compile FlashInfer's kernels, into .carry/modules (to be brought back)
#   recipe.sh test                     there: the device's tests
#   recipe.sh bench [OPTIONS]          there: benchmarks/gpu/engine_gpu.py
#   recipe.sh mesh [OPTIONS]           there: benchmarks/gpu/mesh_gpu.py, a mesh of processes that share the device
#   recipe.sh kv [OPTIONS]             there: benchmarks/gpu/kv_gpu.py, how much of KV's way prefill hides
#   recipe.sh all                      there: build, test, bench, mesh, kv, as long as each succeeds
#
# Two processes share a device in tests/gpu/test_shared_cache.py: where it is in exclusive mode these fail. They need
# cuda.bindings, which torch for CUDA brings.
#
# Carry the repository with its folder .carry, and bring .carry/modules back after the first `build`: carried along the next
# time, the modules are loaded as they are and need no compiler. WORK names the folder of what is unpacked there (default:
# .carry/work), LOGS where the logs of tests go that run beside others (default: the same), MAX_JOBS how many compilers run
# at once (each takes 4 GiB and more). If linking -lcuda fails, set FLASHINFER_EXTRA_LDFLAGS to -L and the driver's folder.
set -eu
cd "$(dirname "$0")/../.."
carry=$PWD/.carry
work=${WORK:-$carry/work}
logs=${LOGS:-$work}
site=$work/site
python=${PYTHON:-python3}

# What the engine imports and such a machine lacks, what the services import besides, and what our tests are written for.
# What takes megabytes and is there (torch, numpy, triton, transformers, tokenizers, uvloop) is used as it is. UCX stays
# behind: KV within a host needs none.
engine_wheels="flashinfer-python apache-tvm-ffi structlog"
service_wheels="annotated-doc annotated-types anyio cffi click cryptography googleapis-common-protos grpcio
    grpcio-health-checking grpcio-reflection h11 httpcore httptools httpx idna llguidance markdown-it-py mdurl msgspec
    opentelemetry-api opentelemetry-exporter-otlp-common opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-otlp-proto-grpc
    opentelemetry-proto opentelemetry-sdk opentelemetry-semantic-conventions prometheus_client protobuf pycparser
    pydantic pydantic_core rich shellingham sniffio starlette typer typing-inspection typing_extensions uvicorn websockets
    xxhash"
test_wheels="charset-normalizer iniconfig packaging pluggy pytest pytest-timeout"

pinned() { sed -n "s/^\($1==.*\)$/\1/p" constraints.txt; }

fetch() {
    version=${1:-3.12}
    rm -rf "$carry/wheels"
    mkdir -p "$carry/wheels"
    $python -m pip download --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$carry/wheels" \
        $(for name in $engine_wheels $service_wheels $test_wheels; do pinned "$name"; done)
    du -sh "$carry/wheels"
}

unpack() {
    if [ ! -d "$site/flashinfer" ]; then
        $python -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$carry"/wheels/*.whl
    fi
    if [ -d "$carry/modules" ]; then
        mkdir -p "$site/flashinfer/data/aot"
        cp -r "$carry/modules/." "$site/flashinfer/data/aot/"
    fi
    sources=$PWD/libs:$PWD/services/gateway:$PWD/services/scheduler:$PWD/services/prefill:$PWD/services/decode
    sources=$sources:$PWD/kubernetes:$PWD/lab:$PWD/testing
    export PYTHONPATH="$site:$sources:$PWD" FLASHINFER_WORKSPACE_BASE="$work" MAX_JOBS="${MAX_JOBS:-6}" PYTHONUNBUFFERED=1
}

build() { $python tests/gpu/build_flashinfer.py "$carry/modules"; }

# Warnings of other people's packages are not ours: there the tests do not turn them into errors.
tests() { $python -m pytest -p no:cacheprovider -q -W default --durations=10 "$@"; }

# In three groups beside each other: what runs on the engine's fast path, models in fp32, and meshes of processes.
run_tests() {
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
    tests tests/gpu/test_mesh.py tests/gpu/test_services.py >"$logs/meshes.log" 2>&1 &
    meshes=$!
    tests tests/gpu/test_models.py tests/unit/test_engine_embeddings.py >"$logs/models.log" 2>&1 &
    models=$!
    failed=0
    tests tests/gpu/test_device.py tests/gpu/test_graphs.py tests/gpu/test_shared_cache.py \
        tests/unit/test_cuda_kernels.py tests/property/test_cuda_attention.py || failed=1
    wait "$models" || failed=1
    wait "$meshes" || failed=1
    cat "$logs/models.log" "$logs/meshes.log"
    return "$failed"
}

bench() { $python -m benchmarks.gpu.engine_gpu "$@"; }

mesh() { $python -m benchmarks.gpu.mesh_gpu "$@"; }

kv() { $python -m benchmarks.gpu.kv_gpu "$@"; }

what=${1:-}
[ $# -gt 0 ] && shift
case $what in
fetch) fetch "$@" ;;
build) unpack && build ;;
test) unpack && run_tests ;;
bench) unpack && bench "$@" ;;
mesh) unpack && mesh "$@" ;;
kv) unpack && kv "$@" ;;
all) unpack && build && run_tests && bench "$@" && mesh && kv ;;
*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 64 ;;
esac
