"""mla_check_vllm.py against a stand-in for vLLM 0.33.0 with the same surface, on the CPU."""

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
import mla_check_vllm as adapter
import standin_vllm as standin
from reading import Dump


class Case(unittest.TestCase):
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

    def settings(self, **env):
        names = {"MLA_CHECK_DUMP": self.folder, "MLA_CHECK_ARM": "now", "MLA_CHECK_LAYER": "0"}
        names.update({f"MLA_CHECK_{key}": str(value) for key, value in env.items()})
        return base.Settings.from_env(names)

    def engine(self, rank=0, ranks=1, eager=True, v32=False, dense_prefill=False, layer=0, before=None, **env):
        """A patched stand-in with one decoder layer."""
        state = standin.build(rank, ranks, eager)
        if before is not None:
            before(state)
        state.adapter = adapter.install(self.settings(**env), "0.33.0")
        before = torch.get_default_dtype()
        self.addCleanup(torch.set_default_dtype, before)
        torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it builds a model
        if v32:
            config = standin.Record(geometry=self.g, weights=self.weights, dense_prefill=dense_prefill)
            state.layer = state.DeepseekV32DecoderLayer(state.config, f"model.layers.{layer}", config=config)
            state.attn = state.layer.self_attn
        else:
            state.layer = state.DeepseekV2DecoderLayer(state.config, f"model.layers.{layer}", self.g, self.weights)
            state.attn = state.layer.self_attn.mla_attn.mla_attn
        torch.set_default_dtype(before)
        return state

    def run_step(self, state, requests, hidden, residual=None, graphs="NONE", padding=0):
        metadata, positions = standin.metadata(requests, state.attn, sparse=state.attn.impl.is_sparse)
        if padding:
            hidden = torch.cat([hidden, hidden[:1].expand(padding, -1)])
            positions = torch.cat([positions, positions[:1].expand(padding)])
        with state.set_forward_context({state.attn.layer_name: metadata}, graphs):
            return state.layer(positions, hidden.clone(), None if residual is None else residual.clone())[0], positions

    def hidden(self, tokens, seed=5):
        made = torch.Generator().manual_seed(seed)
        return torch.randn(tokens, self.g.hidden, generator=made).to(torch.bfloat16)

    def same(self, a, b, what=""):
        self.assertEqual((a.dtype, list(a.shape)), (b.dtype, list(b.shape)), what)
        self.assertTrue(torch.equal(a, b), what)

    def reference(self, hidden, context=0, weights=None):
        """What the layer computes, tensor by tensor, without the engine's in-place rope."""
        g, w = self.g, weights or self.weights
        m = mla.modules(g, {**w, "group": None}, 0, 1)
        positions, r = torch.arange(context, context + len(hidden)), {}
        r["attn_in"] = mla.rms(hidden, mla.Norm(w["g_attn"], g.eps))
        r["q_a"] = mla.matmul(r["attn_in"], w["w_q_a"])
        r["kv_a"] = mla.matmul(r["attn_in"], w["w_kv_a"])
        r["q_a_normed"] = m.q_a_layernorm(r["q_a"])
        r["q_raw"] = mla.matmul(r["q_a_normed"], w["w_q_b"])
        r["kv_c_normed"] = m.kv_a_layernorm(r["kv_a"][:, : g.latent].contiguous())
        q = r["q_raw"].view(len(hidden), g.heads, -1)
        r["q"] = torch.cat([q[..., : g.nope], m.rotary_emb.rotated(positions, q[..., g.nope :])], dim=-1)
        r["k_pe"] = m.rotary_emb.rotated(positions, r["kv_a"][:, g.latent :])
        return r


PAGES = ([3, 7, 1], [2, 9, 5], [11, 4, 6])


