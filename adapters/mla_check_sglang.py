"""Dumps MLA tensors from SGLang's schedulers for `mla-check compare`: a plugin of the group sglang.srt.plugins.

Written from the sources of SGLang 0.5.23; docs/hooks.md says how it is switched on. Hooks go through SGLang's own
HookRegistry. Since that only logs a target that is gone, every target is looked up and its signature checked here
first, and the process ends with a message where one has changed.

SGLang runs all rows of a batch in one form: `forward_absorb_*`, or one of the `forward_normal_*`.
"""

import contextlib

import torch

import mla_check_dump as base
from mla_check_dump import HookError, ImportFailed, Part, Recorder, Request, Settings, Step, check, find, live

ENGINE = "sglang 0.5.23"
ADAPTER = "mla_check_sglang 1"

MODEL = "sglang.srt.models.deepseek_v2"
CLASS = f"{MODEL}:DeepseekV2AttentionMLA"
PLACES = {
    "forward": (f"{CLASS}.forward", ["positions", "hidden_states", "forward_batch"]),
    "latent": (f"{CLASS}.prepare_qkv_latent", ["hidden_states", "forward_batch"]),
    "q_b": (f"{CLASS}.q_b_proj_forward", ["q_lora"]),
    "absorb": (f"{CLASS}.forward_absorb_prepare", ["positions", "hidden_states", "forward_batch"]),
    "normal": (f"{CLASS}.forward_normal_prepare", ["positions", "hidden_states", "forward_batch"]),
    "buffer": (f"{CLASS}._set_mla_kv_buffer", ["latent_cache", "kv_a", "k_pe", "forward_batch"]),
    "chunked": (f"{CLASS}._chunked_prefix_attn_mha", ["q", "accum_output", "accum_lse", "forward_batch"]),
    "radix": ("sglang.srt.layers.radix_attention:RadixAttention.forward", ["q", "k", "v", "forward_batch"]),
}

HEAD = "head*nope+rope"
EXPECTED = {
    "hidden": (["token", "hidden"], None, "forward_batch.residual_stream.residual"),
    "attn_in": (["token", "hidden"], None, "argument hidden_states of self_attn"),
    "q_a": (["token", "q_rank"], None, "prepare_qkv_latent"),
    "q_a_normed": (["token", "q_rank"], None, "q_a_layernorm"),
    "q_raw": (["token", HEAD], None, "q_b_proj"),
    "kv_a": (["token", "latent+rope"], None, "prepare_qkv_latent or kv_a_proj_with_mqa"),
    "kv_c_normed": (["token", "latent"], None, "kv_a_layernorm"),
    "k_pe": (["token", "1", "rope"], None, "forward_absorb_prepare, or _set_mla_kv_buffer"),
    "cache": (["key", "latent+rope"], None, "kv_buffer of the layer after the attention"),
    "q": (["token", "head", "nope+rope"], "fused", "forward_normal_prepare, q"),
    "k": (["key", "head", "nope+rope"], "fused", "forward_normal_prepare, k"),
    "v": (["key", "head", "value"], "fused", "forward_normal_prepare, v"),
    "q_latent": (["token", "head", "latent"], "absorbed", "forward_absorb_prepare, q_nope_out"),
    "q_pe": (["token", "head", "rope"], "absorbed", "forward_absorb_prepare, q_pe"),
    "o_latent": (["token", "head", "latent"], "absorbed", "RadixAttention.forward of attn_mqa"),
    "attn_out@kernel": (["token", "head*value"], "fused", "RadixAttention.forward of attn_mha"),
    "attn_out@caller": (["token", "head*value"], None, "argument of o_proj"),
    "out": (["token", "hidden"], None, "o_proj"),
}


def take(step, name, tensor, place=None, extra=None):
    axes, _, default = EXPECTED[name]
    step.take(name, tensor, axes, place or default, None, 0, extra)


def first(value):
    return value[0] if isinstance(value, tuple) else value


