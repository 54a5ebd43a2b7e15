#!/usr/bin/env bash
# Runs the kernels on a GPU under NVIDIA's compute-sanitizer, all four tools: small cases must be clean, and one planted
# fault a tool (fixtures/sanitizer) must be reported. In the root of a checkout:
#
#   scripts/sanitize.sh
#
# MLA_CHECK names the program (default target/release/mla-check), COMPUTE_SANITIZER the tool, KERNELS a folder of kernels to
# look at instead of the program's own, LIMIT the seconds that a run may take (default 1800).
#
# Ends with 0 where all is as expected, 1 where something is not, 5 where the tool, the program or a GPU is missing.
set -u -o pipefail

missing() {
    printf 'error: %s\n  where: %s\n  do: %s\nnothing was looked at\n' "$1" "$2" "$3" >&2
    exit 5
}

root=$(cd "$(dirname "$0")/.." && pwd)
program=${MLA_CHECK:-$root/target/release/mla-check}
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
limit=${LIMIT:-1800}
reported=86 # what the tool ends with where it reports something

command -v "$sanitizer" >/dev/null 2>&1 ||
    missing "compute-sanitizer is not there" "$sanitizer" "install NVIDIA's CUDA toolkit, or name the tool by COMPUTE_SANITIZER"
[ -x "$program" ] ||
    missing "the program is not there" "$program" "cargo build --release, or name it by MLA_CHECK"
"$program" devices --gpu 0 >/dev/null 2>&1 ||
    missing "no GPU answers, or something that it needs is missing" "$program devices" "see what it lists as missing"

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

rows=()
bad=0

# look TOOL WHAT EXPECTED ARGUMENTS...: a run of the program under a tool; EXPECTED is clean or reported.
look() {
    local tool=$1 what=$2 expected=$3 code seen
    shift 3
    # Memory as it is: what fills it before kernels run would hide what the tools look for.
    timeout "$limit" "$sanitizer" --tool "$tool" --error-exitcode "$reported" \
        "$program" run "$@" --engine cuda --no-poison --no-guards --regime random --kernel-timeout "$limit" \
        >"$work/log" 2>&1
    code=$?
    case $code in
        0) seen=clean ;;
        "$reported") seen=reported ;;
        5) missing "engine cuda can't run here" "$program run --engine cuda" "see $program devices" ;;
        124) seen="no end within $limit s" ;;
        *) seen="ended with $code" ;;
    esac
    if [ "$seen" = "$expected" ]; then
        rows+=("$(printf '%-10s %-34s %-9s %s' "$tool" "$what" "$expected" "as expected")")
    else
        bad=1
        rows+=("$(printf '%-10s %-34s %-9s %s' "$tool" "$what" "$expected" "NOT: $seen")")
        printf -- '--- %s, %s: expected %s, %s\n' "$tool" "$what" "$expected" "$seen"
        # What the tool says, without the program's own report and backtraces.
        grep '^=========' "$work/log" | grep -v 'Host Frame' | head -n 60
        tail -n 20 "$work/log"
    fi
}

# Context in pages and without, a prefill on top of one, decode in splits.
batch=0+3,64+5,0+1,65+1,200+1
own=()
[ -n "${KERNELS:-}" ] && own=(--kernels "$KERNELS")
# racecheck does not follow an order from lane to lane and on through one lane's arrival at an mbarrier: there every lane arrives.
mkdir -p "$work/every-lane"
[ -n "${KERNELS:-}" ] && cp -R "$KERNELS/." "$work/every-lane"
if [ ! -f "$work/every-lane/absorbed.cu" ]; then
    cp "$root/kernels/absorbed.cu" "$work/every-lane"
    if ! grep -q '^constexpr u32 ARRIVALS = 1;' "$work/every-lane/absorbed.cu"; then
        printf 'error: the number of lanes that arrive is not set as expected\n  where: kernels/absorbed.cu, ARRIVALS\n  do: mend the line or this script\n' >&2
        exit 1
    fi
fi
sed -i.unchanged 's/^constexpr u32 ARRIVALS = 1;/constexpr u32 ARRIVALS = 32;/' "$work/every-lane/absorbed.cu"
fault=0
for tool in memcheck racecheck initcheck synccheck; do
    kernels=(${own[@]+"${own[@]}"})
    [ "$tool" = racecheck ] && kernels=(--kernels "$work/every-lane")
    for model in dsv3.Q4_K_M-00001-of-00003 glm5dims.Q4_K_M; do
        for form in fused absorbed; do
            look "$tool" "${model%%.*}, $form" clean "$root/fixtures/models/$model.gguf" \
                --form "$form" --batch "$batch" --splits 2 ${kernels[@]+"${kernels[@]}"}
        done
    done
    fault=$((fault + 1))
    planted=$work/planted/$tool
    mkdir -p "$planted"
    sed "s/^FAULT = 0 /FAULT = $fault /" "$root/fixtures/sanitizer/norm.cu" >"$planted/norm.cu"
    look "$tool" "planted fault" reported "$root/fixtures/models/dsv3.Q4_K_M-00001-of-00003.gguf" \
        --form absorbed --batch 0+3 --splits 1 --kernels "$planted"
done

printf '%-10s %-34s %-9s %s\n' tool case expected seen
printf '%s\n' "${rows[@]}"
exit "$bad"