class Wrapper(Case):
    def test_a_prefill_holds_what_was_computed_and_rope_in_place_is_not_seen_early(self):
        state = self.engine()
        hidden = self.hidden(6)
        out, positions = self.run_step(state, [(0, 6, PAGES[0])], hidden, padding=2)
        dump = Dump(self.folder)
        (capture,) = dump.captures()
        self.assertEqual((capture["form"], capture["requests"], capture["layer"]), ("fused", ["0+6"], 0))
        self.assertEqual(capture["positions"], list(range(6)))
        expected = self.reference(hidden)
        self.same(dump.get(capture, "hidden"), hidden)
        for name in ("attn_in", "q_a", "kv_a", "q_a_normed", "q_raw", "kv_c_normed", "q"):
            self.same(dump.get(capture, name), expected[name], name)
        self.same(dump.get(capture, "k_pe").squeeze(1), expected["k_pe"], "k_pe")
        self.assertFalse(torch.equal(expected["kv_a"][:, -self.g.rope :], expected["k_pe"]))
        self.same(dump.get(capture, "out"), out[:6], "out")
        self.same(dump.get(capture, "attn_out@kernel"), dump.get(capture, "attn_out@caller"))
        cache = torch.cat([expected["kv_c_normed"], expected["k_pe"]], dim=-1)
        self.same(dump.get(capture, "cache"), cache, "cache")
        kv = mla.matmul(expected["kv_c_normed"], self.weights["kv_b"]).view(6, self.g.heads, -1)
        self.same(dump.get(capture, "v"), kv[..., self.g.nope :].contiguous(), "v")
        self.same(dump.get(capture, "k")[..., : self.g.nope], kv[..., : self.g.nope].contiguous(), "k")
        self.assertEqual(capture["failed"], {"lse": "without context the prefill backend is not asked for it"})
        self.assertEqual(set(capture["not_applicable"]), {"q_latent", "q_pe", "o_latent"})
        self.assertTrue(all(entry["fired"] == 1 for entry in capture["tensors"].values()))
        kernel, caller = capture["tensors"]["attn_out@kernel"], capture["tensors"]["attn_out@caller"]
        self.assertEqual(kernel["ptr"], caller["ptr"])
        manifest = dump.manifest
        self.assertEqual((manifest["mode"], manifest["heads"], manifest["page_size"]), ("eager", [0, 4], 4))
        self.assertEqual(manifest["rope"], {"table": "f32"})
        self.assertEqual(manifest["geometry"]["scale"], self.g.scale)
        self.same(dump.weight("0/w_uk"), self.weights["kv_b"].view(4, -1, self.g.latent)[:, : self.g.nope].contiguous())

    def test_a_decode_step_after_a_prefill(self):
        state = self.engine()
        self.run_step(state, [(0, 6, PAGES[0])], self.hidden(6))
        self.run_step(state, [(6, 1, PAGES[0])], self.hidden(1, seed=6))
        dump = Dump(self.folder)
        fused, absorbed = dump.captures()
        self.assertEqual((absorbed["form"], absorbed["requests"], absorbed["step"]), ("absorbed", ["6+1"], 1))
        self.assertEqual(absorbed["positions"], [6])
        cache = dump.get(absorbed, "cache")
        self.same(cache[:6], dump.get(fused, "cache"))
        q, g = dump.get(absorbed, "q"), self.g
        w_uk = self.weights["kv_b"].view(g.heads, -1, g.latent)[:, : g.nope]
        latent = mla.bmm(q[..., : g.nope].transpose(0, 1), w_uk).transpose(0, 1)
        self.same(dump.get(absorbed, "q_latent"), latent.contiguous())
        self.same(dump.get(absorbed, "q_pe"), q[..., g.nope :].contiguous())
        shared = cache[:, None].expand(-1, g.heads, -1)
        query = torch.cat([dump.get(absorbed, "q_latent"), dump.get(absorbed, "q_pe")], dim=-1)
        o, lse = mla.attend(query, shared, shared[..., : g.latent], g.scale, causal=True)
        self.same(dump.get(absorbed, "o_latent"), o)
        self.same(dump.get(absorbed, "lse"), lse.T.contiguous())
        self.assertEqual(set(absorbed["not_applicable"]), {"k", "v"})
        self.assertEqual(dump.manifest["lse"], {"base": "e"})

    def test_decode_and_prefill_rows_in_one_step_are_two_captures(self):
        state = self.engine()
        state.adapter.settings.arm = os.path.join(self.folder, "arm")
        self.run_step(state, [(0, 5, PAGES[0])], self.hidden(5, 1))
        self.assertFalse(os.path.exists(os.path.join(self.folder, "rank-0.json")))
        open(state.adapter.settings.arm, "w").close()
        hidden = self.hidden(4, 2)
        out, _ = self.run_step(state, [(0, 3, PAGES[1]), (5, 1, PAGES[0])], hidden)
        dump = Dump(self.folder)
        absorbed, fused = dump.captures("absorbed")[0], dump.captures("fused")[0]
        self.assertEqual((absorbed["requests"], fused["requests"]), (["5+1"], ["0+3"]))
        self.assertEqual((absorbed["step"], fused["step"]), (0, 0))
        routing = "num_mqa_tokens 1, num_mha_tokens 3, has_context False, num_decodes 1, num_prefills 1"
        self.assertEqual(dump.manifest["notes"]["routing of layer 0, step 0"], routing)
        self.same(dump.get(absorbed, "hidden"), hidden[:1])
        self.same(dump.get(fused, "hidden"), hidden[1:])
        self.same(dump.get(absorbed, "out"), out[:1])
        self.same(dump.get(fused, "out"), out[1:])
        self.assertEqual(list(dump.get(absorbed, "cache").shape), [6, 24])
        self.assertEqual(list(dump.get(fused, "k").shape), [3, 4, 20])
        self.assertEqual((absorbed["positions"], fused["positions"]), ([5], [0, 1, 2]))
        self.same(dump.get(fused, "kv_c_normed"), self.reference(hidden[1:])["kv_c_normed"])

    def test_a_prefill_on_a_context_has_keys_of_both(self):
        state = self.engine()
        first, second = self.hidden(5, 1), self.hidden(3, 2)
        self.run_step(state, [(0, 5, PAGES[0])], first)
        self.run_step(state, [(5, 3, PAGES[0])], second)
        dump = Dump(self.folder)
        whole, late = dump.captures("fused")
        self.assertEqual(late["requests"], ["5+3"])
        k, w = dump.get(late, "k"), self.g.nope
        self.assertEqual(list(k.shape), [8, 4, 20])
        kv = mla.matmul(dump.get(late, "cache")[:, : self.g.latent].contiguous(), self.weights["kv_b"]).view(8, 4, -1)
        self.same(k[..., :w].contiguous(), kv[..., :w].contiguous())
        self.same(dump.get(late, "v"), kv[..., w:].contiguous())
        self.assertEqual(late["tensors"]["k"]["fired"], 2)
        self.assertIn("parts of it", late["failed"]["lse"])

    def test_the_second_layer_gives_the_sum_as_hidden(self):
        state = self.engine(layer=3, LAYER=3)
        hidden, residual = self.hidden(2, 1), self.hidden(2, 2)
        self.run_step(state, [(0, 2, PAGES[0])], hidden, residual)
        dump = Dump(self.folder)
        (capture,) = dump.captures(layer=3)
        self.same(dump.get(capture, "hidden"), (hidden.float() + residual.float()).to(torch.bfloat16))

    def test_a_model_without_q_lora_rank(self):
        self.g.q_rank = None
        drawn = torch.Generator().manual_seed(4)
        w_q = torch.randn(self.g.heads * (self.g.nope + self.g.rope), self.g.hidden, generator=drawn).to(torch.bfloat16)
        self.weights["w_q"] = w_q / 4
        state = self.engine(WEIGHTS="all")
        self.run_step(state, [(0, 3, PAGES[0])], self.hidden(3))
        dump = Dump(self.folder)
        (capture,) = dump.captures()
        attn_in = dump.get(capture, "attn_in")
        self.same(dump.get(capture, "q_raw"), mla.matmul(attn_in, self.weights["w_q"]))
        self.same(dump.get(capture, "kv_a"), mla.matmul(attn_in, self.weights["w_kv_a"]))
        self.assertEqual(capture["not_applicable"]["q_a"], "the model has no q_lora_rank")
        self.assertTrue(all(entry["fired"] == 1 for entry in capture["tensors"].values()))
        self.same(dump.weight("0/w_q"), self.weights["w_q"])

    def test_limits_choose_requests_and_cut_the_last(self):
        state = self.engine(TOKENS=5)
        self.run_step(state, [(0, 3, PAGES[0]), (0, 4, PAGES[1]), (0, 2, PAGES[2])], self.hidden(9))
        dump = Dump(self.folder)
        (capture,) = dump.captures()
        self.assertEqual(capture["requests"], ["0+3", "0+2"])
        expected = [self.reference(self.hidden(9)[a:b])["q_raw"] for a, b in ((0, 3), (3, 5))]
        self.same(dump.get(capture, "q_raw"), torch.cat(expected))
        self.assertEqual(list(dump.get(capture, "k").shape)[0], 5)

    def test_one_request_can_be_chosen(self):
        state = self.engine(REQUEST=1)
        self.run_step(state, [(0, 3, PAGES[0]), (0, 4, PAGES[1])], self.hidden(7))
        (capture,) = Dump(self.folder).captures()
        self.assertEqual(capture["requests"], ["0+4"])

    def test_each_kind_is_dumped_once(self):
        state = self.engine()
        for seed in range(3):
            self.run_step(state, [(0, 3, PAGES[0])], self.hidden(3, seed))
        self.assertEqual(len(Dump(self.folder).captures()), 1)

    def test_a_dump_that_would_be_too_large_is_refused_and_said(self):
        state = self.engine(KEYS=4)
        self.run_step(state, [(0, 6, PAGES[0])], self.hidden(6))
        self.assertFalse(os.path.exists(os.path.join(self.folder, "rank-0.json")))
        self.assertTrue(any("MLA_CHECK_KEYS=4" in line for line in self.said))

    def test_profile_runs_and_full_graphs_are_skipped(self):
        state = self.engine()
        with state.set_forward_context(None):
            state.layer(torch.arange(2), self.hidden(2), None)
        self.run_step(state, [(0, 2, PAGES[0])], self.hidden(2), graphs="FULL")
        self.assertFalse(os.path.exists(os.path.join(self.folder, "rank-0.json")))
        self.assertTrue(any("full CUDA graph" in line for line in self.said))

    def test_other_layers_are_left_alone(self):
        state = self.engine(layer=2)
        self.run_step(state, [(0, 2, PAGES[0])], self.hidden(2))
        self.assertFalse(os.path.exists(os.path.join(self.folder, "rank-0.json")))


