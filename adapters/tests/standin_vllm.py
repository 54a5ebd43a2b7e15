"""A stand-in for vLLM with the surface that mla_check_vllm.py hooks: module paths, class names, methods, signatures
as in vLLM 0.33.0, and MLA arithmetic of its own on the CPU (bf16 values, f32 sums, rope in place).

`build()` makes the modules anew and puts them into sys.modules, so that each test patches a fresh engine.
"""

import contextlib
import sys
import types

import torch
from torch import nn

import arithmetic as mla


def module(name, **contents):
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        if path not in sys.modules:
            made = types.ModuleType(path)
            made.__path__ = []
            sys.modules[path] = made
            if i > 1:
                setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], made)
    for key, value in contents.items():
        setattr(sys.modules[name], key, value)
    return sys.modules[name]


def remove():
    for name in [n for n in sys.modules if n == "vllm" or n.startswith("vllm.")]:
        del sys.modules[name]


attention_now = None  # what the operator below calls: the engine that was built last


@torch.library.custom_op("standin::attention", mutates_args={"output"})
def attention_op(
    q: torch.Tensor, latent: torch.Tensor, k_pe: torch.Tensor, output: torch.Tensor, layer_name: str
) -> None:
    attention_now(q, latent, k_pe, output, layer_name)


@attention_op.register_fake
def _(q, latent, k_pe, output, layer_name):
    return None


class Record:
    def __init__(self, **fields):
        self.__dict__.update(fields)


class Named:
    """An enumeration's member, as far as the adapter reads it."""

    def __init__(self, name):
        self.name = name


def config(eager=True):
    return Record(
        model_config=Record(enforce_eager=eager),
        compilation_config=Record(
            mode=Named("NONE" if eager else "VLLM_COMPILE"),
            cudagraph_mode=Named("NONE"),
            custom_ops=["all" if eager else "none"],
        ),
        kernel_config=Record(ir_op_priority=["vllm_c", "native"]),
        parallel_config=Record(data_parallel_rank=0, pipeline_parallel_size=1),
    )


