"""A stand-in for SGLang with the surface that mla_check_sglang.py hooks (0.5.23): module paths, names, signatures, a
hook registry, and MLA arithmetic of its own on the CPU."""

import functools
import sys
import types

import torch
from torch import nn

import arithmetic as mla
from standin_vllm import Record, module


class Kinds:
    BEFORE, AFTER, AROUND = "before", "after", "around"


class HookRegistry:
    """Registers hooks by a target's dotted path; applies them later."""

    hooks = []

    @classmethod
    def register(cls, target, hook, hook_type=Kinds.AFTER):
        cls.hooks.append((target, hook, hook_type))

    @classmethod
    def apply_hooks(cls):
        for target, hook, kind in cls.hooks:
            path, name = target.rsplit(".", 1)
            parts = path.split(".")
            at = max(i for i in range(1, len(parts) + 1) if ".".join(parts[:i]) in sys.modules)
            owner = sys.modules[".".join(parts[:at])]
            for part in parts[at:]:
                owner = getattr(owner, part)
            setattr(owner, name, cls.wrap(getattr(owner, name), hook, kind))
        cls.hooks = []

    @staticmethod
    def wrap(original, hook, kind):
        @functools.wraps(original)
        def around(*args, **kwargs):
            return hook(original, *args, **kwargs)

        @functools.wraps(original)
        def after(*args, **kwargs):
            result = original(*args, **kwargs)
            changed = hook(result, *args, **kwargs)
            return result if changed is None else changed

        @functools.wraps(original)
        def before(*args, **kwargs):
            changed = hook(*args, **kwargs)
            if changed is not None:
                args, kwargs = changed
            return original(*args, **kwargs)

        return {"around": around, "after": after, "before": before}[kind]


def remove():
    for name in [n for n in sys.modules if n == "sglang" or n.startswith("sglang.")]:
        del sys.modules[name]
    HookRegistry.hooks = []


class Mode:
    def __init__(self, name):
        self.name = name

    def is_decode(self):
        return self.name == "DECODE"

    def is_extend(self):
        return self.name in ("EXTEND", "MIXED", "TARGET_VERIFY")

    def is_target_verify(self):
        return self.name == "TARGET_VERIFY"