class Phantom(Case):
    def test_an_output_in_a_clone_is_seen_at_both_points(self):
        state = self.engine()
        state.attn.fault = "phantom"
        self.run_step(state, [(0, 4, PAGES[0])], self.hidden(4))
        dump = Dump(self.folder)
        (capture,) = dump.captures()
        kernel, caller = capture["tensors"]["attn_out@kernel"], capture["tensors"]["attn_out@caller"]
        self.assertNotEqual(kernel["storage"], caller["storage"])
        self.assertTrue(torch.all(dump.get(capture, "attn_out@caller") == 7.0))
        self.assertFalse(torch.any(dump.get(capture, "attn_out@kernel") == 7.0))

    def test_a_kernel_that_never_ran_is_written_with_fired_0(self):
        state = self.engine()
        state.attn.fault = "op deleted"
        self.run_step(state, [(0, 4, PAGES[0])], self.hidden(4))
        (capture,) = Dump(self.folder).captures()
        for name in ("attn_out@kernel", "q", "k", "v", "cache", "k_pe", "kv_c_normed"):
            self.assertEqual(capture["tensors"][name]["fired"], 0, name)
            self.assertNotIn("array", capture["tensors"][name])
        for name in ("attn_out@caller", "q_raw", "out"):
            self.assertEqual(capture["tensors"][name]["fired"], 1, name)
        self.assertTrue(any("never fired" in line and "attn_out@kernel" in line for line in self.said))

    def test_a_deleted_op_is_noticed_though_all_else_is_compiled(self):
        state = self.engine(eager=False)
        state.attn.fault = "op deleted"
        metadata, _ = standin.metadata([(0, 4, PAGES[0])], state.attn)
        with state.set_forward_context({state.attn.layer_name: metadata}):
            pass  # the compiled code of the layer: no Python of it runs
        (capture,) = Dump(self.folder).captures()
        self.assertEqual(capture["tensors"]["attn_out@kernel"]["fired"], 0)
        self.assertIn("run eagerly", capture["failed"]["attn_out@caller"])
        self.assertIn("may hide", capture["failed"]["attn_out@caller"])


