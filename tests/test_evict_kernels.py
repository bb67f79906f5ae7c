"The kernels of eviction in the emulator against array operations, at sizes that are multiples of nothing."
import mlx.core as mx
import numpy as np
import pytest
from emulated import emulated
from veloxquant_mlx.engine.hook import install
from veloxquant_mlx.engine.registry import methods
from veloxquant_mlx.kernels.evict import *
from veloxquant_mlx.kernels.runtime import use_backend
from veloxquant_mlx.methods.keyformer import gumbel_scores
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

@pytest.mark.parametrize('B,H,n_rep,r,m', [(1,1,1,1,1), (2,2,3,5,61), (1,3,2,2,257), (3,1,4,7,300)])
def test_gumbel_scores(B, H, n_rep, r, m):
    "Noise of each place, also the largest and the smallest; rows that are not seen stay so"
    x, = draw(5, (B,H,n_rep,r,m))
    x = mx.where(mx.arange(m)%7==6, -mx.inf, x)
    rng = np.random.default_rng(m)
    at, pos = mx.array(rng.integers(0, 10**6, (B,r)).astype(np.int32)), mx.array(rng.integers(-5, 10**6, (B,H,m)).astype(np.int32))
    for key,tau in (0, 1.), (2**32-1, .3), (12345, 2.):
        want = gumbel_scores(x, key, at, pos, tau)
        with use_backend(emulated()): got = gumbel_scores(x, key, at, pos, tau, fused=True)
        assert mx.array_equal(mx.isinf(got), mx.isinf(want)) and mx.abs(mx.where(mx.isinf(want), 0, got-want)).max()<2e-5/tau

def test_gumbel_extremes(monkeypatch):
    "Every word gives a finite draw, as exact where u is almost 1 as elsewhere"
    import veloxquant_mlx.methods.keyformer as k
    monkeypatch.setattr(k.gumbel_kernel, 'header', 'FN uint fmix(uint x) { return x; }\n') # the word is the token times an odd number
    back, words = pow(k.TOKEN, -1, 2**32), np.array([0, 1, 2**31, 2**32-1, 2**32-2**9, 2**32-2**14, 2**32-2**27, 2**32-2**28], np.uint64)
    pos = mx.array((words*back%2**32).astype(np.uint32)).view(mx.int32).reshape(1,1,-1)
    with use_backend(emulated()): got = gumbel_scores(mx.zeros((1,1,1,1,8)), 0, mx.zeros((1,1), mx.int32), pos, 1., fused=True)
    u = ((words>>np.uint64(9)).astype(np.float64)+.5)*2.**-23
    assert np.abs(np.array(got)[0,0,0,0]+np.log(-np.log(u))).max()<1e-5

@pytest.mark.parametrize('layout', ['cuda', 'metal'])
@pytest.mark.parametrize('B,H,n_rep,D,n,p,r,dtype', [(1,2,3,32,61,2,9,mx.float16), (2,1,1,80,513,1,80,mx.bfloat16), (1,3,5,64,27,4,1,mx.float32), (2,2,2,24,700,1,5,mx.float16)], ids=str)
def test_page_products(B, H, n_rep, D, n, p, r, dtype, layout):
    "Of the array that has room behind its pages, the runs that are asked"
    from veloxquant_mlx.methods.rocketkv import channel_rows, page_extremes, page_products, products_kernel
    q, k = draw(7, (B,H,n_rep,D), (B,H,n,D))
    pages, rows = mx.pad(page_extremes(k.astype(dtype), p), [(0,0)]*3+[(0,11)]), channel_rows(q, r)
    asked = (mx.arange(2*D)==rows[..., None]).any(axis=2)[..., None]
    want = page_products(q, pages, rows)
    with use_backend(emulated(layout)): got = products_kernel(q, mx.where(asked, pages, mx.nan), rows)
    assert got.shape==want.shape and mx.allclose(got, want, atol=1e-4)

# --- caches

