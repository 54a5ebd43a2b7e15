"""Writes what an engine computed as a dump that `mla-check compare` reads (schema mla-check.hook/1, docs/hooks.md).

Shared by the adapters beside it: settings from the environment, checks of the places that are hooked, clones in
stream order with a record of pointers, rows cut to the chosen requests, limits, the files. It needs PyTorch and the
standard library. An adapter opens a `Step` for a layer, calls `take` wherever it sees a tensor, and closes it.

A place that should have fired and did not is written with "fired": 0, since that is evidence: a kernel that was
never called leaves its caller with a buffer that nobody wrote.
"""

import contextlib
import ctypes
import inspect
import json
import os
import struct
import sys

import torch

SCHEMA = "mla-check.hook/1"
DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
FORMS = ("fused", "absorbed")
EAGERLY = (
    "run eagerly to see it (vLLM: --enforce-eager; SGLang: --disable-decode-cuda-graph --disable-prefill-cuda-graph), "
    "knowing that an eager run may hide a fault of compiled code, such as an output written to another buffer"
)

_say = None


def set_logger(function):
    """Sends messages to an engine's logger instead of stderr."""
    global _say
    _say = function


def say(message):
    if _say is None:
        print(f"mla-check: {message}", file=sys.stderr, flush=True)
    else:
        _say(f"mla-check: {message}")


class HookError(RuntimeError):
    """Something that the adapter needs is not there. The message says what, where, and what to do."""


class ImportFailed(HookError):
    """A module that is there could not be imported in this process, for reasons of its own."""


def live():
    """Whether values are computed here and now: not while torch.compile traces or a CUDA graph is captured."""
    if torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


# --- settings -------------------------------------------------------------------------------------------------------


class Settings:
    """What the environment asks for. Every name begins with MLA_CHECK_; docs/hooks.md lists them."""

    def __init__(self, folder, env):
        self.folder = folder
        self.layers = self._layers(env.get("MLA_CHECK_LAYER", "0"))
        self.arm = env.get("MLA_CHECK_ARM", "") or os.path.join(folder, "arm")
        self.tokens = self._number(env, "MLA_CHECK_TOKENS", 64)
        self.keys = self._number(env, "MLA_CHECK_KEYS", 8192)
        self.steps = self._number(env, "MLA_CHECK_STEPS", 1)
        self.megabytes = self._number(env, "MLA_CHECK_MAX_MB", 512)
        self.request = env.get("MLA_CHECK_REQUEST", "all")
        if self.request != "all":
            self.request = self._number(env, "MLA_CHECK_REQUEST", 0, least=0)
        self.probe = env.get("MLA_CHECK_PROBE", "0") == "1"
        self.weights = env.get("MLA_CHECK_WEIGHTS", "kv")
        if self.weights not in ("none", "norms", "kv", "all"):
            raise HookError(f"MLA_CHECK_WEIGHTS is {self.weights!r}: give none, norms, kv or all")

    @classmethod
    def from_env(cls, env=None):
        """Settings, or None where MLA_CHECK_DUMP is not set and nothing is to be hooked."""
        env = os.environ if env is None else env
        folder = env.get("MLA_CHECK_DUMP", "")
        if not folder:
            return None
        settings = cls(os.path.abspath(folder), env)
        os.makedirs(settings.folder, exist_ok=True)
        return settings

    @staticmethod
    def _number(env, name, default, least=1):
        text = env.get(name, str(default))
        if not text.isdigit() or int(text) < least:
            raise HookError(f"{name} is {text!r}: give a whole number of at least {least}")
        return int(text)

    @staticmethod
    def _layers(text):
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdigit() for part in parts):
            raise HookError(f"MLA_CHECK_LAYER is {text!r}: give a layer's number, as in 3, or several, as in 3,7")
        return sorted({int(part) for part in parts})

    def armed(self):
        return self.arm == "now" or os.path.exists(self.arm)


