"The kernels of eviction in the emulator against array operations, at sizes that are multiples of nothing."
import mlx.core as mx
import numpy as np
import pytest
from emulated import emulated
from veloxquant_mlx.engine.hook import install
from veloxquant_mlx.engine.registry import methods
from veloxquant_mlx.kernels.evict import *
from veloxquant_mlx.kernels.runtime import use_backend
from veloxquant_mlx.ops.select import *

@pytest.fixture(autouse=True)
def hook(): install() # other tests of the process may have taken it away

def draw(seed, *shapes): return [mx.array(np.random.default_rng([seed, i]).standard_normal(s).astype(np.float32)) for i,s in enumerate(shapes)]

SUMS = [ # B, H, n_rep, L, n, D, dtype, causal, sinks, weights
    (1, 2, 2, 27, 61, 64, mx.float16, True, False, False), (2, 1, 3, 61, 61, 32, mx.bfloat16, True, True, True), (1, 1, 1, 1, 113, 128, mx.float16, True, False, True),
    (1, 2, 4, 9, 150, 48, mx.float16, False, True, False), (1, 1, 2, 130, 131, 80, mx.bfloat16, True, False, True), (2, 2, 1, 8, 16, 16, mx.float16, True, True, False)]

@pytest.mark.parametrize('layout', ['cuda', 'metal'])
@pytest.mark.parametrize('B,H,n_rep,L,n,D,dtype,causal,with_sinks,weighted', SUMS, ids=str)
def test_attention_sums(B, H, n_rep, L, n, D, dtype, causal, with_sinks, weighted, layout):
    q, k, sinks, w = draw(0, (B,H*n_rep,L,D), (B,H,n,D), (H*n_rep,), (B,L))
    q, k, sinks, w = (2*q).astype(dtype), k.astype(dtype), sinks if with_sinks else None, mx.abs(w) if weighted else None
    assert sums_gap(q, k) is None
    want = column_sums(q, k, D**-.5, 'causal' if causal else None, sinks, w)
    with use_backend(emulated(layout)): got = attention_sums(q, k, D**-.5, causal, sinks, w)
    assert got.shape==(B,H,n) and mx.abs(got-want).max()<2e-3*(1+want.max())
    if not with_sinks and not weighted: assert mx.abs(got.sum(axis=-1)-L).max()<1e-2

def test_large_numbers_do_not_overflow():
    "bfloat16 reaches beyond half precision: such numbers count as its largest"
    q, k = (1e5*o for o in draw(1, (1,1,9,16), (1,1,20,16)))
    with use_backend(emulated()): assert mx.isfinite(attention_sums(q.astype(mx.bfloat16), k.astype(mx.bfloat16), 1e-9)).all()

@pytest.mark.parametrize('B,H,n_rep,n,with_sinks', [(1,2,3,517,False), (2,1,1,33,True), (1,3,2,1,False), (2,2,4,1000,True)])
def test_step_mass(B, H, n_rep, n, with_sinks):
    x, sinks = draw(2, (B,H*n_rep,n), (H*n_rep,))
    sinks = sinks if with_sinks else None
    x = mx.where(mx.arange(n)%7==6, -3e38, 4*x) # rows that are not seen
    want = normalized(x.reshape(B,H,n_rep,1,n), sinks)[..., 0, :].mean(axis=2)
    with use_backend(emulated()): got = step_mass(x, H, sinks)
    assert mx.abs(got-want).max()<1e-5

@pytest.mark.parametrize('shared', [False, True], ids=['own','shared'])
@pytest.mark.parametrize('n', [2, 61, 257, 900])
def test_slot_step(n, shared):
    "Ties, sinks, newest rows, padding, infinite scores"
    rng = np.random.default_rng(n)
    for trial in range(4):
        B, G = 2, 3
        score = mx.array(rng.choice([0., .5, 1., np.inf, -np.inf], (B,G,n)).astype(np.float32))
        pos = np.stack([rng.permutation(3*n)[:n] for _ in range(B*(1 if shared else G))]).reshape(B,-1,n)-(5 if trial==3 else 0)
        pos = mx.array(pos.astype(np.int32))
        s, newest = trial, 3*n-5-trial
        safe = (pos>=0) & ((pos<s) | (pos>=newest))
        if safe.all(axis=-1).any(): continue
        want = lowest(mx.where(pos<0, -mx.inf, mx.maximum(score, -2.9e38)), pos, safe)
        with use_backend(emulated()): got = slot_step(score, pos, s, newest)
        assert mx.array_equal(got, want), trial

