"""Dumps MLA tensors from vLLM's workers for `mla-check compare`: a plugin of the group vllm.general_plugins.

Written from the sources of vLLM 0.33.0; docs/hooks.md says how it is switched on and what each mode can show.
It patches classes when the plugin is loaded, before a model is built or compiled, and adds module hooks to the
chosen layers alone. All of it returns at once while torch.compile traces or a CUDA graph is captured.

Two ways lead through vLLM's MLA: MultiHeadLatentAttentionWrapper -> MLAAttention -> custom op (DeepSeek-V2 and V3,
Kimi-K2, GLM-4.7-Flash), and DeepseekV32Attention, a subclass of MLAAttention with a forward of its own (GLM-5,
DeepSeek-V3.2). Both end in MLAAttention.forward_impl or impl.forward_mqa, whose Python runs in every mode but full
CUDA graphs; what lies before and after is seen in eager mode.
"""

import contextlib
import functools
import inspect

import torch

import mla_check_dump as base
from mla_check_dump import HookError, Part, Recorder, Request, Settings, Step, check, find, live, patched

ENGINE = "vllm 0.33.0"
ADAPTER = "mla_check_vllm 1"

ATTENTION = "vllm.model_executor.layers.attention.mla_attention"
V32 = "vllm.models.deepseek_v32.attention"
PLACES = {
    "context": ("vllm.forward_context:override_forward_context", ["forward_context"]),
    "wrapper": ("vllm.model_executor.layers.mla:MultiHeadLatentAttentionWrapper.__init__", ["mla_modules", "prefix"]),
    "wrapper.forward": (
        "vllm.model_executor.layers.mla:MultiHeadLatentAttentionWrapper.forward",
        ["positions", "hidden_states"],
    ),
    "attention": (f"{ATTENTION}:MLAAttention.__init__", ["num_heads", "scale", "prefix"]),
    "attention.forward": (f"{ATTENTION}:MLAAttention.forward", ["q", "kv_c_normed", "k_pe", "output_shape"]),
    "forward_impl": (
        f"{ATTENTION}:MLAAttention.forward_impl",
        ["q", "k_c_normed", "k_pe", "kv_cache", "attn_metadata", "output"],
    ),
    "forward_mha": (
        f"{ATTENTION}:MLACommonBaseImpl.forward_mha",
        ["q", "kv_c_normed", "k_pe", "kv_c_and_k_pe_cache", "attn_metadata"],
    ),
    "forward_mqa": (f"{ATTENTION}:MLACommonImpl.forward_mqa", ["q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"]),
    "new tokens": (
        "vllm.v1.attention.backends.mla.prefill.base:MLAPrefillBackend.run_prefill_new_tokens",
        ["q", "k", "v", "return_softmax_lse"],
    ),
    "context chunk": (
        "vllm.v1.attention.backends.mla.prefill.base:MLAPrefillBackend.run_prefill_context_chunk",
        ["chunk", "q", "k", "v"],
    ),
    "v32": (f"{V32}:DeepseekV32Attention.__init__", ["vllm_config", "config", "prefix"]),
    "v32.forward": (f"{V32}:DeepseekV32Attention.forward", ["positions", "hidden_states"]),
    "v32.attn": (
        f"{V32}:DeepseekV32Attention._sparse_indexer_and_attn",
        ["positions", "q_c", "q_nope", "q_pe", "kv_c", "k_pe", "ql_nope", "mqa_q", "output"],
    ),
    "decoder": ("vllm.model_executor.models.deepseek_v2:DeepseekV2DecoderLayer.__init__", ["vllm_config", "prefix"]),
}
# Classes of other models: hooked where they can be imported, else `hidden` is reported as failed with the reason.
DECODERS = [
    "vllm.model_executor.models.glm4_moe_lite:Glm4MoeLiteDecoderLayer.__init__",
    "vllm.models.deepseek_v32.nvidia.model:DeepseekV32DecoderLayer.__init__",
]

# Adds the residual for GLM-5's layers without calling the norm's module where ranks are several.
FUSED_NORM = ("vllm.models.deepseek_v32.nvidia.model:fused_allreduce_rms_norm", ["hidden_states", "residual", "norm"])