class Compiled(Case):
    def compiled(self, fault=None, backend="aot_eager", **env):
        torch.compiler.reset()
        state = self.engine(eager=False, **env)
        state.attn.fault = fault
        call = torch.compile(state.layer, backend=backend, fullgraph=True)
        metadata, positions = standin.metadata([(0, 4, PAGES[0])], state.attn)
        with torch.no_grad():
            call(positions, self.hidden(4), None)  # compiles, without metadata in sight
            with state.set_forward_context({state.attn.layer_name: metadata}):
                call(positions, self.hidden(4), None)
        dump = Dump(self.folder)
        (capture,) = dump.captures()
        self.assertEqual(dump.manifest["mode"], "compiled")
        return dump, capture

    def engine(self, **given):
        state = super().engine(**given)
        sys.modules["vllm.forward_context"]._forward_context = standin.Record(attn_metadata=None)
        return state

    def test_a_compiled_layer_shows_the_op_and_says_why_it_shows_no_more(self):
        dump, capture = self.compiled()
        for name in ("attn_out@kernel", "q", "k", "cache"):
            self.assertEqual(capture["tensors"][name]["fired"], 1, name)
        for name in ("attn_out@caller", "q_raw", "hidden"):
            self.assertIn("run eagerly", capture["failed"][name])

    def test_the_probe_sees_what_the_caller_reads_in_compiled_code(self):
        dump, capture = self.compiled(PROBE=1)
        self.same(dump.get(capture, "attn_out@caller"), dump.get(capture, "attn_out@kernel"))
        self.assertIn("probe", dump.manifest["notes"])
        dump, capture = self.compiled(fault="phantom", backend="eager", PROBE=1)
        self.assertTrue(torch.all(dump.get(capture, "attn_out@caller") == 7.0))
        self.assertFalse(torch.any(dump.get(capture, "attn_out@kernel") == 7.0))

    def test_the_probe_is_kept_by_inductor(self):
        dump, capture = self.compiled(fault="op deleted", backend="inductor", PROBE=1)
        self.assertTrue(torch.all(dump.get(capture, "attn_out@caller") == 7.0))
        self.assertEqual(capture["tensors"]["attn_out@kernel"]["fired"], 0)

    def test_a_probe_that_only_a_graph_replays_leaves_its_rows_in_the_slot(self):
        state = self.engine(eager=False, PROBE=1)
        metadata, _ = standin.metadata([(0, 4, PAGES[0])], state.attn)
        seen = torch.randn(6, self.g.heads * self.g.value).to(torch.bfloat16)
        with state.set_forward_context({state.attn.layer_name: metadata}):
            state.attn.mla_check_slot[:6].copy_(seen)  # as a replay does, without Python
        dump = Dump(self.folder)
        (capture,) = dump.captures()
        self.same(dump.get(capture, "attn_out@caller"), seen[:4])
        self.assertEqual(capture["tensors"]["attn_out@kernel"]["fired"], 0)


