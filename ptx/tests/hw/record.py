"""Records what an NVIDIA GPU computes with the kernels of ../ptx. Usage: record.py OUT.safetensors (needs PyTorch and a driver)

Each case is `NAME/in0 …` (arguments in their order), `NAME/out0 …` (what the kernel wrote), all as raw bytes (U8);
`__metadata__` names the device, the driver, and grid, block, dynamic shared memory and arguments of each case. The PTX
is the committed one for compute_90, compiled by the driver: `-fmad=false` was an option of NVRTC, and ptxas is told so too.
"""
import ctypes, json, os, re, sys

import numpy as np
import torch

here = os.path.dirname(os.path.abspath(__file__))
torch.zeros(1, device="cuda")
cuda = ctypes.CDLL("libcuda.so.1")


def check(rc, what):
    assert rc == 0, f"{what}: {rc}"


def bits(n, seed):
    with np.errstate(over="ignore"):
        z = (np.arange(1, n + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def uniform(shape, seed):
    n = int(np.prod(shape))
    return ((bits(n, seed) >> np.uint64(40)).astype(np.float64) / (1 << 24)).reshape(shape)


def gauss(shape, seed):
    return sum(uniform(shape, seed * 16 + i) for i in range(8)) * np.sqrt(1.5) - 4 * np.sqrt(1.5)


def bf16(x):
    u = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return (((u + 0x7FFF + ((u >> 16) & 1)) >> 16) & 0xFFFF).astype(np.uint16)


def f16(x):
    return np.asarray(x, np.float32).astype(np.float16).view(np.uint16)


def u16(shape, seed):
    return (bits(int(np.prod(shape)), seed) & np.uint64(0xFFFF)).astype(np.uint16).reshape(shape)


def u8(shape, seed):
    return (bits(int(np.prod(shape)), seed) & np.uint64(0xFF)).astype(np.uint8).reshape(shape)


def tiles(kind, n, seed):
    a, b, c = gauss((n, 16, 16), seed), gauss((n, 16, 8), seed + 1), gauss((n, 16, 8), seed + 2)
    if kind == "spread":  # exponents spread over 25 binades
        e = lambda s, sd: 2.0 ** np.floor(uniform(s, sd) * 25 - 12)
        a, b, c = a * e(a.shape, seed + 3), b * e(b.shape, seed + 4), c * e(c.shape, seed + 5)
    if kind == "cancel":  # large terms that cancel
        a[:, :, 8:] = -a[:, :, :8] + 2.0**-7 * gauss((n, 16, 8), seed + 6)
        b[:, 8:] = b[:, :8]
        c = 1e-3 * c
    if kind == "tiny":  # products around 2^-126, C zero or subnormal
        a, b, c = a * 2.0**-64, b * 2.0**-66, c * 2.0**-128
        c[::2] = 0
    if kind == "huge":  # sums that overflow
        a, b, c = a * 2.0**62, b * 2.0**64, c * 2.0**126
    if kind == "raw":  # any bits: infinities and NaN too
        c = bits(n * 128, seed + 2).astype(np.uint32).view(np.float32).reshape(n, 16, 8)
        return u16((n, 16, 16), seed), u16((n, 16, 8), seed + 1), c
    return a, b, c.astype(np.float32)


N = 96
BF16 = ["normal", "spread", "cancel", "tiny", "raw", "huge"]
F16 = ["normal", "raw"]


def cases():
    """name -> (module, kernel, grid, block, shared, arguments)"""
    for dtype, kinds, cast in (("bf16", BF16, bf16), ("f16", F16, f16)):
        for kind in kinds:
            a, b, c = tiles(kind, N, 100)
            if kind != "raw":
                a, b = cast(a), cast(b)
            args = [("in", a), ("in", b), ("in", c), ("out", N * 128 * 4)]
            yield f"mma {dtype} {kind}", ("tile", f"tile_{dtype}", (N, 1, 1), 32, 0, args)
    heads, length, splits = 16, 256, 2
    pages = length // 16
    table = ((np.arange(pages) * 7 + 3) % (pages + 3)).astype(np.int32)
    scale = ("f32", float(np.float32(1.4426950408889634 / np.sqrt(192.0))))
    u32 = lambda v: ("u32", v)
    shared = (16 * 584 + 2 * 32 * 584 + 16 * 40) * 2 + (16 * 36 + 48) * 4
    yield "mla_decode", ("mla", "mla_decode", (splits, 1, 1), 128, shared, [
        ("in", bf16(gauss((1, heads, 576), 1))), ("in", bf16(gauss((pages + 3, 16, 576), 2))), ("in", table),
        ("in", np.array([length - 5], np.int32)), ("out", splits * heads * 512 * 4), ("out", splits * heads * 2 * 4),
        u32(heads), u32(pages), u32(splits), scale])
    ml = np.stack([gauss((splits, heads), 8) * 3, uniform((splits, heads), 9) * 50 + 1], -1).astype(np.float32)
    yield "mla_merge", ("mla", "mla_merge", (heads, 1, 1), 128, 0, [
        ("in", gauss((splits, heads, 512), 7).astype(np.float32)), ("in", ml), ("out", heads * 512 * 2), ("out", heads * 4),
        u32(heads), u32(splits)])
    tokens, two = 100, 2
    yield "mla_prefill", ("mla", "mla_prefill", (2, two, 1), 128, (64 * 200 * 2 + 64 * 136) * 2, [
        ("in", bf16(gauss((tokens, two, 192), 11))), ("in", bf16(gauss((tokens, two, 192), 12))),
        ("in", bf16(gauss((tokens, two, 128), 13))), ("out", tokens * two * 128 * 2), u32(tokens), u32(two), scale])
    yield "rmsnorm", ("mla", "rmsnorm", (4, 1, 1), 128, 0, [
        ("in", bf16(gauss((4, 512), 21) * 3)), ("in", gauss((512,), 22).astype(np.float32)), ("out", 4096), u32(512),
        ("f32", 1e-6)])
    q4 = u8((64, 144), 41)
    q4[:, :4] = (uniform((64, 2), 42) * 0.1).astype(np.float16).view(np.uint8).reshape(64, 4)
    yield "dequant_q4_k", ("mla", "dequant_q4_k", (64, 1, 1), 32, 0, [("in", q4), ("out", 64 * 512)])
    q6 = u8((64, 210), 43)
    q6[:, 208:] = (uniform((64,), 44) * 0.1).astype(np.float16).view(np.uint8).reshape(64, 2)
    yield "dequant_q6_k", ("mla", "dequant_q6_k", (64, 1, 1), 64, 0, [("in", q6), ("out", 64 * 512)])
    yield "gemm_bf16", ("mla", "gemm_bf16", (2, 2, 1), 128, 0, [
        ("in", bf16(gauss((70, 576), 51))), ("in", bf16(gauss((96, 576), 52))), ("out", 70 * 96 * 4), u32(70), u32(96),
        u32(576)])


def load(name):
    text = open(os.path.join(here, "..", "ptx", f"{name}_compute_90.ptx")).read()
    # Lines of the source name debug sections that the files do not hold.
    text = re.sub(r"(?m)^\s*\.(loc|file)\b.*\n", "", text).encode() + b"\0"
    module = ctypes.c_void_p()
    check(cuda.cuModuleLoadData(ctypes.byref(module), text), f"load {name}")
    return module


tensors, about, modules = {}, {}, {}
for name, (file, kernel, grid, block, shared, args) in cases():
    module = modules.setdefault(file, load(file) if file not in modules else None)
    f = ctypes.c_void_p()
    check(cuda.cuModuleGetFunction(ctypes.byref(f), module, kernel.encode()), kernel)
    check(cuda.cuFuncSetAttribute(f, 8, shared), "shared memory")
    keep, values, kinds, outs = [], [], [], []
    for kind, value in args:
        if kind in ("in", "out"):
            raw = value.tobytes() if kind == "in" else bytes(value)
            t = torch.frombuffer(bytearray(raw), dtype=torch.uint8).cuda()
            keep.append(t)
            values.append(ctypes.c_uint64(t.data_ptr()))
            if kind == "in":
                tensors[f"{name}/in{kinds.count('in')}"] = raw
            else:
                outs.append(t)
            kinds.append(kind)
        else:
            values.append(ctypes.c_uint32(value) if kind == "u32" else ctypes.c_float(value))
            kinds.append(f"{kind} {value!r}")
    pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
    check(cuda.cuLaunchKernel(f, *grid, block, 1, 1, shared, None, pointers, None), f"launch {name}")
    torch.cuda.synchronize()
    for i, t in enumerate(outs):
        tensors[f"{name}/out{i}"] = t.cpu().numpy().tobytes()
    sizes = [len(tensors[f"{name}/out{i}"]) for i in range(len(outs))]
    about[name] = json.dumps({"module": file, "kernel": kernel, "grid": grid, "block": block, "shared": shared,
                              "args": kinds, "out": sizes})
driver = ctypes.c_int()
cuda.cuDriverGetVersion(ctypes.byref(driver))
about["device"] = f"{torch.cuda.get_device_name(0)}, compute capability {torch.cuda.get_device_capability(0)}, CUDA driver API {driver.value}"
header, at = {"__metadata__": about}, 0
for name, raw in tensors.items():
    header[name] = {"dtype": "U8", "shape": [len(raw)], "data_offsets": [at, at + len(raw)]}
    at += len(raw)
head = json.dumps(header).encode()
head += b" " * (-len(head) % 8)
with open(sys.argv[1], "wb") as f:
    f.write(len(head).to_bytes(8, "little") + head + b"".join(tensors.values()))
print(about["device"], len(tensors), "tensors", at, "bytes")