HEAD = "head*nope+rope"
# name -> axes, form or None for both, place. What the layers' modules show (eager mode only), then what op bodies show.
OUTSIDE = {
    "hidden": (["token", "hidden"], None, "decoder layer, residual after input_layernorm"),
    "attn_in": (["token", "hidden"], None, "argument hidden_states of the attention module"),
    "q_a": (["token", "q_rank"], None, "fused_qkv_a_proj"),
    "q_a_normed": (["token", "q_rank"], None, "q_a_layernorm"),
    "q_raw": (["token", HEAD], None, "q_b_proj"),
    "kv_a": (["token", "latent+rope"], None, "fused_qkv_a_proj or kv_a_proj_with_mqa"),
    "attn_out@caller": (["token", "head*value"], None, "argument of o_proj"),
    "out": (["token", "hidden"], None, "o_proj"),
}
INSIDE = {
    "q": (["token", "head", "nope+rope"], None, "MLAAttention.forward_impl, q"),
    "kv_c_normed": (["token", "latent"], None, "MLAAttention.forward_impl, k_c_normed"),
    "k_pe": (["token", "1", "rope"], None, "MLAAttention.forward_impl, k_pe"),
    "cache": (["key", "latent+rope"], None, "MLAAttention.kv_cache after the step"),
    "k": (["key", "head", "nope+rope"], "fused", "run_prefill_new_tokens and run_prefill_context_chunk, k"),
    "v": (["key", "head", "value"], "fused", "run_prefill_new_tokens and run_prefill_context_chunk, v"),
    "q_latent": (["token", "head", "latent"], "absorbed", "impl.forward_mqa, q"),
    "q_pe": (["token", "head", "rope"], "absorbed", "impl.forward_mqa, q"),
    "o_latent": (["token", "head", "latent"], "absorbed", "impl.forward_mqa, result"),
    "lse": (["token", "head"], None, "impl.forward_mqa, result"),
    "attn_out@kernel": (["token", "head*value"], None, "MLAAttention.forward_impl, output"),
}


# --- the probe: what the caller reads, in compiled code and in graphs ---

PROBE_ROWS = 1024
probes = {}  # layer -> what to call with the tensor that was seen


def probe(x, slot, layer):
    """Copies what it is given to `slot`, on the device, so that a graph's replay does it too."""
    rows = min(x.shape[0], slot.shape[0])
    slot[:rows].copy_(x[:rows])
    seen = probes.get(layer)
    if seen is not None and live():
        seen(x)


def define_probe():
    """The operator mla_check::probe, which declares that it writes its second argument."""
    if hasattr(torch.ops.mla_check, "probe"):
        return

    def run(x: torch.Tensor, slot: torch.Tensor, layer: int) -> None:
        probe(x, slot, layer)

    operator = torch.library.custom_op("mla_check::probe", run, mutates_args={"slot"})
    operator.register_fake(lambda x, slot, layer: None)


class Layer:
    """A chosen layer: its attention object, and the modules around it where they are known."""

    def __init__(self, index):
        self.index = index
        self.attn = self.outer = self.decoder = self.slot = None
        self.v32 = False

    def module(self, name):
        return getattr(self.outer, name, None)


PROBE = "mla_check::probe at the end of MLAAttention.forward"


