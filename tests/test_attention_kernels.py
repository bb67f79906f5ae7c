"The decode attention kernel in the emulator against the array operations."
import dataclasses, itertools, math
from dataclasses import dataclass
import mlx.core as mx
import numpy as np
import pytest
from emulated import emulated
from emulator import DataRace, DivergentBarrier, EmulatorError, OutOfBounds, UnwrittenOutput
from veloxquant_mlx.engine.attention import attend_part, merge_parts
from veloxquant_mlx.kernels import attention
from veloxquant_mlx.kernels.attention import Side, decode_attention
from veloxquant_mlx.kernels.runtime import Kernel, use_backend
from veloxquant_mlx.kernels.snippets import exact_rows, per_channel, per_token
from veloxquant_mlx.ops.affine import dequantize_per_channel, dequantize_per_token, quantize_per_channel, quantize_per_token

layouts = pytest.mark.parametrize('layout', ['cuda', 'metal'])

# --- one side of a cache

CODECS = dict(token=(quantize_per_token, dequantize_per_token, per_token), channel=(quantize_per_channel, dequantize_per_channel, per_channel))

def draw(rng, *shape, dtype=mx.float16): return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)

def side(x, # (B, H, T, D)
    kind='token', # or 'channel', 'exact'
    n_bits=4, group_size=32,
    origin=0, # first rows that stay exact
    n=None, # packed rows, None: all others
    slack=True # buffers end on whole tiles, behind rows of a forgotten past
):
    "Where rows lie, and the float32 rows that are read"
    B, H, T, D = x.shape
    n = T-origin if n is None else n
    sink, rows, tail = (mx.contiguous(x[:, :, a:b]) for a,b in ((0, origin), (origin, origin+n), (origin+n, T)))
    exact = dict(origin=origin, n_packed=n, sink=sink if origin else None, tail=tail)
    if not n: return Side(D, **exact), x.astype(mx.float32)
    if slack: rows = mx.concatenate([rows, 50*mx.ones((B, H, -n%math.lcm(16, group_size)+group_size, D), x.dtype)*mx.arange(D)], axis=2).astype(x.dtype)
    if kind=='exact': arrays, decoded, snippet = (rows,), rows.astype(mx.float32), exact_rows(D)
    else:
        quantize, dequantize, maker = CODECS[kind]
        arrays = tuple(map(mx.contiguous, quantize(rows, n_bits, group_size)))
        decoded, snippet = dequantize(*arrays, n_bits, group_size, D), maker(n_bits, group_size, D)
    read = mx.concatenate([sink.astype(mx.float32), decoded[:, :, :n], tail.astype(mx.float32)], axis=2)
    return Side(D, snippet, arrays, **exact), read

def reference(q, keys, values, scale, mask=None, sinks=None, lo=0, hi=None):
    "Output and log-sum-exp in float32"
    T, L = keys.shape[2], q.shape[2]
    hi = hi or T
    if mask is None: mask = mx.arange(lo, hi)[None] <= mx.arange(hi-L, hi)[:, None]
    out, lse = attend_part(q, keys[:, :, lo:hi], values[:, :, lo:hi], scale, mask)
    if sinks is None: return out, lse
    return merge_parts([(out, lse)], sinks), mx.logaddexp(lse, sinks[:, None, None])

def error(got, want):
    "Of vectors on the last axis, relative to the typical one"
    got, want = (np.array(o.astype(mx.float32)).astype(np.float64) for o in (got, want))
    norm = lambda o: np.sqrt((o**2).sum(-1))
    return (norm(got-want)/np.maximum(norm(want), np.sqrt((norm(want)**2).mean()))).max()

def assert_attends(got, want, bound=2e-3, lse=2e-3):
    assert np.isfinite(np.array(got[0].astype(mx.float32))).all()
    assert error(got[0], want[0]) < bound
    assert np.abs(np.array(got[1]-want[1])).max() < lse

# --- combinations

FACTORS = dict(
    key=['token', 'channel', 'exact'], key_bits=[4, 2, 3, 8, 1, 5, 6, 7], key_group=[32, 16, 64, 128, 8, 48],
    value=['token', 'channel', 'exact'], value_bits=[4, 2, 3, 8, 1, 5, 6, 7], value_group=[32, 16, 64, 128, 8, 24],
    dim=[128, 64, 80, 96, 256], value_dim=[128, 64, 80, 96, 256], n_rep=[1, 3, 4, 8], B=[1, 2], H=[1, 2, 3], T=[113, 482, 61, 17, 1],
    L=[1, 2, 3, 4, 8, 33], origin=[0, 1, 5, 16], packed=[(1., 1.), (.9, .5), (.3, .8), (0., 1.), (1., .2), (.6, 0.)], part=[False, True],
    mask=[None, 'bool', 'heads', 'padding', 'additive'], sinks=[False, True], scores=[False, True], n_groups=[528, 1, 5],
    dtype=[mx.float16, mx.bfloat16, mx.float32], exact_dtype=[mx.float16, mx.bfloat16, mx.float32], out=[mx.float32, mx.float16])

