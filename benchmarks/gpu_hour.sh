#!/usr/bin/env bash
# Measure everything on a GPU that does nothing else, in steps, the most valuable first:
#
#     benchmarks/gpu_hour.sh RESULTS [PYTHON]
#
# Needs torch with CUDA, transformers, triton and pytest; for the steps "graph tests" and "end to end" also datasets and
# evaluate; uses pytest-xdist, disentangled-flash and flashdeberta where they are installed. Each step has LIMIT seconds
# (default 590), all have TOTAL; if one fails, the next goes on. RESULTS gets steps.txt, log.txt and the result files
# (*.csv). Repeat the command to run what steps.txt does not call finished at this commit. ONLY="check|forward" runs the
# steps whose name matches; ON=cpu rehearses all with small shapes on a CPU.
set -u
results=$(mkdir -p "$1" && cd "$1" && pwd) || exit 1
python=${2:-python3}
[[ $python != */* ]] || python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
cd "$(dirname "$0")/.." || exit 1
failed=0
commit=$(git rev-parse --short HEAD 2> /dev/null || echo "an unknown commit")
export RESULTS=$results PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

step() { # NAME COMMAND...
    local name=$1 start=$SECONDS limit=${LIMIT:-590} left=$((${TOTAL:-86400} - SECONDS))
    shift
    [[ $name =~ ${ONLY:-.} ]] || return
    grep -qs "^$name: finished after .* at $commit\$" "$results/steps.txt" && return
    ((left > 0)) || return
    echo "== $name: $*" >> "$results/log.txt"
    timeout -k 10 $((limit < left ? limit : left)) "$@" >> "$results/log.txt" 2>&1
    local status=$? outcome=finished
    [ $status = 0 ] || { outcome="failed with status $status" && failed=1; }
    echo "$name: $outcome after $((SECONDS - start)) s at $commit" | tee -a "$results/steps.txt"
}

tests=("$python" -m pytest -q -m gpu -p no:cacheprovider)
"$python" -c "import xdist" 2> /dev/null && tests+=(--numprocesses=8)
engines=(tests/engines/test_{attention_sdpa,attention_triton,attention_auto,vocabulary_triton}.py)
check=("$python" -m hf_deberta gpu-check)
encoder=("$python" -W ignore benchmarks/encoder.py --device cuda --dtype bfloat16 --repeats 31)
pretraining=("$python" -W ignore benchmarks/pretraining.py)
end_to_end=("$python" -W ignore benchmarks/end_to_end.py)
whole=(in-tree bert "ours sdpa" "ours triton")
whole_graphs=("bert, CUDA graph" "ours sdpa, CUDA graph" "ours triton, CUDA graph")
whole_compiled=("in-tree, compiled" "bert, compiled" "ours sdpa, layers compiled" "ours triton, layers compiled")
first=(8x128 mnli) second=(32x512 8x512) short=(8x128 8x512 32x512) long=(4x2048 1x8192) longest=(1x16384 1x32768 --repeats 7) large=v3-large
graphs=(in-tree "in-tree, compiled" bert "ours sdpa, no cuDNN")
for backend in sdpa triton; do
    graphs+=("ours $backend" "ours $backend, compiled" "ours $backend, CUDA graph")
done
if [ "${ON:-cuda}" = cpu ]; then
    check=(bash -c '"$0" -m hf_deberta gpu-check; test $? = 2' "$python") # there is no GPU to check
    encoder=("$python" -W ignore benchmarks/encoder.py --preset tiny --repeats 1 --peers in-tree bert "ours sdpa")
    pretraining+=(--device cpu --preset tiny --batch 2 --length 64 --repeats 1)
    end_to_end+=(--preset tiny --rows 64)
    whole=(in-tree bert "ours sdpa") whole_graphs=() whole_compiled=(bert)
    first=(1x16 mnli) second=(1x32) short=(1x16) long=(1x32) longest=(1x64) large=tiny graphs=(in-tree "ours sdpa")
fi

if [ "${ON:-cuda}" = cuda ] && ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "PyTorch finds no CUDA device; ON=cpu rehearses the steps without one" >&2
    exit 1
fi

step correctness "${tests[@]}" "${engines[@]}" -k "bfloat16 and not others"
step "graph tests" "${tests[@]}" tests/training/test_graphed_steps.py
step "whole steps" "${encoder[@]}" --mode step --cases "${first[@]}" --peers "${whole[@]}" "${whole_graphs[@]}"
step "whole steps, 512 tokens" "${encoder[@]}" --mode step --cases "${second[@]}" --peers "${whole[@]}" "${whole_graphs[@]}"
step "end to end" "${end_to_end[@]}"
step check "${check[@]}"
step "whole steps, large" "${encoder[@]}" --mode step --preset $large --cases mnli --peers "${whole[@]}" "${whole_graphs[@]}"
step "whole steps, compiled" "${encoder[@]}" --mode step --cases mnli "${short[0]}" --peers "${whole_compiled[@]}"
for mode in training forward; do
    step "$mode, short" "${encoder[@]}" --mode $mode --cases "${short[@]}" mnli
    step "$mode, long" "${encoder[@]}" --mode $mode --cases "${long[@]}"
    step "$mode, longest" "${encoder[@]}" --mode $mode --cases "${longest[@]}"
    step "$mode, large" "${encoder[@]}" --mode $mode --preset $large --cases "${short[0]}"
done
step pretraining "${pretraining[@]}"
for mode in training forward; do
    step "$mode, graphs" "${encoder[@]}" --mode $mode --cases "${short[0]}" --peers "${graphs[@]}"
done
step tests "${tests[@]}" "${engines[@]}"
exit $failed
