"""torch_dump.py on a module of its own, and on transformers where that is installed; the entry points."""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import torch
from torch import nn

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]

import arithmetic as mla
import mla_check_dump as base
from reading import Dump
from torch_dump import HF_MLA, Spec, TorchDump


class Small(nn.Module):
    """x -> norm -> projection, then a change of the projection in place, as rope does it."""

    def __init__(self):
        super().__init__()
        self.norm, self.proj = (
            mla.Norm(torch.ones(4, dtype=torch.bfloat16), 1e-5),
            nn.Linear(4, 6, bias=False, dtype=torch.bfloat16),
        )

    def forward(self, x):
        y = self.proj(self.norm(x))
        y *= 2
        return self.last(y)

    def last(self, y):
        return y + 1


TABLE = {
    "attn_in": Spec("", "in:x", ["token", "hidden"]),
    "q_raw": Spec("proj", "out", ["token", "head*nope+rope"]),
    "q": Spec("last()", "in:y", ["token", "head*nope+rope"]),
}


class Torch(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="mla-check-")
        self.addCleanup(shutil.rmtree, self.folder)
        base.set_logger(lambda message: None)

    def tearDown(self):
        base.set_logger(None)

    def test_values_are_those_before_the_change_in_place(self):
        small, x = Small(), torch.randn(2, 3, 4).to(torch.bfloat16)
        with TorchDump(small, self.folder, TABLE, requests=["0+3", "0+3"], engine=("mine", "1")):
            small(x)
        dump = Dump(self.folder)
        (capture,) = dump.captures()
        self.assertEqual(capture["requests"], ["0+3", "0+3"])
        self.assertTrue(torch.equal(dump.get(capture, "attn_in"), x.flatten(0, 1)))
        self.assertTrue(torch.equal(dump.get(capture, "q"), dump.get(capture, "q_raw") * 2))
        self.assertNotIn("last", vars(small))
        self.assertFalse(small.proj._forward_hooks)

    def test_a_module_that_is_gone(self):
        with self.assertRaises(base.HookError) as caught:
            TorchDump(
                Small(),
                self.folder,
                {"q_raw": Spec("projection", "out", ["token", "hidden"])},
                requests=["0+1"],
                engine=("m", "1"),
            ).__enter__()
        self.assertIn("projection", str(caught.exception))

    def test_a_shape_that_does_not_fit_the_requests(self):
        small = Small()
        with self.assertRaises(base.HookError) as caught:
            with TorchDump(small, self.folder, TABLE, requests=["0+4"], engine=("m", "1")):
                small(torch.randn(1, 3, 4).to(torch.bfloat16))
        self.assertIn("0+4", str(caught.exception))

    def test_what_was_not_called_is_fired_0(self):
        with TorchDump(Small(), self.folder, TABLE, requests=["0+1"], engine=("m", "1")):
            pass
        (capture,) = Dump(self.folder).captures()
        self.assertEqual([e["fired"] for e in capture["tensors"].values()], [0, 0, 0])

    def test_transformers(self):
        try:
            import transformers
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
            from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
        except ImportError:
            self.skipTest("transformers is not installed")
        config = transformers.DeepseekV3Config(
            hidden_size=32, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8,
            qk_nope_head_dim=12, v_head_dim=10, num_hidden_layers=1, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )  # fmt: skip
        for implementation in ("eager", "sdpa"):
            config._attn_implementation = implementation
            attention, rotary = v3.DeepseekV3Attention(config, 0).eval(), v3.DeepseekV3RotaryEmbedding(config)
            x = torch.randn(1, 5, 32)
            mask = torch.full((5, 5), float("-inf")).triu(1)[None, None]
            with torch.no_grad(), TorchDump(
                attention, os.path.join(self.folder, implementation), HF_MLA, requests=["0+5"],
                engine=("transformers", transformers.__version__), functions=ALL_ATTENTION_FUNCTIONS,
            ):  # fmt: skip
                out = attention(x, rotary(x, torch.arange(5)[None]), mask)[0]
            dump = Dump(os.path.join(self.folder, implementation))
            (capture,) = dump.captures()
            self.assertEqual({e["fired"] for e in capture["tensors"].values()}, {1})
            self.assertTrue(torch.equal(dump.get(capture, "out"), out[0]))
            o, _ = mla.attend(
                dump.get(capture, "q"), dump.get(capture, "k"), dump.get(capture, "v"), attention.scaling, True
            )
            self.assertTrue(torch.allclose(o, dump.get(capture, "attn_out@kernel"), atol=1e-5))
            self.assertTrue(
                torch.equal(dump.get(capture, "attn_out@kernel").flatten(1), dump.get(capture, "attn_out@caller"))
            )
            self.assertEqual(capture["tensors"]["k"]["pair_order"], "half")
            self.assertEqual(dump.manifest["heads"], [0, 4])


class EntryPoints(unittest.TestCase):
    def test_the_folder_on_pythonpath_is_enough(self):
        code = (
            "from importlib.metadata import entry_points\n"
            "for g in ('vllm.general_plugins', 'sglang.srt.plugins'):\n"
            "    for e in entry_points(group=g):\n"
            "        e.load()()\n"
            "        print(g, e.name, e.value)\n"
        )
        env = {**os.environ, "PYTHONPATH": os.path.dirname(HERE)}
        env.pop("MLA_CHECK_DUMP", None)
        out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
        self.assertIn("vllm.general_plugins mla_check mla_check_vllm:register", out)
        self.assertIn("sglang.srt.plugins mla_check mla_check_sglang:register", out)


if __name__ == "__main__":
    unittest.main()
