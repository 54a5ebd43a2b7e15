"""Times `mla-check run --engine reference` on a GLM-5 layer beside numpy's float64 products of the same shapes.

usage: mla-check synth --preset glm-5 /tmp/glm5.gguf
       env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE python3 benches/layer_vs_numpy.py target/release/mla-check /tmp/glm5.gguf

The two take turns, five times; each line has wall and CPU seconds of both and their ratios. numpy multiplies ready
float64 matrices and does nothing else; mla-check reads the file, decodes the weights, draws the case, runs both forms
and both regimes, attention included. The products alone, from stored blocks:
`cargo bench -p mla-reference --bench product -- glm5_run`.
"""
import os
import resource
import statistics
import subprocess
import sys
import time

import numpy as np

BINARY, MODEL = sys.argv[1:3]
BATCH = "0+64,1024+1"
TOKENS, ROWS, KEYS = 65, 66, 64 + 1025 + 1025  # rows of attention and keys: both regimes
HEADS, HIDDEN, Q_RANK, LATENT, NOPE, ROPE, VALUE = 64, 6144, 2048, 512, 192, 64, 256

# (rows of X, columns summed over, columns of the result, times)
PRODUCTS = [
    (TOKENS, HIDDEN, Q_RANK, 1),  # q_a
    (TOKENS, Q_RANK, HEADS * (NOPE + ROPE), 1),  # q_raw
    (TOKENS, HIDDEN, LATENT + ROPE, 1),  # kv_a
    (KEYS, LATENT, HEADS * NOPE, 1),  # k
    (KEYS, LATENT, HEADS * VALUE, 1),  # v
    (TOKENS, NOPE, LATENT, HEADS),  # q_latent
    (ROWS, LATENT, VALUE, HEADS),  # attn_out, absorbed
    (ROWS, HEADS * VALUE, HIDDEN, 2),  # out, both forms
]


def numpy_run(operands):
    for x, w, times in operands:
        for _ in range(times):
            x @ w.T


def timed(what, who):
    before, start = resource.getrusage(who), time.perf_counter()
    what()
    after = resource.getrusage(who)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, cpu


rng = np.random.default_rng(0)
operands = [(rng.standard_normal((t, k)), rng.standard_normal((m, k)), n) for t, k, m, n in PRODUCTS]
flops = sum(2 * t * k * m * n for t, k, m, n in PRODUCTS)
command = [BINARY, "run", MODEL, "--batch", BATCH, "--engine", "reference", "--quiet"]
numpy_run(operands)
print(f"numpy {np.__version__}, {os.cpu_count()} cores, {flops / 1e9:.1f} GFLOP")
ratios = []
for _ in range(5):
    ours = timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL), resource.RUSAGE_CHILDREN)
    theirs = timed(lambda: numpy_run(operands), resource.RUSAGE_SELF)
    ratios.append((ours[0] / theirs[0], ours[1] / theirs[1]))
    print("mla-check %.2f s wall, %.2f s CPU   numpy %.2f s wall, %.2f s CPU   ratio %.2f, %.2f" % (*ours, *theirs, *ratios[-1]))
print("median ratio: wall %.2f, CPU %.2f" % tuple(statistics.median(r) for r in zip(*ratios)))