class Adapter:
    def __init__(self, settings, version):
        self.settings = settings
        self.recorder = Recorder(settings, ADAPTER, "vllm", version)
        self.layers = {}
        self.steps = {}  # layer name -> Step, while a step runs
        self.metadata = {}
        self.no_decoder = {}
        self.described = False

    def layer(self, prefix):
        """The chosen layer that a prefix such as model.layers.3.self_attn belongs to, or None."""
        numbers = [int(part) for part in prefix.split(".") if part.isdigit()]
        if not numbers or numbers[0] not in self.settings.layers:
            return None
        return self.layers.setdefault(numbers[0], Layer(numbers[0]))

    def step_of(self, attn):
        return self.steps.get(getattr(attn, "layer_name", None)) if self.steps else None

    # --- when a step begins and ends ---

    def begin(self, context):
        if context is None or self.steps or not self.layers or not live():
            return
        metadata = getattr(context, "attn_metadata", None)
        if metadata is None or not self.settings.armed():
            return  # a profile or warm-up run, or not asked for yet
        if not isinstance(metadata, dict):
            self.recorder.once(
                "list",
                f"attn_metadata is a {type(metadata).__name__}: micro-batches (DBO) are not dumped; switch them off",
            )
            return
        mode = getattr(getattr(context, "cudagraph_runtime_mode", None), "name", "NONE")
        if mode == "FULL":
            self.recorder.once("full", f"this step replays a full CUDA graph, in which no Python runs: {base.EAGERLY}")
            return
        for layer in self.layers.values():
            name = getattr(layer.attn, "layer_name", None)
            if name in metadata:
                try:
                    self.plan(layer, name, metadata[name])
                except (AttributeError, TypeError, KeyError, IndexError) as error:
                    raise HookError(
                        f"the attention metadata {type(metadata[name]).__name__} of layer {layer.index}, or the layer itself, is "
                        f"not as in {ENGINE} ({error}): use a version that docs/hooks.md names, or correct mla_check_vllm.py"
                    ) from error

    def plan(self, layer, name, metadata):
        attn, decodes, prefills = layer.attn, metadata.num_decodes, metadata.num_prefills
        if getattr(attn.impl, "dcp_world_size", 1) > 1 or getattr(attn, "use_pcp", False):
            self.recorder.once(
                "cp", "context parallelism (DCP, PCP) splits keys over ranks: not dumped in this version"
            )
            return
        if not self.recorder.any_wanted(
            layer.index, ["absorbed"] * bool(decodes) + ["fused"] * bool(prefills) or ["absorbed"]
        ):
            sparse = getattr(attn.impl, "is_sparse", False)
            if not (sparse and prefills and self.recorder.wanted(layer.index, "absorbed")):
                return
        requests = batch(metadata)
        mqa_requests = decodes
        if getattr(attn.impl, "is_sparse", False) and prefills and not attn._use_sparse_mha(metadata):
            mqa_requests = len(requests)
        mqa_tokens = requests[mqa_requests].row if mqa_requests < len(requests) else metadata.num_actual_tokens
        parts = [Part("absorbed", requests[:mqa_requests]), Part("fused", requests[mqa_requests:], mqa_tokens)]
        parts = [p for p in parts if p.requests and self.recorder.wanted(layer.index, p.kind())]
        parts = [p for p in (part.choose(self.settings) for part in parts) if p.requests]
        if not parts:
            return
        step = Step(layer.index, parts, {**OUTSIDE, **INSIDE})
        if getattr(attn, "q_lora_rank", None) is None:
            for gone in ("q_a", "q_a_normed"):
                del step.expected[gone]
                step.not_applicable[gone] = "the model has no q_lora_rank"
        if all(r.context == 0 for part in parts if part.form == "fused" for r in part.requests):
            step.fail("lse", "without context the prefill backend is not asked for it", "fused")
        if layer.module("g_proj") is not None:
            step.fail("attn_out@caller", "a gate (g_proj) multiplies the output before o_proj reads it")
        context = any(r.context for r in requests[mqa_requests:])
        step.routing = (
            f"num_mqa_tokens {mqa_tokens}, num_mha_tokens {metadata.num_actual_tokens - mqa_tokens}, has_context {context}, "
            f"num_decodes {decodes}, num_prefills {prefills}"
        )
        self.describe(layer)
        if self.recorder.admit(step, self.geometry(layer)):
            self.steps[name], self.metadata[name] = step, metadata
            if layer.slot is not None:
                layer.slot.fill_(float("nan"))
        else:
            for part in parts:  # said once, then left alone
                self.recorder.done[(layer.index, part.kind())] = self.settings.steps

    def end(self):
        steps, self.steps, self.metadata = self.steps, {}, {}
        for step in steps.values():
            layer = self.layers[step.layer]
            mode = self.recorder.manifest.get("mode")
            if mode != "eager":
                step.excuse(OUTSIDE, f"in mode {mode} this is inside compiled or captured code: {base.EAGERLY}")
            if layer.outer is None:
                step.excuse(OUTSIDE, "no known attention module owns this layer's MLAAttention")
            if layer.decoder is None:
                step.excuse(["hidden"], f"no known decoder layer class was built {self.no_decoder or ''}")
            self.from_slot(layer, step)
            for name, (axes, _, _) in (("k", INSIDE["k"]), ("v", INSIDE["v"])):
                step.join_pieces(name, axes)
            self.recorder.close(step)

    def from_slot(self, layer, step):
        """A probe inside a graph leaves its copy in the slot; NaN everywhere: it did not run."""
        slot = layer.slot
        if slot is None or step.seen("attn_out@caller"):
            return
        if max(stop for part in step.parts for _, stop in part.rows()) > slot.shape[0]:
            step.fail("attn_out@caller", f"the probe keeps the first {slot.shape[0]} rows of a step")
        elif not torch.isnan(slot[0]).all():
            take(step, "attn_out@caller", slot, place=PROBE + ", replayed")

    def add_probe(self, layer, attn):
        """Gives a layer a slot, which MLAAttention.forward hands to the probe."""
        # The default dtype is the model's while vLLM builds it.
        empty = torch.full(
            (PROBE_ROWS, attn.num_heads * attn.v_head_dim), float("nan"), dtype=torch.get_default_dtype()
        )
        attn.register_buffer("mla_check_slot", empty, persistent=False)
        layer.slot, attn.mla_check_layer = attn.mla_check_slot, layer.index

        def seen(x):
            step = self.step_of(attn)
            if step is not None and not step.seen("attn_out@caller"):
                take(step, "attn_out@caller", x, place=PROBE)

        probes[layer.index] = seen

    # --- what the manifest says ---

    def geometry(self, layer):
        attn, outer = layer.attn, layer.outer
        norm, kv_norm = layer.module("q_a_layernorm"), layer.module("kv_a_layernorm")
        hidden = getattr(outer, "hidden_size", None) or getattr(layer.decoder, "hidden_size", None)
        size, _ = tensor_parallel()
        numbers = {
            "heads": attn.num_heads * size,
            "local_heads": attn.num_heads,
            "hidden": hidden,
            "q_rank": getattr(attn, "q_lora_rank", None),
            "latent": attn.kv_lora_rank,
            "rope": attn.qk_rope_head_dim,
            "nope": attn.qk_nope_head_dim,
            "value": attn.v_head_dim,
            "scale": float(attn.scale),
            "eps_latent": getattr(kv_norm if kv_norm is not None else norm, "variance_epsilon", None),
        }
        return {name: number for name, number in numbers.items() if number is not None}

    def describe(self, layer):
        if self.described:
            return
        self.described = True
        attn, manifest = layer.attn, self.recorder.manifest
        size, rank = tensor_parallel()
        geometry = self.geometry(layer)
        geometry.pop("local_heads")
        config = getattr(attn, "_vllm_config", None)
        notes, mode = modes(config)
        rotary = layer.module("rotary_emb")
        table = getattr(rotary, "cos_sin_cache", None)
        notes["attention backend"] = name_of(attn, "attn_backend")
        notes["prefill backend"] = name_of(attn, "prefill_backend")
        notes["cache dtype"] = str(attn.kv_cache_dtype)
        notes["cache shape"] = f"{list(attn.kv_cache.shape)}, strides {list(attn.kv_cache.stride())}"
        notes["cache scale"] = str(getattr(attn, "_k_scale_float", None))
        notes["attention path"] = "DeepseekV32Attention" if layer.v32 else "MultiHeadLatentAttentionWrapper"
        notes["rope class"] = type(rotary).__name__
        notes["rope uses FlashInfer"] = str(getattr(rotary, "use_flashinfer", None))
        notes["torch"] = torch.__version__
        if layer.slot is not None:
            notes["probe"] = (
                "an operator that reads the output was added to the graph, which may change what a compiler does"
            )
        o_proj = layer.module("o_proj")
        notes["o_proj reduces"] = str(getattr(o_proj, "reduce_results", None))
        impl = attn.impl
        manifest.update(rank=rank, ranks=size, heads=[rank * attn.num_heads, (rank + 1) * attn.num_heads])
        manifest.update(notes={**manifest.get("notes", {}), **notes}, mode=mode, geometry=geometry)
        manifest["page_size"] = int(attn.kv_cache.shape[1])
        manifest["lse"] = {"base": "e" if getattr(impl, "lse_base_on_e", True) else "two"}
        if torch.is_tensor(table):
            names = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
            if table.dtype in names:
                manifest["rope"] = {"table": names[table.dtype]}
            notes["rope table shape"] = str(list(table.shape))
        parallel = getattr(config, "parallel_config", None)
        data_rank = getattr(parallel, "data_parallel_rank", 0) or 0
        stages = getattr(parallel, "pipeline_parallel_size", 1) or 1
        if data_rank:
            self.recorder.folder += f"/data-{data_rank}"
        if stages > 1 and len(self.settings.layers) > 1:
            self.recorder.folder += f"/layers-from-{min(self.layers)}"
        for chosen in self.layers.values():
            if chosen.attn is not None:
                self.weights(chosen)

    def weights(self, layer):
        want, add, attn = self.settings.weights, self.recorder.add_weight, layer.attn
        if want == "none":
            return
        at = layer.index
        owners = [("g_attn", layer.decoder, "input_layernorm", ["hidden"])]
        owners += [
            ("g_q", layer.outer, "q_a_layernorm", ["q_rank"]),
            ("g_kv", layer.outer, "kv_a_layernorm", ["latent"]),
        ]
        if want == "all":
            owners += [
                ("w_o", layer.outer, "o_proj", ["hidden", "head*value"]),
                ("w_q_b", layer.outer, "q_b_proj", [HEAD, "q_rank"]),
            ]
            owners += [("w_q", layer.outer, "q_proj", [HEAD, "hidden"])]
            owners += [("w_kv_a", layer.outer, "kv_a_proj_with_mqa", ["latent+rope", "hidden"])]
            stacked = getattr(layer.module("fused_qkv_a_proj"), "weight", None)
            rank = getattr(attn, "q_lora_rank", None)
            if torch.is_tensor(stacked) and rank and stacked.dim() == 2:
                add(at, "w_q_a", stacked[:rank], ["q_rank", "hidden"], "fused_qkv_a_proj.weight")
                add(at, "w_kv_a", stacked[rank:], ["latent+rope", "hidden"], "fused_qkv_a_proj.weight")
        for name, owner, module, axes in owners:
            weight = getattr(getattr(owner, module, None), "weight", None)
            if torch.is_tensor(weight):
                add(at, name, weight, axes, f"{module}.weight")
        if want in ("kv", "all"):
            source = attn if hasattr(attn, "W_UK_T") else attn.impl
            derived = f"derived at load from kv_b_proj ({type(getattr(attn.kv_b_proj, 'quant_method', None)).__name__})"
            add(at, "w_uk", getattr(source, "W_UK_T", None), ["head", "nope", "latent"], f"W_UK_T, {derived}")
            add(at, "w_uv", getattr(source, "W_UV", None), ["head", "latent", "value"], f"W_UV, {derived}")

    # --- inside the attention ---

    def around_kernels(self, attn, step, metadata, call):
        """Runs `call` with the layer's kernels wrapped. The prefill backend is the step's, shared by layers, so it is
        wrapped only for the time of this call."""
        backend = getattr(getattr(metadata, "prefill", None), "prefill_backend", None)

        def mqa(original):
            def forward_mqa(q, kv_cache, attn_metadata, layer, *args, **kwargs):
                latent = attn.kv_lora_rank
                nope, pe = q if isinstance(q, tuple) else (q[..., :latent], q[..., latent:])
                heads = attn.num_heads
                for name, tensor in (("q_latent", nope), ("q_pe", pe)):
                    if tensor.shape[1] != heads:
                        step.fail(name, f"{tensor.shape[1]} heads and not {heads}: gathered over ranks (DCP)")
                    else:
                        take(step, name, tensor, "absorbed", extra=fp8(tensor))
                result = original(q, kv_cache, attn_metadata, layer, *args, **kwargs)
                out, lse = result if isinstance(result, tuple) else (result, None)
                if out.dim() == 2:
                    out = out.view(out.shape[0], -1, latent)
                if out.shape[1] != heads:
                    step.fail("o_latent", f"{out.shape[1]} heads and not {heads}")
                    step.fail("lse", f"{out.shape[1]} heads and not {heads}")
                    return result
                take(step, "o_latent", out, "absorbed")
                if lse is None:
                    step.fail("lse", "the backend returned none")
                elif tuple(lse.shape) == tuple(out.shape[:2]):
                    take(step, "lse", lse, "absorbed")
                else:
                    step.fail("lse", f"shape {list(lse.shape)} is not [tokens, heads]")
                return result

            return forward_mqa

        def new_tokens(original):
            def run_prefill_new_tokens(*args, **kwargs):
                bound = inspect.signature(original).bind(*args, **kwargs).arguments
                self.pieces_of_new(step, bound["k"], bound["v"], attn)
                result = original(*args, **kwargs)
                if isinstance(result, tuple):
                    step.fail("lse", "with context the backend returns parts of it, merged afterwards", "fused")
                return result

            return run_prefill_new_tokens

        def context_chunk(original):
            def run_prefill_context_chunk(*args, **kwargs):
                bound = inspect.signature(original).bind(*args, **kwargs).arguments
                self.pieces_of_context(step, bound["chunk"], bound["k"], bound["v"], attn)
                return original(*args, **kwargs)

            return run_prefill_context_chunk

        with contextlib.ExitStack() as stack:
            stack.enter_context(patched(attn.impl, "forward_mqa", mqa))
            if backend is not None:
                stack.enter_context(patched(backend, "run_prefill_new_tokens", new_tokens))
                stack.enter_context(patched(backend, "run_prefill_context_chunk", context_chunk))
            return call()

    def pieces_of_new(self, step, k, v, attn):
        part = step.part("fused")
        if part is None:
            return
        for r in part.requests:
            at = r.row - part.base
            for name, tensor in (("k", k), ("v", v)):
                step.piece(name, tensor, r, r.context, r.taken, at, f"run_prefill_new_tokens, {name}")

    def pieces_of_context(self, step, chunk, k, v, attn):
        part = step.part("fused")
        if part is None:
            return
        try:
            starts, lengths, rows = chunk.starts.tolist(), chunk.seq_lens.tolist(), chunk.cu_seq_lens.tolist()
            first = chunk.request_slice.start
        except AttributeError as error:
            step.fail("k", f"a chunk of context is not described as in {ENGINE}: {error}")
            step.fail("v", f"a chunk of context is not described as in {ENGINE}: {error}")
            return
        metadata = self.metadata[attn.layer_name]
        for i, (start, length) in enumerate(zip(starts, lengths)):
            request = next((r for r in part.requests if r.index == metadata.num_decodes + first + i), None)
            if request is None or length == 0:
                continue
            for name, tensor in (("k", k), ("v", v)):
                step.piece(name, tensor, request, start, length, rows[i], f"run_prefill_context_chunk, {name}")

    def cache(self, attn, step, metadata):
        """Rows of the cache of the chosen requests, context and new tokens, after the step has written them."""
        cache = attn.kv_cache
        if getattr(attn, "hisparse_cache", None) is not None:
            step.fail("cache", "it is split over two memories (hisparse)")
            return
        for part in step.parts:
            rows = []
            for request in part.requests:
                table = block_table(metadata, request.index)
                keys = torch.arange(request.keys, device=cache.device)
                blocks = table.to(cache.device).long()[keys // cache.shape[1]]
                rows.append(cache[blocks, keys % cache.shape[1]])
            taken, place, extra = torch.cat(rows), INSIDE["cache"][2], {}
            if attn.kv_cache_dtype == "fp8_ds_mla":
                self.recorder.arrays[f"L{step.layer}.{part.form}.cache.packed"] = taken.cpu()
                taken, place = unpack_ds_mla(taken), place + ", fp8_ds_mla: widened to f32 by the adapter"
            elif "nvfp4" in attn.kv_cache_dtype:
                step.fail("cache", f"packed as {attn.kv_cache_dtype}, which is not read in this version")
                return
            elif taken.dtype == torch.uint8 or taken.element_size() == 1:
                extra = {"dtype": "e4m3"}
                scale = getattr(attn, "_k_scale_float", 1.0)
                if attn.kv_cache_dtype == "fp8_e5m2":
                    step.fail("cache", "fp8_e5m2 is not a format of this version")
                    return
                if scale != 1.0:
                    taken = taken.view(torch.float8_e4m3fn).float() * scale
                    extra, place = {}, place + f", e4m3 times {scale}, widened to f32 by the adapter"
            step.take_whole("cache", taken, INSIDE["cache"][0], place, part, extra, source=cache)


def take(step, name, tensor, form=None, base_row=0, place=None, extra=None):
    axes, _, default = {**OUTSIDE, **INSIDE}[name]
    step.take(name, tensor, axes, place or default, form, base_row, extra)


def fp8(tensor):
    return {"dtype": "e4m3"} if tensor.element_size() == 1 else None


def unpack_ds_mla(rows):
    """656 bytes a row: 512 e4m3, four f32 scales of 128 columns each, 64 rope columns in bf16."""
    values = rows[:, :512].contiguous().view(torch.float8_e4m3fn).float()
    scales = rows[:, 512:528].contiguous().view(torch.float32).repeat_interleave(128, dim=1)
    return torch.cat([values * scales, rows[:, 528:656].contiguous().view(torch.bfloat16).float()], dim=1)


def batch(metadata):
    """The requests of a step in row order, from the attention metadata of a layer."""
    starts = metadata.query_start_loc.tolist()
    total = metadata.num_decodes + metadata.num_prefills
    lengths = getattr(metadata, "seq_lens", None)
    if lengths is not None:
        keys = lengths.tolist()
    else:
        decode, prefill = metadata.decode, metadata.prefill
        keys = decode.seq_lens.tolist()[: metadata.num_decodes] if decode is not None else []
        chunked = getattr(prefill, "chunked_context", None)
        for i in range(metadata.num_prefills):
            at = metadata.num_decodes + i
            context = 0 if chunked is None else chunked.context_lens_list[i]
            keys.append(context + starts[at + 1] - starts[at])
    requests = []
    for i in range(total):
        new = starts[i + 1] - starts[i]
        if new > 0:
            requests.append(Request(i, keys[i] - new, new, starts[i]))
    return requests


def block_table(metadata, index):
    table = getattr(metadata, "block_table", None)
    if table is not None:
        return table[index]
    if index < metadata.num_decodes:
        return metadata.decode.block_table[index]
    return metadata.prefill.block_table[index - metadata.num_decodes]


def tensor_parallel():
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()


def name_of(attn, field):
    backend = getattr(attn, field, None)
    return "none" if backend is None else str(backend.get_name())


def modes(config):
    """Notes about compilation and graphs, and the mode in one word."""
    notes, compilation = {}, getattr(config, "compilation_config", None)
    if compilation is None:
        return {"compilation": "not known"}, "unknown"
    eager = bool(getattr(getattr(config, "model_config", None), "enforce_eager", False))
    level = getattr(compilation, "mode", None)
    level = getattr(level, "name", str(level))
    graphs = getattr(compilation, "cudagraph_mode", None)
    graphs = getattr(graphs, "name", str(graphs))
    notes["enforce_eager"] = str(eager)
    notes["compilation"], notes["cudagraph"] = level, graphs
    notes["custom ops"] = str(getattr(compilation, "custom_ops", None))
    notes["ir op priority"] = str(getattr(getattr(config, "kernel_config", None), "ir_op_priority", None))
    try:
        from vllm import envs

        for name in ("VLLM_BATCH_INVARIANT", "VLLM_USE_BREAKABLE_CUDAGRAPH"):
            notes[name] = str(getattr(envs, name, None))
    except Exception as error:  # an engine's module may fail with anything
        notes["envs"] = str(error)
    if graphs not in ("NONE", "None"):
        mode = "graphs"
    elif level not in ("NONE", "None", "0"):
        mode = "compiled"
    else:
        mode = "eager"
    return notes, mode


# --- patches --------------------------------------------------------------------------------------------------------


def first(value):
    return value[0] if isinstance(value, tuple) else value


def argument(args, kwargs, at, name):
    return kwargs[name] if name in kwargs else (args[at] if len(args) > at else None)


def hook_outer(adapter, layer, owner):
    """Forward hooks on the modules of the attention of one layer: the wrapper's, or DeepseekV32Attention's own."""
    layer.outer = owner

    def step_now():
        return adapter.step_of(layer.attn) if live() else None

    def on_input(module, args, kwargs):
        if torch.compiler.is_compiling():
            return
        if step := step_now():
            step.take_positions(argument(args, kwargs, 0, "positions"))
            take(step, "attn_in", argument(args, kwargs, 1, "hidden_states"))

    def on(name, function):
        module = getattr(owner, name, None)
        if module is None:
            return

        def hook(module, args, output):
            if torch.compiler.is_compiling():
                return
            if step := step_now():
                function(step, first(output))

        module.register_forward_hook(hook)

    def stacked(step, out):
        rank = layer.attn.q_lora_rank
        take(step, "q_a", out[:, :rank])
        take(step, "kv_a", out[:, rank:])

    def on_o_proj(module, args, kwargs):
        if torch.compiler.is_compiling():
            return
        if (step := step_now()) and getattr(owner, "g_proj", None) is None and layer.slot is None:
            take(step, "attn_out@caller", argument(args, kwargs, 0, "input_"))

    def out(step, tensor):
        partial = not getattr(owner.o_proj, "reduce_results", True) and tensor_parallel()[0] > 1
        take(step, "out", tensor, extra={"partial": True} if partial else None)

    if getattr(owner, "o_proj", None) is None:
        raise HookError(f"{type(owner).__name__} has no o_proj: what its output goes to cannot be seen in this version")
    if all(getattr(owner, n, None) is None for n in ("fused_qkv_a_proj", "kv_a_proj_with_mqa")):
        raise HookError(f"{type(owner).__name__} has neither fused_qkv_a_proj nor kv_a_proj_with_mqa in this version")
    owner.register_forward_pre_hook(on_input, with_kwargs=True)
    on("fused_qkv_a_proj", stacked)
    on("kv_a_proj_with_mqa", lambda step, out: take(step, "kv_a", out))
    if not layer.v32:
        on("q_a_layernorm", lambda step, out: take(step, "q_a_normed", out))
        on("q_b_proj", lambda step, out: take(step, "q_raw", out))
        on("q_proj", lambda step, out: take(step, "q_raw", out))
    owner.o_proj.register_forward_pre_hook(on_o_proj, with_kwargs=True)
    on("o_proj", out)


def hook_decoder(adapter, layer, owner):
    """`hidden`: what input_layernorm was given (the first layer), or the sum that it returned beside its result."""
    layer.decoder = owner

    def sums(module, args, kwargs):
        if torch.compiler.is_compiling():
            return
        step = adapter.step_of(layer.attn) if live() else None
        if step is None:
            return
        hidden, residual = argument(args, kwargs, 1, "hidden_states"), argument(args, kwargs, 2, "residual")
        if residual is None:
            take(step, "hidden", hidden, place="decoder layer, hidden_states (first layer)")

    def after_norm(module, args, output):
        if torch.compiler.is_compiling():
            return
        step = adapter.step_of(layer.attn) if live() else None
        if step is not None and isinstance(output, tuple) and len(output) == 2:
            take(step, "hidden", output[1])

    owner.register_forward_pre_hook(sums, with_kwargs=True)
    owner.input_layernorm.register_forward_hook(after_norm)


def install(settings, version):
    """Checks every place, then patches. Returns the Adapter."""
    have = {name: check(path, parameters, ENGINE, version) for name, (path, parameters) in PLACES.items()}
    adapter = Adapter(settings, version)
    context_module = find("vllm.forward_context", ENGINE, version)
    attention = find(f"{ATTENTION}:MLAAttention", ENGINE, version)
    wrapper = find("vllm.model_executor.layers.mla:MultiHeadLatentAttentionWrapper", ENGINE, version)
    v32 = find(f"{V32}:DeepseekV32Attention", ENGINE, version)
    breaks = find("vllm.compilation.breakable_cudagraph:eager_break_during_capture", ENGINE, version)

    original_context = have["context"]

    @contextlib.contextmanager
    def override_forward_context(forward_context):
        with original_context(forward_context):
            outermost = not adapter.steps
            adapter.begin(forward_context)
            try:
                yield
            except BaseException:
                if outermost:
                    adapter.steps, adapter.metadata = {}, {}
                raise
            if outermost:
                adapter.end()

    context_module.override_forward_context = override_forward_context

    def after_init(owner, original, then):
        @functools.wraps(original)
        def __init__(self, *args, **kwargs):
            original(self, *args, **kwargs)
            arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
            layer = adapter.layer(str(arguments.get("prefix", "")))
            if layer is not None:
                then(layer, self)

        owner.__init__ = __init__

    def built_attention(layer, self):
        layer.attn = self
        if settings.probe and not isinstance(self, v32):
            adapter.add_probe(layer, self)

    if settings.probe:
        define_probe()
        original_forward = have["attention.forward"]

        @functools.wraps(original_forward)
        def forward(self, *args, **kwargs):
            out = original_forward(self, *args, **kwargs)
            if hasattr(self, "mla_check_slot"):
                torch.ops.mla_check.probe(out, self.mla_check_slot, self.mla_check_layer)
            return out

        attention.forward = forward

    def built_wrapper(layer, self):
        hook_outer(adapter, layer, self)

    def built_v32(layer, self):
        layer.v32 = True
        hook_outer(adapter, layer, self)

    after_init(attention, have["attention"], built_attention)
    after_init(wrapper, have["wrapper"], built_wrapper)
    after_init(v32, have["v32"], built_v32)
    decoders = [PLACES["decoder"][0], *DECODERS]
    for path in decoders:
        try:
            original = check(path, ["vllm_config", "prefix"], ENGINE, version)
        except HookError as error:
            adapter.no_decoder[path] = str(error)
            continue
        owner = find(path.rpartition(".")[0], ENGINE, version)
        after_init(owner, original, lambda layer, self: hook_decoder(adapter, layer, self))

    try:
        original_norm = check(*FUSED_NORM, ENGINE, version)
    except HookError as error:
        adapter.no_decoder[FUSED_NORM[0]] = str(error)
    else:

        @functools.wraps(original_norm)
        def fused_allreduce_rms_norm(hidden_states, residual, norm, *args, **kwargs):
            result = original_norm(hidden_states, residual, norm, *args, **kwargs)
            if adapter.steps and live():
                for layer in adapter.layers.values():
                    step = adapter.step_of(layer.attn)
                    if (
                        step is not None
                        and norm is getattr(layer.decoder, "input_layernorm", None)
                        and not step.seen("hidden")
                    ):
                        take(step, "hidden", result[1], place="fused_allreduce_rms_norm, second result")
            return result

        find(FUSED_NORM[0].partition(":")[0], ENGINE, version).fused_allreduce_rms_norm = fused_allreduce_rms_norm

    original_impl = have["forward_impl"]
    impl_signature = inspect.signature(original_impl)

    @functools.wraps(original_impl)
    def forward_impl(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return original_impl(self, *args, **kwargs)
        step = adapter.step_of(self) if live() else None
        if step is None or isinstance(self, v32):  # there _sparse_indexer_and_attn, around this call, has it all
            return original_impl(self, *args, **kwargs)
        a = impl_signature.bind(self, *args, **kwargs).arguments
        metadata, output = a["attn_metadata"], a["output"]
        take(step, "q", a["q"])
        take(step, "kv_c_normed", a["k_c_normed"])
        take(step, "k_pe", a["k_pe"])
        result = adapter.around_kernels(self, step, metadata, lambda: original_impl(self, *args, **kwargs))
        adapter.cache(self, step, metadata)
        take(step, "attn_out@kernel", output[: metadata.num_actual_tokens], extra=fp8(output))
        return result

    attention.forward_impl = forward_impl

    decorated = have["v32.attn"]
    inner = getattr(decorated, "__wrapped__", None)
    if inner is None:
        raise HookError(
            f"{PLACES['v32.attn'][0]} is not decorated with eager_break_during_capture any more in {version}: where its "
            "body runs under graphs is not known to this adapter. Use a version that docs/hooks.md names"
        )
    inner_signature = inspect.signature(inner)

    @functools.wraps(inner)
    def sparse_indexer_and_attn(self, *args, **kwargs):
        step = adapter.step_of(self) if live() else None
        if step is None:
            return inner(self, *args, **kwargs)
        a = inner_signature.bind(self, *args, **kwargs).arguments
        metadata, where = adapter.metadata[self.layer_name], "DeepseekV32Attention._sparse_indexer_and_attn"
        nope, unrotated, rotated = a["q_nope"], a["q_pe"], a["mqa_q"]
        step.take_positions(a["positions"])
        take(step, "q_a_normed", a["q_c"], place=f"{where}, q_c")
        take(step, "q_raw", torch.cat([nope, unrotated], dim=-1).flatten(1), place=f"{where}, q_nope and q_pe")
        take(step, "kv_c_normed", a["kv_c"], place=f"{where}, kv_c")
        take(step, "k_pe", a["k_pe"].unsqueeze(1), place=f"{where}, k_pe")
        if rotated.dtype == nope.dtype and rotated.shape == unrotated.shape:
            take(step, "q", torch.cat([nope, rotated], dim=-1), place=f"{where}, q_nope and mqa_q")
        else:
            step.fail("q", f"{where}: mqa_q is packed as {rotated.dtype} {list(rotated.shape)}")
        result = adapter.around_kernels(self, step, metadata, lambda: inner(self, *args, **kwargs))
        adapter.cache(self, step, metadata)
        take(step, "attn_out@kernel", a["output"][: metadata.num_actual_tokens], place=f"{where}, output")
        return result

    v32._sparse_indexer_and_attn = breaks(sparse_indexer_and_attn)
    return adapter


installed = None


def register():
    """Entry point of the group vllm.general_plugins; called in every process of vLLM, does nothing unless
    MLA_CHECK_DUMP is set."""
    global installed
    settings = Settings.from_env()
    if settings is None or installed is not None:
        return
    import vllm

    try:
        from vllm.logger import init_logger

        base.set_logger(init_logger("vllm.mla_check").warning)
    except ImportError:
        pass
    version = getattr(vllm, "__version__", "unknown")
    if settings.probe:
        import os

        os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"  # else a graph that was compiled without the probe may run
    installed = install(settings, version)
    base.say(
        f"{ADAPTER} is in, for layers {settings.layers}; "
        + ("it is armed" if settings.arm == "now" else f"touch {settings.arm} when the server is idle and ready")
    )