# --- places ---------------------------------------------------------------------------------------------------------


def find(path, engine, version):
    """The object named by "package.module:Class.method" or "package.module:function"; HookError where it is gone."""
    module_name, _, names = path.partition(":")
    advice = (
        f"this adapter was written from the sources of {engine}; what runs is {version}. Use a version that "
        "docs/hooks.md names, or correct the name in the adapter's table of places"
    )
    try:
        found = __import__(module_name, fromlist=["_"])
    except Exception as error:  # an engine's module may fail with anything
        gone = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        raise (HookError if gone else ImportFailed)(
            f"module {module_name}, where {names} is hooked, cannot be imported ({error}): {advice}"
        ) from error
    for name in filter(None, names.split(".")):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise HookError(f"{path}: there is no {name} any more: {advice}") from None
    return found


def check(path, parameters, engine, version):
    """Finds a function and checks that it takes `parameters`, in this order, perhaps among others."""
    function = find(path, engine, version)
    try:
        have = list(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:
        raise HookError(f"{path} has no readable signature ({error}); {engine} {version}") from None
    places = [have.index(name) if name in have else -1 for name in parameters]
    if -1 in places or places != sorted(places):
        raise HookError(
            f"{path} was expected to take ({', '.join(parameters)}), and takes ({', '.join(have)}): its signature has "
            f"changed between {engine} and the version that runs, {version}, and tensors could be recorded under wrong "
            "names. Use a version that docs/hooks.md names, or correct the adapter"
        )
    return function


@contextlib.contextmanager
def patched(obj, name, make):
    """Sets obj.name to make(original) on the instance for the time of a call."""
    original = getattr(obj, name, None)
    if original is None:
        raise HookError(
            f"{type(obj).__name__} has no method {name}, which is wrapped while a layer is dumped: it is another backend than "
            "this adapter was written for. Use a version that docs/hooks.md names, or another backend"
        )
    own = name in vars(obj)
    setattr(obj, name, make(original))
    try:
        yield
    finally:
        if own:
            setattr(obj, name, original)
        else:
            delattr(obj, name)


# --- one step of one layer ------------------------------------------------------------------------------------------


class Request:
    """A request's rows in a step: `context` keys were in the cache, `new` tokens begin at row `row` of the batch."""

    def __init__(self, index, context, new, row):
        self.index, self.context, self.new, self.row = index, context, new, row
        self.taken = new

    @property
    def keys(self):
        return self.context + self.taken

    def label(self):
        return f"{self.context}+{self.taken}"


class Part:
    """Rows of a step that took one form. `base` is the first row of the form's own tensors in the batch."""

    def __init__(self, form, requests, base=0):
        self.form, self.requests, self.base = form, requests, base

    def kind(self):
        return (
            f"{self.form} with context" if self.form == "fused" and any(r.context for r in self.requests) else self.form
        )

    def choose(self, settings):
        """Keeps the requests asked for and at most as many new tokens as allowed. A causal prefix of a request is a
        whole problem of its own, so the one at the limit is cut."""
        if settings.request != "all":
            self.requests = self.requests[settings.request : settings.request + 1]
        left, kept = settings.tokens, []
        for request in self.requests:
            if left == 0:
                break
            request.taken = min(request.new, left)
            left -= request.taken
            kept.append(request)
        self.requests = kept
        return self

    def rows(self):
        return [(r.row, r.row + r.taken) for r in self.requests]


def copy_rows(tensor, rows, axis=0):
    """A contiguous clone of rows [from, to) along `axis`, queued on the current stream, any dtype."""
    shape = list(tensor.shape)
    shape[axis] = sum(stop - start for start, stop in rows)
    out = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    at = 0
    for start, stop in rows:
        out.narrow(axis, at, stop - start).copy_(tensor.narrow(axis, start, stop - start))
        at += stop - start
    return out


def provenance(tensor, place):
    return {
        "ptr": tensor.data_ptr(),
        "storage": tensor.untyped_storage().data_ptr(),
        "strides": list(tensor.stride()),
        "place": place,
    }


class Step:
    """What was seen of one layer in one step. `expected`: name -> (axes, form or None, place); a name that is not
    there at the end is written with fired 0, or as failed where `excuse` or `fail` gave a reason."""

    def __init__(self, layer, parts, expected):
        self.layer, self.parts, self.expected = layer, parts, expected
        self.taken, self.fired, self.failed, self.not_applicable = {}, {}, {}, {}
        self.pieces, self.positions, self.routing = {}, None, None
        self.excuses = []

    def seen(self, name):
        return any(self.fired.get((id(part), name)) for part in self.parts)

    def part(self, form):
        return next((p for p in self.parts if p.form == form), None)

    def fail(self, name, reason, form=None):
        """A tensor that was wanted and cannot be had, in one form or in both."""
        self.failed.setdefault((form, name), reason)

    def excuse(self, names, reason):
        """These places could not fire in this mode: failed with `reason`, where nothing was seen, not fired 0."""
        self.excuses.append((tuple(names), reason))

    def take(self, name, tensor, axes, place, form=None, base=0, extra=None):
        """Clones the chosen rows of a tensor whose axes (one of them "token") are those of the batch, row `base` on."""
        if not torch.is_tensor(tensor):
            self.fail(name, f"{place} gave {type(tensor).__name__}, not a tensor")
            return
        if len(axes) != tensor.dim():
            self.fail(name, f"{place} gave shape {list(tensor.shape)}, expected axes {axes}")
            return
        axis = axes.index("token")
        for part in self.parts:
            if not part.requests or (form is not None and part.form != form):
                continue
            rows = [(a - base, b - base) for a, b in part.rows()]
            if rows[0][0] < 0 or rows[-1][1] > tensor.shape[axis]:
                self.fail(
                    name, f"{place} gave {tensor.shape[axis]} rows; rows {rows[0][0]}..{rows[-1][1]} were expected"
                )
                continue
            key = (id(part), name)
            self.fired[key] = self.fired.get(key, 0) + 1
            with torch.no_grad():
                clone = copy_rows(tensor.detach(), rows, axis)
            self.taken[key] = (clone, axes, {**provenance(tensor, place), **(extra or {})})

    def take_whole(self, name, tensor, axes, place, part, extra=None, source=None):
        """Keeps a tensor that is already cut (rows of the cache, k of assembled pieces)."""
        key = (id(part), name)
        self.fired[key] = self.fired.get(key, 0) + 1
        self.taken[key] = (
            tensor,
            axes,
            {**provenance(source if source is not None else tensor, place), **(extra or {})},
        )

    def piece(self, name, tensor, request, key_from, count, row, place):
        """Rows [row, row + count) of a tensor of keys are a request's keys from key_from on; joined at the end."""
        count = min(count, request.keys - key_from)
        if count <= 0:
            return
        with torch.no_grad():
            clone = copy_rows(tensor.detach(), [(row, row + count)])
        self.pieces.setdefault(name, []).append((request.index, key_from, clone, provenance(tensor, place)))

    def take_positions(self, positions):
        if torch.is_tensor(positions) and positions.dim() == 1:
            self.positions = positions.detach().clone()

    def join_pieces(self, name, axes):
        part = self.part("fused")
        if part is None or name not in self.pieces:
            return
        found, joined = self.pieces.pop(name), []
        for request in part.requests:
            mine = sorted((p for p in found if p[0] == request.index), key=lambda p: p[1])
            at = 0
            for _, key_from, clone, _ in mine:
                if key_from != at:
                    break
                at += clone.shape[0]
                joined.append(clone)
            if at != request.keys:
                self.fail(name, f"keys {at} to {request.keys} of request {request.label()} were not seen")
                return
        source = found[-1][3]
        key = (id(part), name)
        self.fired[key] = len(found)
        self.taken[key] = (torch.cat(joined), axes, source)

    def write(self, recorder, number):
        """Gives the captures to the recorder: one for each form of which rows were chosen."""
        for part in self.parts:
            if part.requests and part.form in FORMS:
                recorder.captures.append(self._capture(recorder, part, number))

    def _capture(self, recorder, part, number):
        capture = {
            "layer": self.layer,
            "step": number,
            "form": part.form,
            "requests": [r.label() for r in part.requests],
            "positions": [],
            "tensors": {},
        }
        computed = [r.context + i for r in part.requests for i in range(r.taken)]
        given = self.positions
        if given is not None and given.numel() >= max((b for _, b in part.rows()), default=0):
            computed = [int(p) for a, b in part.rows() for p in given[a:b].tolist()]
        capture["positions"] = computed
        for (owner, name), (tensor, axes, record) in self.taken.items():
            if owner != id(part):
                continue
            array = f"L{self.layer}.S{number}.{part.form}.{name}"
            recorder.arrays[array] = tensor.contiguous().cpu()
            capture["tensors"][name] = {
                "array": array,
                "axes": list(axes),
                "fired": self.fired[(owner, name)],
                **record,
            }
        failed, absent = {}, dict(self.not_applicable)
        for name, (axes, form, place) in self.expected.items():
            if form is not None and form != part.form:
                absent.setdefault(name, f"{place} is not on the way of the {part.form} form")
            elif name not in capture["tensors"]:
                reason = self.failed.get((part.form, name)) or self.failed.get((None, name))
                reason = reason or next((text for names, text in self.excuses if name in names), None)
                if reason is None:
                    capture["tensors"][name] = {"axes": list(axes), "fired": 0, "place": place}
                else:
                    failed[name] = reason
        capture["not_applicable"] = {n: r for n, r in absent.items() if n not in capture["tensors"]}
        capture["failed"] = failed
        return capture


# --- files ----------------------------------------------------------------------------------------------------------


def raw(tensor):
    """The bytes of a CPU tensor, in row-major order."""
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()) if tensor.numel() else b""