class Ranks(Case):
    def test_two_ranks_write_their_heads_and_agree_on_the_rest(self):
        self.weights["group"] = group = mla.Group()
        hidden, outs = self.hidden(4), {}
        for recording in (True, False):
            for rank in (0, 1):
                state = self.engine(rank, 2, ARM="now" if not recording else "/nowhere")
                group.start(rank, recording)
                outs[rank] = self.run_step(state, [(0, 4, PAGES[0])], hidden)[0]
        a, b = Dump(self.folder, 0), Dump(self.folder, 1)
        self.assertEqual((a.manifest["heads"], b.manifest["heads"]), ([0, 2], [2, 4]))
        self.assertEqual(a.manifest["geometry"]["heads"], 4)
        (ca,), (cb,) = a.captures(), b.captures()
        for name in ("hidden", "attn_in", "q_a", "q_a_normed", "kv_a", "kv_c_normed", "k_pe", "cache", "out"):
            self.same(a.get(ca, name), b.get(cb, name), name)
        q = torch.cat([a.get(ca, "q_raw"), b.get(cb, "q_raw")], dim=1)
        self.same(q, self.reference(hidden)["q_raw"])
        caller = torch.cat([a.get(ca, "attn_out@caller"), b.get(cb, "attn_out@caller")], dim=1)
        whole = mla.matmul(caller, self.weights["w_o"])
        self.assertTrue(torch.allclose(a.get(ca, "out").float(), whole.float(), atol=0.02))


