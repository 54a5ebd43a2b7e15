"""examples/python-kernel on cases made here, with PyTorch and without."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import numpy as np
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLE = os.path.join(os.path.dirname(os.path.dirname(HERE)), "examples", "python-kernel")
sys.path[:0] = [HERE]

import arithmetic as mla

BLOCKED = "import sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"


class Example(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="mla-check-")
        self.addCleanup(shutil.rmtree, self.folder)
        self.made = torch.Generator().manual_seed(3)

    def tensor(self, *shape):
        return torch.randn(shape, generator=self.made).to(torch.bfloat16)

    def case(self, info, tensors, wanted):
        info.update(schema="mla-check.case/1", tensors={}, wanted={})
        for name, (array, axes) in tensors.items():
            bits = array.view(torch.int16).numpy().view(np.uint16) if array.dtype == torch.bfloat16 else array.numpy()
            np.save(os.path.join(self.folder, f"{name}.npy"), bits)
            dtype = "bf16" if array.dtype == torch.bfloat16 else "i32"
            info["tensors"][name] = {"file": f"{name}.npy", "dtype": dtype, "axes": axes, "shape": list(array.shape)}
        for name, (dtype, axes, shape) in wanted.items():
            info["wanted"][name] = {"file": f"out/{name}.npy", "dtype": dtype, "axes": axes, "shape": shape}
        with open(os.path.join(self.folder, "case.json"), "w") as file:
            json.dump(info, file)

    def run_with(self, with_torch, *arguments):
        script = [os.path.join(EXAMPLE, "attention.py"), self.folder, *arguments]
        command = [sys.executable, *script] if with_torch else [sys.executable, "-c", BLOCKED, *script]
        env = {**os.environ, "PYTHONPATH": EXAMPLE}
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)

    def out(self, name, shape):
        bits = np.load(os.path.join(self.folder, "out", f"{name}.npy"))
        self.assertEqual(list(bits.shape), shape)
        if bits.dtype == np.float32:
            return torch.from_numpy(bits)
        self.assertEqual(bits.dtype, np.uint16)
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()

    def close(self, a, b):
        self.assertLess(
            (a - b.float()).abs().max().item(), 2**-7
        )  # an output below 4 is half an ulp, 2**-7, off at most

    def test_absorbed(self):
        q, pe, cache = self.tensor(3, 2, 16), self.tensor(3, 2, 8), self.tensor(5, 4, 24)
        w_uv, table = self.tensor(2, 6, 16) / 4, torch.tensor([[3, 1], [4, 0]], dtype=torch.int32)
        info = {"form": "absorbed", "scale": 0.2, "requests": ["5+1", "1+2"], "positions": [5, 1, 2], "page_size": 4}
        inputs = {"q_latent": q, "q_pe": pe, "cache": cache, "block_table": table, "w_uv": w_uv}
        wanted = {
            "o_latent": ("bf16", ["token", "head", "latent"], [3, 2, 16]),
            "lse": ("f32", ["head", "token"], [2, 3]),
        }
        wanted["attn_out"] = ("bf16", ["token", "head*value"], [3, 12])
        self.case(info, {n: (t, []) for n, t in inputs.items()}, wanted)
        rows = [torch.cat([cache[3], cache[1, :2]]), cache[4, :3]]
        expected = []
        for keys, at in zip(rows, (slice(0, 1), slice(1, 3))):
            shared = keys[:, None].expand(-1, 2, -1).float()
            expected.append(mla.attend(torch.cat([q[at], pe[at]], -1).float(), shared, shared[..., :16], 0.2, True))
        o = torch.cat([o for o, _ in expected])
        for with_torch in (True, False):
            self.run_with(with_torch)
            self.close(self.out("o_latent", [3, 2, 16]), o)
            self.close(self.out("lse", [2, 3]), torch.cat([lse for _, lse in expected], dim=1))
            self.close(
                self.out("attn_out", [3, 12]),
                torch.einsum("thl,hvl->thv", o.to(torch.bfloat16).float(), w_uv.float()).flatten(1),
            )
        self.run_with(True, "--drop-last-key")
        self.assertGreater((self.out("o_latent", [3, 2, 16]) - o).abs().max().item(), 0.1)

    def test_fused(self):
        q, k, v = self.tensor(5, 2, 12), self.tensor(7, 2, 12), self.tensor(7, 2, 6)
        info = {
            "form": "fused",
            "scale": 0.3,
            "requests": ["2+3", "0+2"],
            "positions": [2, 3, 4, 0, 1],
            "page_size": 64,
        }
        wanted = {"attn_out": ("bf16", ["token", "head*value"], [5, 12]), "lse": ("f32", ["token", "head"], [5, 2])}
        self.case(info, {n: (t, []) for n, t in (("q", q), ("k", k), ("v", v))}, wanted)
        first = mla.attend(q[:3].float(), k[:5].float(), v[:5].float(), 0.3, True)
        second = mla.attend(q[3:].float(), k[5:].float(), v[5:].float(), 0.3, True)
        for with_torch in (True, False):
            self.run_with(with_torch)
            self.close(self.out("attn_out", [5, 12]), torch.cat([first[0], second[0]]).flatten(1))
            self.close(self.out("lse", [5, 2]), torch.cat([first[1], second[1]], dim=1).T)


if __name__ == "__main__":
    unittest.main()