def write_safetensors(path, arrays):
    header, offset, blobs = {}, 0, []
    for name, tensor in arrays.items():
        if tensor.dtype not in DTYPES:
            raise HookError(f"array {name} has dtype {tensor.dtype}, which safetensors does not know")
        blob = raw(tensor)
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    _replace(path, [struct.pack("<Q", len(text)), text, *blobs])


def _replace(path, chunks):
    temporary = f"{path}.{os.getpid()}.part"
    with open(temporary, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def lines(value, depth=0):
    """JSON with a line for each tensor."""
    nested = isinstance(value, dict) and value and (depth == 0 or any(isinstance(v, dict) for v in value.values()))
    listed = isinstance(value, list) and any(isinstance(v, dict) for v in value)
    if not nested and not listed:
        return json.dumps(value)
    pad = "\n" + " " * (depth + 1)
    if nested:
        parts = [f"{json.dumps(key)}: {lines(item, depth + 1)}" for key, item in value.items()]
    else:
        parts = [lines(item, depth + 1) for item in value]
    left, right = "{}" if nested else "[]"
    return left + pad + ("," + pad).join(parts) + "\n" + " " * depth + right


class Recorder:
    """One worker's dump: collects captures, and writes both files after each step, the manifest last."""

    def __init__(self, settings, adapter, engine, version):
        self.settings, self.adapter, self.engine, self.version = settings, adapter, engine, version
        self.captures, self.arrays, self.weights = [], {}, {}
        self.manifest = {}
        self.folder = settings.folder
        self.done = {}
        self.said = set()
        self.begun = False

    def once(self, key, message):
        if key not in self.said:
            self.said.add(key)
            say(message)

    def wanted(self, layer, kind):
        return self.done.get((layer, kind), 0) < self.settings.steps

    def any_wanted(self, layer, forms):
        """Whether a step with rows of these forms could add something; asked before lengths are read from the GPU."""
        kinds = [k for f in forms for k in (("fused", "fused with context") if f == "fused" else (f,))]
        return any(self.wanted(layer, kind) for kind in kinds)

    def admit(self, step, geometry, item=2):
        """Says how large the step will be before anything is copied; False where it is more than allowed."""
        g = {name: geometry.get(name) or 0 for name in ("hidden", "q_rank", "latent", "rope", "nope", "value")}
        heads = geometry.get("local_heads") or geometry.get("heads") or 0
        total = tokens = keys = 0
        for part in step.parts:
            new = sum(r.taken for r in part.requests)
            held = sum(r.keys for r in part.requests)
            width = 3 * g["hidden"] + 2 * g["q_rank"] + 2 * (g["latent"] + g["rope"])
            width += heads * (2 * (g["nope"] + g["rope"]) + 2 * g["value"])
            per_key = g["latent"] + g["rope"]
            if part.form != "fused":
                width += heads * (2 * g["latent"] + g["rope"])
            else:
                per_key += heads * (g["nope"] + g["rope"] + g["value"])
            tokens, keys = tokens + new, keys + held
            total += item * (new * width + held * per_key)
        size = total / 1e6
        say(
            f"layer {step.layer}: {tokens} new tokens over {keys} keys, about {size:.1f} MB for this rank, into {self.folder}"
        )
        if size > self.settings.megabytes or keys > self.settings.keys:
            say(
                f"layer {step.layer}: not dumped, more than MLA_CHECK_MAX_MB={self.settings.megabytes} or "
                f"MLA_CHECK_KEYS={self.settings.keys} allows: send a shorter request, or raise them and start again"
            )
            return False
        return True

    def add_weight(self, layer, name, tensor, axes, place):
        if (
            not torch.is_tensor(tensor)
            or tensor.numel() == 0
            or not tensor.dtype.is_floating_point
            or tensor.element_size() == 1
        ):
            self.manifest.setdefault("notes", {})[f"weight {layer}/{name}"] = (
                f"not dumped: {place} is quantised or absent"
            )
            return
        array = f"L{layer}.{name}"
        self.arrays[array] = tensor.detach().contiguous().cpu().clone()
        self.weights[f"{layer}/{name}"] = {"array": array, "axes": axes, "fired": 1, **provenance(tensor, place)}

    def close(self, step):
        """Writes a step. Kinds that were asked for often enough are left out, so that a busy server stops soon."""
        step.parts = [p for p in step.parts if p.requests and self.wanted(step.layer, p.kind())]
        if not step.parts:
            return
        number = 1 + max((c["step"] for c in self.captures if c["layer"] == step.layer), default=-1)
        step.write(self, number)
        if step.routing is not None:
            self.manifest.setdefault("notes", {})[f"routing of layer {step.layer}, step {number}"] = step.routing
        for part in step.parts:
            key = (step.layer, part.kind())
            self.done[key] = self.done.get(key, 0) + 1
        self.save()

    def save(self):
        rank = self.manifest.get("rank", 0)
        os.makedirs(self.folder, exist_ok=True)
        base = os.path.join(self.folder, f"rank-{rank}")
        if not self.begun and os.path.exists(base + ".json"):
            self.once("old", f"{base}.json is of an earlier run and is replaced")
            os.remove(base + ".json")
        self.begun = True
        write_safetensors(base + ".safetensors", self.arrays)
        manifest = {
            "schema": SCHEMA,
            "engine": {"backend": self.engine, "version": self.version},
            "adapter": self.adapter,
            **self.manifest,
            "weights": self.weights,
            "captures": self.captures,
        }
        _replace(base + ".json", [lines(manifest).encode()])
        zero = [f"{c['form']}/{n}" for c in self.captures for n, e in c["tensors"].items() if e["fired"] == 0]
        say(f"wrote {base}.json: {len(self.captures)} captures" + (f"; never fired: {', '.join(zero)}" if zero else ""))