class Adapter:
    def __init__(self, settings, version):
        self.settings = settings
        self.recorder = Recorder(settings, ADAPTER, "sglang", version)
        self.step = self.attn = None  # while a chosen layer runs
        self.described = False

    def of(self, attn):
        """The step, where `attn` is the layer that is being dumped and values are computed here and now."""
        return self.step if self.attn is attn and attn is not None and live() else None

    # --- hooks ---

    def around_forward(self, original, attn, *args, **kwargs):
        if (
            torch.compiler.is_compiling()
            or self.step is not None
            or attn.layer_id not in self.settings.layers
            or not live()
        ):
            return original(attn, *args, **kwargs)
        names = ("positions", "hidden_states", "forward_batch")
        given = {name: kwargs.get(name, args[i] if len(args) > i else None) for i, name in enumerate(names)}
        step = self.begin(attn, given["forward_batch"])
        if step is None:
            return original(attn, *args, **kwargs)
        self.step, self.attn = step, attn
        try:
            step.take_positions(given["positions"])
            if isinstance(given["hidden_states"], tuple):
                step.fail("attn_in", "hidden_states is a quantised tensor with its scale")
            else:
                take(step, "attn_in", given["hidden_states"])
            residual = getattr(getattr(given["forward_batch"], "residual_stream", None), "residual", None)
            if residual is None:
                step.fail("hidden", "forward_batch has no residual_stream with a written residual")
            else:
                take(step, "hidden", residual)
            with self.modules(attn, step):
                result = original(attn, *args, **kwargs)
            self.cache(attn, step, given["forward_batch"])
        finally:
            self.step = self.attn = None
        self.end(attn, step)
        return result

    @contextlib.contextmanager
    def modules(self, attn, step):
        """Hooks on the layer's modules for the time of one call: everything runs eagerly here."""
        handles = []

        def on(name, function):
            module = getattr(attn, name, None)
            if module is not None:
                handles.append(
                    module.register_forward_hook(lambda m, args, output: function(first(output)) if live() else None)
                )

        def caller(module, args, kwargs):
            if live():
                take(step, "attn_out@caller", args[0] if args else kwargs.get("input_"))

        def out(tensor):
            partial = not getattr(attn.o_proj, "reduce_results", True) and attn.num_local_heads != attn.num_heads
            take(step, "out", tensor, extra={"partial": True} if partial else None)

        def q_raw(tensor):
            self.q_raw(step, tensor, "q_b_proj")

        on("q_a_layernorm", lambda t: take(step, "q_a_normed", t))
        on("kv_a_layernorm", lambda t: take(step, "kv_c_normed", t.reshape(-1, t.shape[-1])))
        on("q_b_proj", q_raw)
        on("q_proj", q_raw)
        on("kv_a_proj_with_mqa", lambda t: take(step, "kv_a", t))
        handles.append(attn.o_proj.register_forward_pre_hook(caller, with_kwargs=True))
        on("o_proj", out)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def q_raw(self, step, tensor, place):
        if not step.seen("q_raw"):
            take(step, "q_raw", tensor.reshape(tensor.shape[0], -1), place)

    def after_latent(self, result, attn, *args, **kwargs):
        if step := self.of(attn):
            rank = attn.q_lora_rank
            take(step, "q_a", result[:, :rank])
            take(step, "kv_a", result[:, rank:])

    def after_q_b(self, result, attn, *args, **kwargs):
        if step := self.of(attn):
            self.q_raw(step, result, "q_b_proj_forward")

    def after_absorb(self, result, attn, *args, **kwargs):
        step = self.of(attn)
        if step is None:
            return
        shape = [attn.num_local_heads, attn.kv_lora_rank]
        if (
            not isinstance(result, tuple)
            or len(result) < 10
            or not torch.is_tensor(result[2])
            or list(result[2].shape[1:]) != shape
        ):
            raise SystemExit(
                f"mla-check: {PLACES['absorb'][0]} no longer returns (q_pe, k_pe, q_nope_out [T, {shape[0]}, {shape[1]}], …) in "
                f"this version: tensors would be recorded under wrong names. Use a version that docs/hooks.md names"
            )
        step.parts[0].form = "absorbed"
        q_pe, k_pe, q_latent = result[:3]
        if attn._fuse_rope_for_trtllm_mla(args[2] if len(args) > 2 else kwargs["forward_batch"]):
            for name in ("q_pe", "k_pe"):
                step.fail(name, "the backend rotates inside its kernel (trtllm_mla): what leaves here is not rotated")
        else:
            take(step, "q_pe", q_pe)
            take(step, "k_pe", k_pe)
        if result[9] is not None:
            step.fail("q_latent", "the product is fused into the attention (fusion_plan) and is not there yet")
        else:
            take(step, "q_latent", q_latent)

    def after_normal(self, result, attn, *args, **kwargs):
        step = self.of(attn)
        if step is None:
            return
        part = step.parts[0]
        part.form = "fused"
        q, k, v = result[:3]
        take(step, "q", q, extra={"dtype": "e4m3"} if q.element_size() == 1 else None)
        new, keys = part.all_new, part.all_keys
        for name, tensor in (("k", k), ("v", v)):
            if tensor.shape[0] not in (sum(new), sum(keys)):
                step.fail(name, f"{tensor.shape[0]} rows, neither the new tokens nor all keys")
                continue
            whole, row = tensor.shape[0] == sum(keys), 0
            rows = keys if whole else new
            for i, count in enumerate(rows):
                request = next((r for r in part.requests if r.index == i), None)
                if request is not None:
                    step.piece(name, tensor, request, 0 if whole else request.context, count, row, EXPECTED[name][2])
                row += count

    def before_buffer(self, attn, latent_cache, kv_a, k_pe, *args, **kwargs):
        if step := self.of(attn):
            take(step, "k_pe", k_pe if k_pe.dim() == 3 else k_pe.unsqueeze(1))

    def after_chunked(self, result, attn, *args, **kwargs):
        if step := self.of(attn):
            take(step, "attn_out@kernel", result.reshape(result.shape[0], -1), "_chunked_prefix_attn_mha, merged")

    def after_radix(self, result, radix, *args, **kwargs):
        attn = self.attn
        step = self.of(attn)
        if step is None:
            return
        out, lse = (result[0], result[1]) if isinstance(result, tuple) else (result, None)
        if radix is attn.attn_mqa:
            take(step, "o_latent", out.reshape(out.shape[0], attn.num_local_heads, attn.kv_lora_rank))
        elif radix is attn.attn_mha and lse is None:
            take(step, "attn_out@kernel", out.reshape(out.shape[0], -1))

    # --- one step ---

    def begin(self, attn, batch):
        if not self.settings.armed():
            return None
        mode = batch.forward_mode
        decode = mode.is_decode()
        if not decode and (not mode.is_extend() or mode.is_target_verify()):
            self.recorder.once("mode", f"forward mode {mode} is not dumped in this version (idle, speculative)")
            return None
        if getattr(attn, "dcp_size", 1) > 1:
            self.recorder.once("dcp", "context parallelism (DCP) splits keys over ranks: not dumped in this version")
            return None
        if not self.recorder.any_wanted(attn.layer_id, ["absorbed"] if decode else ["fused", "absorbed"]):
            return None
        keys = batch.seq_lens.tolist()
        new = [1] * len(keys) if decode else list(batch.extend_seq_lens_cpu)
        requests, row = [], 0
        for i, count in enumerate(new):
            if count:
                requests.append(Request(i, keys[i] - count, count, row))
            row += count
        part = Part(None, requests).choose(self.settings)
        part.all_new, part.all_keys = new, keys
        if not part.requests:
            return None
        step = Step(attn.layer_id, [part], dict(EXPECTED))
        step.fail(
            "attn_out@kernel",
            "o_latent is what the kernel returns here; its product with w_vc goes to o_proj",
            "absorbed",
        )
        if attn.q_lora_rank is None:
            for name in ("q_a", "q_a_normed"):
                del step.expected[name]
                step.not_applicable[name] = "the model has no q_lora_rank"
        self.describe(attn)
        part.form = "absorbed" if decode else "fused"  # as far as the size goes
        admitted = self.recorder.admit(step, self.geometry(attn))
        part.form = None
        if not admitted:
            for kind in ("absorbed",) if decode else ("fused", "fused with context"):
                self.recorder.done[(attn.layer_id, kind)] = self.settings.steps
        return step if admitted else None

    def end(self, attn, step):
        part = step.parts[0]
        backend = getattr(attn, "current_attention_backend", None)
        self.recorder.manifest["notes"]["attention backend"] = str(backend)
        if part.form is None:
            self.recorder.once(
                "form", f"layer {step.layer}: neither forward_absorb_prepare nor forward_normal_prepare ran: not dumped"
            )
            return
        step.routing = f"{'forward_absorb' if part.form == 'absorbed' else 'forward_normal'}, {len(part.all_new)} requests, backend {backend}"
        step.join_pieces("k", EXPECTED["k"][0])
        step.join_pieces("v", EXPECTED["v"][0])
        self.recorder.close(step)

    def cache(self, attn, step, batch):
        part, where = step.parts[0], "sglang.srt.model_executor.forward_context"
        context = __import__(where, fromlist=["_"])
        pool, table = context.get_token_to_kv_pool(), context.get_req_to_token_pool().req_to_token
        buffers = getattr(pool, "kv_buffer", None)
        if buffers is None:
            step.fail("cache", f"{type(pool).__name__} has no kv_buffer")
            return
        buffer = buffers[attn.layer_id - (getattr(pool, "start_layer", 0) or 0)]
        buffer = buffer.reshape(buffer.shape[0], -1)
        width = attn.kv_lora_rank + attn.qk_rope_head_dim
        slots = [table[batch.req_pool_indices[r.index], : r.keys].to(buffer.device).long() for r in part.requests]
        rows = buffer[torch.cat(slots)]
        if rows.shape[1] != width:
            self.recorder.arrays[f"L{step.layer}.cache.packed.{len(self.recorder.captures)}"] = rows.cpu()
            step.fail(
                "cache", f"rows of {rows.shape[1]} elements and not {width}: packed in a way this version does not read"
            )
            return
        extra = {}
        if rows.element_size() == 1:
            rows, extra = rows.view(torch.uint8), {"dtype": "e4m3"}
        step.take_whole("cache", rows, EXPECTED["cache"][0], EXPECTED["cache"][2], part, extra, source=buffer)

    # --- what the manifest says ---

    def geometry(self, attn):
        norm = getattr(attn, "kv_a_layernorm", None)
        numbers = {
            "heads": attn.num_heads,
            "local_heads": attn.num_local_heads,
            "hidden": attn.hidden_size,
            "q_rank": attn.q_lora_rank,
            "latent": attn.kv_lora_rank,
            "rope": attn.qk_rope_head_dim,
            "nope": attn.qk_nope_head_dim,
            "value": attn.v_head_dim,
            "scale": float(attn.scaling),
            "eps_latent": getattr(norm, "variance_epsilon", None),
        }
        return {name: number for name, number in numbers.items() if number is not None}

    def describe(self, attn):
        if self.described:
            return
        self.described = True
        manifest, geometry = self.recorder.manifest, self.geometry(attn)
        runtime = __import__("sglang.srt.runtime_context", fromlist=["_"])
        parallel = runtime.get_parallel()
        rank, size, local = parallel.attn_tp_rank, parallel.attn_tp_size, geometry.pop("local_heads")
        notes = {"torch": torch.__version__, "cache dtype": str(attn.kv_cache_dtype)}
        decode = prefill = None
        try:
            arguments = runtime.get_server_args()
            for name in (
                "disable_decode_cuda_graph", "disable_prefill_cuda_graph", "enable_torch_compile", "attention_backend",
                "enable_deterministic_inference", "kv_cache_dtype", "chunked_prefill_size", "disable_radix_cache",
            ):  # fmt: skip
                notes[name] = str(getattr(arguments, name, None))
            decode, prefill = arguments.disable_decode_cuda_graph, arguments.disable_prefill_cuda_graph
        except Exception as error:  # an engine's module may fail with anything
            notes["server arguments"] = f"not readable: {error}"
        mode = "unknown" if decode is None else ("eager" if decode and prefill else "graphs")
        rotary = getattr(attn, "rotary_emb", None)
        table = getattr(rotary, "cos_sin_cache", None)
        notes["rope class"], notes["rope half-split"] = (
            type(rotary).__name__,
            str(getattr(rotary, "is_neox_style", None)),
        )
        notes["o_proj reduces"] = str(getattr(attn.o_proj, "reduce_results", None))
        manifest.update(rank=rank, ranks=size, heads=[rank * local, (rank + 1) * local])
        manifest.update(notes={**manifest.get("notes", {}), **notes}, mode=mode, geometry=geometry)
        names = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
        if torch.is_tensor(table) and table.dtype in names:
            manifest["rope"] = {"table": names[table.dtype]}
        if getattr(parallel, "attn_dp_rank", 0):
            self.recorder.folder += f"/data-{parallel.attn_dp_rank}"
        self.weights(attn)

    def weights(self, attn):
        want, add, at = self.settings.weights, self.recorder.add_weight, attn.layer_id
        if want == "none":
            return
        plain = [("g_q", "q_a_layernorm", ["q_rank"]), ("g_kv", "kv_a_layernorm", ["latent"])]
        if want == "all":
            plain += [("w_q_b", "q_b_proj", [HEAD, "q_rank"]), ("w_q", "q_proj", [HEAD, "hidden"])]
            plain += [
                ("w_o", "o_proj", ["hidden", "head*value"]),
                ("w_kv_a", "kv_a_proj_with_mqa", ["latent+rope", "hidden"]),
            ]
            stacked, rank = getattr(getattr(attn, "fused_qkv_a_proj_with_mqa", None), "weight", None), attn.q_lora_rank
            if torch.is_tensor(stacked) and rank:
                add(at, "w_q_a", stacked[:rank], ["q_rank", "hidden"], "fused_qkv_a_proj_with_mqa.weight")
                add(at, "w_kv_a", stacked[rank:], ["latent+rope", "hidden"], "fused_qkv_a_proj_with_mqa.weight")
        for name, module, axes in plain:
            weight = getattr(getattr(attn, module, None), "weight", None)
            if torch.is_tensor(weight):
                add(at, name, weight, axes, f"{module}.weight")
        if want in ("kv", "all"):
            add(at, "w_uk", attn.w_kc, ["head", "nope", "latent"], "w_kc, derived at load from kv_b_proj")
            add(at, "w_uv", attn.w_vc, ["head", "latent", "value"], "w_vc, derived at load from kv_b_proj")


