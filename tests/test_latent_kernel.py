"The kernel that scores latents, in the emulator, against array operations."
import mlx.core as mx
import numpy as np
import pytest
from emulated import emulated
from emulator import DataRace
from test_attention_kernels import assert_attends, draw, layouts, make_mask, side
from veloxquant_mlx.engine.attention import attend_part, merge_parts
from veloxquant_mlx.kernels import latent
from veloxquant_mlx.kernels.latent import LatentKeys, latent_decode_attention, latent_scores
from veloxquant_mlx.kernels.runtime import use_backend
from veloxquant_mlx.kernels.snippets import per_channel, per_token
from veloxquant_mlx.ops.affine import dequantize_per_channel, dequantize_per_token, quantize_per_channel, quantize_per_token
from veloxquant_mlx.ops.rope import RopeParams, apply_rope

def keys(rng, B=1, H=2, G=None, T=113, n_tail=5, D=64, R=40, r=None, kind='token', n_bits=4, group=8, rope=True, origin=0, shared_basis=False, dtype=mx.float16):
    "Latents and a tail, and the float32 keys that are meant, from `origin` on"
    G, r, n = G or H, r or R, T-n_tail
    capacity = -(-n//32)*32+32
    latents = draw(rng, B, G, capacity, R, dtype=mx.float32)*mx.exp(-mx.arange(R)/16)
    latents = mx.where(mx.arange(R)<r, latents, 0)
    quantize, dequantize, maker = dict(token=(quantize_per_token, dequantize_per_token, per_token), channel=(quantize_per_channel, dequantize_per_channel, per_channel))[kind]
    packed = tuple(map(mx.contiguous, quantize(latents, n_bits, group)))
    basis, mean = (draw(rng, 1 if shared_basis else B, H, D, r)*.3).astype(mx.float16), draw(rng, 1 if shared_basis else B, H, D, dtype=mx.float32)
    rope = RopeParams(D, base=500.) if rope is True else rope or None
    rows = mx.repeat(dequantize(*packed, n_bits, group, R)[:, :, :n, :r], H//G, axis=1)@mx.swapaxes(basis.astype(mx.float32), -1, -2)+mean[:, :, None]
    tail = draw(rng, B, H, n_tail, D, dtype=dtype) if n_tail else None
    read = apply_rope(rows, rope, origin)
    if n_tail: read = mx.concatenate([read, tail.astype(mx.float32)], axis=2)
    return LatentKeys(maker(n_bits, group, R), packed, n, basis, mean, R, origin, tail, rope, H//G), read

CASES = dict(plain={}, no_rope=dict(rope=False), channel=dict(kind='channel', group=16, n_bits=2), groups=dict(H=4, G=2), one_group=dict(H=3, G=1, rope=False), wide=dict(D=128, R=128, T=200), no_tail=dict(n_tail=0, T=61),
    odd=dict(D=80, R=24, r=19, group=24), odd_latents=dict(D=96, R=24, r=21, rope=False, group=24), batch=dict(B=2, n_bits=3), shared=dict(B=2, shared_basis=True), large=dict(D=256, R=64, group=32), eight=dict(R=8, n_bits=8, T=40, n_tail=17), only_tail=dict(T=9, n_tail=9))
QUERIES = dict(one=dict(n_rep=2), four=dict(n_rep=1, L=4), many=dict(n_rep=5, L=2), mask=dict(n_rep=2, L=2, mask='bool', sinks=True), additive=dict(n_rep=3, mask='additive', lo=7, sinks=True), part=dict(n_rep=2, L=2, lo=21, hi=-3), padded=dict(n_rep=1, mask='padding'))

def compare(case, query, layout, seed=0):
    rng = np.random.default_rng(seed)
    k, read = keys(rng, **case)
    B, H, T, D = read.shape
    n_rep, L, lo = query.get('n_rep', 1), query.get('L', 1), query.get('lo', 0)
    hi = T+query.get('hi', 0)
    if hi-lo<L: return
    q = draw(rng, B, H*n_rep, L, D)
    values, v = side(draw(rng, B, H, T, 64), 'token', 4, 32, 0, T//2)
    mask, sinks = make_mask(query.get('mask'), rng, B, H*n_rep, L, hi-lo), draw(rng, H*n_rep, dtype=mx.float32) if query.get('sinks') else None
    with use_backend(emulated(layout)): got = latent_decode_attention(q, k, values, D**-.5, mask, sinks, lo, hi)
    meant = mask if mask is not None else mx.arange(lo, hi)[None]<=mx.arange(hi-L, hi)[:, None]
    out, lse = attend_part(q, read[:, :, lo:hi], v[:, :, lo:hi], D**-.5, meant)
    if sinks is not None: out, lse = merge_parts([(out, lse)], sinks), mx.logaddexp(lse, sinks[:, None, None])
    assert_attends(got, (out, lse), 3e-3, 4e-3)

@pytest.mark.parametrize('layout,name', [(l, n) for i,n in enumerate(CASES) for l in (('cuda', 'metal') if i<2 else (('cuda', 'metal')[i%2],))])
def test_keys(layout, name): compare(CASES[name], QUERIES[list(QUERIES)[list(CASES).index(name)%len(QUERIES)]], layout)

@pytest.mark.parametrize('name', QUERIES)
@pytest.mark.parametrize('rope', [True, False])
def test_queries(name, rope): compare(dict(rope=rope), QUERIES[name], 'cuda' if rope else 'metal', 1)

@layouts
def test_rows_behind_a_freed_front(layout):
    "Positions go on where rows were freed; the angle is that of the position"
    rng = np.random.default_rng(2)
    k, read = keys(rng, T=70, origin=512)
    q = draw(rng, 1, 4, 1, 64)
    with use_backend(emulated(layout)): got = latent_scores(q, k, .125, lo=515)
    want = (q.astype(mx.float32)*.125).reshape(1, 2, 2, 64)@mx.swapaxes(read[:, :, 3:], -1, -2)
    assert np.abs(np.array(got.reshape(want.shape)-want)).max()<1e-2

def test_a_missing_barrier_is_found(monkeypatch):
    "The basis in shared memory"
    monkeypatch.setattr(latent, 'LATENT_SCORES', latent.LATENT_SCORES.replace('threadgroup_barrier(mem_flags::mem_threadgroup);', ''))
    latent.latent_scores_kernel.cache_clear()
    k, read = keys(np.random.default_rng(0))
    with use_backend(emulated()), pytest.raises(DataRace): mx.eval(latent_scores(draw(np.random.default_rng(1), 1, 4, 1, 64), k, .125))
    latent.latent_scores_kernel.cache_clear()
