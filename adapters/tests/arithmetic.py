"""MLA's arithmetic for the stand-ins: bf16 values, f32 sums, one rounding at each store."""

import types

import torch
from torch import nn


class Geometry:
    def __init__(self, heads=4, hidden=32, q_rank=24, latent=16, rope=8, nope=12, value=10, eps=1e-5, base=10000.0):
        self.heads, self.hidden, self.q_rank, self.latent = heads, hidden, q_rank, latent
        self.rope, self.nope, self.value, self.eps, self.base = rope, nope, value, eps, base
        self.scale = (nope + rope) ** -0.5


def random_weights(g, seed=1):
    """Weights of a layer by our names, kv_b in rows [nope | value] of each head."""
    made = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return (torch.randn(*shape, generator=made) / shape[-1] ** 0.5).to(torch.bfloat16)

    def gain(n):
        return (1 + 0.1 * torch.randn(n, generator=made)).to(torch.bfloat16)

    return {
        "g_attn": gain(g.hidden),
        "g_q": gain(g.q_rank),
        "g_kv": gain(g.latent),
        "w_q_a": draw(g.q_rank, g.hidden),
        "w_q_b": draw(g.heads * (g.nope + g.rope), g.q_rank),
        "w_kv_a": draw(g.latent + g.rope, g.hidden),
        "kv_b": draw(g.heads * (g.nope + g.value), g.latent),
        "w_o": draw(g.hidden, g.heads * g.value),
    }


def matmul(x, weight):
    return (x.float() @ weight.float().T).to(x.dtype)


def bmm(a, b):
    return torch.bmm(a.float(), b.float()).to(a.dtype)


left_over = None  # a function of a shape, for memory that looks as if another tensor had been there


def fresh(shape, dtype):
    """Memory that nobody has written, made recognisable."""
    return torch.full(tuple(shape), 7.0, dtype=dtype) if left_over is None else left_over(tuple(shape)).to(dtype)


class Linear(nn.Module):
    """Returns (result, bias) as the engines' do. `group`, where given, adds what the other ranks computed."""

    def __init__(self, weight, reduce_results=True, group=None):
        super().__init__()
        self.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        self.reduce_results, self.group = reduce_results, group

    def forward(self, input_):
        out = matmul(input_, self.weight)
        if self.group is not None and self.reduce_results:
            out = self.group.sum(out)
        return out, None


class Group:
    """Sums of ranks that run one after another: a first pass over all ranks records, later passes add."""

    def __init__(self):
        self.recording, self.seen, self.calls, self.rank = True, {}, 0, 0

    def start(self, rank, recording):
        self.rank, self.recording, self.calls = rank, recording, 0

    def sum(self, partial):
        call, self.calls = self.calls, self.calls + 1
        if self.recording:
            self.seen[(call, self.rank)] = partial.clone()
            return partial
        ranks = sorted(rank for at, rank in self.seen if at == call)
        return sum(self.seen[(call, rank)].float() for rank in ranks).to(partial.dtype)


def rms(x, norm, two_roundings=True):
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    if two_roundings:
        return scaled.to(x.dtype) * norm.weight
    return (scaled * norm.weight.float()).to(x.dtype)


class Norm(nn.Module):
    def __init__(self, weight, eps):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x, residual=None):
        if residual is None:
            return rms(x, self)
        residual = (x.float() + residual.float()).to(x.dtype)
        return rms(residual, self), residual


class Rotary(nn.Module):
    """Rotates adjacent pairs in place. The table is in f32 or in the model's dtype."""

    is_neox_style = False
    use_flashinfer = False

    def __init__(self, rope, base, table=torch.float32, rows=128):
        super().__init__()
        angle = torch.arange(rows).float()[:, None] * (1.0 / base ** (torch.arange(0, rope, 2).float() / rope))
        self.register_buffer("cos_sin_cache", torch.cat([angle.cos(), angle.sin()], dim=-1).to(table))

    def rotated(self, positions, x):
        cos, sin = self.cos_sin_cache[positions].float().chunk(2, dim=-1)
        shape = [x.shape[0]] + [1] * (x.dim() - 2) + [-1]
        cos, sin = cos.view(shape), sin.view(shape)
        even, odd = x[..., 0::2].float(), x[..., 1::2].float()
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)

    def forward(self, positions, query, key):
        query.copy_(self.rotated(positions, query))
        key.copy_(self.rotated(positions, key))
        return query, key


def attend(q, k, v, scale, causal):
    """q [t, h, d] at the end of the keys, k [s, h, d], v [s, h, e] -> o [t, h, e] in q's dtype, lse [h, t] in f32."""
    scores = torch.einsum("thd,shd->hts", q.float(), k.float()) * scale
    if causal:
        t, s = scores.shape[1:]
        hidden = torch.arange(s)[None, :] > torch.arange(t)[:, None] + s - t
        scores = scores.masked_fill(hidden, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    p = (scores - top).exp()
    total = p.sum(-1, keepdim=True)
    out = torch.einsum("hts,she->hte", p.to(v.dtype).float(), v.float()) / total
    return out.transpose(0, 1).to(q.dtype), (top + total.log()).squeeze(-1)


def attend_packed(q, k, v, new, keys, scale, causal):
    outs, lses, row, key = [], [], 0, 0
    for n, s in zip(new, keys):
        if s == 0:
            outs.append(torch.zeros(n, q.shape[1], v.shape[-1], dtype=q.dtype))
            lses.append(torch.full((q.shape[1], n), float("-inf")))
        else:
            o, l = attend(q[row : row + n], k[key : key + s], v[key : key + s], scale, causal)
            outs.append(o)
            lses.append(l)
        row, key = row + n, key + s
    return torch.cat(outs), torch.cat(lses, dim=1)


def merge(a, a_lse, b, b_lse):
    """Two partial results by their natural lse [h, t]; weights in f32, the result rounded once."""
    top = torch.maximum(a_lse, b_lse)
    wa, wb = (a_lse - top).exp(), (b_lse - top).exp()
    out = (a.float() * wa.T[..., None] + b.float() * wb.T[..., None]) / (wa + wb).T[..., None]
    return out.to(b.dtype)


def shard(weight, rank, ranks, axis=0):
    return weight.chunk(ranks, dim=axis)[rank]


def modules(g, weights, rank, ranks, reduce=True, table=torch.float32, stacked="fused_qkv_a_proj"):
    """A rank's modules by the engines' names."""
    group = weights.get("group")
    if g.q_rank is None:
        plain = {"q_proj": Linear(shard(weights["w_q"], rank, ranks)), "kv_a_proj_with_mqa": Linear(weights["w_kv_a"])}
        first = {stacked: None, "q_a_layernorm": None, "q_b_proj": None, **plain}
    else:
        first = {
            stacked: Linear(torch.cat([weights["w_q_a"], weights["w_kv_a"]])),
            "kv_a_proj_with_mqa": None,
            "q_a_layernorm": Norm(weights["g_q"], g.eps),
            "q_b_proj": Linear(shard(weights["w_q_b"], rank, ranks)),
            "q_proj": None,
        }
    made = {
        **first,
        "kv_a_layernorm": Norm(weights["g_kv"], g.eps),
        "kv_b_proj": Linear(shard(weights["kv_b"], rank, ranks)),
        "rotary_emb": Rotary(g.rope, g.base, weights.get("table", table)),
        "o_proj": Linear(shard(weights["w_o"], rank, ranks, axis=1), reduce, group),
        "indexer": None,
    }
    return types.SimpleNamespace(**made)