def build(rank=0, ranks=1, eager=True):
    """The modules; returns a namespace with what tests need."""
    remove()
    state = Record(rank=rank, ranks=ranks, config=config(eager), layers={}, compiled=False)

    # --- forward context ---
    context_module = module("vllm.forward_context", _forward_context=None)

    @contextlib.contextmanager
    def override_forward_context(forward_context):
        before = context_module._forward_context
        context_module._forward_context = forward_context
        try:
            yield
        finally:
            context_module._forward_context = before

    @contextlib.contextmanager
    def set_forward_context(attn_metadata, graphs="NONE"):
        made = Record(attn_metadata=attn_metadata, slot_mapping={}, cudagraph_runtime_mode=Named(graphs))
        with context_module.override_forward_context(made):
            yield

    context_module.override_forward_context = override_forward_context
    context_module.set_forward_context = set_forward_context
    context_module.get_forward_context = lambda: context_module._forward_context

    def metadata_of(name):
        given = context_module._forward_context.attn_metadata
        return None if given is None else given[name]

    # --- prefill backend ---
    class MLAPrefillBackend:
        def __init__(self, scale):
            self.scale = scale

        @staticmethod
        def get_name():
            return "FLASH_ATTN"

        def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
            result, lse = mla.attend_packed(q, k, v, self.lengths, self.lengths, self.scale, causal=True)
            return (result, lse) if return_softmax_lse else result

        def run_prefill_context_chunk(self, chunk, q, k, v, out=None):
            return mla.attend_packed(q, k, v, chunk.new, chunk.seq_lens.tolist(), self.scale, causal=False)

    # --- the implementation of a backend ---
    class MLACommonBaseImpl:
        is_sparse = False
        dcp_world_size = 1
        lse_base_on_e = True

        def __init__(self, layer):
            self.num_heads, self.kv_lora_rank = layer.num_heads, layer.kv_lora_rank
            self.qk_nope_head_dim, self.v_head_dim = layer.qk_nope_head_dim, layer.v_head_dim
            self.kv_b_proj, self.scale = layer.kv_b_proj, layer.scale

        def expand(self, latent, k_pe):
            kv = self.kv_b_proj(latent)[0].view(-1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
            k_nope, v = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
            return torch.cat([k_nope, k_pe.expand(-1, self.num_heads, -1)], dim=-1), v

        def forward_mha(
            self, q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale=None
        ):
            prefill = attn_metadata.prefill
            k, v = self.expand(kv_c_normed, k_pe)
            backend, chunked = prefill.prefill_backend, prefill.chunked_context
            result = backend.run_prefill_new_tokens(q=q, k=k, v=v, return_softmax_lse=chunked is not None)
            if chunked is not None:
                new, new_lse = result
                old = self._compute_prefill_context(q, kv_c_and_k_pe_cache, attn_metadata, k_scale)
                result = mla.merge(*old, new, new_lse)
            output.copy_(result.flatten(1))

        def _compute_prefill_context(self, q, cache, attn_metadata, k_scale):
            prefill = attn_metadata.prefill
            outs, lses = [], []
            for chunk in prefill.chunked_context.chunks:  # here: a chunk a request
                table = prefill.block_table[chunk.request_slice][0]
                keys = torch.arange(int(chunk.seq_lens[0]))
                rows = cache[table[keys // cache.shape[1]].long(), keys % cache.shape[1]]
                k, v = self.expand(rows[:, : self.kv_lora_rank], rows[:, self.kv_lora_rank :].unsqueeze(1))
                out, lse = prefill.prefill_backend.run_prefill_context_chunk(
                    chunk=chunk, q=q[chunk.token_slice], k=k, v=v
                )
                outs.append(out)
                lses.append(lse)
            return torch.cat(outs), torch.cat(lses, dim=1)

    class MLACommonImpl(MLACommonBaseImpl):
        def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
            raise NotImplementedError

    class Impl(MLACommonImpl):
        def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
            q_latent, q_pe = q
            out, lse = torch.empty_like(q_latent), q_latent.new_empty(q_latent.shape[:2], dtype=torch.float32)
            starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.decode.seq_lens.tolist()
            for i in range(attn_metadata.num_decodes):
                keys = torch.arange(lengths[i])
                blocks = attn_metadata.decode.block_table[i][keys // kv_c_and_k_pe_cache.shape[1]].long()
                rows = kv_c_and_k_pe_cache[blocks, keys % kv_c_and_k_pe_cache.shape[1]]
                at = slice(starts[i], starts[i + 1])
                query = torch.cat([q_latent[at], q_pe[at]], dim=-1)
                shared = rows.unsqueeze(1).expand(-1, query.shape[1], -1)
                out[at], lse_i = mla.attend(query, shared, shared[..., : self.kv_lora_rank], self.scale, causal=True)
                lse[at] = lse_i.T
            return out, lse

        def record_logical_topk_ready(self):
            pass

    # --- MLAAttention and its op ---
    class MLAAttention(nn.Module):
        def __init__(
            self, num_heads, scale, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, q_lora_rank, kv_lora_rank,
            kv_b_proj, cache_config=None, quant_config=None, prefix="", **extra,
        ):  # fmt: skip
            super().__init__()
            self.num_heads, self.scale, self.layer_name = num_heads, scale, prefix
            self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = (
                qk_nope_head_dim,
                qk_rope_head_dim,
                v_head_dim,
            )
            self.q_lora_rank, self.kv_lora_rank, self.kv_b_proj = q_lora_rank, kv_lora_rank, kv_b_proj
            self.kv_cache_dtype, self._k_scale, self._k_scale_float = "auto", torch.ones(()), 1.0
            self._vllm_config = state.config
            self.impl = Impl(self)
            self.attn_backend = Record(get_name=lambda: "FLASHMLA")
            self.prefill_backend = MLAPrefillBackend(scale)
            per_head = kv_b_proj.weight.view(num_heads, qk_nope_head_dim + v_head_dim, kv_lora_rank)
            self.W_UK_T = per_head[:, :qk_nope_head_dim]
            self.W_UV = per_head[:, qk_nope_head_dim:].transpose(1, 2)
            # Blocks stand further apart than they are long, as where layers share pages.
            self.kv_cache = torch.zeros(16, 8, kv_lora_rank + qk_rope_head_dim, dtype=torch.bfloat16)[:, :4]
            self.fault = None
            state.layers[prefix] = self

        def update_kv_cache(self, kv_c_normed, k_pe, slots):
            rows = torch.cat([kv_c_normed, k_pe.squeeze(1)], dim=-1)
            self.kv_cache[slots // self.kv_cache.shape[1], slots % self.kv_cache.shape[1]] = rows[: len(slots)]

        def forward(self, q, kv_c_normed, k_pe, output_shape=None, q_dcp_replicated=None):
            output = mla.fresh(output_shape, q.dtype)
            if self.fault == "op deleted":
                return output
            target = output.clone() if self.fault == "phantom" else output
            if torch.compiler.is_compiling():
                torch.ops.standin.attention(q, kv_c_normed, k_pe, target, self.layer_name)
            else:
                unified_mla_attention_with_output(q, kv_c_normed, k_pe, target, self.layer_name)
            return output

        def forward_impl(
            self, q, k_c_normed, k_pe, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
        ):
            if attn_metadata is None:
                return output.fill_(0)
            n, mqa = attn_metadata.num_actual_tokens, attn_metadata.num_decode_tokens
            if n > mqa:
                self.impl.forward_mha(
                    q[mqa:n],
                    k_c_normed[mqa:n],
                    k_pe[mqa:n],
                    kv_cache,
                    attn_metadata,
                    self._k_scale,
                    output=output[mqa:n],
                )
            if mqa:
                nope, pe = q[:mqa].split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
                latent = mla.bmm(nope.transpose(0, 1), self.W_UK_T).transpose(0, 1)
                out, lse = self.impl.forward_mqa((latent, pe), kv_cache, attn_metadata, self)
                up = mla.bmm(out.transpose(0, 1), self.W_UV)
                output[:mqa].copy_(up.transpose(0, 1).flatten(1))
            return output

        def _use_sparse_mha(self, attn_metadata):
            return False

    def unified_mla_attention_with_output(q, kv_c_normed, k_pe, output, layer_name):
        layer, metadata = state.layers[layer_name], metadata_of(layer_name)
        if metadata is not None:
            layer.update_kv_cache(kv_c_normed, k_pe, metadata.slot_mapping)
        layer.forward_impl(q, kv_c_normed, k_pe, layer.kv_cache, metadata, output=output)

    globals()["attention_now"] = unified_mla_attention_with_output

    attention = module(
        "vllm.model_executor.layers.attention.mla_attention",
        MLAAttention=MLAAttention,
        MLACommonBaseImpl=MLACommonBaseImpl,
        MLACommonImpl=MLACommonImpl,
    )

    # --- wrapper path ---
    class MultiHeadLatentAttentionWrapper(nn.Module):
        def __init__(
            self, hidden_size, num_heads, scale, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, q_lora_rank,
            kv_lora_rank, mla_modules, cache_config=None, quant_config=None, prefix="", skip_topk=False,
        ):  # fmt: skip
            super().__init__()
            self.hidden_size, self.num_heads, self.q_lora_rank, self.kv_lora_rank = (
                hidden_size,
                num_heads,
                q_lora_rank,
                kv_lora_rank,
            )
            self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = (
                qk_nope_head_dim,
                qk_rope_head_dim,
                v_head_dim,
            )
            for name, made in vars(mla_modules).items():
                setattr(self, name, made)
            self.g_proj = None
            self.mla_attn = attention.MLAAttention(
                num_heads=num_heads, scale=scale, qk_nope_head_dim=qk_nope_head_dim, qk_rope_head_dim=qk_rope_head_dim,
                v_head_dim=v_head_dim, q_lora_rank=q_lora_rank, kv_lora_rank=kv_lora_rank, kv_b_proj=self.kv_b_proj,
                prefix=f"{prefix}.attn",
            )  # fmt: skip

        def forward(self, positions, hidden_states, llama_4_scaling=None):
            if self.q_lora_rank is None:
                q_b_proj, q_c = self.q_proj, hidden_states
                latent = self.kv_a_proj_with_mqa(hidden_states)[0]
            else:
                stacked = self.fused_qkv_a_proj(hidden_states)[0]
                q_c, latent = stacked.split([self.q_lora_rank, self.kv_lora_rank + self.qk_rope_head_dim], dim=-1)
                q_b_proj, q_c = self.q_b_proj, self.q_a_layernorm(q_c)
            kv_c, k_pe = latent.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
            kv_c_normed, k_pe = self.kv_a_layernorm(kv_c), k_pe.unsqueeze(1)
            q = q_b_proj(q_c)[0].view(-1, self.num_heads, self.qk_nope_head_dim + self.qk_rope_head_dim)
            self.rotary_emb(positions, q[..., self.qk_nope_head_dim :], k_pe)
            shape = (hidden_states.shape[0], self.num_heads * self.v_head_dim)
            return self.o_proj(self.mla_attn(q, kv_c_normed, k_pe, output_shape=shape))[0]

    module("vllm.model_executor.layers.mla", MultiHeadLatentAttentionWrapper=MultiHeadLatentAttentionWrapper)

    class DeepseekV2MLAAttention(nn.Module):
        def __init__(self, vllm_config, geometry, weights, prefix=""):
            super().__init__()
            g = geometry
            heads = g.heads // state.ranks
            modules = mla.modules(g, weights, state.rank, state.ranks)
            wrapper = sys.modules["vllm.model_executor.layers.mla"].MultiHeadLatentAttentionWrapper
            self.mla_attn = wrapper(
                g.hidden, heads, g.scale, g.nope, g.rope, g.value, g.q_rank, g.latent, modules, None, None, prefix
            )

        def forward(self, positions, hidden_states, llama_4_scaling=None):
            return self.mla_attn(positions, hidden_states, llama_4_scaling)

    class DeepseekV2DecoderLayer(nn.Module):
        def __init__(self, vllm_config, prefix, geometry=None, weights=None):
            super().__init__()
            self.hidden_size = geometry.hidden
            self.self_attn = DeepseekV2MLAAttention(vllm_config, geometry, weights, f"{prefix}.self_attn")
            self.input_layernorm = mla.Norm(weights["g_attn"], geometry.eps)

        def forward(self, positions, hidden_states, residual, llama_4_scaling=None):
            if residual is None:
                residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
            else:
                hidden_states, residual = self.input_layernorm(hidden_states, residual)
            return self.self_attn(positions, hidden_states, llama_4_scaling), residual

    module("vllm.model_executor.models.deepseek_v2", DeepseekV2DecoderLayer=DeepseekV2DecoderLayer)

    # --- GLM-5's path ---
    def eager_break_during_capture(fn):
        import functools

        @functools.wraps(fn)
        def wrapper(*args, **kwargs):
            return fn(*args, **kwargs)

        wrapper.breaks = True
        return wrapper

    module("vllm.compilation.breakable_cudagraph", eager_break_during_capture=eager_break_during_capture)

    class SparseImpl(Impl):
        is_sparse = True

    class DeepseekV32Attention(attention.MLAAttention):
        def __init__(self, vllm_config, config, prefix, topk_indices_buffer=None, attn_backend=None):
            g, weights = config.geometry, config.weights
            modules = mla.modules(g, weights, state.rank, state.ranks, reduce=False)
            super().__init__(
                num_heads=g.heads // state.ranks, scale=g.scale, qk_nope_head_dim=g.nope, qk_rope_head_dim=g.rope,
                v_head_dim=g.value, q_lora_rank=g.q_rank, kv_lora_rank=g.latent, kv_b_proj=modules.kv_b_proj,
                prefix=f"{prefix}.attn",
            )  # fmt: skip
            for name, made in vars(modules).items():
                setattr(self, name, made)
            self.impl = SparseImpl(self)
            if not config.dense_prefill:
                self.prefill_backend = None
            self.dense_prefill = config.dense_prefill

        def _use_sparse_mha(self, attn_metadata):
            return self.dense_prefill and attn_metadata.prefill is not None

        def forward(self, positions, hidden_states):
            g = self
            q_c, kv_c, k_pe = self.fused_qkv_a_proj(hidden_states)[0].split(
                [g.q_lora_rank, g.kv_lora_rank, g.qk_rope_head_dim], dim=-1
            )
            q_c, kv_out = mla.rms(q_c, self.q_a_layernorm, False), mla.rms(kv_c, self.kv_a_layernorm, False)
            k_pe_out = self.rotary_emb.rotated(positions, k_pe)
            metadata = metadata_of(self.layer_name)
            if metadata is not None:
                self.update_kv_cache(kv_out, k_pe_out.unsqueeze(1), metadata.slot_mapping)
            q = self.q_b_proj(q_c)[0].view(len(positions), self.num_heads, -1)
            q_nope, q_pe = q.split([g.qk_nope_head_dim, g.qk_rope_head_dim], dim=-1)
            ql_nope = mla.bmm(q_nope.transpose(0, 1), self.W_UK_T).transpose(0, 1)
            mqa_q = self.rotary_emb.rotated(positions, q_pe)
            output = mla.fresh((len(positions), self.num_heads * self.v_head_dim), hidden_states.dtype)
            self._sparse_indexer_and_attn(
                positions, q_c, q_nope, q_pe, None, None, None, kv_out, k_pe_out, ql_nope, mqa_q, output
            )
            return self.o_proj(output)[0]

        @eager_break_during_capture
        def _sparse_indexer_and_attn(
            self,
            positions,
            q_c,
            q_nope,
            q_pe,
            index_q_fp8,
            index_k,
            index_weights_out,
            kv_c,
            k_pe,
            ql_nope,
            mqa_q,
            output,
        ):
            metadata = metadata_of(self.layer_name)
            if metadata is None:
                output.zero_()
                return
            if self._use_sparse_mha(metadata):
                q = torch.cat([q_nope, mqa_q], dim=-1)
                self.forward_impl(q, kv_c, k_pe.unsqueeze(1), self.kv_cache, metadata, output)
                return
            n = metadata.num_actual_tokens
            whole = Record(**{**vars(metadata), "num_decodes": metadata.num_decodes + metadata.num_prefills})
            whole.decode = Record(seq_lens=metadata.seq_lens, block_table=metadata.block_table)
            out, lse = self.impl.forward_mqa((ql_nope[:n], mqa_q[:n]), self.kv_cache, whole, self)
            output[:n].copy_(mla.bmm(out.transpose(0, 1), self.W_UV).transpose(0, 1).flatten(1))

    module("vllm.models.deepseek_v32.attention", DeepseekV32Attention=DeepseekV32Attention)

    def fused_allreduce_rms_norm(hidden_states, residual, norm):
        if state.ranks == 1:
            return norm(hidden_states, residual)
        total = (hidden_states.float() + residual.float()).to(residual.dtype)  # as if one rank had it all
        return mla.rms(total, norm, False), total

    class DeepseekV32DecoderLayer(nn.Module):
        def __init__(self, vllm_config, prefix, config=None, topk_indices_buffer=None, index_group_builder=None):
            super().__init__()
            self.hidden_size = config.geometry.hidden
            cls = sys.modules["vllm.models.deepseek_v32.attention"].DeepseekV32Attention
            self.self_attn = cls(vllm_config=vllm_config, config=config, prefix=f"{prefix}.self_attn")
            self.input_layernorm = mla.Norm(config.weights["g_attn"], config.geometry.eps)

        def forward(self, positions, hidden_states, residual, attn_in=None):
            if residual is None:
                residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
            else:
                model = sys.modules["vllm.models.deepseek_v32.nvidia.model"]
                hidden_states, residual = model.fused_allreduce_rms_norm(hidden_states, residual, self.input_layernorm)
            return self.self_attn(positions=positions, hidden_states=hidden_states), residual

    module(
        "vllm.models.deepseek_v32.nvidia.model",
        DeepseekV32DecoderLayer=DeepseekV32DecoderLayer,
        fused_allreduce_rms_norm=fused_allreduce_rms_norm,
    )
    module("vllm.v1.attention.backends.mla.prefill.base", MLAPrefillBackend=MLAPrefillBackend)
    module(
        "vllm.distributed",
        get_tensor_model_parallel_rank=lambda: state.rank,
        get_tensor_model_parallel_world_size=lambda: state.ranks,
    )
    module("vllm.envs", VLLM_BATCH_INVARIANT=False, VLLM_USE_BREAKABLE_CUDAGRAPH=False)
    module("vllm", __version__="0.33.0")
    state.set_forward_context = set_forward_context
    state.DeepseekV2DecoderLayer = DeepseekV2DecoderLayer
    state.DeepseekV32DecoderLayer = DeepseekV32DecoderLayer
    state.DeepseekV32Attention = DeepseekV32Attention
    state.MLAAttention = MLAAttention
    return state


def metadata(requests, slots_of, sparse=False):
    """Attention metadata of a step: requests are (CONTEXT, NEW, PAGES); one new token on a context is decode. Decode
    rows come first, as in the engine. slots are positions in the pages, page_size 4."""
    requests = sorted(requests, key=lambda r: not (r[1] == 1))
    decodes = [r for r in requests if r[1] == 1]
    prefills = requests[len(decodes) :]
    starts = [0]
    for _, new, _ in requests:
        starts.append(starts[-1] + new)
    slots = [pages[p // 4] * 4 + p % 4 for context, new, pages in requests for p in range(context, context + new)]
    width = max(len(pages) for _, _, pages in requests)
    table = torch.tensor([list(p) + [0] * (width - len(p)) for _, _, p in requests], dtype=torch.int32)
    made = Record(
        num_reqs=len(requests),
        num_actual_tokens=starts[-1],
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        num_decodes=len(decodes),
        num_decode_tokens=len(decodes),
        num_prefills=len(prefills),
        prefill=None,
        decode=None,
    )
    lengths = torch.tensor([c + n for c, n, _ in requests], dtype=torch.int32)
    if sparse:
        made.seq_lens, made.block_table = lengths, table
    if decodes:
        made.decode = Record(seq_lens=lengths[: len(decodes)], block_table=table[: len(decodes)])
    if prefills:
        backend = slots_of.prefill_backend
        if backend is not None:
            backend.lengths = [n for _, n, _ in prefills]
        chunks, row = [], 0
        for i, (context, new, _) in enumerate(prefills):
            chunks.append(
                Record(
                    request_slice=slice(i, i + 1),
                    token_slice=slice(row, row + new),
                    new=[new],
                    starts=torch.tensor([0]),
                    seq_lens=torch.tensor([context]),
                    cu_seq_lens=torch.tensor([0, context]),
                )
            )
            row += new
        chunked = Record(chunks=chunks, context_lens_list=[c for c, _, _ in prefills])
        any_context = any(c for c, _, _ in prefills)
        made.prefill = Record(
            block_table=table[len(decodes) :],
            query_start_loc=made.query_start_loc[len(decodes) :] - len(decodes),
            chunked_context=chunked if any_context else None,
            prefill_backend=backend,
        )
    positions = [p for context, new, _ in requests for p in range(context, context + new)]
    return made, torch.tensor(positions)
