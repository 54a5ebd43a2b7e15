"""Makes ptx/tests/ptx/*.ptx from the sources here with NVRTC. Usage: make.py FOLDER_OF_LIBNVRTC [OUT]

Each file holds the module's head and the entries that a test runs, and begins with comments that say what made it.
"""
import ctypes, glob, hashlib, os, re, sys

here = os.path.dirname(os.path.abspath(__file__))
lib = sys.argv[1]
out = sys.argv[2] if len(sys.argv) > 2 else os.path.join(here, "..", "ptx")
# NVRTC looks for its builtins by name; loaded first, they are found.
ctypes.CDLL(glob.glob(os.path.join(lib, "libnvrtc-builtins.so.*"))[0], mode=ctypes.RTLD_GLOBAL)
L = ctypes.CDLL(os.path.join(lib, "libnvrtc.so.13"))


def version():
    a, b = ctypes.c_int(), ctypes.c_int()
    L.nvrtcVersion(ctypes.byref(a), ctypes.byref(b))
    return f"{a.value}.{b.value}"


def ptx(source, name, options):
    p, n = ctypes.c_void_p(), ctypes.c_size_t()
    assert L.nvrtcCreateProgram(ctypes.byref(p), source.encode(), name.encode(), 0, None, None) == 0
    rc = L.nvrtcCompileProgram(p, len(options), (ctypes.c_char_p * len(options))(*[o.encode() for o in options]))
    if rc:
        L.nvrtcGetProgramLogSize(p, ctypes.byref(n))
        log = ctypes.create_string_buffer(n.value)
        L.nvrtcGetProgramLog(p, log)
        sys.exit(f"{name}: {log.value.decode()}")
    L.nvrtcGetPTXSize(p, ctypes.byref(n))
    text = ctypes.create_string_buffer(n.value)
    L.nvrtcGetPTX(p, text)
    return text.value.decode()


def only(text, names):
    """The head, and the entries called so."""
    head, *entries = re.split(r"(?m)^(?=\.visible \.entry )", text)
    keep = [e for e in entries if any(e.startswith(f".visible .entry {n}(") for n in names)]
    body = head + "".join(keep)
    # Debug sections speak of every entry.
    body = re.sub(r"(?ms)^\s*\.section\s+\.debug.*", "", body)
    # NVRTC puts the folder it runs in before the name.
    body = re.sub(r'(?m)^(\s*\.file\s+\d+ ")[^"]*/', r"\1", body)
    return re.sub(r"(?m)^\s*//[^\n]*\n", "", body)


def write(file, source, text, options, names):
    head = [f"// entries {' '.join(names)} of {source[0]}", f"// sha256 of the source: {hashlib.sha256(source[1].encode()).hexdigest()}",
            f"// NVRTC {version()} (wheel nvidia-cuda-nvrtc 13.0.88), options {' '.join(options)}"]
    os.makedirs(os.path.dirname(os.path.join(out, file)), exist_ok=True)
    open(os.path.join(out, file), "w").write("\n".join(head) + "\n" + only(text, names))


def make(file, cu, names, arch, lineinfo=False, edit=None):
    source = open(os.path.join(here, cu)).read()
    label = cu
    if edit:
        old, new = edit
        assert old in source, file
        source, label = source.replace(old, new, 1), f"{cu}, with {old!r} replaced by {new!r}"
    options = [f"--gpu-architecture={arch}", "--std=c++17", "-fmad=false"] + (["-lineinfo"] if lineinfo else [])
    write(file, (label, source), ptx(source, cu, options), options, names)


