"""Looks every hooked place up in an engine's real sources, without importing them:

pip download --no-deps vllm==0.33.0 && unzip -q vllm-*.whl '*.py' -d sources
python check_sources.py vllm sources
"""

import ast
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]


class Sources:
    def __init__(self, root):
        self.root, self.trees = root, {}

    def tree(self, module):
        if module not in self.trees:
            base = os.path.join(self.root, *module.split("."))
            path = base + ".py" if os.path.exists(base + ".py") else os.path.join(base, "__init__.py")
            with open(path) as file:
                self.trees[module] = ast.parse(file.read())
        return self.trees[module]

    def imported(self, module, name):
        """(module, name) that a name may come from, stars included."""
        package = os.path.isdir(os.path.join(self.root, *module.split(".")))
        for node in ast.walk(self.tree(module)):
            if isinstance(node, ast.ImportFrom) and node.module:
                source = node.module
                if node.level:
                    up = module.split(".")
                    up = up[: len(up) - node.level + package]
                    source = ".".join([*up, node.module])
                for alias in node.names:
                    if alias.name == "*" or (alias.asname or alias.name) == name:
                        yield source, name if alias.name == "*" else alias.name

    def find(self, module, names):
        """The node of a function or class, through imports and base classes."""
        scope = self.tree(module).body
        for node in scope:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == names[0]:
                if len(names) == 1:
                    return node
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef) and inner.name == names[1]:
                        return inner
                for parent in node.bases:
                    parent = parent.value if isinstance(parent, ast.Subscript) else parent
                    if isinstance(parent, ast.Name):
                        found = self.find(module, [parent.id, names[1]])
                        if found is not None:
                            return found
                return None
        for source, name in self.imported(module, names[0]):
            try:
                found = self.find(source, [name, *names[1:]])
            except OSError:  # another package
                continue
            if found is not None:
                return found
        return None


def missing(places, root):
    sources, found = Sources(root), []
    for path, parameters in places:
        module, _, names = path.partition(":")
        node = sources.find(module, names.split("."))
        if node is None:
            found.append(f"{path}: gone")
            continue
        if parameters is None:
            continue
        have = [a.arg for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
        at = [have.index(p) if p in have else -1 for p in parameters]
        if -1 in at or at != sorted(at):
            found.append(f"{path}: takes {have}, expected {parameters}")
    return found


def places_of(engine):
    adapter = __import__(f"mla_check_{engine}")
    places = list(adapter.PLACES.values())
    if engine == "vllm":
        places += [(path, ["vllm_config", "prefix"]) for path in adapter.DECODERS]
        places += [adapter.FUSED_NORM, ("vllm.compilation.breakable_cudagraph:eager_break_during_capture", None)]
        places += [("vllm.distributed:get_tensor_model_parallel_rank", None)]
    else:
        places += [("sglang.srt.plugins.hook_registry:HookRegistry.register", ["target", "hook", "hook_type"])]
        where = "sglang.srt.model_executor.forward_context:"
        places += [(where + "get_token_to_kv_pool", None), (where + "get_req_to_token_pool", None)]
        places += [
            ("sglang.srt.runtime_context:get_parallel", None),
            (adapter.CLASS + "._fuse_rope_for_trtllm_mla", None),
        ]
    return places


if __name__ == "__main__":
    places = places_of(sys.argv[1])
    found = missing(places, sys.argv[2])
    print("\n".join(found) or f"{len(places)} places of {sys.argv[1]}: all there")
    sys.exit(bool(found))
