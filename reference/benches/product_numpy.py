"""numpy's float64 products in the shapes of product.rs, from float64 weights that are ready in memory.

    python product_numpy.py [THREADS]      (default: all cores)

Run it in the same minute as `RAYON_NUM_THREADS=THREADS cargo bench --bench product`, on a quiet machine, and compare
medians; better several times in turn. OPENBLAS_CORETYPE and OPENBLAS_L2_SIZE must not be set.
"""
import os
import sys
import time

for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(name, None)
if len(sys.argv) > 1:
    os.environ["OPENBLAS_NUM_THREADS"] = sys.argv[1]

import numpy as np  # noqa: E402  (reads the environment when it is loaded)

rng = np.random.default_rng(1)


def times(run, samples):
    out = []
    for _ in range(samples):
        start = time.perf_counter()
        run()
        out.append(time.perf_counter() - start)
    return sorted(out)


print(f"numpy {np.__version__}\n{'K x M':>14} {'T':>4} {'fastest':>10} {'median':>10}  GFLOP/s")
for k, m in [(6144, 2048), (2048, 16384), (6144, 576), (512, 28672), (16384, 6144)]:
    w = rng.random((m, k)) - 0.5
    for t in [1, 8, 65, 256]:
        x = rng.random((t, k)) - 0.5
        sample = times(lambda: x @ w.T, 10)
        flops = 2e-9 * t * k * m
        print(f"{k:>7} x {m:<5} {t:>4} {flops / sample[0]:>10.1f} {flops / sample[5]:>10.1f}", flush=True)
