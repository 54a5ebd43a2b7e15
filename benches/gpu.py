"""Times the attention kernels of kernels/ on a GPU, beside a copy, a matrix product and PyTorch's attention in the same run.

Usage: python3 benches/gpu.py [--quick] [--anchors] [--markdown]
(PyTorch; libnvrtc.so.13 and libcuda.so.1 where the loader finds them)

--anchors: only what kernels are measured against (copy, matrix product, PyTorch's attention), which needs no NVRTC: beside it,
`mla-check bench` times the kernels themselves. --markdown: tables as in docs/kernels.md.

The kernels are compiled here as the program does it: macros from their headers, no contraction. Before anything is timed,
each kernel's result is compared with PyTorch's in float32 on one short case. Times are medians of events round what was
queued behind a sleep of the GPU, so that no time of this script is in them; L2 is overwritten before each. GB/s count the latent cache once;
TFLOP/s count the causal half.
"""
import ctypes, math, os, re, statistics, sys, tomllib
import torch

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "kernels")
QUICK, ANCHORS, MARKDOWN = ("--" + o in sys.argv for o in ("quick", "anchors", "markdown"))
unknown = [a for a in sys.argv[1:] if a not in ("--quick", "--anchors", "--markdown")]
if unknown:
    sys.exit(f"there is no option {unknown[0]}\n{__doc__}")
cuda = ctypes.CDLL("libcuda.so.1")
nvrtc = None
for name in [] if ANCHORS else ["libnvrtc.so.13", "/usr/local/cuda/lib64/libnvrtc.so.13", os.environ.get("NVRTC", "")]:
    try:
        nvrtc = nvrtc or ctypes.CDLL(name)
    except OSError:
        pass
if nvrtc is None and not ANCHORS:
    sys.exit("libnvrtc.so.13 was not found: set NVRTC to its path")
torch.manual_seed(1)
device = torch.device("cuda")
torch.zeros(1, device=device)
major, minor = torch.cuda.get_device_capability()
SHARED = torch.cuda.get_device_properties(0).shared_memory_per_block_optin


def text(name):
    with open(os.path.join(HERE, name)) as f:
        return f.read()


class File:
    """A kernel file, compiled for a geometry."""

    def __init__(self, name, geometry):
        source = text(name)
        self.header = tomllib.loads(source.split("/*---")[1].split("---*/")[0])
        self.names = {**self.header.get("tile", {}), **geometry}
        defines = {**self.header.get("tile", {}), **{g: geometry[g] for g in self.header.get("geometry", [])}}
        headers = [h for h in os.listdir(HERE) if h.endswith(".cuh")]
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        texts = (ctypes.c_char_p * len(headers))(*[text(h).encode() for h in headers])
        includes = (ctypes.c_char_p * len(headers))(*[h.encode() for h in headers])
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, includes)
        letter = "a" if self.header.get("specific") else ""
        options = [f"--gpu-architecture=sm_{major}{minor}{letter}", "--std=c++17", "--fmad=false"]
        options += [f"-D{k}={v}" for k, v in defines.items()]
        array = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
        if nvrtc.nvrtcCompileProgram(program, len(options), array):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            sys.exit(f"{name}: {log.value.decode()}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
        self.module = ctypes.c_void_p()
        check(cuda.cuModuleLoadData(ctypes.byref(self.module), code))

    def launch(self, entry, struct, **names):
        kernel = next(k for k in self.header["kernel"] if k["entry"] == entry)
        scope = {**self.names, **names, "cdiv": lambda a, b: -(-a // b), "max": max, "min": min}
        value = lambda e: int(eval(e.replace("/", "//").replace("||", " or ").replace("&&", " and "), {}, scope))
        grid = [value(e) for e in kernel["grid"]] + [1, 1, 1]
        shared = value(kernel.get("shared", "0"))
        function = ctypes.c_void_p()
        check(cuda.cuModuleGetFunction(ctypes.byref(function), self.module, entry.encode()))
        if shared > 48 << 10:
            check(cuda.cuFuncSetAttribute(function, 8, shared))
        pointer = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(struct), ctypes.c_void_p))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        threads = value(kernel["threads"])
        check(cuda.cuLaunchKernel(function, *grid[:3], threads, 1, 1, shared, stream, pointer, None))


def check(rc):
    if rc:
        name = ctypes.c_char_p()
        cuda.cuGetErrorName(rc, ctypes.byref(name))
        sys.exit(f"the driver answered {name.value}")


class Wide(int):
    """A whole number of 64 bits."""


def struct(*fields):
    """A struct by value: tensors are pointers, whole numbers 32 bits unless wide, floats 32 bits."""
    of = {Wide: ctypes.c_longlong, int: ctypes.c_int, float: ctypes.c_float}
    kinds = [ctypes.c_void_p if torch.is_tensor(f) else of[type(f)] for f in fields]
    made = type("S", (ctypes.Structure,), {"_fields_": [(f"f{i}", k) for i, k in enumerate(kinds)]})()
    for i, f in enumerate(fields):
        setattr(made, f"f{i}", f.data_ptr() if torch.is_tensor(f) else f)
    return made


flush = torch.empty(64 << 20, dtype=torch.float32, device=device)


def time(run, repeats=11):
    for _ in range(3):
        run()
    times = []
    for _ in range(3 if QUICK else repeats):
        flush.zero_()
        # Launches queue up behind this, so that the time of this script between them is not counted.
        torch.cuda._sleep(2_000_000)
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        run()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e-3)
    return statistics.median(times)