CACHES = [('nestedkv', dict(nestedkv_budget=40, nestedkv_window=7)), ('cam', dict(cam_budget=40)), ('cam', dict(cam_budget=33, cam_n_sink=0, cam_merge='mean')), ('squeeze', dict(squeeze_budget=40)), ('squeeze', dict(squeeze_budget=33, squeeze_n_sink=0)), ('rocketkv', dict(rocketkv_compression_ratio=4., rocketkv_obs_window=12)), ('rocketkv', dict(rocketkv_compression_ratio=9., rocketkv_obs_window=5, rocketkv_page_size=3, rocketkv_head_topk1=7)), ('h2o', dict(h2o_budget=40, h2o_grace=4)), ('h2o', dict(h2o_budget=33, h2o_decay=1., h2o_n_sink=0, h2o_grace=0)), ('snapkv', dict(snap_budget=48, snap_obs_window=12)), ('streaming_llm', dict(stream_window_size=30)),
    ('tova', dict(tova_budget=40)), ('tova', dict(tova_budget=33, tova_n_sink=0)), ('pyramidkv', dict(pyramid_budget=48, pyramid_backend='auto')), ('chunkkv', dict(chunkkv_budget=60, chunkkv_chunk_size=7)),
    ('keyformer', dict(keyformer_budget=40, keyformer_recent=9)), ('keyformer', dict(keyformer_budget=33, keyformer_n_sink=0, keyformer_recent=5, keyformer_tau_end=2., keyformer_anneal_steps=4)),
    ('kvzip', dict(kvzip_budget=40, kvzip_probe='latest')), ('morphkv', dict(morphkv_budget=40)), ('morphkv', dict(morphkv_budget=33, morphkv_n_sink=0, morphkv_window=20))]

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
        got, want = got.astype(mx.float32), want.astype(mx.float32)
        assert (mx.abs(got-want)/mx.maximum(mx.abs(want), 1)).max()<(2e-2 if dtype==mx.bfloat16 else 3e-3)
        assert mx.array_equal(fused.positions, plain.positions), at
        if plain.score is not None: assert mx.abs(fused.score-plain.score).max()<2e-2
        at += n

def test_rocketkv_runs_its_kernels(monkeypatch):
    import veloxquant_mlx.methods.rocketkv as e
    monkeypatch.setattr(e, 'page_products', None)
    q, k = draw(4, (1,4,60,32), (1,2,60,32))
    with use_backend(emulated()):
        c = e.RocketKVCache.of(rocketkv_obs_window=4, head_dim=32)
        c.expect_prompt(50)
        for a,b in (0,50), *((i,i+1) for i in range(50, 54)): mx.eval(mx.fast.scaled_dot_product_attention(q[:,:,a:b], *c.update_and_fetch(k[:,:,a:b], k[:,:,a:b]), scale=.2, mask=c.make_mask(b-a)), c.state)
        assert c.sparse(q[:,:,53:54]) and c.chosen(q[:,:,53:54], .2).sum(axis=-1).tolist()==[[3,3]]

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

@pytest.mark.parametrize('layout', ['cuda', 'metal'])
@pytest.mark.parametrize('how,n_sink,n,dims,dtype', [('sim_weighted', 3, 50, (48,40), mx.float16), ('mean', 0, 41, (64,64), mx.bfloat16), ('sim_weighted', 4, 20, (27,113), mx.float32)], ids=str)
def test_cam_merges(how, n_sink, n, dims, dtype, layout, monkeypatch):
    "The gifts of a step: rows in any order, one of padding that leaves first, gifts that are made, refused and drawn"
    import veloxquant_mlx.methods.cam as e
    k, v, a = draw(6, (2,3,n,dims[0]), (2,3,n,dims[1]), (2,3,n))
    c = e.CaMCache.of(cam_budget=n-1, cam_n_sink=n_sink, cam_merge=how, use_metal_kernels=False)
    order = mx.array(np.stack([np.random.default_rng(i).permutation(n) for i in (0,1)]))[:, None]
    c.pos = mx.where(order<n_sink, order, order+30).astype(mx.int32)
    c.keys, c.values, c.score, c.n, c.offset = k.astype(dtype), v.astype(dtype), mx.abs(a), n, n+30
    index = mx.argmax(c.pos==n_sink+30, axis=-1).astype(mx.int32)
    for pad in False,True:
        if pad: c.pos = mx.where((mx.arange(2)[:, None, None]==1) & (c.pos==n_sink+30), -5, c.pos)
        for lot in mx.zeros((2,3))-1, mx.ones((2,3)), mx.array([[.1,.9,.5]]*2):
            want, places = c.gifts(index, lot)
            with use_backend(emulated(layout)): got, at = e.merge_step(c.keys, c.values, c.pos, c.score, index, lot, n_sink, how)
            put = lambda new, i: mx.put_along_axis(c.values.astype(mx.float32), i[..., None], new, axis=2)
            assert got.shape==want.shape and mx.allclose(put(got, at), put(want, places), atol=1e-5)
    monkeypatch.setattr(e.CaMCache, 'gifts', None)
    x = mx.random.normal((1,2,40,32), key=mx.random.key(0)).astype(mx.float16)
    with use_backend(emulated(layout)):
        c = e.CaMCache.of(cam_budget=20, head_dim=32)
        c.expect_prompt(36)
        for a,b in (0,36), *((i,i+1) for i in range(36, 40)): mx.eval(mx.fast.scaled_dot_product_attention(x[:,:,a:b], *c.update_and_fetch(x[:,:,a:b], x[:,:,a:b]), scale=.2, mask=c.make_mask(b-a)), c.state)
        assert c.size()==20
