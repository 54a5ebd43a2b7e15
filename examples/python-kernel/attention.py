"""A plain attention that fills in the outputs of a case: put your own kernel in place of `attend`.

python attention.py DIR                 # PyTorch, or numpy where it is not installed
python attention.py DIR --drop-last-key # a mistake, to see what mla-check says about it
"""

import sys

import numpy as np
from mla_case import Case, torch


def attend(q, k, v, scale, drop_last_key=False):
    """Causal attention: q [t, head, d] are the last t of s tokens, k [s, head, d], v [s, head, e], everything in f32.
    Returns o [t, head, e] and the natural logarithm of the sum of exponentials, lse [t, head]."""
    t, s = q.shape[0], k.shape[0]
    newest = np.arange(t)[:, None] + s - t
    if drop_last_key:
        newest = np.maximum(newest - 1, 0)
    later = np.arange(s)[None, :] > newest
    if torch is not None:
        scores = torch.einsum("thd,shd->ths", q, k) * scale
        scores = scores.masked_fill(torch.from_numpy(later)[:, None, :], float("-inf"))
        lse = torch.logsumexp(scores, dim=-1)
        return torch.einsum("ths,she->the", torch.exp(scores - lse[..., None]), v), lse
    scores = np.einsum("thd,shd->ths", q, k) * np.float32(scale)
    scores = np.where(later[:, None, :], np.float32("-inf"), scores)
    top = scores.max(axis=-1)
    lse = top + np.log(np.exp(scores - top[..., None]).sum(axis=-1))
    return np.einsum("ths,she->the", np.exp(scores - lse[..., None]), v), lse


def wide(array):
    return array.float() if torch is not None else array.astype(np.float32)


def join(parts, axis=0):
    return torch.cat(parts, dim=axis) if torch is not None else np.concatenate(parts, axis=axis)


def heads(rows, count):
    """[s, d] shared by all heads -> [s, count, d]."""
    return rows[:, None].expand(-1, count, -1) if torch is not None else np.repeat(rows[:, None], count, axis=1)


def run(case, drop_last_key=False):
    info, outs, lses, row, key = case.info, [], [], 0, 0
    absorbed = info["form"] == "absorbed"
    if absorbed:
        q = join([wide(case.load("q_latent")), wide(case.load("q_pe"))], axis=-1)
        latent = case.load("q_latent").shape[-1]
        cache, table = wide(case.load("cache")), case.load("block_table")
    else:
        q, keys, values = (wide(case.load(name)) for name in ("q", "k", "v"))
    for index, text in enumerate(info["requests"]):
        context, new = (int(part) for part in text.split("+"))
        total = context + new
        if absorbed:  # gather the request's rows through its pages
            at = np.arange(total)
            pages = np.asarray(table[index])[at // info["page_size"]].astype(np.int64)
            k = heads(cache[pages, at % info["page_size"]], q.shape[1])
            v = k[..., :latent]
        else:
            k, v = keys[key : key + total], values[key : key + total]
        out, lse = attend(q[row : row + new], k, v, info["scale"], drop_last_key)
        outs.append(out)
        lses.append(lse)
        row, key = row + new, key + total
    out, lse = join(outs), join(lses)
    results = {"o_latent" if absorbed else "attn_out": out, "lse": lse}
    if absorbed and "attn_out" in case.wanted:
        up = wide(case.load("w_uv"))
        einsum = torch.einsum if torch is not None else np.einsum
        # The latent output is rounded before it is multiplied, as between two kernels.
        results["attn_out"] = einsum("thl,hvl->thv", rounded(out, case.wanted["o_latent"]["dtype"]), up)
    for name in case.wanted:
        if name not in results:
            print(f"{name}: not computed here")
            continue
        entry = case.wanted[name]
        array = results[name].T if name == "lse" and entry["axes"][0] == "head" else results[name]
        case.save(name, array.reshape(entry["shape"]))
        print(f"{name}: {entry['file']}")


def rounded(array, dtype):
    if torch is not None:
        return array.to({"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype]).float()
    if dtype != "bf16":
        return array.astype({"f16": np.float16, "f32": np.float32}[dtype]).astype(np.float32)
    word = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    return ((word + 0x7FFF + (word >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


if __name__ == "__main__":
    folders = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    if len(folders) != 1:
        sys.exit(__doc__)
    run(Case(folders[0]), "--drop-last-key" in sys.argv)