# --- caches

CACHES = [('h2o', dict(h2o_budget=40, h2o_grace=4)), ('h2o', dict(h2o_budget=33, h2o_decay=1., h2o_n_sink=0, h2o_grace=0)), ('snapkv', dict(snap_budget=48, snap_obs_window=12)), ('streaming_llm', dict(stream_window_size=30)),
    ('tova', dict(tova_budget=40)), ('tova', dict(tova_budget=33, tova_n_sink=0)), ('pyramidkv', dict(pyramid_budget=48, pyramid_backend='auto')), ('chunkkv', dict(chunkkv_budget=60, chunkkv_chunk_size=7))]

@pytest.mark.parametrize('layout', ['cuda', 'metal'])
@pytest.mark.parametrize('dtype', [mx.float16, mx.bfloat16], ids=['float16','bfloat16'])
@pytest.mark.parametrize('method,fields', CACHES, ids=[f'{m}-{list(f.values())[0]}' for m,f in CACHES])
def test_caches_keep_the_same_rows(method, fields, dtype, layout):
    "A prompt in two calls, steps past the budget, sinks: kernels and array operations choose alike"
    q, k, v, sinks = draw(3, (2,6,130,32), (2,2,130,32), (2,2,130,48), (6,))
    q, k, v = (o.astype(dtype) for o in (2*q, k, v))
    cls = methods()[method].cache_class
    with use_backend(emulated(layout)): fused = cls.of(head_dim=32, use_metal_kernels=True, **fields)
    plain, at = cls.of(head_dim=32, use_metal_kernels=False, **fields), 0
    assert (fused.path, plain.path)==('kernel', 'mlx')
    for c in fused, plain: c.expect_prompt(120)
    def call(c, a, b): return mx.fast.scaled_dot_product_attention(q[:,:,a:b], *c.update_and_fetch(k[:,:,a:b], v[:,:,a:b]), scale=.2, mask=c.make_mask(b-a), sinks=sinks)
    for n in (77, 43, *[1]*10):
        with use_backend(emulated(layout)):
            got = call(fused, at, at+n); mx.eval(got, fused.state)
        want = call(plain, at, at+n)
        assert mx.abs((got-want).astype(mx.float32)).max()<(2e-2 if dtype==mx.bfloat16 else 3e-3)
        assert mx.array_equal(fused.positions, plain.positions), at
        if plain.score is not None: assert mx.abs(fused.score-plain.score).max()<2e-2
        at += n

def test_the_kernels_run(monkeypatch):
    "Not the array operations, where they give the same"
    import veloxquant_mlx.engine.evicting as e
    q, k = draw(4, (1,4,60,32), (1,2,60,32))
    q, k = q.astype(mx.float16), k.astype(mx.float16)
    for name in 'column_sums', 'attend_one', 'lowest': monkeypatch.setattr(e, name, None)
    with use_backend(emulated()):
        c = methods()['h2o'].cache_class.of(h2o_budget=20, h2o_grace=4)
        c.expect_prompt(50)
        for a,b in (0,50), *((i,i+1) for i in range(50, 54)): mx.eval(mx.fast.scaled_dot_product_attention(q[:,:,a:b], *c.update_and_fetch(k[:,:,a:b], k[:,:,a:b]), scale=.2, mask=c.make_mask(b-a)), c.state)
        assert c.size()==20
        with pytest.raises(RuntimeError, match="snap_backend='metal'"):
            with use_backend(None): methods()['snapkv'].cache_class.of(snap_backend='metal')
