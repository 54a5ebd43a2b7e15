"""mla_check_sglang.py against a stand-in for SGLang 0.5.23 with the same surface, on the CPU."""

import os
import shutil
import sys
import tempfile
import unittest

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]

import arithmetic as mla
import mla_check_dump as base
import mla_check_sglang as adapter
import standin_sglang as standin
from reading import Dump


class Sglang(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="mla-check-")
        self.addCleanup(shutil.rmtree, self.folder)
        self.said = []
        base.set_logger(self.said.append)
        self.g = mla.Geometry()
        self.weights = mla.random_weights(self.g)

    def tearDown(self):
        standin.remove()
        base.set_logger(None)

    def engine(self, rank=0, ranks=1, before=None, **env):
        state = standin.build(self.g, self.weights, rank, ranks)
        if before is not None:
            before(state)
        names = {"MLA_CHECK_DUMP": self.folder, "MLA_CHECK_ARM": "now", "MLA_CHECK_LAYER": "3"}
        names.update({f"MLA_CHECK_{key}": str(value) for key, value in env.items()})
        state.adapter = adapter.install(base.Settings.from_env(names), "0.5.23")
        standin.HookRegistry.apply_hooks()
        state.attn = state.Attention(3)
        return state

    def run_step(self, state, requests, hidden, mode="EXTEND"):
        given = standin.batch(state, requests, hidden, mode)
        normed = mla.rms(hidden, mla.Norm(self.weights["g_attn"], self.g.eps))
        return state.attn(given.positions, normed, given, None), normed

    def hidden(self, tokens, seed=5):
        return torch.randn(tokens, self.g.hidden, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)

    def same(self, a, b, what=""):
        self.assertEqual((a.dtype, list(a.shape)), (b.dtype, list(b.shape)), what)
        self.assertTrue(torch.equal(a, b), what)

    def test_a_prefill_then_a_decode_step(self):
        state, g = self.engine(), self.g
        hidden = self.hidden(5)
        out, normed = self.run_step(state, [(0, 5, 20)], hidden)
        later, _ = self.run_step(state, [(5, 1, 20)], self.hidden(1, 8), "DECODE")
        dump = Dump(self.folder)
        fused, absorbed = dump.captures("fused")[0], dump.captures("absorbed")[0]
        self.assertEqual((fused["requests"], absorbed["requests"]), (["0+5"], ["5+1"]))
        self.same(dump.get(fused, "hidden"), hidden)
        self.same(dump.get(fused, "attn_in"), normed)
        kv_a = mla.matmul(normed, self.weights["w_kv_a"])
        self.same(dump.get(fused, "kv_a"), kv_a)
        self.assertFalse(torch.equal(kv_a[:, g.latent :], dump.get(fused, "k_pe").squeeze(1)))
        raw = mla.matmul(dump.get(fused, "q_a_normed"), self.weights["w_q_b"])
        self.same(dump.get(fused, "q_raw"), raw)
        q = dump.get(fused, "q")
        self.same(q[..., : g.nope].contiguous(), raw.view(5, g.heads, -1)[..., : g.nope].contiguous())
        self.assertFalse(torch.equal(q.flatten(1), raw))
        o, _ = mla.attend(q, dump.get(fused, "k"), dump.get(fused, "v"), g.scale, True)
        self.same(dump.get(fused, "attn_out@kernel"), o.flatten(1))
        self.same(dump.get(fused, "attn_out@caller"), o.flatten(1))
        self.same(dump.get(fused, "out"), out)
        rows = torch.cat([dump.get(fused, "kv_c_normed"), dump.get(fused, "k_pe").squeeze(1)], dim=1)
        self.same(dump.get(fused, "cache"), rows)
        cache = dump.get(absorbed, "cache")
        self.same(cache[:5], rows)
        shared = cache[:, None].expand(-1, g.heads, -1)
        query = torch.cat([dump.get(absorbed, "q_latent"), dump.get(absorbed, "q_pe")], dim=-1)
        o, _ = mla.attend(query, shared, shared[..., : g.latent], g.scale, True)
        self.same(dump.get(absorbed, "o_latent"), o)
        self.same(dump.get(absorbed, "out"), later)
        self.assertIn("attn_out@kernel", absorbed["not_applicable"])
        self.assertEqual(absorbed["tensors"]["q_raw"]["fired"], 1)
        zero = [n for c in (fused, absorbed) for n, e in c["tensors"].items() if e["fired"] != 1]
        self.assertEqual(zero, [])
        self.assertEqual((dump.manifest["mode"], dump.manifest["rope"]), ("eager", {"table": "f32"}))

    def test_an_absorbed_extend_on_a_prefix(self):
        state = self.engine()
        state.absorb_extend = True
        self.run_step(state, [(0, 3, 20), (0, 2, 40)], self.hidden(5))
        dump = Dump(self.folder)
        (capture,) = dump.captures()
        self.assertEqual((capture["form"], capture["requests"]), ("absorbed", ["0+3", "0+2"]))
        self.assertEqual(capture["positions"], [0, 1, 2, 0, 1])
        self.assertEqual(list(dump.get(capture, "cache").shape), [5, 24])

    def test_a_model_without_q_lora_rank(self):
        self.g.q_rank = None
        self.weights["w_q"] = torch.randn(4 * 20, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16) / 4
        state = self.engine()
        _, normed = self.run_step(state, [(0, 3, 20)], self.hidden(3))
        self.run_step(state, [(3, 1, 20)], self.hidden(1), "DECODE")
        dump = Dump(self.folder)
        fused, absorbed = dump.captures()
        self.same(dump.get(fused, "q_raw"), mla.matmul(normed, self.weights["w_q"]))
        self.same(dump.get(fused, "kv_a"), mla.matmul(normed, self.weights["w_kv_a"]))
        self.assertEqual({e["fired"] for c in (fused, absorbed) for e in c["tensors"].values()}, {1})
        self.assertIn("q_a", absorbed["not_applicable"])

    def test_ranks_have_their_heads_and_partial_sums(self):
        for rank in (0, 1):
            self.run_step(self.engine(rank, 2), [(0, 4, 20)], self.hidden(4))
        a, b = Dump(self.folder, 0), Dump(self.folder, 1)
        (ca,), (cb,) = a.captures(), b.captures()
        self.assertEqual((a.manifest["heads"], b.manifest["heads"], a.manifest["ranks"]), ([0, 2], [2, 4], 2))
        self.assertTrue(ca["tensors"]["out"]["partial"])
        self.same(a.get(ca, "kv_a"), b.get(cb, "kv_a"))
        self.assertFalse(torch.equal(a.get(ca, "q_raw"), b.get(cb, "q_raw")))

    def test_nothing_is_left_on_the_modules_and_other_layers_are_not_dumped(self):
        state = self.engine(LAYER=4)
        self.run_step(state, [(0, 4, 20)], self.hidden(4))
        self.assertFalse(os.path.exists(os.path.join(self.folder, "rank-0.json")))
        state = self.engine()
        self.run_step(state, [(0, 4, 20)], self.hidden(4))
        self.assertFalse(state.attn.o_proj._forward_pre_hooks or state.attn.q_a_layernorm._forward_hooks)

    def test_a_kernel_that_was_not_called_is_fired_0(self):
        state = self.engine()
        state.attn.attn_mha.forward = lambda q, k, v, batch, **rest: mla.fresh(
            (q.shape[0], v.shape[1] * v.shape[2]), q.dtype
        )
        self.run_step(state, [(0, 4, 20)], self.hidden(4))
        (capture,) = Dump(self.folder).captures()
        self.assertEqual(capture["tensors"]["attn_out@kernel"]["fired"], 0)
        self.assertEqual(capture["tensors"]["attn_out@caller"]["fired"], 1)

    def test_speculative_steps_are_said_and_skipped(self):
        state = self.engine()
        self.run_step(state, [(0, 2, 20)], self.hidden(2), "TARGET_VERIFY")
        self.assertTrue(any("speculative" in line for line in self.said))
        self.assertFalse(os.path.exists(os.path.join(self.folder, "rank-0.json")))

    def test_a_place_that_is_gone_ends_the_process(self):
        def change(state):
            state.Attention.prepare_qkv_latent = lambda self, hidden: None

        with self.assertRaises(base.HookError) as caught:
            self.engine(before=change)
        self.assertIn("prepare_qkv_latent", str(caught.exception))
        self.assertIn("signature has changed", str(caught.exception))
        os.environ["MLA_CHECK_DUMP"] = self.folder
        try:
            with self.assertRaises(SystemExit) as ended:
                adapter.register()
        finally:
            del os.environ["MLA_CHECK_DUMP"]
        self.assertIn("prepare_qkv_latent", str(ended.exception))

    def test_a_module_that_is_gone_ends_the_process_and_one_that_fails_does_not(self):
        standin.build(self.g, self.weights)
        os.environ["MLA_CHECK_DUMP"] = self.folder
        self.addCleanup(os.environ.pop, "MLA_CHECK_DUMP")
        del sys.modules["sglang.srt.models.deepseek_v2"]
        with self.assertRaises(SystemExit) as ended:
            adapter.register()
        self.assertIn("sglang.srt.models.deepseek_v2", str(ended.exception))

        class Fails:
            def find_spec(self, name, path=None, target=None):
                if name == "sglang.srt.models.deepseek_v2":
                    raise RuntimeError("no configuration in this process")

        sys.meta_path.insert(0, Fails())
        self.addCleanup(sys.meta_path.pop, 0)
        adapter.register()
        self.assertIsNone(adapter.installed)

    def test_a_tuple_that_has_changed_ends_the_process(self):
        def change(state):
            original = state.Attention.forward_absorb_prepare

            def forward_absorb_prepare(self, positions, hidden_states, forward_batch, zero_allocator):
                return original(self, positions, hidden_states, forward_batch, zero_allocator)[1:]

            state.Attention.forward_absorb_prepare = forward_absorb_prepare

        state = self.engine(before=change)
        state.absorb_extend = True
        with self.assertRaises(SystemExit):
            self.run_step(state, [(0, 2, 20)], self.hidden(2))


if __name__ == "__main__":
    unittest.main()
