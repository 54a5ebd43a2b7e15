"""Dumps of any torch module by forward hooks and a table of names, for `mla-check compare`; and the table of the MLA
attention of Hugging Face's transformers (DeepseekV3Attention and its kin), read in 5.24.0.

    from torch_dump import TorchDump, HF_MLA
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with TorchDump(model.model.layers[3].self_attn, "dump", HF_MLA, layer=3, requests=["0+7"],
                   engine=("transformers", transformers.__version__), functions=ALL_ATTENTION_FUNCTIONS):
        model(input_ids)

A table has for each tensor a `Spec`: the submodule (or method) that has it, which of its inputs or outputs, the axes
that mla-check is told, and the layout that the module uses.
"""

import contextlib
import functools
import inspect
import os

import torch

from mla_check_dump import HookError, Part, Recorder, Request, Settings, Step, live

ADAPTER = "torch_dump 1"


class Spec:
    """`module`: path of a submodule, "" the module itself, "name()" a method of it, "attention()" the function that
    `functions` gives. `what`: "in:0" or "in:name" (an argument), "out", "out:1". `layout`: "bt" for [batch, token, …],
    "bht" for [batch, head, token, …]. `width`: the last axis is cut into that many heads, no less."""

    def __init__(self, module, what, axes, layout="bt", pair_order=None, form=None):
        self.module, self.what, self.axes, self.layout, self.pair_order, self.form = (
            module,
            what,
            axes,
            layout,
            pair_order,
            form,
        )

    def pick(self, args, kwargs, output, signature):
        kind, _, which = self.what.partition(":")
        if kind == "out":
            return output[int(which)] if which else (output[0] if isinstance(output, tuple) else output)
        if which.isdigit():
            return args[int(which)]
        if which in kwargs:
            return kwargs[which]
        return signature.bind_partial(*args, **kwargs).arguments[which]

    def flat(self, tensor):
        """[token or key, …]: the batch joined with the tokens."""
        if self.layout == "bht":
            tensor = tensor.transpose(1, 2)
        return tensor.flatten(0, 1)


HALF = "half"
HF_MLA = {
    "attn_in": Spec("", "in:hidden_states", ["token", "hidden"]),
    "q_a": Spec("q_a_proj", "out", ["token", "q_rank"]),
    "q_a_normed": Spec("q_a_layernorm", "out", ["token", "q_rank"]),
    "q_raw": Spec("q_b_proj", "out", ["token", "head*nope+rope"]),
    "kv_a": Spec("kv_a_proj_with_mqa", "out", ["token", "latent+rope"]),
    "kv_c_normed": Spec("kv_a_layernorm", "out", ["token", "latent"]),
    "q": Spec("attention()", "in:1", ["token", "head", "nope+rope"], "bht", HALF),
    "k": Spec("attention()", "in:2", ["key", "head", "nope+rope"], "bht", HALF),
    "v": Spec("attention()", "in:3", ["key", "head", "value"], "bht"),
    "attn_out@kernel": Spec("attention()", "out:0", ["token", "head", "value"]),
    "attn_out@caller": Spec("o_proj", "in:0", ["token", "head*value"]),
    "out": Spec("o_proj", "out", ["token", "hidden"]),
}


