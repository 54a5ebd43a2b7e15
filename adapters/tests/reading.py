"""Reads a dump back, independently of the writer."""

import json
import os
import struct

import torch

TYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8,
    "I64": torch.int64, "I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


def arrays(path):
    with open(path, "rb") as file:
        data = file.read()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    header, made = json.loads(data[8 : 8 + length]), {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        blob = bytearray(data[8 + length + start : 8 + length + stop])
        made[name] = (
            torch.frombuffer(blob, dtype=TYPES[entry["dtype"]]).view(entry["shape"])
            if blob
            else torch.empty(entry["shape"])
        )
    end = max((e["data_offsets"][1] for e in header.values()), default=0)
    assert 8 + length + end == len(data)
    return made


class Dump:
    def __init__(self, folder, rank=0):
        with open(os.path.join(folder, f"rank-{rank}.json")) as file:
            self.manifest = json.load(file)
        self.arrays = arrays(os.path.join(folder, f"rank-{rank}.safetensors"))

    def captures(self, form=None, layer=None):
        return [
            c for c in self.manifest["captures"]
            if (form is None or c["form"] == form) and (layer is None or c["layer"] == layer)
        ]  # fmt: skip

    def get(self, capture, name):
        return self.arrays[capture["tensors"][name]["array"]]

    def weight(self, name):
        return self.arrays[self.manifest["weights"][name]["array"]]