MLA = ["mla_decode", "mla_merge", "rmsnorm", "rope", "dequant_q4_k", "dequant_q6_k", "gemm_bf16", "mla_prefill"]
DECODE = ["merge", "r16_v2_row", "r16_v2_row_prod", "r16_v2_pad", "p64_w8_s4_row", "r64_c1_pd1_pad", "d8_s4_bulk_e1"]
WAIT = "cp_wait<1>();\n    __syncthreads();"
FAULTS = {  # name: (entry, old text, new text)
    "decode-no-barrier-after-wait": ("mla_decode", WAIT, "cp_wait<1>();"),
    "decode-no-wait": ("mla_decode", WAIT, "__syncthreads();"),
    "decode-wait-2": ("mla_decode", WAIT, "cp_wait<2>();\n    __syncthreads();"),
    "decode-no-barrier-at-end": ("mla_decode", "      }\n    }\n    __syncthreads();\n  }\n  cp_wait<0>();", "      }\n    }\n  }\n  cp_wait<0>();"),
    "decode-no-barrier-before-softmax": ("mla_decode", "-INFINITY_;\n    }\n    __syncthreads();\n    // softmax", "-INFINITY_;\n    }\n    // softmax"),
    "decode-no-syncwarp": ("mla_decode", "__syncwarp();", ""),
    "decode-pitch-580": ("mla_decode", "LD = QK + 8", "LD = QK + 4"),
    "decode-page-off-by-one": ("mla_decode", "tab[tok / PAGE]", "tab[tok / PAGE + 1]"),
    "decode-no-length-mask": ("mla_decode", "tok < len;\n      int page", "tok < len + 64;\n      int page"),
    "decode-sum-not-initialised": ("mla_decode", "sM[tid] = -INFINITY_; sL[tid] = 0.f;", "sM[tid] = -INFINITY_;"),
    "decode-rows-too-far": ("mla_decode", "*(float2*)(o + (g + 8) * LAT + col)", "*(float2*)(o + (g + 16) * LAT + col)"),
    "decode-half-not-stored": ("mla_decode", "if (hb + g + 8 < heads) *(float2*)", "if (hb + g + 24 < heads) *(float2*)"),
    "gemm-stage-too-early": ("gemm_bf16", "load(kt + 2, (kt + 2) % 3)", "load(kt + 2, (kt + 3) % 3)"),
    "gemm-blocks-overlap": ("gemm_bf16", "n0 = blockIdx.x * BN;", "n0 = blockIdx.x * (BN - 8);"),
    "gemm-rows-not-clamped": ("gemm_bf16", "(size_t)min(m0 + r, M - 1) * K + k, m0 + r < M && k < K", "(size_t)(m0 + r) * K + k, k < K"),
    "rms-barrier-in-branch": ("rmsnorm", "if ((threadIdx.x & 31) == 0) red[threadIdx.x >> 5] = s;\n  __syncthreads();", "if ((threadIdx.x & 31) == 0) { red[threadIdx.x >> 5] = s; __syncthreads(); }"),
    "rms-shuffle-in-branch": ("rmsnorm", "for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(0xffffffffu, s, o);", "if ((threadIdx.x & 31) < 16) for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(0xffffffffu, s, o);"),
    "rms-absent-warps": ("rmsnorm", "threadIdx.x < (blockDim.x >> 5) ? red[threadIdx.x] : 0.f", "red[threadIdx.x]"),
    "rms-no-barrier-before-read": ("rmsnorm", "red[0] = rsqrtf(s / n + eps);\n  }\n  __syncthreads();", "red[0] = rsqrtf(s / n + eps);\n  }"),
    "prefill-no-barrier-before-reuse": ("mla_prefill", "mma(o[2 * i], a, b[0], b[1]); mma(o[2 * i + 1], a, b[2], b[3]);\n      }\n    }\n    __syncthreads();", "mma(o[2 * i], a, b[0], b[1]); mma(o[2 * i + 1], a, b[2], b[3]);\n      }\n    }"),
}

if __name__ == "__main__":
    for arch in ("compute_90", "compute_120"):
        make(f"mla_{arch}.ptx", "mla.cu", MLA, arch, lineinfo=True)
        make(f"decode_{arch}.ptx", "decode.cu", DECODE, arch)
        make(f"tile_{arch}.ptx", "tile.cu", ["tile_bf16", "tile_f16"], arch)
    make("misc_compute_120.ptx", "misc.cu", ["divergent", "half_math", "double_math"], "compute_120")
    for name, (entry, old, new) in FAULTS.items():
        make(f"faults/{name}.ptx", "mla.cu", [entry], "compute_120", edit=(old, new))