class Sparse(Case):
    def test_glm_5_is_absorbed_throughout_and_out_is_partial(self):
        state = self.engine(rank=1, ranks=2, v32=True)
        hidden = self.hidden(5)
        out, _ = self.run_step(state, [(0, 5, PAGES[0])], hidden)
        dump = Dump(self.folder, 1)
        (capture,) = dump.captures()
        self.assertEqual((capture["form"], capture["requests"]), ("absorbed", ["0+5"]))
        self.assertTrue(capture["tensors"]["out"]["partial"])
        self.same(dump.get(capture, "out"), out)
        self.assertEqual(set(capture["not_applicable"]), {"k", "v"})
        half = self.weights["w_q_b"].chunk(2)[1]
        q_a = mla.matmul(dump.get(capture, "attn_in"), self.weights["w_q_a"])
        self.same(dump.get(capture, "q_a"), q_a)
        self.same(dump.get(capture, "q_raw"), mla.matmul(dump.get(capture, "q_a_normed"), half))
        self.same(dump.get(capture, "attn_out@kernel"), dump.get(capture, "attn_out@caller"))
        self.assertEqual(capture["tensors"]["o_latent"]["fired"], 1)
        self.assertTrue(state.DeepseekV32Attention._sparse_indexer_and_attn.breaks)

    def test_a_prefill_that_is_decompressed_where_the_backend_can(self):
        state = self.engine(v32=True, dense_prefill=True)
        hidden = self.hidden(5)
        self.run_step(state, [(0, 5, PAGES[0])], hidden)
        self.run_step(state, [(5, 1, PAGES[0])], self.hidden(1, 9))
        dump = Dump(self.folder)
        fused, absorbed = dump.captures("fused")[0], dump.captures("absorbed")[0]
        self.assertEqual((fused["requests"], absorbed["requests"]), (["0+5"], ["5+1"]))
        self.assertEqual({e["fired"] for c in (fused, absorbed) for e in c["tensors"].values()}, {1})
        o, _ = mla.attend(dump.get(fused, "q"), dump.get(fused, "k"), dump.get(fused, "v"), self.g.scale, True)
        self.same(dump.get(fused, "attn_out@kernel"), o.flatten(1))
        raw = dump.get(fused, "q_raw").view(5, self.g.heads, -1)
        self.assertFalse(torch.equal(raw, dump.get(fused, "q")))

    def test_hidden_of_a_later_layer_is_the_sum_however_it_is_added(self):
        hidden, residual = self.hidden(3, 1), self.hidden(3, 2)
        for ranks in (1, 2):
            state = self.engine(rank=0, ranks=ranks, v32=True, layer=2, LAYER=2)
            self.run_step(state, [(0, 3, PAGES[0])], hidden, residual)
            dump = Dump(self.folder)
            (capture,) = dump.captures()
            self.same(dump.get(capture, "hidden"), (hidden.float() + residual.float()).to(torch.bfloat16))
            self.assertEqual(capture["tensors"]["hidden"]["fired"], 1)

    def test_packed_rows_of_the_cache_are_widened(self):
        rows = torch.zeros(1, 656, dtype=torch.uint8)
        rows[0, :512] = torch.full((512,), 1.5).to(torch.float8_e4m3fn).view(torch.uint8)
        rows[0, 512:528] = torch.tensor([1.0, 2.0, 4.0, 0.5]).view(torch.uint8)
        rows[0, 528:] = torch.full((64,), -3.0).to(torch.bfloat16).view(torch.uint8)
        wide = adapter.unpack_ds_mla(rows)
        expected = [1.5] * 128 + [3.0] * 128 + [6.0] * 128 + [0.75] * 128 + [-3.0] * 64
        self.assertEqual(wide[0].tolist(), expected)


