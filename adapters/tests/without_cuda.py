"""Makes `import torch` work where only PyTorch's CPU part is used and NVIDIA's libraries (two gigabytes) are not
installed: PyPI has no CPU build for Linux. For tests only.

    pip install --no-deps torch==2.15.0 nvidia-cuda-runtime==13.2.86
    pip install filelock typing-extensions sympy networkx jinja2 fsspec numpy
    python without_cuda.py SITE-PACKAGES

For each library that torch's own link to and that is not there, one is built of the symbols that they want from it. A
call of any of them ends the process. The CUDA runtime must be the real one, since it is called while torch is loaded. Needs gcc,
nm and readelf.
"""

import glob
import os
import re
import subprocess
import sys
import tempfile

OURS = (
    "libcublas",
    "libcudnn",
    "libcufft",
    "libcufile",
    "libcupti",
    "libcusolver",
    "libcusparse",
    "libnccl",
    "libnvrtc",
    "libnvshmem",
)


def out(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(site):
    folder = os.path.join(site, "torch", "lib")
    installed = {
        os.path.basename(path) for path in glob.glob(os.path.join(site, "nvidia", "**", "lib", "*.so*"), recursive=True)
    }
    wanted, undefined, defined = set(), set(), set()
    for path in glob.glob(os.path.join(folder, "*.so*")):
        wanted |= set(re.findall(r"NEEDED.*\[(.*)\]", out("readelf", "-dW", path)))
        for line in out("nm", "-D", "--with-symbol-versions", path).splitlines():
            kind, name = line.split()[-2:]
            (undefined.add(name) if kind == "U" else defined.add(name.partition("@")[0]))
    libraries = sorted(name for name in wanted if name.startswith(OURS) and name not in installed)
    versioned, plain = {}, set()
    for name in undefined:
        symbol, _, version = name.partition("@")
        version = version.lstrip("@")
        if version:
            versioned.setdefault(version, set()).add(symbol)
        elif symbol not in defined and re.match(r"cu|nccl|nvrtc|nvshmem|_ZN\w*cudnn", symbol):
            plain.add(symbol)
    with tempfile.TemporaryDirectory() as work:
        source, script = os.path.join(work, "a.c"), os.path.join(work, "a.map")
        for library in libraries:
            version = "NVSHMEM" if library.startswith("libnvshmem") else library
            symbols = versioned.get(version, set())
            with open(source, "w") as file:
                file.writelines(f"void {symbol}(void) {{ __builtin_trap(); }}\n" for symbol in sorted(symbols | plain))
                file.write("int mla_check_nothing;\n")
            plain = set()  # once is enough
            with open(script, "w") as file:
                file.write(f"{version} {{ {' '.join(symbol + ';' for symbol in sorted(symbols))} }};\n")
            command = [
                "gcc",
                "-shared",
                "-fPIC",
                "-w",
                f"-Wl,-soname,{library}",
                "-o",
                os.path.join(folder, library),
                source,
            ]
            subprocess.run(command + [f"-Wl,--version-script={script}"] * bool(symbols), check=True)
    print(f"{len(libraries)} libraries: {' '.join(libraries)}")


if __name__ == "__main__":
    main(sys.argv[1])