Case = dataclasses.make_dataclass('Case', FACTORS, frozen=True)

def pairs(case): return {((f, str(a)), (g, str(b))) for (f,a),(g,b) in itertools.combinations(vars(case).items(), 2)}

def cover(n, tries=60, seed=0):
    "n combinations, each of which brings as many new pairs of values as it can"
    rng, seen, out = np.random.default_rng(seed), set(), []
    for _ in range(n):
        found = [Case(**{k: v[rng.integers(len(v))] for k,v in FACTORS.items()}) for _ in range(tries)]
        out.append(max(found, key=lambda c: len(pairs(c)-seen)))
        seen |= pairs(out[-1])
    return out

CASES = cover(44)

def test_combinations_cover_all_values():
    for k,v in FACTORS.items(): assert {str(getattr(c, k)) for c in CASES}=={str(o) for o in v}, k

def make_mask(kind, rng, B, H_q, L, n):
    "Masks of every form; the last position stays visible, so that no row is empty"
    if kind is None: return None
    if kind=='padding': # each batch row begins later
        return (mx.arange(n) >= mx.minimum(mx.array([3, 40][:B]), n-1)[:, None])[:, None, None]
    shape = dict(bool=(L, n), heads=(B, H_q, L, n), additive=(1, 1, L, n))[kind]
    visible = rng.random(shape)<.7
    visible[..., -1] = True
    if kind=='bool': return mx.array(visible)
    return mx.array(np.where(visible, rng.standard_normal(shape), -np.inf).astype(np.float32))

def n_packed(kind, group_size, T, origin, share):
    "Groups of tokens are whole"
    n = round(share*max(0, T-origin))
    return n//group_size*group_size if kind=='channel' else n

@layouts
@pytest.mark.parametrize('i', range(len(CASES)))
def test_combination(i, layout, monkeypatch):
    c, rng = CASES[i], np.random.default_rng(i)
    monkeypatch.setattr(attention, 'N_GROUPS', c.n_groups)
    attention.plan.cache_clear()
    B, H, H_q, T, L = c.B, c.H, c.H*c.n_rep, c.T, min(c.L, c.T)
    origin, scale = min(c.origin, T), c.dim**-.5
    sides, reads = [], []
    for kind,bits,g,dim,share in ((c.key, c.key_bits, c.key_group, c.dim, c.packed[0]), (c.value, c.value_bits, c.value_group, c.value_dim, c.packed[1])):
        if kind=='channel': g = max(16, g//16*16)
        x = draw(rng, B, H, T, dim, dtype=c.exact_dtype)+mx.array(rng.standard_normal(dim), c.exact_dtype)
        s, read = side(x, kind, bits, g, origin, n_packed(kind, g, T, origin, share))
        sides.append(s)
        reads.append(read)
    q = draw(rng, B, H_q, L, c.dim, dtype=c.dtype)
    hi = T-T//7 if c.part else T
    lo = T//5 if c.part and T//5+L<=hi else 0
    L = min(L, hi)
    q = mx.contiguous(q[:, :, :L])
    mask, sinks = make_mask(c.mask, rng, B, H_q, L, hi-lo), mx.array(rng.standard_normal(H_q)*3, mx.float32) if c.sinks else None
    scores = c.scores and (L==1 or mask is not None) # the causal rule leaves invisible scores unwritten
    with use_backend(emulated(layout, order='forward' if i%2 else i)):
        got = decode_attention(q, *sides, scale, mask, sinks, lo, hi if c.part else None, dtype=c.out, with_scores=scores)
    want = reference(q, *reads, scale, mask, sinks, lo, hi)
    assert got[0].dtype==c.out and got[0].shape==(B, H_q, L, c.value_dim) and got[1].shape==(B, H_q, L, 1)
    assert_attends(got, want)
    if not scores: return
    n = hi-lo
    plain = (q.astype(mx.float32).reshape(B, H, -1, c.dim)@mx.swapaxes(reads[0][:, :, lo:hi], -1, -2)).reshape(B, H_q, L, n)*scale
    if mask is not None: plain = mx.where(mask, plain, -1e30) if mask.dtype==mx.bool_ else plain+mask
    seen = np.broadcast_to(np.array(plain)>-1e29, got[2].shape)
    assert np.abs(np.array(got[2])-np.array(plain))[seen].max() < 4e-3
    assert np.array(got[2])[~seen].max(initial=-2e30) < -9e29
    mass = mx.exp(got[2]-got[1]).sum(-1)
    if sinks is not None: mass += mx.exp(sinks[:, None]-got[1][..., 0])
    assert np.abs(np.array(mass)-1).max() < 1e-3