class Gone(Case):
    def test_a_backend_without_the_method(self):
        state = self.engine()
        del type(state.attn.impl).forward_mqa
        del sys.modules["vllm.model_executor.layers.attention.mla_attention"].MLACommonImpl.forward_mqa
        with self.assertRaises(base.HookError) as caught:
            self.run_step(state, [(0, 2, PAGES[0])], self.hidden(2))
        self.assertIn("forward_mqa", str(caught.exception))

    def refused(self, change):
        with self.assertRaises(base.HookError) as caught:
            self.engine(before=change)
        return str(caught.exception)

    def test_a_method_that_is_gone(self):
        message = self.refused(lambda state: delattr(state.MLAAttention, "forward_impl"))
        self.assertIn("MLAAttention.forward_impl", message)
        self.assertIn("docs/hooks.md", message)

    def test_a_signature_that_has_changed(self):
        def change(state):
            state.MLAAttention.forward_impl = lambda self, q, k, output: None

        message = self.refused(change)
        self.assertIn("k_c_normed", message)
        self.assertIn("signature has changed", message)

    def test_a_module_that_is_gone(self):
        message = self.refused(lambda state: sys.modules.pop("vllm.model_executor.layers.mla"))
        self.assertIn("vllm.model_executor.layers.mla", message)

    def test_a_decorator_that_is_gone(self):
        def change(state):
            state.DeepseekV32Attention._sparse_indexer_and_attn = (
                state.DeepseekV32Attention._sparse_indexer_and_attn.__wrapped__
            )

        self.assertIn("eager_break_during_capture", self.refused(change))

    def test_metadata_that_has_changed(self):
        state = self.engine()
        metadata, positions = standin.metadata([(0, 2, PAGES[0])], state.attn)
        del metadata.query_start_loc
        with self.assertRaises(base.HookError) as caught:
            with state.set_forward_context({state.attn.layer_name: metadata}):
                pass
        self.assertIn("query_start_loc", str(caught.exception))

    def test_settings_that_cannot_be(self):
        for env in ({"LAYER": "x"}, {"TOKENS": "0"}, {"WEIGHTS": "some"}, {"REQUEST": "-1"}):
            with self.assertRaises(base.HookError):
                self.settings(**env)
        self.assertIsNone(base.Settings.from_env({}))


if __name__ == "__main__":
    unittest.main()