def words(items):
    return torch.tensor(items, dtype=torch.int32, device=device)


class Fused:
    def __init__(self, heads, nope, value, tokens):
        self.file = File("fused.cu", {"NOPE": nope, "ROPE": 64, "VALUE": value})
        self.heads, self.dk, self.dv, self.tokens = heads, nope + 64, value, tokens
        make = lambda d: torch.randn(tokens, heads, d, device=device, dtype=torch.bfloat16)
        self.q, self.k, self.v = make(self.dk), make(self.dk), make(self.dv)
        self.o = torch.empty(tokens, heads, self.dv, device=device, dtype=torch.bfloat16)
        self.lse = torch.empty(tokens, heads, device=device)
        rows = self.file.names["BM"]
        items = [[r, min(rows, tokens - r), r, 0, 0, tokens, 1, 0] for r in range(0, tokens, rows)]
        self.work = words(items[::-1])
        self.scale = self.dk**-0.5

    def run(self):
        k, v, h = self.dk, self.dv, self.heads
        strides = [Wide(h * w) for w in (k, k, v, v)] + [k, k, v, v]
        p = struct(self.q, self.k, self.v, self.work, self.o, self.lse, *strides, h, self.scale / math.log(2))
        self.file.launch("fused", p, items=len(self.work), heads=self.heads)

    def error(self):
        self.run()
        q, k, v = (t.transpose(0, 1).float() for t in (self.q, self.k, self.v))
        s = (q @ k.transpose(1, 2)) * self.scale
        s.masked_fill_(torch.ones(self.tokens, self.tokens, device=device, dtype=torch.bool).triu(1), -math.inf)
        want = (s.softmax(-1) @ v).transpose(0, 1)
        lse = s.logsumexp(-1).transpose(0, 1)
        off = (self.o.float() - want).norm() / want.norm()
        return off.item(), (self.lse - lse).abs().max().item()


