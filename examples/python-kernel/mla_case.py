"""Arrays of a case that `mla-check case --save DIR` wrote: `Case(DIR).load(name)`, then `.save(name, array)`.

Arrays are PyTorch tensors in their own dtype, or numpy arrays in float32 where PyTorch is not installed."""

import json
import os

import numpy as np

try:
    import torch
except ImportError:
    torch = None


class Case:
    def __init__(self, folder):
        self.folder = folder
        with open(os.path.join(folder, "case.json")) as file:
            self.info = json.load(file)
        self.tensors, self.wanted = self.info["tensors"], self.info["wanted"]

    def load(self, name):
        """An array by its name in case.json. 16-bit and 8-bit formats are stored as their bits."""
        entry = self.tensors[name]
        bits, dtype = np.load(os.path.join(self.folder, entry["file"])), entry["dtype"]
        if torch is not None:
            kinds = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn}
            tensor = torch.from_numpy(bits.view({2: np.int16, 1: np.uint8}[bits.itemsize]) if dtype in kinds else bits)
            return tensor.view(kinds[dtype]) if dtype in kinds else tensor
        if dtype == "e4m3":
            sign, exponent, fraction = np.where(bits >> 7, -1.0, 1.0), bits >> 3 & 15, (bits & 7) / 8.0
            value = np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - 7.0), fraction * 2.0**-6)
            return np.where(bits & 127 == 127, np.nan, sign * value).astype(np.float32)
        if dtype == "bf16":
            return (bits.astype(np.uint32) << 16).view(np.float32)
        return bits.view(np.float16).astype(np.float32) if dtype == "f16" else bits

    def save(self, name, array):
        """Writes an output that case.json wants, rounded to its dtype where it is not in it."""
        entry = self.wanted[name]
        dtype, path = entry["dtype"], os.path.join(self.folder, entry["file"])
        if torch is not None and torch.is_tensor(array):
            kind = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype]
            array = array.detach().cpu().to(kind).contiguous()
            bits = (array if dtype == "f32" else array.view(torch.int16)).numpy()
        elif dtype == "bf16":
            wide = np.ascontiguousarray(array, dtype=np.float32)
            word = wide.view(np.uint32)
            bits = np.where(np.isnan(wide), 0x7FC0, (word + 0x7FFF + (word >> 16 & 1)) >> 16).astype(np.uint16)
        else:
            bits = np.asarray(array, dtype={"f16": np.float16, "f32": np.float32}[dtype])
        bits = bits.view(np.uint16) if dtype in ("bf16", "f16") else bits
        if list(bits.shape) != entry["shape"]:
            raise ValueError(
                f"{name} has shape {list(bits.shape)}, and the case wants {entry['shape']}, axes {entry['axes']}"
            )
        os.makedirs(os.path.dirname(path), exist_ok=True)
        np.save(path, np.ascontiguousarray(bits))