def build(g, weights, rank=0, ranks=1):
    remove()
    slots = torch.zeros(64, 1, g.latent + g.rope, dtype=torch.bfloat16)
    state = Record(
        pool=Record(kv_buffer=[slots], start_layer=3),
        table=Record(req_to_token=torch.zeros(8, 32, dtype=torch.int32)),
        latent=None,
        absorb_extend=False,
    )

    class RadixAttention(nn.Module):
        def __init__(self, heads, scaling, layer_id):
            super().__init__()
            self.heads, self.scaling, self.layer_id = heads, scaling, layer_id

        def forward(self, q, k, v, forward_batch, save_kv_cache=True, key_value_num_tokens=None, **kwargs):
            if "q_rope" in kwargs:
                q, k = torch.cat([q, kwargs["q_rope"]], dim=-1), torch.cat([k, kwargs["k_rope"]], dim=-1)
            absorbed = k.shape[1] == 1 and q.shape[1] > 1
            if absorbed and save_kv_cache:
                state.pool.kv_buffer[0][forward_batch.out_cache_loc] = k
            outs, row = [], 0
            for i, keys in enumerate(forward_batch.seq_lens.tolist()):
                new = 1 if forward_batch.forward_mode.is_decode() else forward_batch.extend_seq_lens_cpu[i]
                at = slice(row, row + new)
                if absorbed:
                    held = state.table.req_to_token[forward_batch.req_pool_indices[i], :keys].long()
                    rows = state.pool.kv_buffer[0][held].expand(-1, self.heads, -1)
                    outs.append(mla.attend(q[at], rows, rows[..., : g.latent], self.scaling, True)[0])
                else:
                    outs.append(mla.attend(q[at], k[at], v[at], self.scaling, True)[0])
                row += new
            return torch.cat(outs).flatten(1)

    def plain(attn, hidden_states):
        q = attn.q_proj(hidden_states)[0].view(-1, attn.num_local_heads, g.nope + g.rope)
        return q, attn.kv_a_proj_with_mqa(hidden_states)[0]

    class DeepseekMLAForwardMixin:
        def forward_absorb_prepare(
            self, positions, hidden_states, forward_batch, zero_allocator, llama_4_scaling=None, prev_topk_indices=None
        ):
            if g.q_rank is None:
                q, latent = plain(self, hidden_states)
            else:
                q, latent = state.latent().split([g.q_rank, g.latent + g.rope], dim=-1)
                q = self.q_b_proj_forward(self.q_a_layernorm(q))
            k_nope = self.kv_a_layernorm(latent[..., : g.latent]).unsqueeze(1)
            q_nope, q_pe = q.split([g.nope, g.rope], dim=-1)
            k_pe = latent[..., g.latent :].unsqueeze(1)
            q_latent = mla.bmm(q_nope.transpose(0, 1), self.w_kc).transpose(0, 1)
            q_pe, k_pe = self.rotary_emb(positions, q_pe, k_pe)
            return q_pe, k_pe, q_latent, k_nope, forward_batch, zero_allocator, positions, None, llama_4_scaling, None

        def forward_absorb_core(self, q_pe, k_pe, q_latent, k_nope, forward_batch, *rest):
            out = self.attn_mqa(q_latent, k_nope, k_nope, forward_batch, q_rope=q_pe, k_rope=k_pe)
            out = out.view(-1, self.num_local_heads, g.latent)
            up = mla.bmm(out.transpose(0, 1), self.w_vc).transpose(0, 1).flatten(1)
            return self.o_proj(up)[0]

        def _fuse_rope_for_trtllm_mla(self, forward_batch):
            return False

    class DeepseekMHAForwardMixin:
        def forward_normal_prepare(self, positions, hidden_states, forward_batch, zero_allocator):
            if g.q_rank is None:
                q, latent = plain(self, hidden_states)
            else:
                q, latent = state.latent().split([g.q_rank, g.latent + g.rope], dim=-1)
                q = self.q_b_proj(self.q_a_layernorm(q))[0].view(-1, self.num_local_heads, g.nope + g.rope)
            kv_a, latent = self.kv_a_layernorm(latent[..., : g.latent]), latent.unsqueeze(1)
            k_pe = latent[:, :, g.latent :]
            self.rotary_emb(positions, q[..., g.nope :], k_pe)
            self._set_mla_kv_buffer(latent, kv_a, k_pe, forward_batch)
            kv = self.kv_b_proj(kv_a)[0].view(-1, self.num_local_heads, g.nope + g.value)
            k = torch.cat([kv[..., : g.nope], k_pe.expand(-1, self.num_local_heads, -1)], dim=-1)
            return q, k, kv[..., g.nope :], forward_batch

        def _set_mla_kv_buffer(self, latent_cache, kv_a, k_pe, forward_batch):
            state.pool.kv_buffer[0][forward_batch.out_cache_loc] = torch.cat([kv_a.unsqueeze(1), k_pe], dim=-1)

        def forward_normal_core(self, q, k, v, forward_batch):
            return self.o_proj(self.attn_mha(q, k, v, forward_batch, save_kv_cache=False))[0]

        def _chunked_prefix_attn_mha(self, q, accum_output, accum_lse, forward_batch):
            raise NotImplementedError

    class DeepseekV2AttentionMLA(nn.Module, DeepseekMHAForwardMixin, DeepseekMLAForwardMixin):
        def __init__(self, layer_id):
            super().__init__()
            self.layer_id, self.hidden_size, self.num_heads, self.num_local_heads = (
                layer_id,
                g.hidden,
                g.heads,
                g.heads // ranks,
            )
            self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = g.nope, g.rope, g.value
            self.q_lora_rank, self.kv_lora_rank, self.scaling = g.q_rank, g.latent, g.scale
            self.kv_cache_dtype, self.current_attention_backend, self.dcp_size = "auto", "triton", 1
            named = mla.modules(g, weights, rank, ranks, reduce=False, stacked="fused_qkv_a_proj_with_mqa")
            for name, made in vars(named).items():
                setattr(self, name, made)
            heads = self.num_local_heads
            per_head = self.kv_b_proj.weight.view(heads, g.nope + g.value, g.latent)
            self.w_kc, self.w_vc = per_head[:, : g.nope], per_head[:, g.nope :].transpose(1, 2)
            self.attn_mqa, self.attn_mha = (
                RadixAttention(heads, g.scale, layer_id),
                RadixAttention(heads, g.scale, layer_id),
            )

        def prepare_qkv_latent(self, hidden_states, forward_batch):
            return self.fused_qkv_a_proj_with_mqa(hidden_states)[0]

        def q_b_proj_forward(self, q_lora):
            return self.q_b_proj(q_lora)[0].view(-1, self.num_local_heads, g.nope + g.rope)

        def forward(
            self, positions, hidden_states, forward_batch, zero_allocator, input_on_attn_tp_slices=False,
            llama_4_scaling=None, prev_topk_indices=None,
        ):  # fmt: skip
            state.latent = lambda: self.prepare_qkv_latent(hidden_states, forward_batch)
            fused = forward_batch.forward_mode.is_extend() and not state.absorb_extend
            prepare = self.forward_normal_prepare if fused else self.forward_absorb_prepare
            core = self.forward_normal_core if fused else self.forward_absorb_core
            return core(*prepare(positions, hidden_states, forward_batch, zero_allocator))

    module("sglang", __version__="0.5.23")
    module("sglang.srt.plugins.hook_registry", HookRegistry=HookRegistry, HookType=Kinds)
    module("sglang.srt.models.deepseek_v2", DeepseekV2AttentionMLA=DeepseekV2AttentionMLA)
    module("sglang.srt.layers.radix_attention", RadixAttention=RadixAttention)
    module(
        "sglang.srt.model_executor.forward_context",
        get_token_to_kv_pool=lambda: state.pool,
        get_req_to_token_pool=lambda: state.table,
    )
    module(
        "sglang.srt.runtime_context",
        get_parallel=lambda: Record(attn_tp_rank=rank, attn_tp_size=ranks, attn_dp_rank=0),
        get_server_args=lambda: Record(disable_decode_cuda_graph=True, disable_prefill_cuda_graph=True),
    )
    state.Attention = DeepseekV2AttentionMLA
    return state


def batch(state, requests, hidden, mode):
    """requests: (CONTEXT, NEW, first slot); slots of a request follow one another backwards, to tell them apart."""
    for i, (context, new, first) in enumerate(requests):
        state.table.req_to_token[i + 1, : context + new] = first - torch.arange(context + new)
    located = [first - p for context, new, first in requests for p in range(context, context + new)]
    return types.SimpleNamespace(
        forward_mode=Mode(mode),
        seq_lens=torch.tensor([c + n for c, n, _ in requests]),
        extend_seq_lens_cpu=[n for _, n, _ in requests],
        extend_prefix_lens_cpu=[c for c, _, _ in requests],
        req_pool_indices=torch.arange(1, len(requests) + 1),
        out_cache_loc=torch.tensor(located),
        residual_stream=types.SimpleNamespace(residual=hidden),
        positions=torch.tensor([p for c, n, _ in requests for p in range(c, c + n)]),
    )