class Absorbed:
    def __init__(self, heads, nope, batch, context, splits):
        self.file = File("absorbed.cu", {"ROPE": 64, "LATENT": 512, "SHARED": SHARED})
        self.merge_file = File("merge.cu", {})
        self.heads, self.batch, self.context, self.splits = heads, batch, context, splits
        pages = batch * -(-context // 64)
        self.cache = torch.randn(pages, 64, 576, device=device, dtype=torch.bfloat16)
        self.order = torch.randperm(pages, device=device).to(torch.int32)
        make = lambda d: torch.randn(batch, heads, d, device=device, dtype=torch.bfloat16)
        self.q_latent, self.q = make(512), make(nope + 64)
        self.o, self.lse = make(512), torch.empty(batch, heads, device=device)
        self.part_o = torch.empty(splits, batch, heads, 512, device=device)
        self.part_lse = torch.empty(splits, batch, heads, device=device)
        self.to = torch.arange(batch, dtype=torch.int32, device=device)
        self.rows = next((r for r in (16, 32, 64) if r >= heads), 64)
        per = -(-context // splits) + 31 & ~31
        items = []
        for s in range(splits):
            for b in range(batch):
                for h in range(0, heads, self.rows):
                    first = b * heads
                    out = (s * batch + b) * heads + h if splits > 1 else first + h
                    begin, end = min(s * per, context), min((s + 1) * per, context)
                    items.append([first + h, min(self.rows, heads - h), out, b * (pages // batch), begin, end, context, first])
        self.work = words(items)
        self.c2 = (nope + 64) ** -0.5 / math.log(2)

    def run(self):
        part = self.splits > 1
        o, lse = (self.part_o, self.part_lse) if part else (self.o, self.lse)
        widths = [512, self.q.shape[-1], 512]
        strides = [Wide(self.heads * w) for w in widths] + widths + [576]
        rest = (self.q.shape[-1] - 64, self.heads, 64, self.c2)
        p = struct(self.q_latent, self.q, self.cache, self.order, self.work, o, lse, *strides, *rest)
        self.file.launch(f"absorbed_{'part_' if part else ''}{self.rows}", p, items=len(self.work))
        if part:
            p = struct(self.part_o, self.part_lse, self.to, self.o, self.lse, self.splits, self.heads, 512)
            self.merge_file.launch("merge", p, rows=self.batch, heads=self.heads)

    def error(self):
        self.run()
        per = len(self.order) // self.batch
        worst, off = 0.0, 0.0
        for b in range(self.batch):
            keys = self.cache[self.order[b * per : (b + 1) * per].long()].reshape(-1, 576)[: self.context].float()
            q = torch.cat([self.q_latent[b], self.q[b, :, -64:]], -1).float()
            s = (q @ keys.T) * (self.c2 * math.log(2))
            want = s.softmax(-1) @ keys[:, :512]
            off = max(off, ((self.o[b].float() - want).norm() / want.norm()).item())
            worst = max(worst, (self.lse[b] - s.logsumexp(-1)).abs().max().item())
        return off, worst


class Table:
    """Rows under a head, printed as they come or as Markdown."""

    def __init__(self, title, *head):
        self.head = head
        self.widths = [max(len(h), 12) for h in head]
        print(f"\n{title}\n" if MARKDOWN else f"\n{title}")
        self.row(*head)
        if MARKDOWN:
            print("|" + "---|" + "---:|" * (len(head) - 1))

    def row(self, *cells):
        cells = [c if isinstance(c, str) else f"{c:.2f}" if c < 10 else f"{c:.0f}" for c in cells]
        if MARKDOWN:
            print("| " + " | ".join(cells) + " |")
        else:
            print("  ".join(f"{c:>{w}}" if i else f"{c:{w + 8}}" for i, (c, w) in enumerate(zip(cells, self.widths))))


def backends(q, k, v, scale):
    """TFLOP/s of PyTorch's attention by backend; those that refuse the shape are left out."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads, tokens = q.shape[1:3]
    flops = heads * tokens**2 * (q.shape[-1] + v.shape[-1])
    # FlashAttention 2 takes one width for all three: V padded, as vLLM does it.
    padded = torch.nn.functional.pad(v, (0, q.shape[-1] - v.shape[-1]))
    found = []
    for backend, values in ((SDPBackend.FLASH_ATTENTION, padded), (SDPBackend.CUDNN_ATTENTION, v)):
        with sdpa_kernel(backend):
            run = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, values, is_causal=True, scale=scale)
            try:
                found.append(flops / time(run) / 1e12)
            except RuntimeError:
                found.append("-")
    return found


print(f"{torch.cuda.get_device_name()}, sm_{major}{minor}, PyTorch {torch.__version__}")
big = torch.empty(1 << 29, dtype=torch.float32, device=device)
half = len(big) // 2
copy = 2 * half * 4 / time(lambda: big[:half].copy_(big[half:])) / 1e9
del big
m = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
product = 2 * 8192**3 / time(lambda: m @ m) / 1e12
print(f"copy {copy:.0f} GB/s, bf16 matrix product {product:.0f} TFLOP/s")
torch.backends.cuda.matmul.allow_tf32 = False
off_by = "off by: o, lse"

PREFILL = [("DeepSeek-V3 128", 128, 128, 128), ("GLM-5 64", 64, 192, 256)]
TOKENS = [2048] if QUICK else [2048, 8192, 16384]
if ANCHORS:
    table = Table("prefill, TFLOP/s of the causal half", "heads", "tokens", "SDPA FA2", "SDPA cuDNN")
    for name, heads, nope, value in PREFILL:
        for tokens in TOKENS:
            make = lambda d: torch.randn(1, heads, tokens, d, device=device, dtype=torch.bfloat16)
            table.row(name, str(tokens), *backends(make(nope + 64), make(nope + 64), make(value), (nope + 64) ** -0.5))
            torch.cuda.empty_cache()
    sys.exit()

table = Table("prefill, TFLOP/s of the causal half", "heads", "tokens", "ours", "SDPA FA2", "SDPA cuDNN", "ours/FA2", off_by)
for name, heads, nope, value in PREFILL:
    off = Fused(2, nope, value, 333).error()
    for tokens in TOKENS:
        case = Fused(heads, nope, value, tokens)
        flops = heads * tokens**2 * (case.dk + case.dv)
        ours = flops / time(case.run) / 1e12
        theirs = backends(*(t.transpose(0, 1)[None] for t in (case.q, case.k, case.v)), case.scale)
        ratio = "-" if theirs[0] == "-" else ours / theirs[0]
        table.row(name, str(tokens), ours, *theirs, ratio, f"{off[0]:.1e}, {off[1]:.1e}")
        del case
        torch.cuda.empty_cache()

table = Table("decode", "heads", "batch x keys", "splits", "us", "GB/s", "of copy", "TFLOP/s", off_by)
for name, heads, nope in [("V2-Lite 16", 16, 128), ("GLM-4.7-Flash 20", 20, 192), ("GLM-5 64", 64, 192), ("DeepSeek-V3 128", 128, 128)]:
    off = max(Absorbed(heads, nope, 2, 333, s).error() for s in (1, 3))
    for batch, context, splits in [(128, 8192, 1), (64, 8192, 2), (8, 32768, 16), (1, 32768, 64)][: 1 if QUICK else 4]:
        case = Absorbed(heads, nope, batch, context, splits)
        t = time(case.run)
        bytes_ = batch * context * 1152
        flops = 2 * batch * heads * context * (576 + 512)
        speed = bytes_ / t / 1e9
        table.row(name, f"{batch} x {context}", str(splits), t * 1e6, speed, speed / copy, flops / t / 1e12, f"{off[0]:.1e}, {off[1]:.1e}")
        del case
        torch.cuda.empty_cache()