def install(settings, version):
    """Checks every target, then registers the hooks with HookRegistry, which applies them after this returns."""
    registry = find("sglang.srt.plugins.hook_registry:HookRegistry", ENGINE, version)
    kinds = find("sglang.srt.plugins.hook_registry:HookType", ENGINE, version)
    for path, parameters in PLACES.values():
        check(path, parameters, ENGINE, version)
    find(f"{CLASS}._fuse_rope_for_trtllm_mla", ENGINE, version)
    for name in ("get_token_to_kv_pool", "get_req_to_token_pool"):
        find(f"sglang.srt.model_executor.forward_context:{name}", ENGINE, version)
    find("sglang.srt.runtime_context:get_parallel", ENGINE, version)
    adapter = Adapter(settings, version)

    def target(name):
        return PLACES[name][0].replace(":", ".")

    registry.register(target("forward"), adapter.around_forward, kinds.AROUND)
    registry.register(target("latent"), adapter.after_latent, kinds.AFTER)
    registry.register(target("q_b"), adapter.after_q_b, kinds.AFTER)
    registry.register(target("absorb"), adapter.after_absorb, kinds.AFTER)
    registry.register(target("normal"), adapter.after_normal, kinds.AFTER)
    registry.register(target("buffer"), adapter.before_buffer, kinds.BEFORE)
    registry.register(target("chunked"), adapter.after_chunked, kinds.AFTER)
    registry.register(target("radix"), adapter.after_radix, kinds.AFTER)
    return adapter


installed = None


def register():
    """Entry point of the group sglang.srt.plugins; does nothing unless MLA_CHECK_DUMP is set. SGLang logs an exception
    of a plugin and goes on, so a place that is gone ends the process instead."""
    global installed
    settings = Settings.from_env()
    if settings is None or installed is not None:
        return
    import logging

    import sglang

    base.set_logger(logging.getLogger("sglang.mla_check").warning)
    version = getattr(sglang, "__version__", "unknown")
    try:
        installed = install(settings, version)
    except ImportFailed as error:  # a process without a model, or an engine that cannot load this model either
        base.say(f"nothing is hooked in this process: {error}")
        return
    except HookError as error:
        base.say(str(error))
        raise SystemExit(f"mla-check: {error}") from error
    base.say(
        f"{ADAPTER} is in, for layers {settings.layers}; "
        + ("it is armed" if settings.arm == "now" else f"touch {settings.arm} when the server is idle and ready")
    )