class TorchDump(contextlib.AbstractContextManager):
    """Hooks a module for the time of a `with`; what its calls computed is written at the end. `requests`: one a row of
    the batch, all of one length. Tensors of a module that the table names and that does not exist are an error,
    unless the name is in `absent`, a table of reasons."""

    def __init__(
        self, module, folder, table, *, requests, engine, layer=0, form="fused", geometry=None, notes=None, functions=None,
        absent=None, rope=None, lse=None, page_size=64,
    ):  # fmt: skip
        self.module, self.table, self.functions, self.absent = module, dict(table), functions, dict(absent or {})
        settings = Settings(os.path.abspath(folder), {"MLA_CHECK_LAYER": str(layer), "MLA_CHECK_TOKENS": "1000000"})
        os.makedirs(settings.folder, exist_ok=True)
        self.recorder = Recorder(settings, ADAPTER, *engine)
        rows, row = [], 0
        for i, text in enumerate(requests):
            context, _, new = text.partition("+")
            rows.append(Request(i, int(context), int(new), row))
            row += int(new)
        self.part = Part(form, rows).choose(settings)
        self.tokens = row
        self.keys = sum(r.keys for r in rows)
        expected = {name: (s.axes, s.form, f"{s.module or 'the module'}, {s.what}") for name, s in self.table.items()}
        self.step = Step(layer, [self.part], expected)
        self.recorder.manifest = {
            "rank": 0, "ranks": 1, "mode": "eager", "page_size": page_size, "geometry": geometry or {},
            "notes": {"torch": torch.__version__, "module": type(module).__name__, **(notes or {})},
        }  # fmt: skip
        if geometry and "heads" in geometry:
            self.recorder.manifest["heads"] = [0, geometry["heads"]]
        for key, value in (("rope", rope), ("lse", lse)):
            if value is not None:
                self.recorder.manifest[key] = value
        self.stack = contextlib.ExitStack()

    def __enter__(self):
        by_module = {}
        for name, spec in self.table.items():
            if name in self.absent:
                self.step.expected.pop(name)
                self.step.not_applicable[name] = self.absent[name]
            else:
                by_module.setdefault(spec.module, []).append(name)
        try:
            for path, names in by_module.items():
                self.hook(path, names)
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(self, kind, error, trace):
        self.stack.close()
        if kind is None:
            for tensor, axes, _ in self.step.taken.values():
                if "head" in axes:
                    self.recorder.manifest.setdefault("heads", [0, tensor.shape[axes.index("head")]])
            self.recorder.manifest.setdefault("heads", [0, 0])  # no tensor has an axis of heads
            self.recorder.close(self.step)

    def hook(self, path, names):
        if path == "attention()":
            if self.functions is None or not hasattr(self.functions, "get_interface"):
                raise HookError(
                    f"{', '.join(names)} are arguments of the attention function: give functions=ALL_ATTENTION_FUNCTIONS of "
                    "transformers.modeling_utils (it must have get_interface), or name them in absent={…}"
                )
            original = self.functions.get_interface

            def get_interface(*args, **kwargs):
                return self.around(original(*args, **kwargs), names)

            self.functions.get_interface = get_interface
            self.stack.callback(delattr, self.functions, "get_interface")
            return
        if path.endswith("()"):
            original = getattr(self.module, path[:-2], None)
            if original is None:
                raise HookError(
                    f"{type(self.module).__name__} has no method {path}, which gives {', '.join(names)}: correct the table"
                )
            setattr(self.module, path[:-2], self.around(original, names))
            self.stack.callback(delattr, self.module, path[:-2])
            return
        try:
            found = self.module.get_submodule(path) if path else self.module
        except AttributeError:
            found = None
        if found is None:
            raise HookError(
                f"{type(self.module).__name__} has no module {path!r}, which gives {', '.join(names)}: correct the table, or name "
                "what this model does not have in absent={…}"
            )
        before = [name for name in names if self.table[name].what.startswith("in")]
        after = [name for name in names if name not in before]
        if before:
            signature = inspect.signature(found.forward)

            def pre(module, args, kwargs):
                if not torch.compiler.is_compiling():
                    self.see(before, args, kwargs, None, signature)

            self.stack.callback(found.register_forward_pre_hook(pre, with_kwargs=True).remove)
        if after:

            def post(module, args, output):
                if not torch.compiler.is_compiling():
                    self.see(after, args, {}, output, None)

            self.stack.callback(found.register_forward_hook(post).remove)

    def around(self, original, names):
        signature = inspect.signature(original)
        before = [name for name in names if self.table[name].what.startswith("in")]
        after = [name for name in names if name not in before]

        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            self.see(before, args, kwargs, None, signature)
            output = original(*args, **kwargs)
            self.see(after, args, kwargs, output, signature)
            return output

        return wrapper

    def see(self, names, args, kwargs, output, signature):
        if not live():
            return
        for name in names:
            spec = self.table[name]
            tensor = spec.pick(args, kwargs, output, signature)
            if not torch.is_tensor(tensor):
                self.step.fail(name, f"{spec.module} {spec.what} is {type(tensor).__name__}, not a tensor")
                continue
            given, tensor = tensor, spec.flat(tensor.detach())
            keyed = "key" in spec.axes
            rows = self.keys if keyed else self.tokens
            if tensor.shape[0] != rows or tensor.dim() != len(spec.axes):
                raise HookError(
                    f"{name}: {spec.module or 'the module'} {spec.what} has shape {list(given.shape)}; with requests "
                    f"{[r.label() for r in self.part.requests]} {rows} rows and axes {spec.axes} were expected"
                )
            extra = {"pair_order": spec.pair_order} if spec.pair_order else None
            place = self.step.expected[name][2]
            self.step.take_whole(name, tensor.clone(), spec.axes, place, self.part, extra, source=given)

    def weight(self, name, tensor, axes, place):
        """Adds a weight to the dump, under the names of `mla-check run`."""
        self.recorder.add_weight(self.step.layer, name, tensor, axes, place)
